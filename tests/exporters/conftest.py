"""Shared by the tests of exporters: a machine that is always the same, and snapshots of known content."""

from __future__ import annotations

import http.server
import json
import threading
import time
from types import SimpleNamespace

import pytest

from deep500_timing import CPUGPUTimer, TimeType
from deep500_timing._base.warn import forget_warnings
from deep500_timing._summary import reading as _reading
from deep500_timing._summary import snapshot as _anchor
from deep500_timing._summary.snapshot import RegionTimes, Snapshot
from deep500_timing._summary.stats import TimeStats

UNIX_TIME_S = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC


@pytest.fixture(autouse=True)
def _said_nothing_yet():
    """Let each test see the warnings that are said once."""
    forget_warnings()
    yield
    forget_warnings()


@pytest.fixture
def machine(monkeypatch):
    """A host, process, moment and time zone for snapshots, so that the output can be compared whole."""
    monkeypatch.setattr(_reading, "time", SimpleNamespace(time=lambda: UNIX_TIME_S))
    monkeypatch.setattr(_anchor, "time", SimpleNamespace(time_ns=lambda: int(UNIX_TIME_S * 1e9)))
    monkeypatch.setattr(_reading, "known_rank_and_world", lambda: (None, None))
    monkeypatch.setattr(_reading, "socket", SimpleNamespace(gethostname=lambda: "node01"))
    monkeypatch.setattr(_reading, "os", SimpleNamespace(getpid=lambda: 4711))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def tmr(clock, device, machine):
    """A timer after two batches of 1 s on the host and 2 s on the device, the second with I/O of 250 ms."""
    timer = CPUGPUTimer(clock=clock, device_clock=device)
    for _ in range(2):
        timer.start(TimeType.BATCH, gpu=True)
        device.launch(2.0)
        clock.advance(1.0)
        timer.end(TimeType.BATCH, gpu=True)
    with timer.region(TimeType.IO):
        clock.advance(0.25)
    device.finish()
    return timer


def _stats_of(value: float, **changes) -> TimeStats:
    values = dict.fromkeys(("min", "mean", "median", "max", "total", "p90", "p95", "p99"), value)
    return TimeStats(**{**values, "stdev": 0.0, "count": 1, "median_ci": None, **changes})


@pytest.fixture
def snapshot_of():
    """Make a snapshot of regions: ``snapshot_of(("BATCH", "CPU", 1.5), RegionTimes(...))``."""

    def make(*regions) -> Snapshot:
        return Snapshot(
            tuple(
                region if isinstance(region, RegionTimes) else RegionTimes(*region[:2], _stats_of(region[2]))
                for region in regions
            ),
            UNIX_TIME_S,
            "node01",
            4711,
        )

    return make


@pytest.fixture(scope="session")
def stats_of():
    """Make statistics of one value: ``stats_of(1.5, p95=2.0)``."""
    return _stats_of


class MoodyServer:
    """Takes reports on the loopback interface, or does not.

    ``mood`` is asked at each request for its answer: the HTTP status of ``path`` with ``body``. It may wait.
    """

    def __init__(self):
        self.reports = []
        """Bodies of the batches that were taken."""
        self.mood = lambda path, body: 200
        self.asked = threading.Condition()
        self.requests = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
                with outer.asked:
                    outer.requests += 1
                    outer.asked.notify_all()
                status = outer.mood(self.path, body)
                if status == 200 and self.path.endswith("log-batch"):
                    outer.reports.append(body)
                answer = {} if status == 200 else {"error_code": "INVALID_PARAMETER_VALUE", "message": "not this one"}
                if status == 404:
                    answer["error_code"] = "RESOURCE_DOES_NOT_EXIST"
                try:
                    self.send_response(status)
                    self.send_header("content-type", "application/json")
                    self.end_headers()
                    self.wfile.write(json.dumps(answer).encode())
                except OSError:
                    pass  # The client has gone.

            do_GET = do_POST  # noqa: N815 (the names are the base class's)

            def log_message(self, *args):
                """Print nothing."""

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._make = lambda port: Server(("127.0.0.1", port), Handler)
        self._server = None
        self.start()

    def start(self, port=0):
        """Listen, on the port it had if it had one."""
        self._server = self._make(port)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        """Refuse connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def wait_for_requests(self, number):
        """Wait until that many have come."""
        with self.asked:
            assert self.asked.wait_for(lambda: self.requests >= number, timeout=300)

    @property
    def uri(self):
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def steps(self, run_id=None):
        """The steps of the reports that arrived, those of one run if it is given."""
        return [
            metric["step"]
            for body in self.reports
            for metric in body["metrics"]
            if run_id is None or body["run_id"] == run_id
        ]


@pytest.fixture
def moody():
    """A tracking server with a mood that the test sets."""
    server = MoodyServer()
    yield server
    server.stop()
