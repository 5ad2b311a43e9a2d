"""One batch as a picture, and the pipeline in the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import charts, format_share, format_time
from deep500_timing_torch.pipeline._actions import COMPUTE, Action, Kind
from deep500_timing_torch.pipeline._bubble import Bubble, account
from deep500_timing_torch.pipeline._pipeline_timer import bubble_of
from deep500_timing_torch.pipeline._recorder import TABLE
from deep500_timing_torch.pipeline._schedules import NAMES

if TYPE_CHECKING:
    from deep500_timing.report import Content, Context, Figure
    from deep500_timing.runs import Run


@dataclass(frozen=True, slots=True)
class RunBatches:
    """Batches of one replica that a run holds.

    Attributes:
        schedule: The schedule's name; None for one of the user's own.
        numbers: Which batches they are.
        batches: The actions of each, on one clock.
    """

    schedule: str | None
    numbers: tuple[int, ...]
    batches: tuple[tuple[Action, ...], ...]

    def bubble(self) -> Bubble:
        """Where their time went.

        Raises:
            PipelineError: There is none.
        """
        return bubble_of(self.batches, self.schedule)


def read_batches(run: Run, *, replica: int = 0, last: int = 16) -> RunBatches:
    """The latest batches of a run that are no warm-up and no evaluation.

    Args:
        run: An open run.
        replica: Of the pipeline.
        last: How many at most.
    """
    if TABLE not in run.tables:
        return RunBatches(None, (), ())

    def rows(query: str) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for row in run.sql(query).rows()]

    of = (
        f"from {TABLE} where schedule <> 'evaluation' and replica = {int(replica)} "
        f"and session = (select max(session) from {TABLE})"
    )
    world = rows(f"select count(distinct pipe_rank) {of}")
    complete = rows(
        f"select batch {of} group by batch having sum(warm_up) = 0 and count(distinct pipe_rank) = {world[0][0]} "
        f"order by batch desc limit {int(last)}"
    )
    numbers = sorted(row[0] for row in complete)
    if not numbers:
        return RunBatches(None, (), ())
    found: dict[int, list[Action]] = {number: [] for number in numbers}
    schedules = set()
    # Ranks of one host share its monotonic clock, which is truer than what each of them took Unix time to be.
    hosts = rows("select count(distinct host) from logs")[0][0]
    start = "start_ns" if hosts == 1 else "unix_ns"
    for batch, rank, stage, microbatch, kind, start_ns, dur_ns, schedule in rows(
        f"select batch, pipe_rank, stage, microbatch, kind, {start}, dur_ns, schedule {of} and batch >= {numbers[0]} "
        f"order by {start}"
    ):
        if batch in found:
            found[batch].append(Action(rank, stage, microbatch, Kind(kind), start_ns, start_ns + dur_ns))
            schedules.add(schedule)
    name = schedules.pop() if len(schedules) == 1 else ""
    return RunBatches(name if name in NAMES else None, tuple(numbers), tuple(tuple(found[one]) for one in numbers))


COLOURS = {
    "forward": charts.REGION_COLOURS["FORWARD"],
    "backward": charts.REGION_COLOURS["BACKWARD"],
    "backward, input": "#00664b",
    "backward, weight": "#7fceb9",
    "communication": charts.REGION_COLOURS["COMM"],
    "idle": "#EEEEEE",
}
"""The colours of the regions on the whole page; the two parts of a backward pass are of its hue."""
LAYER_OF = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input",
    Kind.BACKWARD_WEIGHT: "backward, weight",
    **{kind: "communication" for kind in Kind if kind.value.startswith(("send ", "receive ", "wait "))},
}
"""The layer of an action; loading, reduction and steps are not drawn."""
_LIGHTER = 0.72
"""Opacity of a rank's second stage relative to its first, and so on."""


def draw_schedule(actions: Sequence[Action], path: str | PathLike[str], *, title: str | None = None) -> Path:
    """Draw one batch as the report does: when each rank computed what, talked to others, and was idle.

    Where a rank has several stages, the later ones are lighter. Numbers are micro-batches.

    Args:
        actions: Of all ranks and one batch, as ``gather()`` gives them.
        path: The file, an SVG if its name says so, else a PNG.
        title: Title of the picture; the bubble if None.

    Returns:
        The path.

    Raises:
        MissingPackageError: vl-convert is not installed.
        ValueError: There is no computation among the actions.
    """
    heading = title or f"Bubble {100 * account(actions).bubble:.1f} % of the batch"
    spec = _spec(actions) | {"title": {"text": heading, "anchor": "start"}}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    charts.save_picture(charts.styled(spec, 900), target, caller="Drawing a schedule")
    return target


def _shades(computed: Sequence[Action]) -> dict[int, float]:
    # Of each stage the opacity: which one of its rank's it is.
    by_rank: dict[int, set[int]] = {}
    for one in computed:
        by_rank.setdefault(one.rank, set()).add(one.stage)
    return {stage: _LIGHTER**number for stages in by_rank.values() for number, stage in enumerate(sorted(stages))}


_MOST = 3000
"""Actions that a chart holds; a reader cannot tell more apart on a page."""


class PipelineSection:
    """A section of :func:`deep500_timing.report.write_report`.

    ::

        write_report(run, "report.html", sections=[PipelineSection()])

    Args:
        replica: Which replica of the pipeline it shows.
    """

    name, title, place = "pipeline", "Pipeline", 75
    missing = "No pipeline was timed, or no batch of one but the warm-up."

    def __init__(self, replica: int = 0) -> None:
        self._replica = replica

    def build(self, context: Context) -> Content | None:
        from deep500_timing.report import Content

        found = read_batches(context.run, replica=self._replica)
        if not found.batches:
            return None
        bubble = found.bubble()
        # What each rank did is in the table below the chart.
        text = tuple(line for line in str(bubble).splitlines() if not line.startswith("  rank "))
        return Content((_figure(found.batches[-1], found.numbers[-1], bubble),), text=text)


def _spec(batch: Sequence[Action]) -> dict[str, Any]:
    computed = [one for one in batch if one.kind in COMPUTE]
    first_ns, last_ns = min(one.start_ns for one in computed), max(one.end_ns for one in computed)
    ranks = sorted({one.rank for one in computed})
    shades = _shades(computed)
    # A computation is drawn over the wait that it ends.
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
            "opacity": shades.get(one.stage, 1) if one.kind in COMPUTE else 1,
        }
        for one in drawn[-_MOST:]
        if one.end_ns > first_ns and one.start_ns < last_ns and one.rank in ranks
    ]
    idle = [
        {"rank": rank, "what": "idle", "start": 0, "end": (last_ns - first_ns) / 1e6, "opacity": 1} for rank in ranks
    ]
    shown = {"idle", *(value["what"] for value in values)}
    colour = charts.coloured("what", {name: colour for name, colour in COLOURS.items() if name in shown})
    x = charts.quantity("start", title="time in the batch (ms)")
    tip = charts.tooltip(what="what", stage="stage", microbatch="micro-batch", start="start", end="end")
    mark = {"type": "bar", "clip": True, "strokeWidth": 0.3, "stroke": "#ffffff"}
    opacity = charts.quantity("opacity", scale=None)
    bar = charts.layer(mark, x=x, x2="end", color=colour, opacity=opacity, tooltip=tip)
    look = {"type": "text", "clip": True, "fontSize": 10, "color": "#000000"}
    text = charts.layer(look, x=charts.quantity("middle"), text={"field": "microbatch", "type": "nominal"})
    return {
        "height": 34 * len(ranks) + 10,
        "data": {"values": idle + values},
        "encoding": {"y": {"field": "rank", "type": "ordinal", "title": "rank"}},
        "layer": [bar | {"params": [charts.ZOOM]}, text | {"transform": [{"filter": "datum.thick == 1"}]}],
    }


def _figure(batch: Sequence[Action], number: int, bubble: Bubble) -> Figure:
    from deep500_timing.report import Figure, Panel

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
        (Panel(_spec(batch)),),
        heads,
        table,
        note="Numbers are micro-batches. The table splits the idle time of all batches by cause.",
        zooms=True,
    )
