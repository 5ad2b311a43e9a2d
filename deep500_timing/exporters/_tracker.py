"""What exporters to trackers have in common: reports travel in the background and are accounted for."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from deep500_timing._base.warn import warn_once
from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._metrics import metrics_of
from deep500_timing.exporters._reports import Account

if TYPE_CHECKING:
    from collections.abc import Hashable

    from deep500_timing._summary.snapshot import Snapshot
    from deep500_timing.exporters._background import BackgroundCaller
    from deep500_timing.exporters._metrics import Metric


class TrackerExporter(BaseExporter):
    """An exporter to a service that may be busy, slow, gone, or refuse a report, none of which holds up training.

    While the service is prompt a report has arrived when ``export`` returns. Whatever the service does, no thread
    waits for it for more than ``timeout_s``, all reports of the run together; from then on reports go from a queue. A
    report that the service refuses costs itself, and a warning. While the service is down the queue keeps the latest
    256 reports. The end of the program waits ``exit_timeout_s`` for what is left. What is lost is counted in ``lost``
    and said: when the service is back, and when the program ends.

    A strict exporter waits for each report and raises if it does not arrive.
    """

    _prefix: str
    _stats: tuple[str, ...]

    def __init__(
        self, *, strict: bool, whole_run: bool, by_rank: bool, timeout_s: float, exit_timeout_s: float
    ) -> None:
        """Set how long to wait.

        Args:
            strict: Raise ``ExportError`` instead of warning once.
            whole_run: Report the whole run each time, under names of its own (``run_mean``).
            by_rank: Put the rank into the names: ``prefix/rank3/CPU/BATCH``.
            timeout_s: How long training may wait, in seconds, all reports of this process together.
            exit_timeout_s: How long the end of the program may wait, in seconds.

        Raises:
            ValueError: A time is negative or not a number.
        """
        super().__init__(strict=strict, whole_run=whole_run)
        self._by_rank = by_rank
        for name, seconds in (("timeout_s", timeout_s), ("exit_timeout_s", exit_timeout_s)):
            if not seconds >= 0 or math.isinf(seconds):
                raise ValueError(f"{type(self).__name__} was given {name}={seconds!r}; give seconds, 0 for no waiting.")
        self._timeout_s = timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._accounts: WeakKeyDictionary[BackgroundCaller, Account] = WeakKeyDictionary()
        self._numbers: dict[Hashable, int] = {}

    @abstractmethod
    def _caller(self) -> BackgroundCaller | None:
        """What sends this exporter's reports now, if there is anywhere to send them."""

    def _name(self) -> str:
        return type(self).__name__

    @property
    def delivered(self) -> int:
        """Reports of this exporter that the service has taken, in this process."""
        return sum(account.delivered for account in self._accounts.values())

    @property
    def pending(self) -> int:
        """Reports of this exporter on their way."""
        return sum(account.pending for account in self._accounts.values())

    @property
    def lost(self) -> int:
        """Reports of this exporter that were refused, or dropped because the queue was full, in this process."""
        return sum(account.lost for account in self._accounts.values())

    def _metrics(self, snapshot: Snapshot, separator: str) -> list[Metric]:
        prefix = self._prefix
        if self._by_rank and snapshot.rank is not None:
            prefix += f"rank{snapshot.rank}/"
        return list(metrics_of(snapshot, self._stats, prefix=prefix, separator=separator, whole_run=self.whole_run))

    def _number(self, where: Hashable, step: int | None) -> int:
        # Trackers know no "no step": a report without one is placed after the one before it.
        number = self._numbers.get(where, -1) + 1 if step is None else step
        self._numbers[where] = number
        return number

    def _send(self, caller: BackgroundCaller, payload: Any, *, group: Hashable = None, size: int = 1) -> None:
        try:
            caller.send(
                payload,
                self._account(caller),
                group=group,
                size=size,
                wait_s=self._timeout_s,
                exit_s=self._exit_timeout_s,
                insist=self._strict,
            )
        finally:
            self._tell(caller)

    def _account(self, caller: BackgroundCaller) -> Account:
        account = self._accounts.get(caller)
        if account is None:
            account = self._accounts[caller] = Account(self._name())
        return account

    def _tell(self, caller: BackgroundCaller) -> None:
        if self._strict:
            return  # It has raised its errors where they came up.
        for kind, sentence in caller.take_news():
            warn_once(f"{sentence}.", key=f"{caller.service} {kind}")
        for error in self._account(caller).take_errors():
            self._say_once("exporting", error)

    def _flush(self) -> None:
        caller = self._caller()
        if caller is None:
            return
        try:
            caller.flush(self._account(caller), self._timeout_s)
        finally:
            self._tell(caller)

    _close = _flush
