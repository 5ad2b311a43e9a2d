"""Times in Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._base.require import require
from deep500_timing.exceptions import ExportError
from deep500_timing.exporters._metrics import check_prefix, check_stats, distinct
from deep500_timing.exporters._tracker import TrackerExporter
from deep500_timing.exporters._wandb_rows import Row, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._summary.snapshot import Snapshot
    from deep500_timing.exporters._metrics import Metric

STEP_METRIC = "timing/step"
"""The x-axis of times, below the exporter's prefix. W&B's own step belongs to the user."""


class WandbExporter(TrackerExporter):
    """Log each snapshot to a W&B run, CPU and GPU together.

    Keys are ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH/p95`` and so on for other statistics.
    Their x-axis is the metric ``prefix/timing/step``: the step that ``export`` is given, or the next number.
    The run's config gets a key ``deep500_timing`` with the unit, unless it has one.

    Rows that you log are neither lost nor moved, with or without ``step=``: a report joins the row that W&B is filling
    and does not end it. A row holds one value per key. If two reports with the same keys come between two of your rows,
    the second waits for your next row, or for the end of the run. At most 256 wait. If you log less often than that,
    give each timer its own prefix, report less often, or set ``own_rows`` if you never pass ``step`` to ``wandb.log``.

    The exporter starts no run; without one it warns once. ``wandb.log`` hands rows to W&B's own process, which does the
    network traffic, so a report takes as long as a ``wandb.log`` of yours.
    """

    package = "wandb"

    def __init__(
        self,
        prefix: str = "",
        *,
        stats: Sequence[str] = ("mean",),
        run: Any = None,
        own_rows: bool = False,
        whole_run: bool = False,
        by_rank: bool = False,
        strict: bool = False,
    ) -> None:
        """Choose what to log and where.

        Args:
            prefix: Put before the keys, with one slash between.
            stats: Fields of ``TimeStats`` to log; ``median_ci`` gives two keys, its low and high end.
            run: A W&B run; None is the run that is active at each export.
            own_rows: Write each report at once as a separate row. That ends the row that W&B is filling and advances
                its step: only where nothing else is logged, or never with ``step=``.
            whole_run: Report the times of the whole run each time, as ``run_mean`` and so on, instead of the times
                since this exporter's last report.
            by_rank: Put the rank, where known, into the names: ``prefix/rank3/CPU/BATCH``.
            strict: Raise ``ExportError`` if logging fails, instead of warning once.

        Raises:
            MissingPackageError: wandb is not installed.
            ValueError: A statistic is unknown, or the prefix holds ``*``, W&B's wildcard.
        """
        super().__init__(strict=strict, whole_run=whole_run, by_rank=by_rank)
        self._prefix = check_prefix(prefix, "WandbExporter")
        if "*" in self._prefix:
            raise ValueError(f"WandbExporter was given prefix={prefix!r}; '*' is W&B's wildcard, leave it out.")
        self._stats = check_stats(stats, "WandbExporter")
        self._wandb = require("wandb", extra="wandb", caller="WandbExporter")
        self._run = run
        self._own_rows = own_rows
        self._account.name = f"WandbExporter({repr(self._prefix) if self._prefix else ''})"

    def _where(self) -> str:
        return str(id(self._run)) if self._run is not None else ""

    def _active_run(self) -> Any:
        return self._run if self._run is not None else self._wandb.run

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        run = self._active_run()
        if run is None:
            raise ExportError("no W&B run is active; call wandb.init() first, or pass run=")
        metrics = self._metrics(snapshot, "/")
        if not metrics:
            return
        axis = self._prefix + STEP_METRIC
        data: dict[str, Any] = dict(distinct(metrics, _clean))
        data[axis] = self._number(getattr(run, "id", None), step)
        axes = {f"{self._prefix}{device}/*": axis for device in dict.fromkeys(region.device for region in snapshot)}
        rows = rows_of(run)
        error = rows.add(Row(data, axes, self._account, self._own_rows))
        if error is not None:
            raise error
        self._tell(rows.service, rows.take_news())

    def _flush(self) -> None:
        run = self._active_run()
        if run is not None:
            rows_of(run).write()

    _close = _flush


def _clean(metric: Metric) -> str:
    # Keys are sent as UTF-8, which has no lone surrogates.
    return metric.name.encode("utf-8", "backslashreplace").decode("utf-8")
