"""A lock on a file that is held until the file is closed, where the system has one."""

from __future__ import annotations

import os
import sys
import time

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
