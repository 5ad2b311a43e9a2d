"""A connection of our own to the store of a job, whose requests nobody has to wait for.

A request to a process that is stopped, or to a machine that no longer answers, ends when its connection does, which
may be minutes; while it waits, it keeps other requests on the same connection waiting. So requests are made on a
thread and a connection of their own.
"""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from deep500_timing._base.fork import after_fork
from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.identity import distributed

if TYPE_CHECKING:
    from collections.abc import Callable

NO_ANSWER = "the store does not answer"
_TIMEOUT_S = 1.0
"""So long a key is waited for that is not there: one that was deleted between a look and a get."""


class Connection:
    """Requests to one store, one thread at a time."""

    def __init__(self, store: Any) -> None:
        """Connect to a store of ``torch.distributed`` when it is first asked something.

        Args:
            store: It is not kept alive.
        """
        self._shared = weakref.ref(store)
        self._own: Any = None
        self._free = threading.Lock()
        self._stuck = False
        self.kept: dict[Any, Any] = {}
        """What its users know of the store, to be forgotten with the connection."""

    def is_to(self, store: Any) -> bool:
        """Whether it is to this store."""
        return self._shared() is store

    def run(self, work: Callable[[Any], object], deadline_s: float) -> str | None:
        """Do something with the store, on another thread.

        It returns within the deadline even if the store is gone and its requests never end; then the thread goes on
        by itself, and whatever ``work`` still does must not be looked at. As long as it has not ended, later calls
        return at once.

        Args:
            work: Called with the store.
            deadline_s: Seconds that it may take.

        Returns:
            What went wrong, as one line; None if nothing did.
        """
        if not self._free.acquire(timeout=0 if self._stuck else max(deadline_s, 0.0)):
            return NO_ANSWER
        faults: list[str] = []
        done = threading.Event()

        def run() -> None:
            try:
                work(self._store())
            except Exception as error:
                faults.append(f"{type(error).__name__}: {error}".splitlines()[0])
            finally:
                self._stuck = False
                self._free.release()
                done.set()

        try:
            threading.Thread(target=run, name="deep500-timing ranks", daemon=True).start()
        except RuntimeError as error:  # no more threads, or the interpreter is about to end
            self._free.release()
            return f"{type(error).__name__}: {error}"
        if not done.wait(max(deadline_s, 0.0)):
            self._stuck = not done.is_set()
            if self._stuck:
                return NO_ANSWER
        return faults[0] if faults else None

    def _store(self) -> Any:
        if self._own is None:
            shared = self._shared()
            if shared is None:
                raise RuntimeError("the process group has been destroyed")
            try:
                self._own = own = shared.clone()
                # That of a HashStore is the store itself, whose time-out is the user's.
                if _innermost(own) is not _innermost(shared):
                    own.set_timeout(timedelta(seconds=_TIMEOUT_S))
            except Exception:
                # A store that cannot be cloned, such as one of the user's own, is used as it is.
                return shared
        return self._own


def _innermost(store: Any) -> Any:
    while (underlying := getattr(store, "underlying_store", None)) is not None:
        store = underlying
    return store


_lock = threading.Lock()
_current: Connection | None = None


def store_connection() -> Connection | None:
    """The connection to the store of the job's default process group, one for the process; None where there is none."""
    global _current
    dist = distributed()
    if dist is None:
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
    except Exception as error:
        warn_once(f"The job's store cannot be had; reports show this rank only: {error}", key="exchange store")
        return None
    with _lock:
        if _current is None or not _current.is_to(store):
            _current = Connection(store)
        return _current


@after_fork
def _forget_connection() -> None:
    # The socket is the parent's, and the lock may be held by a thread that does not exist here.
    global _current, _lock
    _current, _lock = None, threading.Lock()
