"""Files that are there as a whole or not at all, files of others, and locks on open files."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from deep500_timing._base.regular import BINARY, NO_LINK, NO_WAIT, link_flag
from deep500_timing._base.settings import setting

LONGEST_WAIT_S = 1.0
"""A process that was stopped while it held the lock must not stop others."""
_PAUSE_S = 0.001
_DESCRIPTORS = ("/dev/std", "/dev/fd/", "/proc/")
_UNFINISHED = ".unfinished"
"""How the names of temporary files and folders end."""
_OLD_S = 86400.0

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


def lock(descriptor: int) -> bool:
    """Lock an open file against other processes and threads that lock it."""
    end = time.monotonic() + LONGEST_WAIT_S
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


def unlock(descriptor: int) -> None:
    """Give a lock back: closing the file does not, while a child that was forked meanwhile has it open."""
    if sys.platform != "win32":
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def file_mode() -> int:
    """The permissions of new files, before the umask; ``DEEP500_TIMING_PRIVATE=1`` leaves those of the owner."""
    return 0o600 if setting("private") else 0o666


def make_folder(path: str) -> None:
    """Create a folder and those above it, with the permissions of :func:`file_mode`."""
    os.makedirs(path, 0o700 if setting("private") else 0o777, exist_ok=True)


def new_file(path: str) -> int:
    """Create a file that is not there, following no link, and return its descriptor.

    Raises:
        FileExistsError: Something has that name.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | BINARY, file_mode())


def append_line(path: str, line: str) -> None:
    """Append a short line to a file, made if it is not there, at once: lines of several processes do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_LINK | NO_WAIT | BINARY, file_mode())
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: str) -> Iterator[IO[bytes]]:
    """Write a result: a temporary file that is renamed at the end, replacing an existing one.

    If the writing fails, Ctrl-C included, the existing file stays as it was. What is no regular file, such as a device
    or a pipe, is written into, and so is ``/dev/stdout``, wherever it leads. Of a link the target is replaced; in a
    folder in which others can make links, the link.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file in it", path)
    if os.path.abspath(path).startswith(_DESCRIPTORS) or (os.path.exists(path) and not os.path.isfile(path)):
        with open(path, "wb") as file:
            yield file
        return
    target = os.path.abspath(path)
    if os.path.islink(target) and not link_flag(target):
        target = os.path.realpath(target)
    folder, name = os.path.split(target)
    scratch = os.path.join(folder, f".{name[:100]}.{os.urandom(8).hex()}{_UNFINISHED}")
    try:
        handle = new_file(scratch)
    except OSError as error:  # It names the temporary file.
        raise type(error)(error.errno, error.strerror, path) from None
    try:
        with os.fdopen(handle, "wb", buffering=1 << 20) as file:
            yield file
        os.replace(scratch, target)
    except BaseException:
        os.unlink(scratch)
        raise
    remove_unfinished(folder, f".{name[:100]}.")


def remove_unfinished(folder: str, prefix: str) -> None:
    """Remove temporary files and folders of a prefix that killed processes have left, older than a day."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not (entry.name.startswith(prefix) and entry.name.endswith(_UNFINISHED)):
                continue
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _OLD_S:
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path)
                    else:
                        os.unlink(entry.path)
