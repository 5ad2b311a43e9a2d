"""Reports on their way to a service that may be busy, slow, gone, or of another opinion, while training goes on."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from deep500_timing.exceptions import ExportError
from deep500_timing.exporters import _exit
from deep500_timing.exporters._outage import Outage
from deep500_timing.exporters._reports import Report, ReportQueue
from deep500_timing.exporters._trouble import BusyError, is_outage

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from deep500_timing.exporters._reports import Account

CAPACITY = 256
"""Reports that may wait for one service; beyond it the oldest are dropped."""
MOST_FAILURES = 5
"""How often a report may meet an error of a service that answers (500) before the report is blamed."""


class BackgroundCaller:
    """Hands reports to one service on a thread of its own, in order, from a short queue.

    Four kinds of trouble are told apart. A service that is *busy* (the report must wait its turn) or *slow* gets its
    reports from the queue. One that *refuses* a report costs that report and no other. One that is *down* (no
    connection, no answer in time, 5xx, 429) is left alone for pauses that double from half a second to half a minute,
    then asked by a short request of ours before the queue goes on. A queue that is full loses its oldest report.

    While the service is prompt, ``send`` returns when the report has arrived. What the calling threads may wait is
    bounded once for the whole run, not for each report.

    The thread ends when the queue is empty, so none is left behind, and no other thing of it after a fork: the child
    begins with an empty queue, since what the parent has queued the parent sends.
    """

    def __init__(
        self,
        service: str,
        deliver: Callable[[Any, list[Any]], None],
        *,
        probe: Callable[[], None] | None = None,
        most_numbers: int = 0,
        capacity: int = CAPACITY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is known of the service yet.

        Args:
            service: What it is called in messages.
            deliver: Hands over the payloads of one group. What it raises says what is wrong: ``BusyError`` that they
                must wait, an outage (see ``is_outage``) that the service is down, anything else that it refuses them.
            probe: Asks a service that was down whether it is well again; raises if not.
            most_numbers: Reports of one group go together up to this size; one by one if 0.
            capacity: Reports that may wait.
            clock: Seconds that never run backwards.
        """
        self.service = service
        self._deliver = deliver
        self._probe = probe
        self._most_numbers = most_numbers
        self._capacity = capacity
        self._clock = clock
        self._waited_s = 0.0
        self._begin_anew()
        _exit.look_after(self)

    def _begin_anew(self) -> None:
        # A condition's lock can be taken again by its thread: a signal's handler may export amid a send.
        self._changed = threading.Condition()
        self._queue = ReportQueue(self._capacity)
        self._flying: list[Report] = []
        self._thread: threading.Thread | None = None
        self._outage = Outage(self.service, self._capacity, self._clock)
        self._parked = False
        self._gave_up = False

    def after_fork_in_child(self) -> None:
        """Forget what belongs to the parent: its thread, its lock, its reports."""
        for report in (*self._queue, *self._flying):
            report.account.pending = 0
        self._waited_s = 0.0
        self._begin_anew()

    # The user's side

    def send(
        self,
        payload: Any,
        account: Account,
        *,
        group: Hashable = None,
        size: int = 1,
        wait_s: float = 0.0,
        exit_s: float = 5.0,
        insist: bool = False,
    ) -> None:
        """Queue a report, and wait for it as long as waiting is allowed.

        Args:
            payload: What ``deliver`` gets.
            account: Whose report it is.
            group: Reports of equal groups may go together.
            size: How many numbers it holds.
            wait_s: How long the threads of this process may wait for the service, all reports of the run together.
            exit_s: How long the end of the program may wait for it.
            insist: Try now, whatever happened before, wait ``wait_s`` for this one, and raise if it does not arrive.

        Raises:
            ExportError: It did not arrive and ``insist`` is true; it is lost then.
            Exception: Why the service refused it, if that was told in time.
        """
        insist = insist or _exit.has_ended()
        report = Report(payload, account, group, size, exit_s, insist)
        _exit.expect_end_of_child()
        with self._changed:
            for oldest in self._queue.make_room(size):
                self._lose(oldest, None)
                self._outage.say(
                    "full",
                    f"{self.service} takes reports of times more slowly than they come; the queue is full, and the "
                    f"oldest are lost and counted",
                )
            account.pending += 1
            self._queue.append(report)
            if insist or not self._outage.failures:
                self._outage.retry_at = 0.0
            self._parked = False
            self._wake()
            self._wait_for(report, wait_s)
            if insist and not (report.settled or self._parked):
                self._withdraw(report, ExportError(f"{self.service} has not answered within {wait_s:g} s"))
        if report.error is not None:
            raise report.error

    def _wait_for(self, report: Report, wait_s: float) -> None:
        allowed_s = wait_s if report.insists or _exit.has_begun() else max(wait_s - self._waited_s, 0.0)
        begin = now = self._clock()
        while not (report.settled or self._parked) and (report.insists or not self._outage.failures):
            left_s = begin + allowed_s - now
            if left_s <= 0:
                # Many short waits may use up what is allowed as well, which is no trouble to tell.
                if not report.insists and allowed_s > wait_s / 2:
                    self._outage.say(
                        "slow",
                        f"{self.service} has not answered within {allowed_s:.3g} s; from now on reports of "
                        f"times wait for it in a queue, and training does not",
                    )
                break
            self._changed.wait(left_s)
            now = self._clock()
        if not report.insists:
            self._waited_s += now - begin
            if report.error is not None:
                with suppress(ValueError):
                    report.account.errors.remove(report.error)  # It is raised, and not told again.

    def _withdraw(self, report: Report, error: Exception) -> None:
        self._lose(report, error)
        self._queue.forget_settled()

    def flush(self, account: Account, timeout_s: float) -> None:
        """Wait until the reports of one exporter have arrived, or wait for nothing but their turn.

        A thread that has waited in vain waits no more until the service has answered.

        Raises:
            ExportError: Some have not arrived.
        """
        with self._changed:
            if account.pending and self._outage.failures:
                self._outage.retry_at = 0.0
                self._wake()
            outages = self._outage.failures_in_all
            begin = now = self._clock()
            allowed_s = 0.0 if self._gave_up else timeout_s
            while account.pending and not self._parked and outages == self._outage.failures_in_all:
                left_s = begin + allowed_s - now
                if left_s <= 0:
                    self._gave_up = True
                    break
                self._changed.wait(left_s)
                now = self._clock()
            if not account.pending or self._parked:
                return
            pending = account.pending
            told = outages != self._outage.failures_in_all
            why = "does not answer" if told else f"has not answered within {timeout_s:g} s"
        raise ExportError(
            f"{self.service} {why}; {pending} report(s) wait for it and are tried again in the background"
        )

    def take_news(self) -> list[tuple[str, str]]:
        """What happened since: pairs of a kind of trouble and a sentence; each is handed out once."""
        return self._outage.take_news()

    # The end of the program

    def hurry(self) -> float:
        """Try without long pauses from now on.

        Returns:
            For how many seconds the end of the program may wait, by what the queued reports allow.
        """
        with self._changed:
            waiting = (*self._queue, *self._flying)
            self._outage.hurried = True
            self._outage.retry_at = 0.0
            self._parked = False
            if waiting:
                self._wake()
            return max((report.exit_s for report in waiting), default=0.0)

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait for the queue to be empty.

        Returns:
            Whether it is.
        """
        end = self._clock() + timeout_s
        with self._changed:
            while self._queue or self._flying:
                left_s = end - self._clock()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return True

    def give_up(self) -> list[str]:
        """Count what has not arrived as lost.

        Returns:
            A sentence for each exporter that has lost reports.
        """
        with self._changed:
            for report in (*self._queue, *self._flying):
                self._lose(report, None)
            self._queue.clear()
            self._flying = []
            self._changed.notify_all()
            return self._outage.take_losses()

    # The thread's side

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._thread is not None:
            return
        # A daemon, so that a call that hangs does not hold up the end of the program for longer than it allows.
        self._thread = threading.Thread(target=self._work, name="deep500-timing-export", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            # The interpreter is shutting down and starts no thread any more.
            self._work(linger=False)

    def _work(self, *, linger: bool = True) -> None:
        while self._wait_for_work(linger):
            error: Exception | None = None
            reports = self._flying
            if self._outage.failures and self._probe is not None:
                error = _error_of(self._probe)
            if error is None:
                payloads = [report.payload for report in reports]
                # The call sees its caller's context.
                error = _error_of(reports[0].context.run, self._deliver, reports[0].group, payloads)
                if error is not None and is_outage(error, answered=True):
                    for report in reports:
                        report.failures += 1
            with self._changed:
                self._settle(reports, error)
                self._changed.notify_all()

    def _wait_for_work(self, linger: bool) -> bool:
        with self._changed:
            while self._queue:
                left_s = self._outage.retry_at - self._clock()
                if left_s <= 0:
                    self._flying = self._queue.take(self._most_numbers)
                    return True
                if not linger:
                    break
                self._changed.wait(left_s)
            self._thread = None
            return False

    def _settle(self, reports: list[Report], error: Exception | None) -> None:
        self._flying = []
        # Who insists, and the end of the program, may have given them up meanwhile.
        reports = [report for report in reports if not report.settled]
        if isinstance(error, BusyError):
            self._queue.put_back(reports)
            self._parked = True
            self._outage.note_busy()
            return
        if error is not None and is_outage(error):
            self._outage.note_failure(error)
            blamed = [report for report in reports if report.failures >= MOST_FAILURES]
            self._queue.put_back([report for report in reports if report.failures < MOST_FAILURES])
            for report in (*blamed, *(report for report in self._queue if report.insists)):
                self._lose(report, error)
            self._queue.forget_settled()
            return
        self._parked = self._gave_up = False
        self._outage.note_answer()
        if error is None:
            for report in reports:
                report.settled = True
                report.account.pending -= 1
                report.account.delivered += 1
        elif len(reports) == 1:
            self._lose(reports[0], error)
        else:
            # One of them is refused; each for itself, the others arrive.
            for report in reports:
                report.alone = True
            self._queue.put_back(reports)

    def _lose(self, report: Report, error: Exception | None) -> None:
        if report.settled:
            return
        account = report.account
        report.settled = True
        account.pending -= 1
        account.lost += 1
        self._outage.note_loss(account.name, reported=error is not None)
        if error is not None:
            report.error = error
            if not report.insists:
                account.errors.append(error)


def _error_of(call: Callable[..., object], *arguments: Any) -> Exception | None:
    try:
        call(*arguments)
    except Exception as error:
        return error
    except SystemExit as error:
        return ExportError(f"it would end the program: {error!r}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Such as asyncio.CancelledError. The thread goes on, or nothing would be sent any more.
        return ExportError(f"it was cancelled: {error!r}")
    return None
