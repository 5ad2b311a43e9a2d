"""Files that are there as a whole or not at all, and locks on open files."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


LONGEST_WAIT_S = 1.0
"""A process that was stopped while it held the lock must not stop others."""
_PAUSE_S = 0.001

if sys.platform == "win32":
    import msvcrt

    # Far beyond the file's content: a lock on Windows blocks reading of the locked bytes.
    _FAR = 2**31 - 2

    def _try(descriptor: int) -> None:
        os.lseek(descriptor, _FAR, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _try(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock(descriptor: int, wait_s: float | None = None) -> bool:
    """Lock an open file against other processes and threads that lock it."""
    end = time.monotonic() + (LONGEST_WAIT_S if wait_s is None else wait_s)
    while True:
        try:
            _try(descriptor)
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= end:
                return False
            time.sleep(_PAUSE_S)
        except OSError:
            return False
        else:
            return True


@contextmanager
def whole_file(path: str) -> Iterator[IO[bytes]]:
    """Write a temporary file and rename it at the end, replacing an existing one.

    If the writing fails, Ctrl-C included, the existing file stays as it was.
    """
    folder, name = os.path.split(os.path.abspath(path))
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file in it", path)
    try:
        handle, scratch = tempfile.mkstemp(prefix=f".{name[:100]}.", dir=folder)
    except OSError as error:  # It names the temporary file.
        raise type(error)(error.errno, error.strerror, path) from None
    try:
        with os.fdopen(handle, "wb", buffering=1 << 20) as file:
            yield file
        # mkstemp creates private files; a result has the permissions of any new file.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(scratch, 0o666 & ~mask)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
