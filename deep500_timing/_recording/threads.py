"""The end of a thread, its name, and the reset of timers in a forked process."""

from __future__ import annotations

import sys
from _thread import RLock, _local, get_ident, get_native_id
from weakref import WeakSet, ref

from deep500_timing._base.fork import after_fork

TYPE_CHECKING = False
if TYPE_CHECKING:
    from threading import Thread
    from typing import Any

all_recorders: WeakSet[Any] = WeakSet()
claim_lock = RLock()
_of_thread = _local()
_ending: dict[int, int] = {}
"""Per thread id, which is reused, the native id of the last thread with cleared local storage."""


class _Token:
    """Lives in a thread's local storage, as long as the thread."""


def watch_thread(regions: Any) -> ref[Any] | None:
    """Release the regions when the calling thread ends.

    The main thread is not watched: it ends with the process. A thread that Python did not start is not watched: its
    local storage may be cleared after each call into Python.
    """
    if sys.is_finalizing():
        return None  # Nothing can be imported, and no thread ends any more.
    import threading

    thread = _thread_of(get_ident())
    if thread is None or thread is threading.main_thread() or isinstance(thread, threading._DummyThread):
        return None
    token = getattr(_of_thread, "token", None)
    if token is None:
        token = _of_thread.token = _Token()
    watched = ref(regions)
    is_finalizing = sys.is_finalizing  # Daemon threads outlive module globals.
    native_id = get_native_id()

    def release(_token: ref[Any]) -> None:
        released = watched()
        if not is_finalizing():
            if get_native_id() == native_id:  # Else a forked child clears the storage of a thread that it has not.
                _ending[get_ident()] = native_id
            if released is not None:
                released.release()

    return ref(token, release)


def is_ending() -> bool:
    """Whether the calling thread has cleared its local storage, so that it cannot be watched any more."""
    return _ending.get(get_ident()) == get_native_id()


def thread_name(ident: int) -> str:
    """Return a thread's name for an error text."""
    thread = _thread_of(ident)
    return f"thread {ident}" if thread is None else f"thread {thread.name!r}"


def _thread_of(ident: int) -> Thread | None:
    import threading

    # threading.current_thread() would make an entry, never removed, for a thread that Python did not start.
    return next((thread for thread in threading.enumerate() if thread.ident == ident), None)


def _reset_after_fork() -> None:
    global claim_lock
    claim_lock = RLock()
    for recorder in list(all_recorders):
        recorder._after_fork()


after_fork(_reset_after_fork)
