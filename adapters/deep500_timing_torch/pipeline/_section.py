"""The pipeline in the HTML report: the account of the bubble, and the latest batch as it ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import format_share, format_time
from deep500_timing_torch.pipeline._actions import COMPUTE
from deep500_timing_torch.pipeline._of_run import batches_of_rows
from deep500_timing_torch.pipeline._picture import COLOURS, LAYER_OF
from deep500_timing_torch.pipeline._recorder import TABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing.report import Content, Context, Figure
    from deep500_timing_torch.pipeline._actions import Action
    from deep500_timing_torch.pipeline._bubble import Bubble

__all__ = ["PipelineSection"]

_MOST = 3000
"""Actions that a chart holds; a reader cannot tell more apart on a page."""
_PLACE = 75


class PipelineSection:
    """A section of :func:`deep500_timing.report.write_report`.

    ::

        write_report(run, "report.html", sections=[PipelineSection()])

    Args:
        replica: Which replica of the pipeline it shows.
    """

    name, title, place = "pipeline", "Pipeline", _PLACE
    missing = "No pipeline was timed, or no batch of one but the warm-up."

    def __init__(self, replica: int = 0) -> None:
        self._replica = replica

    def build(self, context: Context) -> Content | None:
        """Build the section of a run; None if the run has no pipeline."""
        from deep500_timing.report import Content

        if TABLE not in context.run.tables:
            return None

        def rows(query: str) -> list[tuple[Any, ...]]:
            return [tuple(row.values()) for row in context.rows(query)]

        found = batches_of_rows(rows, replica=self._replica)
        if not found.batches:
            return None
        bubble = found.bubble()
        # What each rank did is in the table below the chart.
        text = tuple(line for line in str(bubble).splitlines() if not line.startswith("  rank "))
        return Content((_figure(found.batches[-1], found.numbers[-1], bubble),), text=text)


def _figure(batch: Sequence[Action], number: int, bubble: Bubble) -> Figure:
    from deep500_timing.report import Figure, Panel

    computed = [one for one in batch if one.kind in COMPUTE]
    first_ns, last_ns = min(one.start_ns for one in computed), max(one.end_ns for one in computed)
    drawn = sorted((one for one in batch if one.kind in LAYER_OF), key=lambda one: one.kind in COMPUTE)
    values = [
        {
            "rank": one.rank,
            "what": LAYER_OF[one.kind],
            "stage": one.stage,
            "microbatch": one.microbatch,
            "start": round((max(one.start_ns, first_ns) - first_ns) / 1e6, 4),
            "end": round((min(one.end_ns, last_ns) - first_ns) / 1e6, 4),
            "middle": round(((one.start_ns + one.end_ns) / 2 - first_ns) / 1e6, 4),
            "thick": 1 if one.kind in COMPUTE else 0,
        }
        for one in drawn[-_MOST:]
        if one.end_ns > first_ns and one.start_ns < last_ns
    ]
    shown = {value["what"] for value in values}
    names = [name for name in COLOURS if name in shown]
    row: dict[str, Any] = {"field": "rank", "type": "ordinal", "title": "rank"}
    spec = {
        "height": 34 * len(bubble.ranks) + 10,
        "data": {"values": values},
        "encoding": {"y": row},
        "layer": [
            {
                "mark": {"type": "bar", "clip": True, "strokeWidth": 0.3, "stroke": "#ffffff"},
                "encoding": {
                    "x": {"field": "start", "type": "quantitative", "title": "time in the batch (ms)"},
                    "x2": {"field": "end"},
                    "color": {
                        "field": "what",
                        "type": "nominal",
                        "title": None,
                        "scale": {"domain": names, "range": [COLOURS[name] for name in names]},
                    },
                    "tooltip": [
                        {"field": name, "type": "nominal"} for name in ("what", "stage", "microbatch", "start", "end")
                    ],
                },
                "params": [
                    {"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"},
                ],
            },
            {
                "mark": {"type": "text", "clip": True, "fontSize": 10, "color": "#000000"},
                "transform": [{"filter": "datum.thick == 1"}],
                "encoding": {
                    "x": {"field": "middle", "type": "quantitative"},
                    "text": {"field": "microbatch", "type": "nominal"},
                },
            },
        ],
    }
    heads = ("rank", "busy", "idle", "warm-up", "drain", "imbalance", "messages")
    table = [
        (
            rank.rank,
            *(format_time(ns / bubble.batches / 1e9) for ns in (rank.busy_ns, rank.idle_ns)),
            *(
                format_share(ns / bubble.span_ns)
                for ns in (rank.warm_up_ns, rank.drain_ns, rank.imbalance_ns, rank.messages_ns)
            ),
        )
        for rank in bubble.ranks
    ]
    return Figure(
        f"Batch {number} as it ran",
        f"Ranks are idle for {format_share(bubble.bubble)} of a batch.",
        (Panel(spec),),
        heads,
        table,
        note="Numbers are micro-batches. The table splits the idle time of all batches by cause.",
        zooms=True,
    )
