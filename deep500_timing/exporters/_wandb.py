"""Times in Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._base.require import require
from deep500_timing.exceptions import ExportError
from deep500_timing.exporters._metrics import check_prefix, check_stats, distinct
from deep500_timing.exporters._tracker import TrackerExporter
from deep500_timing.exporters._wandb_rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._summary.snapshot import Snapshot
    from deep500_timing.exporters._background import BackgroundCaller
    from deep500_timing.exporters._metrics import Metric

STEP_METRIC = "timing/step"
"""The x-axis of times, below the exporter's prefix. W&B's own step belongs to whoever calls ``wandb.log``."""


class WandbExporter(TrackerExporter):
    """Logs each snapshot to a W&B run, CPU and GPU together.

    The keys are ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH/p95`` and so on for other
    statistics. Their x-axis is a metric of their own, ``prefix/timing/step``, which holds the step that is given to
    ``export``, or one that grows by report.

    W&B's metrics have no unit, so the run's config gets a key ``deep500_timing`` with it, unless it has one.

    Rows that you log yourself are neither lost nor moved, whatever ``step`` you give: a report joins the row that W&B
    is filling and ends none. A row holds one value of a key, so where two reports of the same keys come between two
    rows of yours, the later one waits for the next row, or for the end of the run. At most 256 wait; if you log less
    often than that, give each timer a prefix of its own, or report less often, or set ``own_rows`` if you never give
    ``step`` to ``wandb.log``.

    No run is started: without one, that is said once. Reports go to the run in the background, in order, see
    :class:`TrackerExporter`.
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
        timeout_s: float = 5.0,
        exit_timeout_s: float = 5.0,
    ) -> None:
        """Choose what to log and where.

        Args:
            prefix: Put before the keys, with one slash between.
            stats: Which fields of ``TimeStats`` to log; ``median_ci`` gives two keys, its low and its high end.
            run: A W&B run; the one that is active at the time of each export if None.
            own_rows: Write each report at once, as a row of its own, which ends the row that W&B is filling and moves
                its step: only where nothing else is logged to the run, or never with ``step=``.
            whole_run: Report the times of the whole run each time, as ``run_mean`` and so on, not what came since
                this exporter's last report.
            by_rank: Put the rank of this process into the names, where it is known: ``prefix/rank3/CPU/BATCH``.
            strict: Raise ``ExportError`` if logging fails, instead of warning once.
            timeout_s: How long training may wait for W&B's service, in seconds, all reports of this process together.
            exit_timeout_s: How long the end of the run, or of the program, may wait for reports that are on their way.

        Raises:
            MissingPackageError: wandb is not installed.
            ValueError: A statistic is not known, the prefix holds ``*``, which W&B takes for a wildcard, or a time is
                negative.
        """
        super().__init__(
            strict=strict, whole_run=whole_run, by_rank=by_rank, timeout_s=timeout_s, exit_timeout_s=exit_timeout_s
        )
        self._prefix = check_prefix(prefix, "WandbExporter")
        if "*" in self._prefix:
            raise ValueError(f"WandbExporter was given prefix={prefix!r}; W&B takes '*' for a wildcard, leave it out.")
        self._stats = check_stats(stats, "WandbExporter")
        self._wandb = require("wandb", extra="wandb", caller="WandbExporter")
        self._run = run
        self._own_rows = own_rows

    def _where(self) -> str:
        return str(id(self._run)) if self._run is not None else ""

    def _name(self) -> str:
        return f"WandbExporter({repr(self._prefix) if self._prefix else ''})"

    def _run_now(self) -> Any:
        run = self._run if self._run is not None else self._wandb.run
        if run is None:
            raise ExportError("no W&B run is active; call wandb.init() first, or pass run=")
        return run

    def _caller(self) -> BackgroundCaller | None:
        run = self._run if self._run is not None else self._wandb.run
        return None if run is None else rows_of(run).caller

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        run = self._run_now()
        metrics = self._metrics(snapshot, "/")
        if not metrics:
            return
        axis = self._prefix + STEP_METRIC
        data: dict[str, Any] = dict(distinct(metrics, _clean))
        data[axis] = self._number(getattr(run, "id", None), step)
        axes = {f"{self._prefix}{device}/*": axis for device in dict.fromkeys(region.device for region in snapshot)}
        self._send(rows_of(run).caller, (run, data, axes, self._own_rows))


def _clean(metric: Metric) -> str:
    # Keys travel as UTF-8, which has no lone surrogates.
    return metric.name.encode("utf-8", "backslashreplace").decode("utf-8")
