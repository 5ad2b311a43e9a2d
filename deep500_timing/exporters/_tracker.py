"""What exporters to trackers share: names, steps, and the outcome of reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._base.warn import warn_once
from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._delivery import Account
from deep500_timing.exporters._metrics import metrics_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from deep500_timing._summary.snapshot import Snapshot
    from deep500_timing.exporters._metrics import Metric


class TrackerExporter(BaseExporter):
    """An exporter to a tracker. Reports that do not arrive are counted and said, and never hold up training."""

    _prefix: str
    _stats: tuple[str, ...]

    def __init__(self, *, strict: bool, whole_run: bool, by_rank: bool) -> None:
        """Set what all trackers have in common.

        Args:
            strict: Raise ``ExportError`` instead of warning once.
            whole_run: Report the whole run each time, under separate names (``run_mean``).
            by_rank: Put the rank into the names: ``prefix/rank3/CPU/BATCH``.
        """
        super().__init__(strict=strict, whole_run=whole_run)
        self._by_rank = by_rank
        self._account = Account(type(self).__name__)
        self._numbers: dict[Hashable, int] = {}

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

    def _metrics(self, snapshot: Snapshot, separator: str) -> list[Metric]:
        prefix = self._prefix
        if self._by_rank and snapshot.rank is not None:
            prefix += f"rank{snapshot.rank}/"
        return list(metrics_of(snapshot, self._stats, prefix=prefix, separator=separator, whole_run=self.whole_run))

    def _number(self, where: Hashable, step: int | None) -> int:
        # Trackers need a step: a report without one gets the next.
        number = self._numbers.get(where, -1) + 1 if step is None else step
        self._numbers[where] = number
        return number

    def _tell(self, service: str, news: list[tuple[str, str]]) -> None:
        for kind, sentence in news:
            warn_once(f"{sentence}.", key=f"{service} {kind}")
        while self._account.errors:
            self._say_once("exporting", self._account.errors.popleft())
