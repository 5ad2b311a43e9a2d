"""A file that is there as a whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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
