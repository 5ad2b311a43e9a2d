"""Writing to files so that another process, or a full disk, leaves no half of a report behind."""

from __future__ import annotations

import os
from contextlib import suppress

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)


def encode(text: str) -> bytes:
    """As UTF-8; a lone surrogate in a name becomes its escape."""
    return text.encode("utf-8", "backslashreplace")


def create(path: str) -> None:
    """Make an empty file.

    Raises:
        FileExistsError: There is one; it is left as it is.
        OSError: It cannot be made, for the reason that the system gives.
    """
    os.close(os.open(path, _APPEND | os.O_EXCL, 0o666))


def check_appendable(path: str) -> None:
    """See that a file can be appended to, making it if need be.

    Raises:
        OSError: It cannot, for the reason that the system gives.
    """
    os.close(os.open(path, _APPEND, 0o666))


def append(path: str, data: bytes) -> None:
    """Add to the end of a file by one write, which keeps lines of several processes apart.

    If the disk fills up in the middle, what was written of ``data`` is taken away again.

    Raises:
        OSError: As the system says.
    """
    descriptor = os.open(path, _APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        written = 0
        try:
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            with suppress(OSError):
                # Otherwise another process has written since.
                if os.fstat(descriptor).st_size == size + written:
                    os.ftruncate(descriptor, size)
            raise
    except OSError as error:
        # Only opening names the file by itself.
        if error.filename is None:
            error.filename = path
        raise
    finally:
        os.close(descriptor)


def ends_amid_line(path: str) -> bool:
    """Whether the last line of a file was not finished."""
    with open(path, "rb") as file:
        if not file.seekable() or file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
