"""One MLflow tracking store as a service: how a report is handed over, and whether it is well again."""

from __future__ import annotations

from typing import Any

from deep500_timing.exporters._background import BackgroundCaller
from deep500_timing.exporters._trouble import UnavailableError, is_outage, without_passwords

MAX_BATCH = 999
"""Metrics in a request: MLflow takes 1000 things in one, and the first brings a tag."""
FIRST_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 5.0
UNITS = {"deep500_timing.unit": "times in seconds, names that end in _bytes in bytes"}
"""The tag that a run gets with its first report."""

# What is known of a server outlives an exporter, and is shared by all of a process.
_callers: dict[str, BackgroundCaller] = {}


def caller_of(uri: str) -> BackgroundCaller:
    """What sends reports to the store at an address."""
    caller = _callers.get(uri)
    if caller is None:
        store = Store(uri)
        caller = BackgroundCaller(
            f"MLflow at {without_passwords(uri)}", store.log, probe=store.probe, most_numbers=MAX_BATCH
        )
        caller = _callers.setdefault(uri, caller)
    return caller


class Store:
    """A tracking server, or a local store."""

    def __init__(self, uri: str) -> None:
        """Nothing is opened yet.

        Args:
            uri: As ``mlflow.get_tracking_uri`` gives it.
        """
        self._uri = uri
        self._timeout_s = FIRST_TIMEOUT_S
        self._client: Any = None
        self._told: set[str] = set()

    def log(self, run_id: str, reports: list[list[Any]]) -> None:
        """Log the metrics of several reports to one run, in as few requests as it takes."""
        metrics = [metric for report in reports for metric in report]
        client = self._get_client()
        creds_of = getattr(_store_of(client), "get_host_creds", None)
        # MLflow's metrics have no unit nor description, its runs have tags.
        tags = {} if run_id in self._told else UNITS
        for first in range(0, len(metrics), MAX_BATCH):
            batch = metrics[first : first + MAX_BATCH]
            if creds_of is None:
                from mlflow.entities import RunTag

                client.log_batch(run_id, batch, tags=[RunTag(name, value) for name, value in tags.items()])
            else:
                self._post(creds_of(), run_id, batch, tags)
            tags = {}
        self._told.add(run_id)

    def probe(self) -> None:
        """Ask a server whether it is there. Any answer but that it cannot serve will do."""
        creds_of = getattr(_store_of(self._get_client()), "get_host_creds", None)
        if creds_of is not None:
            self._request(creds_of(), "/health", "GET", PROBE_TIMEOUT_S)

    def _get_client(self) -> Any:
        if self._client is None:
            from mlflow import MlflowClient

            self._client = MlflowClient(tracking_uri=self._uri)
        return self._client

    def _post(self, creds: Any, run_id: str, metrics: list[Any], tags: dict[str, str]) -> None:
        # Not by the client, which tries again by itself for minutes. https://mlflow.org/docs/latest/rest-api.html
        from mlflow.utils.rest_utils import verify_rest_response

        endpoint = "/api/2.0/mlflow/runs/log-batch"
        body = {
            "run_id": run_id,
            "tags": [{"key": name, "value": value} for name, value in tags.items()],
            "metrics": [
                {"key": metric.key, "value": metric.value, "timestamp": metric.timestamp, "step": metric.step}
                for metric in metrics
            ],
        }
        try:
            response = self._request(creds, endpoint, "POST", self._timeout_s, json=body)
        except Exception as error:
            if _is_timeout(error):
                self._timeout_s = min(2 * self._timeout_s, _longest_timeout_s())
            raise
        verify_rest_response(response, endpoint)

    def _request(self, creds: Any, endpoint: str, method: str, timeout_s: float, **more: Any) -> Any:
        from mlflow.utils.rest_utils import http_request

        response: Any = http_request(
            creds, endpoint, method, max_retries=0, raise_on_status=False, timeout=timeout_s, **more
        )
        unavailable = UnavailableError(
            f"it answered {response.status_code} to {method} {endpoint}", response.status_code
        )
        if is_outage(unavailable):
            raise unavailable
        return response


def _store_of(client: Any) -> Any:
    return getattr(getattr(client, "_tracking_client", None), "store", None)


def _is_timeout(error: BaseException | None) -> bool:
    while error is not None:
        if "timeout" in type(error).__name__.lower() or "timed out" in str(error).lower():
            return True
        error = error.__cause__
    return False


def _longest_timeout_s() -> float:
    # As long as MLflow itself would wait for one answer.
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT

    return max(float(MLFLOW_HTTP_REQUEST_TIMEOUT.get()), FIRST_TIMEOUT_S)
