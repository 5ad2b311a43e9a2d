"""Times in MLflow."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from deep500_timing._ground.require import require
from deep500_timing.exceptions import ExportError
from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._courier import Courier
from deep500_timing.exporters._metrics import check_prefix, check_stats, distinct, metrics_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._summary.snapshot import Snapshot

MAX_NAME = 250
MAX_BATCH = 1000
_FORBIDDEN = re.compile(r"[^/\w.\- ]")

# What is known of a server outlives an exporter: log_mlflow_all makes one each time.
_couriers: dict[str, Courier] = {}


class MlflowExporter(BaseExporter):
    """Logs each snapshot to an MLflow run as metrics, up to 1000 in a request.

    The names are ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH.p95`` and so on for other
    statistics: MLflow keeps a metric on the file system as a file, which cannot be a folder as well. What MLflow does
    not allow in a name becomes ``_``, and names of different regions stay different.

    No run is started: without one, that is said once. Times are logged to the run that is active on the thread that
    exports, or to the one that the variable ``MLFLOW_RUN_ID`` names, as MLflow itself would.

    MLflow tries an unreachable server again for minutes. Here a report waits ``timeout_s`` at most, and only once:
    then one report now and then is tried in the background, after pauses from 10 s to 10 min, and the ones in
    between are dropped. When the server answers again, it is said how many were lost. MLflow's own settings
    (``MLFLOW_HTTP_REQUEST_MAX_RETRIES``, ``MLFLOW_HTTP_REQUEST_TIMEOUT``) are left alone. A strict exporter
    tries each report, waits, and raises.
    """

    package = "mlflow"

    def __init__(
        self,
        prefix: str = "",
        *,
        stats: Sequence[str] = ("mean",),
        run_id: str | None = None,
        strict: bool = False,
        timeout_s: float = 5.0,
    ) -> None:
        """Choose what to log and where.

        Args:
            prefix: Put before the names, with one slash between.
            stats: Which fields of ``TimeStats`` to log; ``median_ci`` gives two metrics, its low and its high end.
            run_id: The run; the one that is active at the time of each export if None.
            strict: Raise ``ExportError`` if logging fails, instead of warning once.
            timeout_s: How long an export may wait for the server, in seconds.

        Raises:
            MissingPackageError: mlflow is not installed.
            ValueError: A statistic is not known.
        """
        super().__init__(strict=strict)
        self._prefix = check_prefix(prefix, "MlflowExporter")
        self._stats = check_stats(stats, "MlflowExporter")
        self._mlflow = require("mlflow", extra="mlflow", caller="MlflowExporter")
        self._run_id = run_id
        self._timeout_s = timeout_s

    @property
    def lost(self) -> int:
        """Reports of this process that the current tracking server has not taken."""
        return self._courier().lost

    def _where(self) -> str:
        return str(self._mlflow.get_tracking_uri())

    def _courier(self) -> Courier:
        uri = self._where()
        return _couriers.setdefault(uri, Courier(f"MLflow at {_without_password(uri)}"))

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        run_id = self._run_id or self._active_run_id()
        metrics = list(metrics_of(snapshot, self._stats, prefix=self._prefix, separator="."))
        if not metrics:
            return
        from mlflow.entities import Metric

        when_ms = int(snapshot.unix_time_s * 1000)
        named = [
            Metric(name, value, when_ms, 0 if step is None else int(step))
            for name, value in distinct(metrics, clean_name, limit=MAX_NAME).items()
        ]
        client = self._mlflow.MlflowClient(tracking_uri=self._where())

        def send() -> None:
            for first in range(0, len(named), MAX_BATCH):
                client.log_batch(run_id, named[first : first + MAX_BATCH])

        self._courier().send(send, timeout_s=self._timeout_s, insist=self._strict)

    def _active_run_id(self) -> Any:
        run = self._mlflow.active_run()
        if run is not None:
            return run.info.run_id
        run_id = os.environ.get("MLFLOW_RUN_ID")
        if not run_id:
            raise ExportError(
                "no MLflow run is active on this thread; call mlflow.start_run() first, or use MlflowExporter(run_id=)"
            )
        return run_id

    def _flush(self) -> None:
        self._courier().wait(self._timeout_s)

    _close = _flush


def clean_name(name: str) -> str:
    """A name as every version of MLflow takes it, but for its length.

    Letters and digits of any script, ``_``, ``-``, ``.``, blanks and slashes are left; it must also be a path in
    its shortest form that leads nowhere up.
    """
    allowed = _FORBIDDEN.sub("_", name)
    parts = [part.replace(".", "_") if part in {"", ".", ".."} else part for part in allowed.split("/")]
    cleaned = "/".join(part or "_" for part in parts)
    return "_" + cleaned[1:] if cleaned.startswith("..") else cleaned


def _without_password(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//", uri)
