"""TensorBoard, Prometheus, OpenTelemetry, Trackio and Comet: written by us, read back by their own readers."""

from __future__ import annotations

import json
import math
import sys
import threading
import types
import urllib.request
import zipfile

import pytest

from deep500_timing import Timer
from deep500_timing._summary.distribution import Distribution
from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters import (
    CometExporter,
    OpenTelemetryExporter,
    PrometheusExporter,
    TensorBoardExporter,
    TrackioExporter,
    grafana_dashboard,
    send_spans,
)
from deep500_timing.exporters._opentelemetry import MAX_BUCKETS, exponential_of
from deep500_timing.exporters._prometheus import METRICS
from deep500_timing.testing import ManualClock, ManualDeviceClock

np = pytest.importorskip("numpy")

MS = 1_000_000
TIMES_MS = (1, 2, 2, 4, 8)


@pytest.fixture
def timer():
    """A timer with five steps of 1 to 8 ms, and one copy."""
    timer = Timer()
    at = 0
    for length in TIMES_MS:
        timer.record("BATCH", at, at + length * MS)
        at += 10 * MS
    timer.record("copy", 0, 500_000)
    return timer


@pytest.fixture
def rank_3(monkeypatch):
    """Be rank 3 of 8."""
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)


class TestExponential:
    @pytest.mark.parametrize("spread", [0.05, 3.0, 5.0])
    def test_counts_and_quantiles_agree(self, spread):
        """Every time is in one bucket, and the median's bucket holds the median to the sum of both resolutions."""
        times_ns = np.exp(np.random.default_rng(7).normal(14, spread, 5000)).astype(np.int64)
        found = exponential_of(Distribution.of(times_ns))
        base = 2**2**-found.scale
        cumulated = found.zero_count + np.cumsum(found.counts)
        upper_s = base ** (found.offset + 1 + np.searchsorted(cumulated, 2500))

        assert 5000 == cumulated[-1]
        assert len(found.counts) <= MAX_BUCKETS
        assert upper_s / base / 1.01 <= np.median(times_ns) / 1e9 <= upper_s * 1.01

    def test_bounds_are_opentelemetrys(self):
        """A time is put where OpenTelemetry's own mapping puts the middle of its bin; 0 ns are counted apart."""
        mapping = pytest.importorskip(
            "opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping"
        ).LogarithmMapping(5)
        for time_ns in (1, 99, 100_000, 123_456_789, 3_600_000_000_000):
            (place,), _ = Distribution.of(np.array([time_ns])).used_bins()
            from deep500_timing._summary.distribution import middle_of

            found = exponential_of(Distribution.of(np.array([time_ns])))
            assert (5, mapping.map_to_index(middle_of(int(place)) / 1e9), (1,)) == (
                found.scale,
                found.offset,
                found.counts,
            )
        assert (2, ()) == exponential_of(Distribution.of(np.array([0, 0])))[1::2]

    def test_an_empty_histogram_has_no_buckets(self):
        """Nothing is not zero times."""
        assert (0, ()) == exponential_of(Distribution.of(np.zeros(0, dtype=np.int64)))[1::2]


class TestTensorBoard:
    @pytest.fixture
    def read(self, monkeypatch):
        """Read a folder with TensorBoard's reader, which with this module does without TensorFlow."""
        monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", types.ModuleType("notf"))
        pytest.importorskip("tensorboardX")
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

        def read(folder):
            events = accumulator.EventAccumulator(str(folder), {"histograms": 0, "scalars": 0})
            return events.Reload()

        return read

    def test_scalars_and_histograms_are_read_back(self, timer, tmp_path, read):
        """Values in seconds at the step, and each bin with its count; a later report covers what came since."""
        exporter = TensorBoardExporter(tmp_path, "train", stats=("mean", "max", "count"))
        timer.export(exporter, step=7)
        timer.record("BATCH", 0, 16 * MS)
        timer.export(exporter, step=8)
        exporter.close()
        events = read(tmp_path)
        mean = events.Scalars("train/CPU/BATCH")
        (first, second) = events.Histograms("train/CPU/BATCH/times")

        assert [(7, pytest.approx(0.0034)), (8, pytest.approx(0.016))] == [(one.step, one.value) for one in mean]
        assert 0.008 == pytest.approx(events.Scalars("train/CPU/BATCH/max")[0].value)
        assert (5, 1) == (first.histogram_value.num, second.histogram_value.num)
        assert (0.001, 0.008, pytest.approx(0.017)) == (
            first.histogram_value.min,
            first.histogram_value.max,
            first.histogram_value.sum,
        )
        limits, counts = first.histogram_value.bucket_limit, first.histogram_value.bucket
        assert 5 == sum(counts)
        assert sorted(limits) == list(limits)
        for length in set(TIMES_MS):
            place = next(n for n, limit in enumerate(limits) if length / 1e3 < limit)
            assert TIMES_MS.count(length) == counts[place]
        assert "seconds" == events.summary_metadata["train/CPU/BATCH"].summary_description

    def test_each_rank_is_a_run(self, timer, tmp_path, read, rank_3):
        """Ranks write to their own folders."""
        timer.export(TensorBoardExporter(tmp_path, histograms=False, strict=True))

        assert ["rank3"] == [path.name for path in tmp_path.iterdir()]
        assert {"CPU/BATCH", "CPU/copy"} == set(read(tmp_path / "rank3").Tags()["scalars"])
        assert [] == read(tmp_path / "rank3").Tags()["histograms"]

    def test_a_fault_costs_a_warning_and_begins_another_file(self, timer, tmp_path, read, monkeypatch):
        """After a disk that was full for one report, the others are readable, with the times of that one."""
        writer = pytest.importorskip("tensorboardX.event_file_writer").EventsWriter
        exporter = TensorBoardExporter(tmp_path)
        timer.export(exporter, step=1)
        exporter.flush()
        with monkeypatch.context() as patch, pytest.warns(TimingWarning, match="No space left"):
            patch.setattr(writer, "flush", lambda self: (_ for _ in ()).throw(OSError(28, "No space left")))
            timer.record("BATCH", 0, 1 * MS)
            timer.export(exporter, step=2)
            timer.export(exporter, step=3)
            exporter.flush()
        timer.record("BATCH", 0, 3 * MS)
        timer.export(exporter, step=4)
        exporter.close()

        last = max(tmp_path.iterdir(), key=lambda path: int(path.name.rsplit(".", 1)[1]))
        assert [(4, pytest.approx(0.002))] == [(one.step, one.value) for one in read(last).Scalars("CPU/BATCH")]

    def test_a_folder_that_cannot_be_made_costs_a_warning(self, timer, tmp_path):
        """The destination is not there: one warning, and nothing else."""
        (tmp_path / "file").touch()
        exporter = TensorBoardExporter(tmp_path / "file" / "below")
        with pytest.warns(TimingWarning, match="TensorBoardExporter failed") as warned:
            for _ in range(3):
                timer.export(exporter)
            exporter.flush()

        assert (1, 3) == (len(warned), exporter.failures)


class TestPrometheus:
    @pytest.fixture
    def parse(self):
        """Read a text with Prometheus' own parser: the values by name and labels."""
        parser = pytest.importorskip("prometheus_client.parser")

        def parse(text):
            return {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for family in parser.text_string_to_metric_families(text)
                for sample in family.samples
            }

        return parse

    def scrape(self, exporter, accept="text/plain"):
        """Ask the endpoint."""
        request = urllib.request.Request(f"http://127.0.0.1:{exporter.port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.read().decode()

    def test_the_endpoint_serves_the_newest_report(self, timer, parse):
        """Seconds in all, as a histogram; counters end in ``_total``; before a report there is nothing."""
        exporter = PrometheusExporter(port=0, buckets=(0.0035, 1))
        try:
            assert {} == parse(self.scrape(exporter))
            timer.export(exporter)
            timer.record("BATCH", 0, 3 * MS)
            timer.export(exporter)
            found, text = parse(self.scrape(exporter)), self.scrape(exporter)
            newer = self.scrape(exporter, "application/openmetrics-text; version=1.0.0")
        finally:
            exporter.close()
        batch = (("device", "CPU"), ("region", "BATCH"))
        name = "deep500_timing_region_seconds"

        assert 6 == found[f"{name}_count", *batch]
        assert 0.02 == pytest.approx(found[f"{name}_sum", *batch])
        for bound, count in (("0.0035", 4), ("1.0", 6), ("+Inf", 6)):
            assert count == found[f"{name}_bucket", batch[0], ("le", bound), batch[1]]
        assert 0 == found["deep500_timing_excluded_total", ("reason", "failed")]
        assert found["deep500_timing_last_report_timestamp_seconds",] > 1.7e9
        assert "# TYPE deep500_timing_region_seconds histogram" in text
        openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")
        units = {one.name: one.unit for one in openmetrics.text_string_to_metric_families(newer)}
        assert "seconds" == units[name]
        assert set(METRICS) == set(units)

    def test_only_loopback_reaches_it(self):
        """The endpoint listens where this machine alone can ask, unless another address is given."""
        pytest.importorskip("prometheus_client")
        exporter = PrometheusExporter(port=0)
        host, _ = exporter._server.server_address[:2]
        exporter.close()
        exporter.close()

        assert "127.0.0.1" == host

    def test_a_file_for_each_rank(self, timer, tmp_path, parse, rank_3):
        """The file is whole or not there, has the rank as a label, and nothing lies next to it."""
        exporter = PrometheusExporter(folder=tmp_path / "collected")
        timer.export(exporter)
        timer.export(exporter)
        exporter.flush()

        (path,) = (tmp_path / "collected").iterdir()
        assert "deep500_timing_rank3.prom" == path.name
        labels = (("device", "CPU"), ("rank", "3"), ("region", "BATCH"))
        assert 5 == parse(path.read_text())["deep500_timing_region_seconds_count", *labels]

    def test_series_are_limited_and_it_is_said(self, parse, tmp_path):
        """The regions with the largest totals are reported, and how many are missing."""
        timer = Timer()
        for number in range(9):
            timer.record(f"region {number}", 0, (number + 1) * MS)
        exporter = PrometheusExporter(folder=tmp_path, max_regions=2)
        with pytest.warns(TimingWarning, match=r"7 region\(s\) with the smallest totals are left out.*max_regions=9"):
            timer.export(exporter)
            exporter.flush()
        found = parse((tmp_path / "deep500_timing.prom").read_text())

        assert 7 == found["deep500_timing_regions_left_out",]
        assert {"region 7", "region 8"} == {label for key in found for name, label in key[1:] if name == "region"}

    def test_either_a_port_or_a_folder(self, tmp_path):
        """Neither and both are errors."""
        pytest.importorskip("prometheus_client")
        for wrong in ({}, {"port": 0, "folder": tmp_path}):
            with pytest.raises(ValueError, match="needs either port= for an endpoint or folder="):
                PrometheusExporter(**wrong)

    def test_a_port_in_use_is_named(self):
        """The system's error has the address."""
        pytest.importorskip("prometheus_client")
        first = PrometheusExporter(port=0)
        with pytest.raises(OSError, match="in use") as caught:
            PrometheusExporter(port=first.port)
        first.close()

        assert f"127.0.0.1:{first.port}" == caught.value.filename

    def test_a_folder_that_is_gone_costs_a_warning(self, timer, tmp_path):
        """One warning for any number of reports."""
        pytest.importorskip("prometheus_client")
        exporter = PrometheusExporter(folder=tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        with pytest.warns(TimingWarning, match="PrometheusExporter failed") as warned:
            for _ in range(3):
                timer.export(exporter)
            exporter.flush()

        assert 1 == len(warned)


class TestGrafana:
    def test_the_dashboard_asks_for_what_is_exported(self, timer):
        """Each query parses, and its metrics and labels are those of the exporter."""
        parser = pytest.importorskip("promql_parser")
        pytest.importorskip("prometheus_client")
        exporter = PrometheusExporter(port=0)
        timer.export(exporter)
        exporter.close()
        names = {sample.name for family in exporter.collect() for sample in family.samples} | set(METRICS)
        asked = set()

        def visit(node):
            for part in ("expr", "lhs", "rhs"):
                if (below := getattr(node, part, None)) is not None:
                    visit(below)
            for below in getattr(node, "args", ()) or ():
                visit(below)
            selector = getattr(node, "vector_selector", None) or (node if hasattr(node, "matchers") else None)
            if selector is not None:
                asked.add(selector.name)
                matched = {one.name for one in selector.matchers.matchers}
                assert matched <= {"job", "rank", "region", "device"}

        for panel in grafana_dashboard()["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "1m").replace("$job", ".*").replace("$rank", ".*")
                visit(parser.parse(query))

        assert asked
        assert asked <= names

    def test_the_dashboard_is_grafanas(self):
        """Grafana's own model takes it and gives it back, field for field."""
        models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
        encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
        ours = grafana_dashboard("My runs")
        theirs = json.loads(json.dumps(models.Dashboard.from_json(ours), cls=encoder.JSONEncoder))

        def lost(ours, theirs, path=""):
            """What Grafana's model does not give back as it was: a field that it does not know, or a wrong value."""
            if isinstance(ours, dict):
                return [one for name in ours for one in lost(ours[name], (theirs or {}).get(name), f"{path}.{name}")]
            if isinstance(ours, list):
                pairs = zip(ours, theirs or [None] * len(ours), strict=True)
                return [one for n, (mine, other) in enumerate(pairs) for one in lost(mine, other, f"{path}[{n}]")]
            return [] if ours == theirs else [f"{path}: {ours!r} became {theirs!r}"]

        assert "My runs" == theirs["title"]
        assert [] == lost(ours, theirs)


class TestOpenTelemetry:
    @pytest.fixture
    def collector(self):
        """A collector on loopback that decodes requests with OpenTelemetry's own messages."""
        import http.server

        service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")

        class Handler(http.server.BaseHTTPRequestHandler):
            requests: list = []  # noqa: RUF012

            def do_POST(self):
                import gzip

                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                self.requests.append(service.ExportMetricsServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format, *args):  # noqa: A002 (the name is the base class's)
                """Print nothing."""

        Handler.requests = []
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        server.requests = Handler.requests  # pyright: ignore[reportAttributeAccessIssue]
        yield server
        server.shutdown()
        server.server_close()

    def exporter(self, port, **settings):
        """An exporter to a port, over OTLP."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        endpoint = f"http://127.0.0.1:{port}/v1/metrics"
        timeout_s = 1 if port == 1 else 300  # The SDK asks a dead collector until then.
        return OpenTelemetryExporter(OTLPMetricExporter(endpoint, timeout=timeout_s), **settings)

    def test_a_collector_reads_names_units_and_values(self, timer, collector, rank_3):
        """Steps and regions are exponential histograms in seconds, with the time since the last report."""
        exporter = self.exporter(collector.server_port, attributes={"service.name": "training"})
        timer.export(exporter)
        timer.record("BATCH", 0, 16 * MS)
        timer.export(exporter)
        exporter.close()
        (first, second) = collector.requests
        (resource,) = first.resource_metrics
        about = {one.key: one.value for one in resource.resource.attributes}
        (scope,) = resource.scope_metrics
        metrics = {metric.name: metric for metric in scope.metrics}
        step = metrics["training.step.duration"]
        (point,) = step.exponential_histogram.data_points

        assert (2, 0, 0) == (exporter.delivered, exporter.pending, exporter.lost)
        assert ("s", 1) == (step.unit, step.exponential_histogram.aggregation_temporality)  # 1 is delta
        assert (5, 0.001, 0.008, pytest.approx(0.017)) == (point.count, point.min, point.max, point.sum)
        base = 2**2**-point.scale
        places = [math.ceil(math.log(length / 1e3, base)) - 1 - point.positive.offset for length in TIMES_MS]
        near = [sum(point.positive.bucket_counts[max(place - 1, 0) : place + 2]) for place in places]
        assert [TIMES_MS.count(length) for length in TIMES_MS] == near
        assert ("training", 3, 8) == (
            about["service.name"].string_value,
            about["training.rank"].int_value,
            about["training.world_size"].int_value,
        )
        names = {
            one.value.string_value
            for point in metrics["training.region.duration"].exponential_histogram.data_points
            for one in point.attributes
            if one.key == "training.region.name"
        }
        assert {"BATCH", "copy"} == names
        assert "urn:deep500-timing:schema:1" == scope.schema_url
        (later,) = second.resource_metrics[0].scope_metrics[0].metrics[0].exponential_histogram.data_points
        assert (1, point.time_unix_nano) == (later.count, later.start_time_unix_nano)
        assert 0 < point.start_time_unix_nano < point.time_unix_nano

    def test_the_whole_run_is_cumulative(self, timer, collector):
        """As Prometheus needs it."""
        exporter = self.exporter(collector.server_port, whole_run=True, strict=True)
        timer.export(exporter)
        timer.record("BATCH", 0, 16 * MS)
        timer.export(exporter)
        histograms = [
            one.resource_metrics[0].scope_metrics[0].metrics[0].exponential_histogram for one in collector.requests
        ]

        assert [(2, 5), (2, 6)] == [(one.aggregation_temporality, one.data_points[0].count) for one in histograms]

    def test_a_dead_collector_costs_one_warning(self, timer, caplog, monkeypatch):
        """No export waits, nothing is logged, and each report is counted."""
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        from deep500_timing.exporters import _delivery

        monkeypatch.setattr(_delivery, "FIRST_PAUSE_S", 0.0)
        exporter = self.exporter(1)
        with pytest.warns(TimingWarning, match="does not answer") as warned:
            for _ in range(3):
                timer.export(exporter)
                assert exporter._wait_until_empty(60)

        assert (0, 0, 3) == (exporter.delivered, exporter.pending, exporter.lost)
        assert 1 == len(warned)
        assert [] == [record for record in caplog.records if record.name.startswith("opentelemetry")]

    def test_a_strict_exporter_raises(self, timer):
        """A report that does not arrive is an error at the call."""
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        with pytest.raises(ExportError, match="the export failed"):
            timer.export(self.exporter(1, strict=True))


class TestSpans:
    @pytest.fixture
    def memory(self):
        """The SDK's own exporter that keeps spans in memory."""
        return pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()

    @pytest.fixture
    def run(self, tmp_path, rank_3):
        """A run of two steps in an EPOCH, with a region on a device."""
        pytest.importorskip("duckdb")
        from deep500_timing.runs import Run

        clock, device = ManualClock(), ManualDeviceClock()
        timer = Timer(clock=clock, device_clock=device, run=tmp_path / "run")
        with timer.region("EPOCH"):
            for step in range(2):
                timer.step(step)
                with timer.region("BATCH"):
                    clock.advance(1)
                    with timer.region("FORWARD", gpu=True):
                        clock.advance(2)
                        device.launch(3)
                    device.finish()
        timer.complete_all()
        timer.run.close()
        with Run.open(tmp_path / "run") as run:
            yield run

    def test_the_sdks_memory_holds_the_intervals(self, run, memory):
        """Each BATCH is a trace with its regions, on host and device, in Unix time, linked to its EPOCH."""
        count = send_spans(run, memory, attributes={"service.name": "training"})
        spans = memory.get_finished_spans()
        by_name = {name: [one for one in spans if one.name == name] for name in ("EPOCH", "BATCH", "FORWARD")}
        (epoch,), (first, second) = by_name["EPOCH"], by_name["BATCH"]
        forward = [
            (one.attributes["training.device.type"], one.end_time - one.start_time) for one in by_name["FORWARD"]
        ]
        unix_ns = {row["region"]: row["unix_ns"] for row in run.intervals(steps=(0, 0)).rows()}

        assert 7 == count == len(spans)
        assert len({epoch.context.trace_id, first.context.trace_id, second.context.trace_id}) == 3
        assert [None, None] == [first.parent, second.parent]
        assert [epoch.context] == [link.context for link in first.links]
        assert [("cpu", 2_000_000_000), ("gpu", 3_000_000_000)] * 2 == forward
        host, gpu = by_name["FORWARD"][:2]
        assert (first.context, host.context) == (host.parent, gpu.parent)
        assert (unix_ns["BATCH"], 0) == (first.start_time, first.attributes["training.step"])
        about = first.resource.attributes
        assert ("training", 3, 8) == (about["service.name"], about["training.rank"], about["training.world_size"])
        json.loads(first.to_json())

    def test_ranks_and_steps_are_chosen(self, run, memory):
        """A metric without request is not sent."""
        assert 0 == send_spans(run, memory, ranks=[0])
        assert 3 == send_spans(run, memory, ranks=[3], steps=(0, 0))

    def test_a_dead_collector_is_an_error(self, run, caplog):
        """The caller asked for it: it gets the error."""
        otlp = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        with pytest.raises(ExportError, match="Sending spans with OTLPSpanExporter failed"):
            send_spans(run, otlp.OTLPSpanExporter("http://127.0.0.1:1/v1/traces", timeout=1))


class TestTrackio:
    def test_a_run_holds_the_rows(self, timer, tmp_path, monkeypatch):
        """Trackio's own storage gives the values at their steps."""
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
        trackio = pytest.importorskip("trackio")
        from trackio import utils
        from trackio.sqlite_storage import SQLiteStorage

        for module in (trackio, utils, __import__("trackio.sqlite_storage", fromlist=["x"])):
            if hasattr(module, "TRACKIO_DIR"):
                monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
        exporter = TrackioExporter("train", stats=("mean", "p95"))
        with pytest.warns(TimingWarning, match="no Trackio run is active"):
            timer.export(exporter)
        run = trackio.init(project="ours", name="one", embed=False, auto_log_gpu=False, auto_log_cpu=False)
        timer.export(exporter, step=7)
        trackio.finish()
        rows = SQLiteStorage.get_logs("ours", "one", run_id=run.id)

        (row,) = rows
        assert (7, pytest.approx(0.0034)) == (row["step"], row["train/CPU/BATCH"])
        assert "train/CPU/BATCH/p95" in row


class TestComet:
    def test_an_offline_archive_holds_the_metrics(self, timer, tmp_path, monkeypatch):
        """The archive that ``comet upload`` sends has the values at their steps."""
        monkeypatch.setenv("COMET_CONFIG", str(tmp_path / "none"))
        comet_ml = pytest.importorskip("comet_ml")
        exporter = CometExporter("train")
        with pytest.warns(TimingWarning, match="no Comet experiment is running"):
            timer.export(exporter)
        experiment = comet_ml.OfflineExperiment(
            project_name="ours", offline_directory=str(tmp_path), log_code=False, log_git_metadata=False,
            log_env_details=False, auto_output_logging=False, display_summary_level=0,
        )  # fmt: skip
        timer.export(exporter, step=7)
        experiment.end()
        (path,) = tmp_path.glob("*.zip")
        with zipfile.ZipFile(path) as archive:
            messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        found = [one["payload"]["metric"] for one in messages if one["payload"].get("metric")]
        (batch,) = [one for one in found if one["metricName"] == "train/CPU/BATCH"]

        assert (7, pytest.approx(0.0034)) == (batch["step"], batch["metricValue"])
