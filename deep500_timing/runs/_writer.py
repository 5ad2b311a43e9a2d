"""Writes the frames of a rank to one file after another."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress

from deep500_timing._base.files import make_folder, new_file
from deep500_timing._base.warn import warn_once
from deep500_timing.runs._format import END, TABLES, Encoder, Table, log_name
from deep500_timing.runs._worlds import claim

_MOST_FAULTS = 100
_FILES_KEPT = 8
"""Number of files that ``keep_bytes`` is divided into, so that only a part is removed at a time."""


class OpenLog:
    """A new file that one process appends to, and its content so far."""

    def __init__(self, path: str, tables: Mapping[str, Table]) -> None:
        self.path = path
        self.encoder = Encoder(tables)
        self.size = 0
        self._tables = tables
        self._file = os.fdopen(new_file(path), "wb", buffering=0)

    def restart(self) -> None:
        """Write header and names again: an error has lost frames."""
        self.encoder = Encoder(self._tables)

    def append(self, data: bytes) -> None:
        """Write all data, or nothing."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            # A reader skips half a frame, but it would waste space.
            with suppress(OSError):
                self._file.seek(self.size)
                self._file.truncate()
            raise
        self.size += len(data)

    @property
    def is_gone(self) -> bool:
        """Whether the file was deleted."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def close(self) -> None:
        self._file.close()


class Writer:
    """The files of one session of one rank.

    One flush that could not be written waits for the next try. Later intervals stay in the timers until then, so that a
    disk that is full for a minute loses nothing.
    """

    def __init__(self, folder: str, rotate_bytes: int, keep_bytes: int | None) -> None:
        self.folder = folder
        self.session = 0
        self.segment = -1
        self.file: OpenLog | None = None
        self.tables = dict(TABLES)
        """Declared tables too."""
        self.unwritten = b""
        self._keep_bytes = keep_bytes
        if keep_bytes is not None:
            rotate_bytes = max(min(rotate_bytes, keep_bytes // _FILES_KEPT), 1)
        self._rotate_bytes = rotate_bytes
        self._rank = 0
        self._complete: list[tuple[str, int]] = []
        """Paths and sizes of the files before this one, oldest first."""
        self._faults: list[str] = []

    def begin(self, rank: int, world: str) -> int:
        """Choose the run and the session of a rank; returns the number of BATCHes in the sessions before."""
        self._rank, named = rank, self.folder
        try:
            self.folder, earlier = claim(named, rank, world)
        except OSError:  # Said when the log is made.
            return 0
        if rank == 0 and self.folder.startswith(f"{named}-") and sys.stderr is not None:
            old, own = map(os.path.basename, (named, self.folder))
            said = f"{old} holds a finished run, so this one is {own}. `--append` adds to it."
            with suppress(OSError, ValueError):
                sys.stderr.write(f"deep500-timing: {said}\n")
        self.session = 0 if earlier is None else earlier.session + 1
        return 0 if earlier is None else earlier.batches

    def prepare(self) -> OpenLog | None:
        """The file for the next flush, once the waiting flush is written; None if that fails."""
        if self.file is not None and self.file.is_gone:
            self._fault(f"{self.file.path} was deleted; the run goes on in a new file")
            self.close()
            self.unwritten = b""
        is_ready = (self.file is not None or self._open()) and self.write(b"")
        return self.file if is_ready else None

    def write(self, data: bytes) -> bool:
        """Write a flush; if that fails, keep it for the next :meth:`prepare`."""
        assert self.file is not None
        self.unwritten += data
        try:
            self.file.append(self.unwritten)
        except OSError as error:
            self._fault(f"writing to {self.file.path}: {error}")
            return False
        self.unwritten = b""
        return True

    def rotate_if_full(self, counts: Mapping[str, int]) -> Iterable[str]:
        """Begin the next file if this one is full, and remove the oldest ones; yields the names of removed files."""
        full = self.file
        if full is None or self.unwritten or full.size < self._rotate_bytes or not self._open():
            return
        try:
            full.append(full.encoder.document(END, {"reason": "rotated", **counts}))
        except OSError as error:
            self._fault(f"ending {full.path}: {error}")
        full.close()
        if self._keep_bytes is None:
            return
        self._complete.append((full.path, full.size))
        while sum(size for _, size in self._complete) > self._keep_bytes:
            path = self._complete.pop(0)[0]
            with suppress(FileNotFoundError):
                os.unlink(path)
            yield os.path.basename(path)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def take_faults(self) -> list[str]:
        faults, self._faults = self._faults, []
        return faults

    def _name(self, segment: int) -> str:
        return log_name(self._rank, self.session, segment)

    def _open(self) -> bool:
        segment = self.segment + 1
        try:
            make_folder(self.folder)
            while True:
                try:
                    self.file = OpenLog(os.path.join(self.folder, self._name(segment)), self.tables)
                    break
                except FileExistsError:
                    # Another process of the same rank was faster.
                    if segment:
                        segment += 1
                    else:
                        self.session += 1
        except OSError as error:
            self._fault(f"making a log in {self.folder}: {error}")
            return False
        self.segment = segment
        return True

    def _fault(self, text: str) -> None:
        if len(self._faults) < _MOST_FAULTS:
            self._faults.append(text)
        warn_once(
            f"The log of the run has a fault: {text}. Recorded times wait in memory; the training goes on.",
            key=f"run log {self.folder}",
        )
