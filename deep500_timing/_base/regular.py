"""Which files may be read and believed: regular ones, bounded, and of owners who are trusted."""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO

NO_LINK, NO_WAIT, BINARY = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


def is_ours(found: os.stat_result) -> bool:
    """Whether a file or folder is this user's or root's, and no other user can write to it.

    A group of the owner's number has no other member. Windows has none of this in this form.
    """
    mode = found.st_mode
    others_write = mode & 0o002 or (mode & 0o020 and found.st_gid != found.st_uid)
    return not hasattr(os, "geteuid") or (found.st_uid in (0, os.geteuid()) and not others_write)


def is_private(path: str) -> bool:
    """Whether a file or folder and the one around it, where links lead, are ours alone."""
    real = os.path.realpath(path)
    return all(is_ours(os.stat(one)) for one in (real, os.path.dirname(real)))


def link_flag(path: str) -> int:
    """The flag of ``os.open`` that refuses a link as a file's name, for a folder in which others can make links."""
    return 0 if is_ours(os.stat(os.path.dirname(os.path.abspath(path)))) else NO_LINK


def open_regular(path: str, *, follow: bool = True) -> IO[bytes]:
    """Open a file, or with ``follow`` a link, for reading: without waiting for a pipe's other end or reading a device.

    Raises:
        OSError: It is no regular file, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | NO_WAIT | BINARY | (0 if follow else NO_LINK))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", path)
    return os.fdopen(descriptor, "rb")


def read_bounded(path: str, limit: int, *, follow: bool = True) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: It is no regular file, or cannot be read.
        ValueError: It has more bytes than ``limit``.
    """
    with open_regular(path, follow=follow) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path!r} has more than {limit} bytes.")
    return data
