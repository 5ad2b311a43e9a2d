"""Times in MLflow."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING, Any

from deep500_timing._base.require import require
from deep500_timing.exceptions import ExportError
from deep500_timing.exporters._metrics import check_prefix, check_stats, distinct
from deep500_timing.exporters._mlflow_server import delivery_to
from deep500_timing.exporters._tracker import TrackerExporter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._summary.snapshot import Snapshot
    from deep500_timing.exporters._delivery import Delivery
    from deep500_timing.exporters._metrics import Metric

MAX_NAME = 250
_FORBIDDEN = re.compile(r"[^/\w.\- ]")


class MlflowExporter(TrackerExporter):
    """Log each snapshot to an MLflow run as metrics, in the background.

    Names are ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH.p95`` and so on for other
    statistics. They fit every store of MLflow: a slash in a region's name becomes a dot (on the file system a metric is
    a file and cannot be a folder as well), a character that MLflow refuses becomes ``_``, and names of different
    regions stay different, also on a disk that ignores case. The run gets a tag with the unit.

    The exporter starts no run. It logs to the run that is active on the exporting thread, or to the one that the
    variable ``MLFLOW_RUN_ID`` names; without one it warns once.

    ``export`` does not wait. A report that the server refuses is lost alone, with a warning. While the server is down,
    up to 256 reports wait and are retried. MLflow's own retries and their settings are not used. Losses are counted in
    ``lost`` and said at the end of the program.
    """

    package = "mlflow"

    def __init__(
        self,
        prefix: str = "",
        *,
        stats: Sequence[str] = ("mean",),
        run_id: str | None = None,
        whole_run: bool = False,
        by_rank: bool = False,
        strict: bool = False,
        timeout_s: float = 5.0,
        exit_timeout_s: float = 5.0,
    ) -> None:
        """Choose what to log and where.

        Args:
            prefix: Put before the names, with one slash between.
            stats: Fields of ``TimeStats`` to log; ``median_ci`` gives two metrics, its low and high end.
            run_id: The run; None is the run that is active at each export.
            whole_run: Report the times of the whole run each time, as ``run_mean`` and so on, instead of the times
                since this exporter's last report.
            by_rank: Put the rank, where known, into the names: ``prefix/rank3/CPU/BATCH``.
            strict: Deliver each report before ``export`` returns, and raise ``ExportError`` if that fails.
            timeout_s: How long ``flush`` and a strict report may wait for the server, in seconds.
            exit_timeout_s: How long the end of the program may wait for undelivered reports, in seconds.

        Raises:
            MissingPackageError: mlflow is not installed.
            ValueError: A statistic is unknown, or a time is negative.
        """
        super().__init__(strict=strict, whole_run=whole_run, by_rank=by_rank)
        for name, seconds in (("timeout_s", timeout_s), ("exit_timeout_s", exit_timeout_s)):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"MlflowExporter was given {name}={seconds!r}; give seconds, 0 for no waiting.")
        self._prefix = check_prefix(prefix, "MlflowExporter")
        self._stats = check_stats(stats, "MlflowExporter")
        self._mlflow = require("mlflow", extra="mlflow", caller="MlflowExporter")
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._noted_run_id: str | None = None
        named = [*([repr(self._prefix)] if self._prefix else []), *([f"run_id={run_id!r}"] if run_id else [])]
        self._account.name = f"MlflowExporter({', '.join(named)})"

    def _where(self) -> str:
        return str(self._mlflow.get_tracking_uri())

    def _delivery(self) -> Delivery:
        return delivery_to(self._where())

    def note_destination(self) -> None:
        """Remember the run that is active on this thread, for a report from a thread without one."""
        run = self._mlflow.active_run()
        self._noted_run_id = None if run is None else run.info.run_id

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        run_id = self._run_id or self._active_run_id()
        metrics = self._metrics(snapshot, ".")
        if not metrics:
            return
        from mlflow.entities import Metric as Entity

        when_ms = int(snapshot.unix_time_s * 1000)
        number = self._number(run_id, step)
        named = [
            Entity(name, value, when_ms, number)
            for name, value in distinct(metrics, clean_name, limit=MAX_NAME, fold=str.casefold).items()
        ]
        delivery = self._delivery()
        if self._strict:
            delivery.send_now((run_id, named), self._account, self._timeout_s)
            return
        delivery.send((run_id, named), self._account, self._exit_timeout_s)
        self._tell(delivery.service, delivery.take_news())

    def _flush(self) -> None:
        delivery = self._delivery()
        try:
            delivery.flush(self._account, self._timeout_s)
        finally:
            self._tell(delivery.service, delivery.take_news())

    _close = _flush

    def _active_run_id(self) -> Any:
        run = self._mlflow.active_run()
        if run is not None:
            return run.info.run_id
        run_id = os.environ.get("MLFLOW_RUN_ID") or self._noted_run_id
        if not run_id:
            raise ExportError(
                "no MLflow run is active on this thread; call mlflow.start_run() first, or use MlflowExporter(run_id=)"
            )
        return run_id


def clean_name(metric: Metric) -> str:
    """A name that every store of MLflow takes, apart from its length.

    Letters and digits of any script, ``_``, ``-``, ``.``, blanks, and slashes outside the region's name remain. The
    result is also a normalized relative path without ``..``.
    """
    before, region = metric.name[: metric.region_at], metric.name[metric.region_at :]
    allowed = _FORBIDDEN.sub("_", before + region.replace("/", "."))
    parts = [part.replace(".", "_") if part in {"", ".", ".."} else part for part in allowed.split("/")]
    cleaned = "/".join(part or "_" for part in parts)
    return "_" + cleaned[1:] if cleaned.startswith("..") else cleaned
