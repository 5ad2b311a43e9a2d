"""Times in Weights & Biases."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from deep500_timing._ground.require import require
from deep500_timing.exceptions import ExportError
from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._metrics import check_prefix, check_stats, distinct, metrics_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._summary.snapshot import Snapshot
    from deep500_timing.exporters._metrics import Metric

STEP_METRIC = "timing/step"
"""The x-axis of times that are exported with a step. W&B's own step only ever grows, by every call of ``log``."""

# A run is told once which axis its times have, however many exporters there are: log_wb_all makes one each time.
_axes: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class WandbExporter(BaseExporter):
    """Logs each snapshot to a W&B run by one call of ``log``, CPU and GPU together.

    The keys are ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH/p95`` and so on for other
    statistics. Like every ``log`` without W&B's own step, the call ends the row that W&B is filling and begins the
    next. A step that is given to ``export`` becomes the x-axis of the times, as the metric ``timing/step``.

    No run is started: without one, that is said once.
    """

    package = "wandb"

    def __init__(
        self, prefix: str = "", *, stats: Sequence[str] = ("mean",), run: Any = None, strict: bool = False
    ) -> None:
        """Choose what to log and where.

        Args:
            prefix: Put before the keys, with one slash between.
            stats: Which fields of ``TimeStats`` to log; ``median_ci`` gives two keys, its low and its high end.
            run: A W&B run; the one that is active at the time of each export if None.
            strict: Raise ``ExportError`` if logging fails, instead of warning once.

        Raises:
            MissingPackageError: wandb is not installed.
            ValueError: A statistic is not known, or the prefix holds ``*``, which W&B takes for a wildcard.
        """
        super().__init__(strict=strict)
        self._prefix = check_prefix(prefix, "WandbExporter")
        if "*" in self._prefix:
            raise ValueError(f"WandbExporter was given prefix={prefix!r}; W&B takes '*' for a wildcard, leave it out.")
        self._stats = check_stats(stats, "WandbExporter")
        self._wandb = require("wandb", extra="wandb", caller="WandbExporter")
        self._run = run

    def _where(self) -> str:
        return str(id(self._run)) if self._run is not None else ""

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        run = self._run if self._run is not None else self._wandb.run
        if run is None:
            raise ExportError("no W&B run is active; call wandb.init() first, or pass run=")
        metrics = list(metrics_of(snapshot, self._stats, prefix=self._prefix, separator="/"))
        if not metrics:
            return
        data: dict[str, Any] = dict(distinct(metrics, _clean))
        if step is not None and math.isfinite(step):
            for device in dict.fromkeys(region.device for region in snapshot):
                self._set_axis(run, f"{self._prefix}{device}/*")
            data[STEP_METRIC] = step
        run.log(data)

    def _set_axis(self, run: Any, keys: str) -> None:
        told = _axes.setdefault(run, set())
        if keys not in told:
            if not told:
                run.define_metric(STEP_METRIC, hidden=True)
            run.define_metric(keys, step_metric=STEP_METRIC)
            told.add(keys)


def _clean(metric: Metric) -> str:
    # Keys travel as UTF-8, which has no lone surrogates.
    return metric.name.encode("utf-8", "backslashreplace").decode("utf-8")
