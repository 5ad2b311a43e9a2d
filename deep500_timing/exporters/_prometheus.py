"""Times for Prometheus: an endpoint that it scrapes, or a text file for node_exporter's collector."""

from __future__ import annotations

import json
import os
import socket
import threading
from bisect import bisect_right
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from deep500_timing._base.files import whole_file
from deep500_timing._base.memory_usage import MAXIMA
from deep500_timing._base.require import require
from deep500_timing._base.warn import warn_once
from deep500_timing._summary.distribution import middle_of
from deep500_timing._summary.snapshot import STORED_COUNTERS
from deep500_timing.exporters._delivery import BackgroundExporter
from deep500_timing.exporters._files import path_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deep500_timing._summary.distribution import Distribution
    from deep500_timing._summary.snapshot import Snapshot

TIMES = "deep500_timing_region_seconds"
EXCLUDED = "deep500_timing_excluded"
"""Intervals without a time, by reason; ``_total`` is added."""
MEMORY = "deep500_timing_region_memory_max_bytes"
REPORTED = "deep500_timing_last_report_timestamp_seconds"
LEFT_OUT = "deep500_timing_regions_left_out"
METRICS = (TIMES, EXCLUDED, MEMORY, REPORTED, LEFT_OUT)


class PrometheusExporter(BackgroundExporter):
    """Offer the times of the whole run to Prometheus, in seconds and bytes.

    With ``port`` it serves the newest report on loopback. With ``folder`` it writes each report to
    ``deep500_timing.prom`` there, or ``deep500_timing_rank3.prom``, renamed into place, for node_exporter's text file
    collector. Rank is a label, never part of a name. There is no Pushgateway: it keeps what a dead rank pushed for
    ever.

    A region and device costs three series, and one for each of ``buckets``. ``max_regions`` limits them; the metric
    ``deep500_timing_regions_left_out`` says how many regions with the smallest totals are missing. Native histograms
    are not offered: prometheus_client cannot write them in the formats that Prometheus reads. Send the times to
    Prometheus with :class:`OpenTelemetryExporter` for those.
    """

    package = "prometheus_client"

    def __init__(
        self,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        folder: str | os.PathLike[str] | None = None,
        buckets: Sequence[float] = (),
        max_regions: int = 100,
        strict: bool = False,
    ) -> None:
        """Start the endpoint, or check the folder.

        Args:
            port: Port of the endpoint on local rank 0; other local ranks add their number. 0 takes any free port.
            host: Address to listen on. Other machines reach only an address that you give; there is no password.
            folder: The folder of the text file; made if it does not exist.
            buckets: Upper bounds in seconds of a classic histogram, for a Prometheus without native histograms.
            max_regions: Regions, per device, to report at most.
            strict: Raise ``ExportError`` if a report cannot be written, instead of warning once.
        """
        super().__init__(strict=strict, whole_run=True)
        if (port is None) == (folder is None):
            raise ValueError("PrometheusExporter needs either port= for an endpoint or folder= for a text file.")
        self._library: Any = require("prometheus_client", extra="prometheus", caller="PrometheusExporter")
        self._is_direct |= port is not None  # The report is only kept.
        self._buckets_s = tuple(sorted(buckets))
        self._max_regions = max_regions
        self._snapshot: Snapshot | None = None
        self._server: Any = None
        self.port: int | None = None
        """The port that is listened on; None with a text file."""
        self._folder = (
            None if folder is None else os.path.dirname(path_of(os.path.join(folder, "x"), type(self).__name__))
        )
        self._registry: Any = self._library.CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        if port is not None:
            from deep500_timing._distributed.launchers import discover_launch

            asked = port + (discover_launch().local_rank if port else 0)
            try:
                self._server = _serve(self._library.make_wsgi_app(self._registry), host, asked)
            except OSError as error:
                error.filename = f"{host}:{asked}"  # the system does not say which
                raise
            self.port = self._server.server_port

    def _where(self) -> str:
        return self._folder or f"port {self.port}"

    def _send(self, snapshot: Snapshot, destination: int | None, timeout_s: float | None) -> None:
        self._snapshot = snapshot
        if self._folder is not None:
            rank = "" if snapshot.rank is None else f"_rank{snapshot.rank}"
            path = os.path.join(self._folder, f"deep500_timing{rank}.prom")
            with whole_file(path) as file:
                file.write(self._library.generate_latest(self._registry))

    def _close(self) -> None:
        super()._close()
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def collect(self) -> Iterator[Any]:
        """The metric families of the newest report, for prometheus_client."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        rank = {} if snapshot.rank is None else {"rank": str(snapshot.rank)}
        timed = sorted(
            ((region, region.stats) for region in snapshot if region.stats is not None), key=lambda pair: -pair[1].total
        )
        left_out = max(len(timed) - self._max_regions, 0)
        if left_out:
            warn_once(
                f"Exporting times with PrometheusExporter: {left_out} region(s) with the smallest totals are left out, "
                f"since each costs series. max_regions={len(timed)} reports all."
            )
        times = self._library.Metric(TIMES, "Times of a region.", "histogram", "seconds")
        memory = GaugeMetricFamily(MEMORY, "Largest memory at the ends of a region.")
        for region, stats in timed[: self._max_regions]:
            labels = {"region": region.name, "device": region.device, **rank}
            for bound_s, below in self._counts_below(region.distribution):
                times.add_sample(f"{TIMES}_bucket", {**labels, "le": repr(float(bound_s))}, below)
            times.add_sample(f"{TIMES}_bucket", {**labels, "le": "+Inf"}, stats.count)
            times.add_sample(f"{TIMES}_count", labels, stats.count)
            times.add_sample(f"{TIMES}_sum", labels, stats.total)
            for what in MAXIMA:
                size_bytes = getattr(region.memory, what, None)
                if size_bytes is not None:
                    kind = what.removeprefix("max_").removesuffix("_bytes")
                    memory.add_sample(MEMORY, {**labels, "kind": kind}, size_bytes)
        excluded = CounterMetricFamily(EXCLUDED, "Intervals that are in no histogram.")
        for reason in STORED_COUNTERS:
            total = sum(getattr(region, reason) for region in snapshot)
            excluded.add_sample(f"{EXCLUDED}_total", {"reason": reason, **rank}, total)
        reported = GaugeMetricFamily(REPORTED, "Unix time of the newest report.")
        reported.add_sample(REPORTED, rank, snapshot.unix_time_s)
        missing = GaugeMetricFamily(LEFT_OUT, "Regions left out to limit the number of series.")
        missing.add_sample(LEFT_OUT, rank, left_out)
        yield from (times, excluded, memory, reported, missing)

    def _counts_below(self, distribution: Distribution | None) -> Iterator[tuple[float, int]]:
        """For each bound of the classic histogram, how many times are up to it."""
        if distribution is None or not self._buckets_s:
            return
        bins, counts = distribution.used_bins()
        middles_ns = [middle_of(place) for place in bins.tolist()]
        for bound_s in self._buckets_s:
            yield bound_s, int(counts[: bisect_right(middles_ns, bound_s * 1e9)].sum())


_CONNECTIONS = 16
"""Connections that are answered at the same time. Each takes a thread of the training process."""
_REQUEST_S = 5.0
"""After it a connection that says nothing is closed."""


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing into the program's output."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__(*args)

    def server_bind(self) -> None:
        # WSGIServer would look up the host's name.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no fault of the program."""


def _serve(app: Any, host: str, port: int) -> _Server:
    """Answer requests from a thread, at most 16 at once."""

    def checked(environ: Any, start_response: Any) -> Any:
        # A page in a browser that reaches a loopback address under another name sends that name.
        name = str(environ.get("HTTP_HOST", "")).rpartition(":")[0] or str(environ.get("HTTP_HOST", ""))
        if is_loopback and name.strip("[]") not in ("", "localhost", "127.0.0.1", "::1", host):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"The Host header names no local address.\n"]
        return app(environ, start_response)

    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    is_loopback = str(address[0]).startswith(("127.", "::1"))
    kind = type("_Server", (_Server,), {"address_family": family})
    server: _Server = kind(address[:2], _Handler)
    server.set_app(checked)
    threading.Thread(target=server.serve_forever, name="deep500-timing prometheus", daemon=True).start()
    return server


def grafana_dashboard(title: str = "Training times") -> dict[str, Any]:
    """The dashboard, to be written with ``json.dump`` and imported in Grafana, which asks for the data source.

    Args:
        title: Its title.
    """
    with open(os.path.join(os.path.dirname(__file__), "grafana.json"), encoding="utf-8") as file:
        return {**json.load(file), "title": title}
