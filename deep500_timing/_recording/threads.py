"""Threads and forks: when a thread ends, what it is called, and who starts anew in a forked process."""

from __future__ import annotations

import sys
from _thread import RLock, _local, get_ident, get_native_id
from weakref import WeakSet, ref

from deep500_timing._base.fork import after_fork

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class Releasable(Protocol):
        """What a thread has recorded."""

        def release(self) -> None:
            """Become free for another thread."""
            ...


all_recorders: WeakSet[Any] = WeakSet()
claim_lock = RLock()
_of_thread = _local()
_ending: dict[int, int] = {}
"""By its id, which is used again, the system's number of the last thread whose local storage was taken down."""


class _Token:
    """Lives in a thread's local storage, and so for as long as the thread does."""


def watch_thread(regions: Releasable) -> ref[Any] | None:
    """See to it that the regions are released when the calling thread ends.

    Not for the main thread, which ends with the process, nor for one that Python did not start, whose local storage
    may go after each call into Python.

    Returns:
        What must be kept for as long as the thread is watched.
    """
    import threading

    # threading.current_thread() would make an entry, never removed, for a thread that Python did not start.
    ident = get_ident()
    for thread in threading.enumerate():
        if thread.ident == ident:
            if thread is threading.main_thread() or isinstance(thread, threading._DummyThread):
                return None
            break
    else:
        return None
    token = getattr(_of_thread, "token", None)
    if token is None:
        token = _of_thread.token = _Token()
    watched = ref(regions)
    is_finalizing = sys.is_finalizing  # Daemon threads outlive what a module holds.

    def release(_token: ref[Any]) -> None:
        released = watched()
        if not is_finalizing():
            _ending[get_ident()] = get_native_id()
            if released is not None:
                released.release()

    return ref(token, release)


def is_ending() -> bool:
    """Whether the calling thread, which cannot be watched, has let go of what it had: what it keeps nobody releases."""
    return _ending.get(get_ident()) == get_native_id()


def thread_name(ident: int) -> str:
    """How an error's text names a thread."""
    import threading

    for thread in threading.enumerate():
        if thread.ident == ident:
            return f"thread {thread.name!r}"
    return f"thread {ident}"


def _start_anew() -> None:
    global claim_lock
    claim_lock = RLock()
    for recorder in list(all_recorders):
        recorder._after_fork()


after_fork(_start_anew)
