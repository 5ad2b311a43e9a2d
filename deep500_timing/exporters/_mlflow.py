"""Times in MLflow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import CPU, GPU, outside_name
from deep500_timing._base.warn import warn_once
from deep500_timing.exceptions import ExportError
from deep500_timing.exporters._base import without_passwords
from deep500_timing.exporters._delivery import BackgroundExporter, UnavailableError, is_outage
from deep500_timing.exporters._trackers import Metric, TrackerExporter, distinct

if TYPE_CHECKING:
    from deep500_timing._summary.snapshot import Snapshot

MAX_NAME = 250
MAX_BATCH = 999
"""Metrics in a request: MLflow takes 1000 items, and the first request brings a tag."""
TIMEOUT_S = 30.0
UNITS = {"deep500_timing.unit": "times in seconds, names that end in _bytes in bytes"}
"""The tag that a run gets with its first report: MLflow's metrics have no unit."""


class MlflowExporter(BackgroundExporter, TrackerExporter):
    """Log each snapshot to an MLflow run as metrics, in the background.

    Names are ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH.p95`` and so on for other
    statistics. They fit every store of MLflow: a slash in a region's name becomes a dot (on the file system a metric is
    a file and cannot be a folder as well), a character that MLflow refuses becomes ``_``, and names of different
    regions stay different, also on a disk that ignores case. The run gets a tag with the unit.

    The exporter starts no run. It logs to the run that is active on the exporting thread, or to the one that the
    variable ``MLFLOW_RUN_ID`` names; without one it warns once.

    ``export`` does not wait. A report that the server refuses is lost, with a warning; the next one covers its times.
    While the server is down, up to 256 reports wait and are retried. MLflow's own retries and their settings are not
    used. Losses are counted in ``lost`` and said at the end of the program.
    """

    package = "mlflow"
    _is_server = True

    def __init__(
        self,
        prefix: str = "",
        *,
        run_id: str | None = None,
        timeout_s: float = 5.0,
        exit_timeout_s: float = 5.0,
        **settings: Any,
    ) -> None:
        """Choose what to log and where.

        Args:
            prefix: Put before the names, with one slash between.
            run_id: The run; None is the run that is active at each export.
            timeout_s: How long ``flush`` and a strict report may wait for the server, in seconds.
            exit_timeout_s: How long the end of the program may wait for undelivered reports, in seconds.
            **settings: ``stats``, ``whole_run``, ``by_rank`` and ``strict``, as of every tracker's exporter. A strict
                exporter delivers each report before ``export`` returns.
        """
        super().__init__(prefix, timeout_s=timeout_s, exit_timeout_s=exit_timeout_s, **settings)
        self._run_id = run_id
        self._noted_run_id: str | None = None
        self._uri = ""
        """Where the latest report goes."""
        self._clients: dict[str, Any] = {}
        self._tagged: set[str] = set()
        named = [*([repr(self._prefix)] if self._prefix else []), *([f"run_id={run_id!r}"] if run_id else [])]
        self._name = f"MlflowExporter({', '.join(named)})"

    def _where(self) -> str:
        return str(self._library.get_tracking_uri())

    def _service(self) -> str:
        return f"MLflow at {without_passwords(self._uri)}"

    def note_destination(self) -> None:
        run = self._library.active_run()
        self._noted_run_id = None if run is None else run.info.run_id

    def _destination(self, step: int | None) -> tuple[str, str, int]:
        run_id = self._run_id or self._active_run_id()
        self._uri = self._where()
        if run_id not in self._numbers:
            self._numbers[run_id] = self._last_step(run_id)
        return self._uri, run_id, self._number(run_id, step)

    def _send(self, snapshot: Snapshot, destination: tuple[str, str, int], timeout_s: float | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric as Entity
        from mlflow.entities import RunTag

        uri, run_id, number = destination
        named = distinct(self._metrics(snapshot, "."), clean_name, limit=MAX_NAME, fold=str.casefold)
        when_ms = int(snapshot.unix_time_s * 1000)
        metrics = [Entity(name, value, when_ms, number) for name, value in named.items()]
        if not metrics and self._tagged and run_id not in self._tagged:
            warn_once(
                f"{self._name} has nothing new for the run {run_id}: no region has ended since its last report, which "
                "went to another run. Pass whole_run=True for the times of the whole program."
            )
            return
        if uri not in self._clients:
            self._clients[uri] = MlflowClient(tracking_uri=uri)
        client = self._clients[uri]
        store = getattr(getattr(client, "_tracking_client", None), "store", None)
        creds_of = getattr(store, "get_host_creds", None)
        tags = [] if run_id in self._tagged else [RunTag(name, value) for name, value in UNITS.items()]
        for first in range(0, len(metrics), MAX_BATCH):
            batch = metrics[first : first + MAX_BATCH]
            if creds_of is None:
                client.log_batch(run_id, batch, tags=tags)
            else:
                _post(creds_of(), run_id, batch, tags, timeout_s or TIMEOUT_S)
            tags = []
        self._tagged.add(run_id)

    def _last_step(self, run_id: str) -> int:
        # Of a run that goes on from another process; MLflow has read its metrics as it was started again.
        run = self._library.active_run()
        if run is None or run.info.run_id != run_id:
            return -1
        ours = tuple(f"{self._prefix}{part}" for part in (f"{CPU}/", f"{GPU}/", "rank"))
        return max((one.step for one in run.data.to_proto().metrics if one.key.startswith(ours)), default=-1)

    def _active_run_id(self) -> Any:
        run = self._library.active_run()
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

    As :func:`outside_name`, and slashes remain only outside the region's name. The result is also a normalized relative
    path without ``..``.
    """
    before, region = metric.name[: metric.region_at], metric.name[metric.region_at :]
    allowed = outside_name(before + region.replace("/", "."))
    parts = [part.replace(".", "_") if part in {"", ".", ".."} else part for part in allowed.split("/")]
    cleaned = "/".join(part or "_" for part in parts)
    return "_" + cleaned[1:] if cleaned.startswith("..") else cleaned


def _post(creds: Any, run_id: str, metrics: list[Any], tags: list[Any], timeout_s: float) -> None:
    # MLflow's client would retry for minutes, also at exit. https://mlflow.org/docs/latest/rest-api.html
    from mlflow.utils.rest_utils import http_request, verify_rest_response

    endpoint = "/api/2.0/mlflow/runs/log-batch"
    body = {
        "run_id": run_id,
        "tags": [{"key": tag.key, "value": tag.value} for tag in tags],
        "metrics": [
            {"key": metric.key, "value": metric.value, "timestamp": metric.timestamp, "step": metric.step}
            for metric in metrics
        ],
    }
    response: Any = http_request(
        creds, endpoint, "POST", max_retries=0, raise_on_status=False, timeout=timeout_s, json=body
    )
    unavailable = UnavailableError(f"status {response.status_code}", response.status_code)
    if is_outage(unavailable):
        raise unavailable
    verify_rest_response(response, endpoint)
