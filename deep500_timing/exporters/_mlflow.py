"""Times in MLflow."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from deep500_timing._base.require import require
from deep500_timing.exceptions import ExportError
from deep500_timing.exporters._metrics import check_prefix, check_stats, distinct
from deep500_timing.exporters._mlflow_server import caller_of
from deep500_timing.exporters._tracker import TrackerExporter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._summary.snapshot import Snapshot
    from deep500_timing.exporters._background import BackgroundCaller
    from deep500_timing.exporters._metrics import Metric

MAX_NAME = 250
_FORBIDDEN = re.compile(r"[^/\w.\- ]")


class MlflowExporter(TrackerExporter):
    """Logs each snapshot to an MLflow run as metrics, up to 1000 in a request.

    The names are ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH.p95`` and so on for other
    statistics. They are names that each of MLflow's stores can hold: on the file system a metric is a file, which
    cannot be a folder as well, so a slash within a region's name becomes a dot (``load/decode`` is
    ``prefix/CPU/load.decode``); what MLflow does not allow in a name becomes ``_``; and names of different regions
    stay different, also where a disk does not tell ``a`` from ``A``.

    No run is started: without one, that is said once. Times are logged to the run that is active on the thread that
    exports, or to the one that the variable ``MLFLOW_RUN_ID`` names, as MLflow itself would.

    MLflow's metrics have no unit, so the run gets a tag, ``deep500_timing.unit``, with its first report.

    Reports go to the server in the background, in order, see :class:`TrackerExporter`. MLflow's own way of trying
    again for minutes is not used for them, and its settings (``MLFLOW_HTTP_REQUEST_MAX_RETRIES`` and so on) are left
    alone.
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
            stats: Which fields of ``TimeStats`` to log; ``median_ci`` gives two metrics, its low and its high end.
            run_id: The run; the one that is active at the time of each export if None.
            whole_run: Report the times of the whole run each time, as ``run_mean`` and so on, not what came since
                this exporter's last report.
            by_rank: Put the rank of this process into the names, where it is known: ``prefix/rank3/CPU/BATCH``.
            strict: Raise ``ExportError`` if logging fails, instead of warning once.
            timeout_s: How long training may wait for the server, in seconds, all reports of this process together.
            exit_timeout_s: How long the end of the program may wait for reports that are on their way, in seconds.

        Raises:
            MissingPackageError: mlflow is not installed.
            ValueError: A statistic is not known, or a time is negative.
        """
        super().__init__(
            strict=strict, whole_run=whole_run, by_rank=by_rank, timeout_s=timeout_s, exit_timeout_s=exit_timeout_s
        )
        self._prefix = check_prefix(prefix, "MlflowExporter")
        self._stats = check_stats(stats, "MlflowExporter")
        self._mlflow = require("mlflow", extra="mlflow", caller="MlflowExporter")
        self._run_id = run_id
        self._noted_run_id: str | None = None

    def _where(self) -> str:
        return str(self._mlflow.get_tracking_uri())

    def _caller(self) -> BackgroundCaller:
        return caller_of(self._where())

    def _name(self) -> str:
        named = [repr(self._prefix)] if self._prefix else []
        named += [f"run_id={self._run_id!r}"] if self._run_id else []
        return f"MlflowExporter({', '.join(named)})"

    def note_destination(self) -> None:
        """Note the run that is active on this thread, for a report from one where none is."""
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
        self._send(self._caller(), named, group=run_id, size=len(named))

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
    """A name as every store of MLflow takes it, but for its length.

    Letters and digits of any script, ``_``, ``-``, ``.`` and blanks are left, and slashes but for those of the region;
    it must also be a path in its shortest form that leads nowhere up.
    """
    before, region = metric.name[: metric.region_at], metric.name[metric.region_at :]
    allowed = _FORBIDDEN.sub("_", before + region.replace("/", "."))
    parts = [part.replace(".", "_") if part in {"", ".", ".."} else part for part in allowed.split("/")]
    cleaned = "/".join(part or "_" for part in parts)
    return "_" + cleaned[1:] if cleaned.startswith("..") else cleaned
