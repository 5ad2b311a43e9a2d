"""OpenTelemetry: times as metrics, sent by OTLP in the background, and the intervals of a run as spans."""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing._base.memory_usage import MAXIMA
from deep500_timing._base.names import BATCH, CPU
from deep500_timing._base.require import require
from deep500_timing._summary.distribution import middle_of
from deep500_timing.exceptions import ExportError
from deep500_timing.exporters._delivery import BackgroundExporter, UnavailableError, is_outage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from deep500_timing._summary.distribution import Distribution
    from deep500_timing._summary.snapshot import Snapshot
    from deep500_timing.runs import Run

STEP, REGION, MEMORY = "training.step.duration", "training.region.duration", "training.region.memory.max"
SCHEMA_URL = "urn:deep500-timing:schema:1"
"""Of the names ``training.*``: OpenTelemetry has no convention for training."""

SCALE = 5
"""Finest resolution: ``2 ** SCALE`` buckets for each doubling, each 2.2 % wide. Our bins are 0.8 to 1.6 % wide."""
MAX_BUCKETS = 160
"""Buckets at most, as in OpenTelemetry's own aggregation; the scale is reduced until they fit."""


class OpenTelemetryExporter(BackgroundExporter):
    """Send each snapshot as OpenTelemetry metrics, by OTLP over HTTP or by an exporter of yours.

    ``training.step.duration`` holds the times of BATCH on the host and ``training.region.duration`` those of every
    region, with the attributes ``training.region.name`` and ``training.device.type``. Both are exponential histograms
    in seconds. ``training.region.memory.max`` is a gauge in bytes. The resource names host, process, rank and world
    size. ``hw.gpu.*`` is not sent, since a timer does not know ``hw.id``.

    A report holds the time since the last one (delta temporality), or the whole run (cumulative) with ``whole_run``,
    as Prometheus needs it. ``export`` does not wait. While the collector is away, up to 256 reports wait; one that
    fails five times is lost and counted in ``lost``.
    """

    package = "opentelemetry.sdk.metrics"

    def __init__(
        self,
        exporter: Any = None,
        *,
        attributes: dict[str, str] | None = None,
        whole_run: bool = False,
        strict: bool = False,
        timeout_s: float = 5.0,
        exit_timeout_s: float = 5.0,
    ) -> None:
        """Choose where to send the times.

        Args:
            exporter: A ``MetricExporter`` of OpenTelemetry's SDK; None makes an ``OTLPMetricExporter`` over HTTP, which
                takes its endpoint and headers from ``OTEL_EXPORTER_OTLP_ENDPOINT`` and so on.
            attributes: Added to the resource, such as ``{"service.name": "training"}``.
            whole_run: Send the whole run in each report.
            strict: Send each report before ``export`` returns, and raise ``ExportError`` if that fails.
            timeout_s: How long one attempt and ``flush`` may take, in seconds.
            exit_timeout_s: How long the end of the program may wait for undelivered reports, in seconds.

        Raises:
            MissingPackageError: The SDK, or the OTLP exporter, is not installed.
        """
        super().__init__(strict=strict, whole_run=whole_run, timeout_s=timeout_s, exit_timeout_s=exit_timeout_s)
        require("opentelemetry.sdk.metrics", extra="opentelemetry", caller="OpenTelemetryExporter")
        if exporter is None:
            module = "opentelemetry.exporter.otlp.proto.http.metric_exporter"
            otlp = require(module, extra="opentelemetry", caller="OpenTelemetryExporter")
            exporter = otlp.OTLPMetricExporter(timeout=timeout_s)
        self._exporter = exporter
        self._attributes = attributes or {}

    def _service(self) -> str:
        return f"the collector of {type(self._exporter).__name__}"

    def _is_outage(self, error: Exception) -> bool:
        return is_outage(error)

    def _send(self, snapshot: Snapshot, destination: int | None, timeout_s: float | None) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        _quiet_logs()
        found = self._exporter.export(self._data(snapshot), timeout_millis=(timeout_s or self._timeout_s) * 1e3)
        if found != MetricExportResult.SUCCESS:
            # It does not say why. Five failures cost the report, since it may be at fault.
            raise UnavailableError("the export failed", 500)

    def _data(self, snapshot: Snapshot) -> Any:
        from opentelemetry.sdk.metrics import export as sdk
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from deep500_timing.runs._header import _process_start_unix_ns

        since_s, now_ns = snapshot.since_unix_time_s, int(snapshot.unix_time_s * 1e9)
        start_ns = (_process_start_unix_ns() or 0) if since_s is None else int(since_s * 1e9)
        temporality = sdk.AggregationTemporality.CUMULATIVE if self.whole_run else sdk.AggregationTemporality.DELTA
        steps, regions, memory = [], [], []
        for region in snapshot:
            attributes = {"training.region.name": region.name, "training.device.type": region.device.lower()}
            if region.distribution is not None:
                point = _point(sdk, region.distribution, start_ns, now_ns)
                regions.append(replace(point, attributes=attributes))
                if (region.name, region.device) == (BATCH, CPU):
                    steps.append(point)
            for what in MAXIMA:
                size_bytes = getattr(region.memory, what, None)
                if size_bytes is not None:
                    kind = {**attributes, "training.memory.kind": what}
                    memory.append(sdk.NumberDataPoint(kind, start_ns, now_ns, size_bytes))
        metrics = []
        if steps:
            text = "Duration of a training step."
            metrics.append(sdk.Metric(STEP, text, "s", sdk.ExponentialHistogram(steps, temporality)))
        if regions:
            text = "Duration of a region of a training step."
            metrics.append(sdk.Metric(REGION, text, "s", sdk.ExponentialHistogram(regions, temporality)))
        if memory:
            metrics.append(sdk.Metric(MEMORY, "Largest memory at the ends of a region.", "By", sdk.Gauge(memory)))
        scope = sdk.ScopeMetrics(InstrumentationScope("deep500-timing", schema_url=SCHEMA_URL), metrics, SCHEMA_URL)
        of_process = resource_of(snapshot.host, snapshot.pid, snapshot.rank, snapshot.world_size, self._attributes)
        return sdk.MetricsData([sdk.ResourceMetrics(of_process, [scope], of_process.schema_url)])


def _point(sdk: Any, distribution: Distribution, start_ns: int, now_ns: int) -> Any:
    found = exponential_of(distribution)
    return sdk.ExponentialHistogramDataPoint(
        attributes={},
        start_time_unix_nano=start_ns,
        time_unix_nano=now_ns,
        count=distribution.count,
        sum=distribution.total_ns / 1e9,
        scale=found.scale,
        zero_count=found.zero_count,
        positive=sdk.Buckets(found.offset, found.counts),
        negative=sdk.Buckets(0, ()),
        flags=0,
        min=distribution.min_ns / 1e9,
        max=distribution.max_ns / 1e9,
    )


def resource_of(host: str, pid: int, rank: int | None, world_size: int | None, attributes: dict[str, str]) -> Any:
    """The resource of a process, in OpenTelemetry's names where it has some."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.semconv.schemas import Schemas

    known = {"host.name": host, "process.pid": pid, "training.rank": rank, "training.world_size": world_size}
    found = {name: value for name, value in known.items() if value is not None}
    return Resource({**found, **attributes}, Schemas.V1_25_0.value)


def _is_not_ours(_record: logging.LogRecord) -> bool:
    return not threading.current_thread().name.startswith("deep500-timing")


def _quiet_logs() -> None:
    # The SDK logs each failure with a traceback. A fault of ours is said once, by a warning.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("opentelemetry.exporter"):
            logging.getLogger(name).addFilter(_is_not_ours)


class Exponential(NamedTuple):
    """Counts of times in seconds.

    Bucket ``i`` of ``counts`` holds those over ``base ** (offset + i)`` and up to ``base ** (offset + i + 1)``.
    """

    scale: int
    """``base = 2 ** 2 ** -scale``."""
    zero_count: int
    """Times of 0 s."""
    offset: int
    counts: tuple[int, ...]
    """Times in each bucket, the empty ones between others included."""


def exponential_of(distribution: Distribution) -> Exponential:
    """Convert a histogram. Each of our bins goes to the bucket that holds its middle.

    The mapping of a value to a bucket is that of OpenTelemetry's data model, section ExponentialHistogram.
    """
    bins, counts = distribution.used_bins()
    scale, zero_count, buckets = SCALE, 0, dict[int, int]()
    for place, count in zip(bins.tolist(), counts.tolist(), strict=True):
        middle_ns = middle_of(place)
        if middle_ns == 0:
            zero_count += count
        else:
            index = math.ceil(math.log2(middle_ns / 1e9) * 2**scale) - 1
            buckets[index] = buckets.get(index, 0) + count
    while buckets and max(buckets) - min(buckets) >= MAX_BUCKETS:
        scale -= 1
        merged: dict[int, int] = {}
        for index, count in buckets.items():
            merged[index >> 1] = merged.get(index >> 1, 0) + count
        buckets = merged
    if not buckets:
        return Exponential(scale, zero_count, 0, ())
    first, last = min(buckets), max(buckets)
    return Exponential(scale, zero_count, first, tuple(buckets.get(index, 0) for index in range(first, last + 1)))


_TOGETHER = 512
"""Spans in one request, as many as the SDK's own batches."""
_ROWS = f"""
select i.*, t.name as thread_name from intervals i
left join threads t on i.rank = t.rank and i.session = t.session and i.thread = t.thread
where i.unix_ns is not null{{where}}
order by i.rank, i.session, coalesce(i.host_start_ns, i.start_ns), case when i.device = '{CPU}' then 0 else 1 end,
    i.dur_ns desc, i.depth"""


def send_spans(
    run: Run,
    exporter: Any = None,
    *,
    ranks: Sequence[int] | None = None,
    steps: tuple[int, int] | None = None,
    attributes: dict[str, str] | None = None,
) -> int:
    """Send the intervals of a run as OpenTelemetry spans, and return how many were sent.

    Each BATCH is a trace, with the regions inside it as its children. A BATCH inside another region, such as EPOCH, is
    linked to that region's span. Choose a few ranks and steps: a span is about 100 times as large as an interval of a
    run. A span has the attributes ``training.step``, ``training.device.type`` and ``thread.name``.

    Args:
        run: The run.
        exporter: A ``SpanExporter`` of OpenTelemetry's SDK; None makes an ``OTLPSpanExporter`` over HTTP, which takes
            its endpoint and headers from ``OTEL_EXPORTER_OTLP_ENDPOINT`` and so on.
        ranks: Only these ranks.
        steps: Only these steps, the first and the last.
        attributes: Added to the resource, such as ``{"service.name": "training"}``.

    Raises:
        MissingPackageError: The SDK, or the OTLP exporter, is not installed.
        ExportError: The collector did not take the spans.
    """
    trace = require("opentelemetry.sdk.trace", extra="opentelemetry", caller="send_spans")
    from opentelemetry.sdk.trace.export import SpanExportResult

    ours = exporter is None
    if exporter is None:
        module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
        exporter = require(module, extra="opentelemetry", caller="send_spans").OTLPSpanExporter()
    where = "" if ranks is None else f" and i.rank in ({', '.join(str(int(rank)) for rank in ranks) or 'null'})"
    where += "" if steps is None else f" and i.step between {int(steps[0])} and {int(steps[1])}"
    rows = (row for batch in run.sql(_ROWS.format(where=where)).batches() for row in batch.to_pylist())
    spans = _spans(trace, run, rows, attributes or {})
    sent = 0
    try:
        while together := list(islice(spans, _TOGETHER)):
            if exporter.export(together) != SpanExportResult.SUCCESS:
                name = type(exporter).__name__
                raise ExportError(f"Sending spans with {name} failed. See that the collector is reachable.")
            sent += len(together)
        return sent
    finally:
        if ours:
            exporter.shutdown()


def _spans(trace: Any, run: Run, rows: Iterable[dict[str, Any]], attributes: dict[str, str]) -> Iterator[Any]:
    """A span for each row; the rows of a rank and session come in the order of their starts."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags

    ids = RandomIdGenerator()
    scope = InstrumentationScope("deep500-timing", schema_url=SCHEMA_URL)
    resources = {
        (log["rank"], log["session"]): resource_of(log["host"], log["pid"], log["rank"], log["world_size"], attributes)
        for log in run.sql("select * from logs").rows()
    }
    # By session and thread, the spans that are open at the current row: the end, the region and the context.
    opened: defaultdict[tuple[int, int, int], list[tuple[int, str, Any]]] = defaultdict(list)
    # The host's intervals that began when the newest one did, by thread and region.
    begun: dict[tuple[int, str], Any] = {}
    begun_ns = 0
    for row in rows:
        stack = opened[row["rank"], row["session"], row["thread"]]
        place = row["thread"], row["region"]
        end_ns = row["start_ns"] + row["dur_ns"]
        links: list[Any] = []
        if row["device"] == CPU:
            while stack and stack[-1][0] < end_ns:
                stack.pop()
            parent = stack[-1][2] if stack else None
            if parent is not None and row["region"] == BATCH and all(region != BATCH for _, region, _ in stack):
                links, parent = [Link(parent)], None
        else:
            parent = begun.get(place) if row["host_start_ns"] == begun_ns else None
        trace_id = ids.generate_trace_id() if parent is None else parent.trace_id
        context = SpanContext(trace_id, ids.generate_span_id(), False, TraceFlags(TraceFlags.SAMPLED))
        if row["device"] == CPU:
            stack.append((end_ns, row["region"], context))
            if row["start_ns"] != begun_ns:
                begun, begun_ns = {}, row["start_ns"]
            begun[place] = context
        known = {"training.step": row["step"], "thread.name": row["thread_name"]}
        yield trace.ReadableSpan(
            row["region"],
            context,
            parent,
            resources[row["rank"], row["session"]],
            {
                **{name: value for name, value in known.items() if value is not None},
                "training.device.type": row["device"].lower(),
            },
            links=links,
            kind=SpanKind.INTERNAL,
            start_time=row["unix_ns"],
            end_time=row["unix_ns"] + row["dur_ns"],
            instrumentation_scope=scope,
        )
