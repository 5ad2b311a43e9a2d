"""Calls to a service that may be slow or gone, so that a training loop does not wait for it."""

from __future__ import annotations

import contextvars
import threading
import time
from typing import TYPE_CHECKING

from deep500_timing._ground.warn import warn_once
from deep500_timing.exceptions import ExportError

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0


class Courier:
    """Makes calls to one service, one at a time, each on a thread of its own, and waits for a bounded time only.

    While the service answers, ``send`` returns when the call is done. Once it has failed, or not answered in time,
    later calls are tried in the background, without waiting, after pauses that double from 10 s to 10 min; what
    comes in between is dropped and counted. A call that succeeds ends that, and the loss is told.
    """

    def __init__(self, service: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is known of the service yet.

        Args:
            service: What it is called in messages.
            clock: Seconds that never run backwards.
        """
        self.lost = 0
        """Reports that were dropped, or whose call failed."""
        self._service = service
        self._clock = clock
        self._lock = threading.Lock()
        self._call: _Call | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._untold = 0

    def send(self, call: Callable[[], None], *, timeout_s: float, insist: bool = False) -> None:
        """Make a call, or drop it.

        Args:
            call: What to do; may raise anything.
            timeout_s: How long to wait for it at most.
            insist: Try and wait whatever happened before, and raise if the call is dropped.

        Raises:
            ExportError: There was no answer in time, or the call was dropped and ``insist`` is true.
            Exception: What the call raised, if it did so in time.
        """
        with self._lock:
            self._settle()
            busy = self._call is not None
            if busy or (self._failures and not insist and self._clock() < self._retry_at):
                self.lost += 1
                self._untold += 1
                if insist:
                    raise ExportError(f"{self._service} has not answered an earlier call yet; this one was dropped")
                return
            wait_s = timeout_s if insist or not self._failures else 0.0
            current = self._call = _Call(call)
        current.start()
        current.done.wait(wait_s)
        with self._lock:
            if current.done.is_set():
                self._settle()
                if current.error is not None:
                    raise current.error
                return
            if self._failures and not insist:
                return  # In the background, where its end is looked at by the next call.
            # Counts as a failure from now on, so that nobody waits again before the service answers.
            self._failures += 1
            self._pause()
        raise ExportError(
            f"{self._service} has not answered within {timeout_s:g} s; later reports are tried in the background, "
            f"now and then, until it does, and dropped in between"
        )

    def wait(self, timeout_s: float) -> None:
        """Wait for a call in the background.

        Raises:
            ExportError: It has not ended in time.
            Exception: What it raised.
        """
        current = self._call
        if current is None:
            return
        if not current.done.wait(timeout_s):
            raise ExportError(f"{self._service} has not answered within {timeout_s:g} s")
        with self._lock:
            self._settle()
        if current.error is not None:
            raise current.error

    def _settle(self) -> None:
        # Take note of how the last call ended, if it did.
        call = self._call
        if call is None or not call.done.is_set():
            return
        self._call = None
        if call.error is not None:
            self.lost += 1
            self._untold += 1
            self._failures += 1
            self._pause()
            return
        self._failures = 0
        if self._untold:
            warn_once(
                f"{self._service} takes reports again; {self._untold} report(s) of times were lost in between.",
                about=f"{self._service} {self.lost}",
            )
            self._untold = 0

    def _pause(self) -> None:
        self._retry_at = self._clock() + min(FIRST_PAUSE_S * 2 ** (self._failures - 1), LONGEST_PAUSE_S)


class _Call:
    def __init__(self, call: Callable[[], None]) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self._call = call

    def start(self) -> None:
        # The call sees the context of whoever made it. As a daemon it does not hold up the end of the program.
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._run,), name="deep500-timing-export", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._run()  # The interpreter is shutting down and starts no thread any more.

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()
