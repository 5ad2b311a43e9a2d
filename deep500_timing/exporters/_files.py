"""Append whole reports to files that several processes may share, also on a disk that fills up."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Any

from deep500_timing._base.files import lock

_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_APPEND = os.O_APPEND | os.O_CREAT | _BINARY
_MOST_NUMBERS = 10_000


def encode(text: str) -> bytes:
    """As UTF-8; a lone surrogate in a name becomes its escape."""
    return text.encode("utf-8", "backslashreplace")


def path_of(destination: Any, caller: str) -> str:
    """The absolute path that a user means, so that a later change of the working directory changes nothing.

    Missing folders are made.
    """
    try:
        text = os.fsdecode(destination)
    except TypeError:
        remedy = "give the name of a file, such as 'times.txt'"
        if callable(getattr(destination, "write", None)):
            remedy = "it is an open file; print_all_time_stats and TerminalExporter take one"
        raise TypeError(f"{caller} was given {destination!r:.100}, which is not a path: {remedy}.") from None
    if not text or "\0" in text:
        what = "holds a NUL character" if text else "is empty"
        raise ValueError(f"{caller} was given the path {text!r:.100}, which {what}; name a file, such as 'times.txt'.")
    path = os.path.abspath(text)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, f"{caller} was given a folder; name a file in it", path)
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        _make_folder(folder, path, caller)
    return path


def _make_folder(folder: str, path: str, caller: str) -> None:
    # The system reports a file in the middle of the path as "file exists".
    there = folder
    while not os.path.lexists(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    if os.path.isfile(there):
        what = f"{caller} was given a path below {there!r}, which is a file and no folder; name another place"
        raise NotADirectoryError(errno.ENOTDIR, what, path)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        error.filename = path
        raise


def create(path: str, *, overwrite: bool = False) -> str:
    """Make an empty file.

    Args:
        path: The file. A device such as ``/dev/null`` is used as it is.
        overwrite: Empty a file that is there, instead of taking the first of ``times-2.txt``, ``times-3.txt`` ... that
            is free.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        return path
    if overwrite:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY, 0o666))
        return path
    root, extension = os.path.splitext(path)
    for number in range(1, _MOST_NUMBERS):
        candidate = path if number == 1 else f"{root}-{number}{extension}"
        with suppress(FileExistsError):
            os.close(os.open(candidate, os.O_WRONLY | _APPEND | os.O_EXCL, 0o666))
            return candidate
    raise FileExistsError(errno.EEXIST, f"{_MOST_NUMBERS - 1} files have this name and a number; remove some", path)


class SharedFile:
    """Append whole reports to a file that other processes may append to as well.

    The file is closed between two reports. Reading its size, writing, and undoing a partial write hold one lock.
    """

    def __init__(self, path: str, *, header: bytes = b"") -> None:
        """See that the file can be added to, making it if need be, and that its first line is the header."""
        self.path = path
        self._header = header
        descriptor = self._open()
        try:
            if self._size(descriptor):
                self._check_header(descriptor)
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        try:
            # Read access is for the last character; a write-only file works without it.
            return os.open(self.path, os.O_RDWR | _APPEND, 0o666)
        except PermissionError:
            return os.open(self.path, os.O_WRONLY | _APPEND, 0o666)

    def append(self, data: bytes) -> None:
        """Append a report, starting on a new line.

        If the disk fills up, the partial report is removed.
        """
        try:
            descriptor = self._open_locked()
            try:
                size = self._size(descriptor)
                self._write(descriptor, self._what_comes_first(descriptor, size) + data, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            # Only `open` sets the file name in its errors.
            if error.filename is None:
                error.filename = self.path
            raise

    def _open_locked(self) -> int:
        for _ in range(10):
            descriptor = self._open()
            locked = lock(descriptor)
            # The file may have been moved between open and lock.
            with suppress(OSError):
                if not locked or os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    return descriptor
            os.close(descriptor)
        return self._open()

    def _size(self, descriptor: int) -> int:
        status = os.fstat(descriptor)
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    def _what_comes_first(self, descriptor: int, size: int) -> bytes:
        if size == 0:
            return self._header
        self._check_header(descriptor)
        return b"" if _read(descriptor, size - 1, 1) in (b"\n", b"") else b"\n"

    def _check_header(self, descriptor: int) -> None:
        first = _read(descriptor, 0, len(self._header)) if self._header else b""
        if first and first.replace(b"\r\n", b"\n") != self._header:
            shown = first.partition(b"\n")[0][:60].decode("utf-8", "backslashreplace").rstrip("\r")
            raise ValueError(
                f"Adding times to {self.path!r}: its first line, {shown!r}, is not the header of these reports; name "
                f"another file, or move this one away."
            )

    def _write(self, descriptor: int, data: bytes, size: int) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            with suppress(OSError):
                # Keep a line that another process has written since without the lock.
                if os.fstat(descriptor).st_size == size + written:
                    os.ftruncate(descriptor, size)
            raise


def _read(descriptor: int, at: int, count: int) -> bytes:
    try:
        os.lseek(descriptor, at, os.SEEK_SET)
        return os.read(descriptor, count)
    except OSError:
        return b""  # It may only be written to.
