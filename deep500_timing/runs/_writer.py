"""Writes the frames of a rank to one file after another."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from deep500_timing._base.warn import warn_once
from deep500_timing.runs._format import LogFile, name_of, segments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


_MOST_FAULTS = 100


class Writer:
    """The files of one session of one rank.

    One flush that could not be written waits for the next try. Later intervals stay in the timers until then, so that a
    disk that is full for a minute loses nothing.
    """

    def __init__(self, folder: str, rotate_bytes: int) -> None:
        self.folder = folder
        self.session = 0
        self.segment = 0
        self.sealed: list[tuple[str, int]] = []
        """Complete files of this session with their sizes in bytes, oldest first."""
        self.needs_header = True
        self._rank = 0
        self._begun = False
        self._rotate_bytes = rotate_bytes
        self._file: LogFile | None = None
        self._waiting: list[bytes] = []
        self._faults: list[str] = []

    def begin(self, rank: int) -> list[str]:
        self._rank = rank
        before = segments_of(self.folder, rank)
        if before:
            self.session = before[-1][0] + 1
        return [path for session, _, path in before if session == self.session - 1]

    def prepare(self) -> bool:
        """Whether a flush can be written: the file is open and the waiting flush is written."""
        if self._file is not None and self._file.is_gone:
            self._fault(f"{self._file.path} was deleted; the run goes on in a new file")
            self._file.close()
            self._file = None
            self._waiting.clear()
            self.segment += 1
            self.needs_header = True
        if self._file is None and not self._open():
            return False
        return self._write_waiting()

    def write(self, data: bytes) -> bool:
        """Write a flush; if that fails, keep it for the next :meth:`prepare`."""
        self.needs_header = False
        self._waiting.append(data)
        return self._write_waiting()

    def rotate_if_full(self, end: Callable[[], bytes]) -> bool:
        """Begin the next file if this one is full; ``end`` makes its last frame."""
        file = self._file
        if file is None or self._waiting or file.size < self._rotate_bytes:
            return False
        self.segment += 1
        self._file = None
        if not self._open():
            self.segment -= 1
            self._file = file
            return False
        try:
            file.append(end())
        except OSError as error:
            self._fault(f"ending {file.path}: {error}")
        self.sealed.append((file.path, file.size))
        file.close()
        self.needs_header = True
        return True

    def keep_within(self, keep_bytes: int) -> Iterable[str]:
        """Remove the oldest complete files until the others fit; yields their names."""
        while self.sealed and sum(size for _, size in self.sealed) > keep_bytes:
            path, _ = self.sealed[0]
            with suppress(FileNotFoundError):
                os.unlink(path)
            self.sealed.pop(0)
            yield os.path.basename(path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def take_faults(self) -> list[str]:
        faults, self._faults = self._faults, []
        return faults

    def _name(self) -> str:
        return name_of(self._rank, self.session, self.segment)

    def _open(self) -> bool:
        try:
            os.makedirs(self.folder, exist_ok=True)
            while True:
                path = os.path.join(self.folder, self._name())
                try:
                    self._file = LogFile(path)
                    self._begun = True
                    return True
                except FileExistsError:
                    # Another process of the same rank was faster.
                    if self._begun:
                        self.segment += 1
                    else:
                        self.session += 1
        except OSError as error:
            self._fault(f"making a log in {self.folder}: {error}")
            return False

    def _write_waiting(self) -> bool:
        assert self._file is not None
        try:
            while self._waiting:
                self._file.append(self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            self._fault(f"writing to {self._file.path}: {error}")
            return False
        return True

    def _fault(self, text: str) -> None:
        if len(self._faults) < _MOST_FAULTS:
            self._faults.append(text)
        warn_once(
            f"The log of the run has a fault: {text}. Recorded times wait in memory; the training goes on.",
            key=f"run log {self.folder}",
        )
