"""Intervals of a run as OpenTelemetry spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import CPU
from deep500_timing._base.require import require
from deep500_timing.exceptions import ExportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing.runs import Run

_TOGETHER = 512
"""Spans in one request, as many as the SDK's own batches."""
_ROWS = """
select i.*, t.name as thread_name from intervals i
left join threads t on i.rank = t.rank and i.session = t.session and i.thread = t.thread
where i.unix_ns is not null{where}
order by i.rank, i.session, coalesce(i.host_start_ns, i.start_ns), case when i.device = 'CPU' then 0 else 1 end,
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
    ours = exporter is None
    if exporter is None:
        module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
        exporter = require(module, extra="opentelemetry", caller="send_spans").OTLPSpanExporter()
    where = "" if ranks is None else f" and i.rank in ({', '.join(str(int(rank)) for rank in ranks) or 'null'})"
    where += "" if steps is None else f" and i.step between {int(steps[0])} and {int(steps[1])}"
    spans = _Spans(trace, run, attributes or {})
    sent, waiting = 0, []
    try:
        for rows in run.sql(_ROWS.format(where=where)).batches():
            for row in rows.to_pylist():
                waiting.append(spans.of(row))
                if len(waiting) == _TOGETHER:
                    sent += _send(exporter, waiting)
                    waiting = []
        return sent + _send(exporter, waiting)
    finally:
        if ours:
            exporter.shutdown()


def _send(exporter: Any, spans: list[Any]) -> int:
    from opentelemetry.sdk.trace.export import SpanExportResult

    if spans and exporter.export(spans) != SpanExportResult.SUCCESS:
        raise ExportError(f"Sending spans with {type(exporter).__name__} failed. See that the collector is reachable.")
    return len(spans)


class _Spans:
    """Makes spans of rows that come by rank and session, in the order of their starts."""

    def __init__(self, trace: Any, run: Run, attributes: dict[str, str]) -> None:
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from deep500_timing.exporters._opentelemetry import SCHEMA_URL, resource_of

        self._trace = trace
        self._ids = RandomIdGenerator()
        self._scope = InstrumentationScope("deep500-timing", schema_url=SCHEMA_URL)
        self._resources = {
            (log["rank"], log["session"]): resource_of(
                log["host"], log["pid"], log["rank"], log["world_size"], attributes
            )
            for log in run.sql("select * from logs").rows()
        }
        self._key: tuple[int, int] | None = None
        # By thread, the spans that are open at the current row: the end, the region and the context.
        self._open: dict[int, list[tuple[int, str, Any]]] = {}
        # The host's intervals that began when the newest one did, by thread and region.
        self._begun: dict[tuple[int, str], Any] = {}
        self._begun_ns = 0

    def of(self, row: dict[str, Any]) -> Any:
        from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags

        key = row["rank"], row["session"]
        if key != self._key:
            self._key, self._open = key, {}
        start_ns, end_ns = row["start_ns"], row["start_ns"] + row["dur_ns"]
        links: list[Any] = []
        if row["device"] == CPU:
            stack = self._open.setdefault(row["thread"], [])
            while stack and stack[-1][0] < end_ns:
                stack.pop()
            parent = stack[-1][2] if stack else None
            if parent is not None and row["region"] == "BATCH" and all(region != "BATCH" for _, region, _ in stack):
                links, parent = [Link(parent)], None
        else:
            is_launched = row["host_start_ns"] == self._begun_ns
            parent = self._begun.get((row["thread"], row["region"])) if is_launched else None
        trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
        context = SpanContext(trace_id, self._ids.generate_span_id(), False, TraceFlags(TraceFlags.SAMPLED))
        if row["device"] == CPU:
            stack.append((end_ns, row["region"], context))
            if start_ns != self._begun_ns:
                self._begun, self._begun_ns = {}, start_ns
            self._begun[row["thread"], row["region"]] = context
        known = {"training.step": row["step"], "thread.name": row["thread_name"]}
        attributes = {name: value for name, value in known.items() if value is not None}
        return self._trace.ReadableSpan(
            row["region"],
            context,
            parent,
            self._resources[key],
            {**attributes, "training.device.type": row["device"].lower()},
            links=links,
            kind=SpanKind.INTERNAL,
            start_time=row["unix_ns"],
            end_time=row["unix_ns"] + row["dur_ns"],
            instrumentation_scope=self._scope,
        )
