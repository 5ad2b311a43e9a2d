"""Names of log files, and an append-only file."""

from __future__ import annotations

import os
import re

SUFFIX = ".d5log"
_NAME = re.compile(r"rank-(\d+)(?:\.s(\d+))?(?:\.(\d+))?\.d5log\Z")


def name_of(rank: int, session: int, segment: int) -> str:
    """The name of a log: ``rank-00003.d5log``; ``.s1`` for the first restart; ``.0002`` for the second rotation."""
    again = f".s{session}" if session else ""
    later = f".{segment:04}" if segment else ""
    return f"rank-{rank:05}{again}{later}{SUFFIX}"


def parse_name(name: str) -> tuple[int, int, int] | None:
    """Rank, session and segment from a name; None for other files."""
    match = _NAME.match(name)
    return None if match is None else (int(match[1]), int(match[2] or 0), int(match[3] or 0))


def segments_of(folder: str, rank: int) -> list[tuple[int, int, str]]:
    """Session, segment and path of one rank's logs in a folder, in order; empty if it cannot be read."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                parsed = parse_name(entry.name)
                if parsed is not None and parsed[0] == rank:
                    found.append((parsed[1], parsed[2], entry.path))
    except OSError:
        return []
    return sorted(found)


class LogFile:
    """A file that one process appends to.

    An existing file is never opened.
    """

    def __init__(self, path: str) -> None:
        """Create the file."""
        self.path = path
        self.size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._handle = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o644)

    def append(self, data: bytes) -> None:
        """Write all data, or nothing."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._handle, view) :]
        except OSError:
            # A reader skips half a frame, but it would waste space.
            try:
                os.ftruncate(self._handle, self.size)
            except OSError:
                self.size += len(data) - len(view)
            raise
        self.size += len(data)

    @property
    def is_gone(self) -> bool:
        """Whether the file was deleted."""
        return os.fstat(self._handle).st_nlink == 0

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
