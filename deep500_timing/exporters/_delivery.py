"""Deliver reports to a server in the background: bounded queue, retries, bounded exit, every loss counted."""

from __future__ import annotations

import atexit
import http.client
import os
import random
import sys
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from deep500_timing._base.at_exit import do_after_reports
from deep500_timing._base.fork import after_fork
from deep500_timing._base.warn import warn_once
from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters._base import BaseExporter, without_passwords

if TYPE_CHECKING:
    from collections.abc import Callable

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


@dataclass(eq=False)
class Account:
    """The reports of one exporter in this process, by outcome."""

    name: str
    delivered: int = 0
    pending: int = 0
    lost: int = 0
    errors: deque[Exception] = field(default_factory=lambda: deque(maxlen=4))
    """Why reports were refused, until a warning has said so."""

    def settle(self, *, arrived: bool) -> None:
        """Count a pending report as delivered, or as lost."""
        self.pending -= 1
        self.delivered += arrived
        self.lost += not arrived


class CountingExporter(BaseExporter):
    """An exporter whose reports may wait. Reports that do not arrive are counted, and a warning says so."""

    _timeout_s = _exit_timeout_s = 0.0

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        prefix = getattr(self, "_prefix", "")
        self._account = Account(f"{type(self).__name__}({repr(prefix) if prefix else ''})")

    @property
    def delivered(self) -> int:
        """Reports of this exporter that the tracker has taken, in this process."""
        return self._account.delivered

    @property
    def pending(self) -> int:
        """Reports of this exporter that wait for delivery."""
        return self._account.pending

    @property
    def lost(self) -> int:
        """Reports of this exporter that were refused, dropped from a full queue, or undelivered at exit."""
        return self._account.lost

    def _tell(self, queue: Any) -> None:
        for kind, sentence in queue.take_news():
            warn_once(f"{sentence}.", key=f"{queue.service} {kind}")
        while self._account.errors:
            self._say_once("exporting", self._account.errors.popleft())

    def _deliver(self, delivery: Delivery, payload: Any) -> None:
        if self._strict:
            delivery.send_now(payload, self._account, self._timeout_s)
            return
        delivery.send(payload, self._account, self._exit_timeout_s)
        self._tell(delivery)

    def _await(self, delivery: Delivery) -> None:
        try:
            delivery.flush(self._account, self._timeout_s)
        finally:
            self._tell(delivery)


@dataclass(eq=False)
class Report:
    payload: Any
    account: Account
    exit_s: float
    tries: int = 0


class Delivery:
    """Deliver reports to one server on a daemon thread, in order.

    ``send`` never waits. A report that the server refuses is lost alone. While the server is down (no connection,
    time-out, 408, 425, 429, 5xx), reports wait and are retried with growing pauses. When the queue is full, the oldest
    report is lost. The thread ends when the queue is empty. A forked child starts with an empty queue.
    """

    def __init__(
        self,
        service: str,
        deliver: Callable[[Any, float | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = service
        self._deliver = deliver
        self._clock = clock
        self._reset()
        _deliveries.add(self)
        _register()

    def _reset(self) -> None:
        # A condition is reentrant: a signal handler may export during a send.
        self._changed = threading.Condition()
        self._queue: deque[Report] = deque()
        self._in_flight: Report | None = None
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._attempts = 0
        self._retry_at = 0.0
        self._is_exiting = self._is_closed = self._flush_failed = False
        self._accounts: set[Account] = set()
        self._news: deque[tuple[str, str]] = deque(maxlen=16)

    def _unsettled(self) -> list[Report]:
        return [*([self._in_flight] if self._in_flight else []), *self._queue]

    def send(self, payload: Any, account: Account, exit_s: float) -> None:
        """Queue a report; the end of the program may wait ``exit_s`` seconds for it."""
        _register_in_multiprocessing_child()
        if self._is_closed:
            self.send_now(payload, account, exit_s)
            return
        with self._changed:
            if len(self._queue) >= CAPACITY:
                self._queue.popleft().account.settle(arrived=False)
                what = f"the queue of reports for {self.service} is full; the oldest are lost and counted"
                self._news.append(("full", what))
            account.pending += 1
            self._accounts.add(account)
            self._queue.append(Report(payload, account, exit_s))
            self._wake()

    def send_now(self, payload: Any, account: Account, timeout_s: float) -> None:
        error = _error_of(self._deliver, payload, timeout_s)
        with self._changed:
            account.delivered += error is None
            account.lost += error is not None
        if error is not None:
            raise error

    def flush(self, account: Account, timeout_s: float) -> None:
        """Retry now and wait until the reports of one exporter have arrived.

        After a flush has failed, the next ones do not wait until the server has answered.
        """
        with self._changed:
            attempts = self._attempts
            if account.pending and self._failures:
                self._retry_at = 0.0
                self._wake()
            self._changed.wait_for(
                lambda: not account.pending or (self._failures and self._attempts != attempts),
                0.0 if self._flush_failed else timeout_s,
            )
            pending = account.pending
            self._flush_failed = pending > 0
            why = "does not answer" if self._failures else f"has not answered within {timeout_s:g} s"
        if pending:
            raise ExportError(f"{self.service} {why}; {pending} report(s) wait and are retried in the background")

    def take_news(self) -> list[tuple[str, str]]:
        """Pairs of a kind of trouble and a sentence, each returned once."""
        news, self._news = [*self._news], deque(maxlen=16)
        return news

    def hurry(self) -> float:
        """Retry without long pauses from now on.

        Returns:
            Seconds that the queued reports allow the end of the program to wait.
        """
        with self._changed:
            self._is_exiting = True
            self._retry_at = 0.0
            waiting = self._unsettled()
            if waiting:
                self._wake()
            return max((report.exit_s for report in waiting), default=0.0)

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until no report is queued or in flight, and tell whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and self._in_flight is None, max(timeout_s, 0.0))

    def close(self) -> list[str]:
        """Count undelivered reports as lost; deliver later reports on the exporting thread."""
        with self._changed:
            for report in self._unsettled():
                report.account.settle(arrived=False)
            self._queue.clear()
            self._in_flight = None
            self._is_closed = True
            accounts, self._accounts = self._accounts, set()
            self._changed.notify_all()
        return [
            f"{account.lost} report(s) of {account.name} were lost: {self.service} did not take them"
            + (f" (last error: {reason_of(account.errors[-1])})." if account.errors else ".")
            for account in sorted(accounts, key=lambda account: account.name)
            if account.lost
        ]

    def after_fork_in_child(self) -> None:
        for report in self._unsettled():
            report.account.pending = 0
        self._reset()

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
        while (report := self._next()) is not None:
            error = _error_of(self._deliver, report.payload, None)
            with self._changed:
                self._settle(report, error)
                self._changed.notify_all()

    def _next(self) -> Report | None:
        with self._changed:
            while self._queue:
                left_s = self._retry_at - self._clock()
                if left_s <= 0:
                    self._in_flight = self._queue.popleft()
                    return self._in_flight
                self._changed.wait(left_s)
            self._thread = None
            return None

    def _settle(self, report: Report, error: Exception | None) -> None:
        if self._is_closed:
            return  # `close` has counted it as lost.
        self._in_flight = None
        self._attempts += 1
        if error is not None and is_outage(error):
            self._note_outage(error)
            report.tries += getattr(error, "status", None) == 500
            if report.tries < MAX_TRIES:
                self._queue.appendleft(report)
            else:
                report.account.settle(arrived=False)  # The outage has been said, with its reason.
            return
        self._failures = 0
        self._retry_at = 0.0
        self._flush_failed = False
        if error is not None:
            report.account.errors.append(error)
        report.account.settle(arrived=error is None)

    def _note_outage(self, error: Exception) -> None:
        self._failures += 1
        longest_s = EXIT_PAUSE_S if self._is_exiting else LONGEST_PAUSE_S
        pause_s = min(FIRST_PAUSE_S * 2 ** min(self._failures - 1, 20), longest_s)
        # Spread, so that a thousand ranks do not retry at once.
        self._retry_at = self._clock() + pause_s * _random.uniform(0.75, 1.0)
        what = f"{self.service} does not answer ({reason_of(error)}); up to {CAPACITY} reports of times wait in a queue"
        self._news.append(("down", f"{what} and are retried in the background"))


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


_deliveries: WeakSet[Delivery] = WeakSet()


_children: set[int] = set()
"""The process, once it is registered as a child of multiprocessing."""


@cache
def _register() -> None:
    atexit.register(_drain_all)
    do_after_reports(_drain_all)
    after_fork(_after_fork_in_child)


def _register_in_multiprocessing_child() -> None:
    # Children of multiprocessing exit without `atexit`.
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None and os.getpid() not in _children:
        from multiprocessing.util import Finalize

        _children.add(os.getpid())
        Finalize(None, _drain_all, exitpriority=0)


def _drain_all() -> None:
    deliveries = sorted(_deliveries, key=lambda delivery: delivery.service)
    begin = time.monotonic()
    allowed_s = [delivery.hurry() for delivery in deliveries]
    for delivery, seconds in zip(deliveries, allowed_s, strict=True):
        delivery.wait_until_empty(begin + seconds - time.monotonic())
    for delivery in deliveries:
        for sentence in delivery.close():
            warnings.warn(sentence, TimingWarning, stacklevel=2)


def _after_fork_in_child() -> None:
    for delivery in list(_deliveries):
        delivery.after_fork_in_child()


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
    return isinstance(error, (OSError, http.client.HTTPException)) and not isinstance(error, (*_LASTING, ValueError))


def reason_of(error: Exception) -> str:
    """An error in a few words, without passwords."""
    return without_passwords(f"{type(error).__name__}: {error}")[:200].rstrip(". ")
