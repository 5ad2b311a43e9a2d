"""A private connection to the store of a job. Its requests never keep a caller longer than its deadline.

A request to a stopped process, or to a host that no longer answers, ends when its connection does, which may take
minutes, and holds up other requests on the same connection. So requests are made on a thread and a connection of their
own.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

NO_ANSWER = "the store does not answer"
NOT_CONNECTED = "the connection to the store is not made yet"
_TIMEOUT_S = 1.0
"""How long the store waits for a key that is not there: one that was deleted between a look and a get."""
_STUCK_SHARE = 0.5
"""Share of its deadline that a call waits for an earlier request that is past its own deadline."""
_RETRY_S = 60.0
"""How long a store is not asked again after it has closed the connection."""
_CLOSED = ("DistNetworkError", "ConnectionError", "ConnectionResetError", "BrokenPipeError", "ConnectionRefusedError")
_POLL_S = 0.002
_LONGEST_POLL_S = 0.1
"""Pauses between looks grow by half each time, up to this, so that many ranks do not overrun the store."""


class Connection:
    """Requests to one store, one at a time."""

    def __init__(self, store: Any) -> None:
        self.shared = weakref.ref(store)
        self._own: Any = None
        self._free = threading.Lock()
        self._stuck = False
        self._connected = threading.Event()
        self._connecting = False
        self._fault: str | None = None
        self._closed_until_s = 0.0

    def connect(self) -> None:
        """Begin to connect, on a thread; it counts towards no deadline."""
        if not self._connecting:
            self._connecting = True
            try:
                threading.Thread(target=self._connect, name="deep500-timing connect", daemon=True).start()
            except RuntimeError:  # no more threads, or the interpreter is about to end
                self._connecting = False

    def run(self, work: Callable[[Any], object], deadline_s: float) -> str | None:
        """Do something with the store, on another thread.

        It returns within the deadline even if a request never ends. The thread then goes on, so ``work`` must look
        whether its caller has given up before it writes anything. The result is the fault as one line, None if there is
        none.
        """
        until = time.monotonic() + max(deadline_s, 0.0)
        if self._fault is not None and time.monotonic() < self._closed_until_s:
            return self._fault
        self.connect()
        if not self._connected.wait(max(deadline_s, 0.0)):
            return NOT_CONNECTED
        share = _STUCK_SHARE if self._stuck else 1.0
        if not self._free.acquire(timeout=max(share * (until - time.monotonic()), 0.0)):
            return NO_ANSWER
        faults: list[str] = []
        done = threading.Event()

        def run() -> None:
            try:
                work(self._own or self.store)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}".splitlines()[0]
                faults.append(fault)
                if type(error).__name__ in _CLOSED:
                    self._fault, self._closed_until_s = fault, time.monotonic() + _RETRY_S
            finally:
                self._stuck = False
                self._free.release()
                done.set()

        try:
            threading.Thread(target=run, name="deep500-timing ranks", daemon=True).start()
        except RuntimeError as error:  # no more threads, or the interpreter is about to end
            self._free.release()
            return f"{type(error).__name__}: {error}"
        if not done.wait(max(until - time.monotonic(), 0.0)):
            self._stuck = not done.is_set()
            if self._stuck:
                return NO_ANSWER
        return faults[0] if faults else None

    def _connect(self) -> None:
        shared = self.shared()
        try:
            if shared is not None:
                own = shared.clone()
                # The clone of a HashStore is the store itself. Its time-out is the user's.
                if _innermost(own) is not _innermost(shared):
                    own.set_timeout(timedelta(seconds=_TIMEOUT_S))
                self._own = own
        except Exception:
            self._own = None  # A store that cannot be cloned is used as it is.
        finally:
            self._connected.set()

    @property
    def store(self) -> Any:
        """The store itself, which others use too.

        Raises:
            RuntimeError: It is gone.
        """
        store = self.shared()
        if store is None:
            raise RuntimeError("the process group has been destroyed")
        return store


def _innermost(store: Any) -> Any:
    while (underlying := getattr(store, "underlying_store", None)) is not None:
        store = underlying
    return store


def pauses(until: float) -> Iterator[float]:
    """Pauses that grow, in seconds, one at least; the last ends at a moment of ``time.monotonic``."""
    pause_s = _POLL_S
    while True:
        left_s = until - time.monotonic()
        yield max(min(pause_s, left_s), 0.0)
        if left_s <= 0:
            return
        pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)
