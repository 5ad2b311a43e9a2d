"""Deliver reports in the background: bounded queue, retries, bounded exit, every loss counted."""

from __future__ import annotations

import atexit
import math
import os
import random
import sys
import threading
import time
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from deep500_timing._base.at_exit import do_after_reports
from deep500_timing._base.fork import after_fork
from deep500_timing._base.warn import warn_once
from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters._base import BaseExporter, Had, without_passwords

if TYPE_CHECKING:
    from deep500_timing._summary.snapshot import Snapshot

CAPACITY = 256
MAX_TRIES = 5
"""Answers with status 500 after which the report, not the server, is at fault."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
EXIT_PAUSE_S = 0.2
"""Longest pause between retries while the program waits to exit."""

# The functions of `random` would advance the state of the user's generator.
_random = random.Random()


# Errors of the operating system that no waiting cures.
_LASTING = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


class Waiting(NamedTuple):
    """A report in the queue."""

    snapshot: Snapshot
    had: Had | None
    """What the exporter has had of the same timer when it is this report's turn; None for the whole snapshot."""
    destination: Any


class BackgroundExporter(BaseExporter):
    """An exporter that delivers its reports on a daemon thread, in order. A subclass writes ``_send``.

    An export queues its report and never waits, unless the exporter is strict. A report that is refused is lost; the
    next one covers its times. While a server is down (no connection, time-out, 408, 425, 429, 5xx), reports wait and
    are retried with growing pauses. When the queue is full, the oldest report is lost. The thread ends when the queue
    is empty. A forked child starts with an empty queue.
    """

    _is_server = False
    """Whether it may be down, and a report is then retried."""

    def __init__(self, *arguments: Any, timeout_s: float = 5.0, exit_timeout_s: float = 5.0, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for name, seconds in (("timeout_s", timeout_s), ("exit_timeout_s", exit_timeout_s)):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{type(self).__name__} was given {name}={seconds!r}; give seconds, 0 for no waiting.")
        self._timeout_s, self._exit_timeout_s = timeout_s, exit_timeout_s
        self.delivered = 0
        """Reports that have arrived, in this process."""
        self.pending = 0
        """Reports that wait for delivery."""
        self.lost = 0
        """Reports that were refused, dropped from a full queue, or undelivered at exit. A warning says so."""
        self._name = type(self).__name__
        self._clock = time.monotonic
        self._is_direct = self._strict
        """Whether the exporting thread delivers."""
        self._reset()
        _exporters.add(self)
        _register()

    def _reset(self) -> None:
        # A condition is reentrant: a signal handler may export during an export.
        self._changed = threading.Condition()
        self._queue: deque[Waiting] = deque()
        self._thread: threading.Thread | None = None
        self.pending = 0
        self._tries = 0
        """Answers with status 500 to the oldest report."""
        self._failures = 0
        self._attempts = 0
        self._retry_at = 0.0
        self._is_exiting = self._is_closed = False

    def _settle(self, *, arrived: bool) -> None:
        """Count a pending report as delivered, or as lost."""
        self.pending -= 1
        self.delivered += arrived
        self.lost += not arrived

    def _destination(self, step: int | None) -> Any:
        """Where a report goes, with its step: read on the exporting thread, and may raise anything."""
        return step

    @abstractmethod
    def _send(self, snapshot: Snapshot, destination: Any, timeout_s: float | None) -> None:
        """Deliver one report; may raise anything."""

    def _service(self) -> str:
        """What takes the reports, for messages."""
        return self._where()

    def _queue_up(self, snapshot: Snapshot, had: Had | None, step: int | None) -> bool:
        if self._is_direct or self._is_closed:
            return False
        self._guard("exporting", self._deliver, snapshot, had, step)
        return True

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        self._deliver(snapshot, None, step)

    def _deliver(self, snapshot: Snapshot, had: Had | None, step: int | None) -> None:
        """Queue a report, or send it now and raise the answer's error, if the exporter is strict."""
        _register_in_multiprocessing_child()
        report = Waiting(snapshot, had, self._destination(step))
        if self._is_direct or self._is_closed:
            error = _error_of(self._send, snapshot, report.destination, self._timeout_s)
            with self._changed:
                self.delivered += error is None
                self.lost += error is not None
            if error is not None:
                raise error
            return
        with self._changed:
            is_full = len(self._queue) >= CAPACITY
            if is_full:
                self._queue.popleft()
                self._settle(arrived=False)
            self.pending += 1
            self._queue.append(report)
            self._wake()
        if is_full:
            what = f"the queue of reports for {self._service()} is full; the oldest are lost and counted."
            warn_once(what, key=f"{self._service()} full")

    def _flush(self) -> None:
        """Retry now and wait until the reports have arrived, or an attempt has failed."""
        with self._changed:
            attempts = self._attempts
            if self.pending and self._failures:
                self._retry_at = 0.0
                self._wake()
            self._changed.wait_for(
                lambda: not self.pending or (self._failures and self._attempts != attempts), self._timeout_s
            )
            pending = self.pending
            why = "does not answer" if self._failures else f"has not answered within {self._timeout_s:g} s"
        if pending:
            raise ExportError(f"{self._service()} {why}; {pending} report(s) wait and are retried in the background")

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._work, name="deep500-timing export", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # The interpreter is shutting down.
            self._work()

    def _work(self) -> None:
        while (report := self._await_turn()) is not None:
            error = _error_of(self._send_share, report)
            if error is not None:
                with suppress(TimingWarning):  # Where warnings are errors, this thread goes on.
                    self._say(error)
            with self._changed:
                if not self._is_closed:  # Otherwise it has been counted as lost.
                    self._take_answer(report, error)
                self._changed.notify_all()

    def _send_share(self, report: Waiting) -> None:
        before = None if report.had is None else report.had.snapshot
        self._send(report.snapshot.since(before), report.destination, None)

    def _await_turn(self) -> Waiting | None:
        with self._changed:
            while self._queue:
                left_s = self._retry_at - self._clock()
                if left_s <= 0:
                    return self._queue.popleft()
                self._changed.wait(left_s)
            self._thread = None
            return None

    def _say(self, error: Exception) -> None:
        if not (self._is_server and is_outage(error)):
            self._say_once("exporting", error)
            return
        what = f"{self._service()} does not answer ({reason_of(error)}); up to {CAPACITY} reports of times wait"
        warn_once(f"{what} in a queue and are retried in the background.", key=f"{self._service()} down")

    def _take_answer(self, report: Waiting, error: Exception | None) -> None:
        self._attempts += 1
        if error is None or not (self._is_server and is_outage(error)):
            self._failures = self._tries = 0
            self._retry_at = 0.0
            if error is not None:
                self.failures += 1
            elif report.had is not None:
                report.had.snapshot = report.snapshot
            self._settle(arrived=error is None)
            return
        self._failures += 1
        longest_s = EXIT_PAUSE_S if self._is_exiting else LONGEST_PAUSE_S
        pause_s = min(FIRST_PAUSE_S * 2 ** min(self._failures - 1, 20), longest_s)
        # Spread, so that a thousand ranks do not retry at once.
        self._retry_at = self._clock() + pause_s * _random.uniform(0.75, 1.0)
        self._tries += getattr(error, "status", None) == 500
        if self._tries < MAX_TRIES:
            self._queue.appendleft(report)
        else:
            self._tries = 0
            self._settle(arrived=False)

    def _hurry(self) -> float:
        """Retry without long pauses from now on; return how many seconds the end of the program may wait."""
        with self._changed:
            self._is_exiting = True
            self._retry_at = 0.0
            if self.pending:
                self._wake()
            return self._exit_timeout_s if self.pending else 0.0

    def _wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until no report is queued or in flight, and tell whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.pending, max(timeout_s, 0.0))

    def _end(self) -> None:
        """Count undelivered reports as lost, and say how many were; deliver later ones on the exporting thread."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self.lost += self.pending
            self.pending = 0
            self._queue.clear()
            self._changed.notify_all()
        if self.lost:
            what = f"{self.lost} report(s) of {self._name} were lost: {self._service()} did not take them."
            warnings.warn(what, TimingWarning, stacklevel=3)


def _error_of(call: Callable[..., object], *arguments: Any) -> Exception | None:
    try:
        call(*arguments)
    except Exception as error:
        return error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # SystemExit or asyncio.CancelledError from a client library must not end the thread.
        return ExportError(f"the call was cancelled: {error!r}")
    return None


_exporters: WeakSet[BackgroundExporter] = WeakSet()
_children: set[int] = set()
"""The process, once it is registered as a child of multiprocessing."""


@cache
def _register() -> None:
    atexit.register(_drain_all)
    do_after_reports(_drain_all)
    after_fork(_reset_all)


def _register_in_multiprocessing_child() -> None:
    # Children of multiprocessing exit without `atexit`.
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None and os.getpid() not in _children:
        from multiprocessing.util import Finalize

        _children.add(os.getpid())
        Finalize(None, _drain_all, exitpriority=0)


def _drain_all() -> None:
    exporters = sorted(_exporters, key=lambda exporter: exporter._name)
    begin = time.monotonic()
    allowed_s = [exporter._hurry() for exporter in exporters]
    for exporter, seconds in zip(exporters, allowed_s, strict=True):
        exporter._wait_until_empty(begin + seconds - time.monotonic())
    for exporter in exporters:
        exporter._end()


def _reset_all() -> None:
    for exporter in list(_exporters):
        exporter._reset()


class UnavailableError(OSError):
    """A server answered that it cannot serve now."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def is_outage(error: Exception) -> bool:
    """Whether the server is away: no connection, no answer in time, or a status of 408, 425, 429 or 5xx."""
    # MLflow's errors, those of a database included, carry a status.
    ask = getattr(error, "get_http_status_code", None)
    status = getattr(error, "status", ask() if callable(ask) else None)
    if isinstance(status, int):
        return status >= 500 or status in {408, 425, 429}
    # `requests` raises OSErrors that are ValueErrors for malformed addresses.
    of_http = getattr(sys.modules.get("http.client"), "HTTPException", OSError)  # its import takes a table 14 ms
    return isinstance(error, (OSError, of_http)) and not isinstance(error, (*_LASTING, ValueError))


def reason_of(error: Exception) -> str:
    """An error in a few words, without passwords."""
    return without_passwords(f"{type(error).__name__}: {error}")[:200].rstrip(". ")
