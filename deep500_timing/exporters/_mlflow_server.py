"""One MLflow tracking store: how metrics reach it."""

from __future__ import annotations

from typing import Any

from deep500_timing.exporters._delivery import Delivery
from deep500_timing.exporters._errors import UnavailableError, is_outage, without_passwords

MAX_BATCH = 999
"""Metrics in a request: MLflow takes 1000 items, and the first request brings a tag."""
TIMEOUT_S = 30.0
UNITS = {"deep500_timing.unit": "times in seconds, names that end in _bytes in bytes"}
"""The tag that a run gets with its first report: MLflow's metrics have no unit."""

# Shared by the exporters of a process, so that one outage is met once.
_deliveries: dict[str, Delivery] = {}


def delivery_to(uri: str) -> Delivery:
    """The delivery to the store at an address, as ``mlflow.get_tracking_uri`` gives it."""
    if uri not in _deliveries:
        _deliveries.setdefault(uri, Delivery(f"MLflow at {without_passwords(uri)}", Store(uri).log))
    return _deliveries[uri]


class Store:
    """A tracking server or a local store."""

    def __init__(self, uri: str) -> None:
        """Open nothing yet.

        Args:
            uri: As ``mlflow.get_tracking_uri`` gives it.
        """
        self._uri = uri
        self._client: Any = None
        self._tagged: set[str] = set()

    def log(self, report: tuple[str, list[Any]], timeout_s: float | None) -> None:
        """Log metrics to a run.

        Args:
            report: The run's id and MLflow's metrics.
            timeout_s: For each request to a server.
        """
        from mlflow.entities import RunTag

        run_id, metrics = report
        if self._client is None:
            from mlflow import MlflowClient

            self._client = MlflowClient(tracking_uri=self._uri)
        store = getattr(getattr(self._client, "_tracking_client", None), "store", None)
        creds_of = getattr(store, "get_host_creds", None)
        tags = [] if run_id in self._tagged else [RunTag(name, value) for name, value in UNITS.items()]
        for first in range(0, len(metrics), MAX_BATCH):
            batch = metrics[first : first + MAX_BATCH]
            if creds_of is None:
                self._client.log_batch(run_id, batch, tags=tags)
            else:
                _post(creds_of(), run_id, batch, tags, timeout_s or TIMEOUT_S)
            tags = []
        self._tagged.add(run_id)


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
