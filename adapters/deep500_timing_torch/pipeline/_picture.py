"""One batch as a picture, and the pipeline in the HTML report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import REGION_COLOURS, format_share, format_time, require
from deep500_timing_torch.pipeline._actions import COMPUTE, Action, Kind
from deep500_timing_torch.pipeline._pipeline_timer import bubble_of
from deep500_timing_torch.pipeline._recorder import TABLE
from deep500_timing_torch.pipeline._schedules import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from deep500_timing.report import Content, Context, Figure
    from deep500_timing.runs import Run
    from deep500_timing_torch.pipeline._bubble import Bubble


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

    def rows(query: str) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for row in run.sql(query).rows()]

    if TABLE not in run.tables:
        return RunBatches(None, (), ())
    return batches_of_rows(rows, replica=replica, last=last)


def batches_of_rows(rows: Callable[[str], list[tuple[Any, ...]]], *, replica: int = 0, last: int = 16) -> RunBatches:
    """The same from a function that answers SQL over the run's tables with rows as tuples."""
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
    "forward": REGION_COLOURS["FORWARD"],
    "backward": REGION_COLOURS["BACKWARD"],
    "backward, input": "#00664b",
    "backward, weight": "#7fceb9",
    "communication": REGION_COLOURS["COMM"],
    "idle": "#EEEEEE",
}
"""The colours of the regions on the whole page; the two parts of a backward pass are of its hue."""
LAYER_OF = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input",
    Kind.BACKWARD_WEIGHT: "backward, weight",
    Kind.SEND_ACTIVATION: "communication",
    Kind.SEND_GRADIENT: "communication",
    Kind.RECEIVE_ACTIVATION: "communication",
    Kind.RECEIVE_GRADIENT: "communication",
    Kind.WAIT_ACTIVATION: "communication",
    Kind.WAIT_GRADIENT: "communication",
    Kind.WAIT_SENT: "communication",
}
"""The layer of an action; loading, reduction and steps are not drawn."""
_DARKER = 0.72
"""Brightness of a rank's second stage relative to its first, and so on."""
_POINTS_OF_A_DIGIT = 5.0


def draw_schedule(actions: Sequence[Action], path: str | PathLike[str], *, title: str | None = None) -> Path:
    """Draw one batch: when each rank computed what, talked to others, and was idle.

    Where a rank has several stages, the later ones are darker. Numbers are micro-batches; one that its box has no room
    for is left out.

    Args:
        actions: Of all ranks and one batch, as ``gather()`` gives them.
        path: The file, a PNG unless its name says otherwise.
        title: Title of the picture; the bubble if None.

    Returns:
        The path.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ValueError: There is no computation among the actions.
    """
    require("matplotlib", extra="plots", caller="Drawing a schedule")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from deep500_timing_torch.pipeline._bubble import account

    bubble = account(actions)
    shown = [one for one in actions if one.kind in LAYER_OF]
    computed = [one for one in shown if one.kind in COMPUTE]
    first_ns = min(one.start_ns for one in computed)
    last_ns = max(one.end_ns for one in computed)
    ranks = sorted({one.rank for one in computed})
    per_unit = 1e6
    width = 11.0
    figure = Figure(figsize=(width, 1.3 + 0.55 * len(ranks)), layout="constrained", dpi=144)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlim(0, (last_ns - first_ns) / per_unit)
    room = 72 * (width - 1.2) * per_unit / (last_ns - first_ns)  # points for a unit of time
    place = {rank: row for row, rank in enumerate(ranks)}
    chunk = _chunks(computed)
    for rank in ranks:
        axes.barh(place[rank], (last_ns - first_ns) / per_unit, height=0.8, color=COLOURS["idle"], zorder=1)
    used = {"idle"}
    # A computation is drawn over the wait that it ends.
    for one in sorted(shown, key=lambda one: one.kind in COMPUTE):
        layer = LAYER_OF[one.kind]
        start, end = max(one.start_ns, first_ns), min(one.end_ns, last_ns)
        if end <= start or one.rank not in place:
            continue
        used.add(layer)
        computes = one.kind in COMPUTE
        axes.barh(
            place[one.rank],
            (end - start) / per_unit,
            left=(start - first_ns) / per_unit,
            height=0.8 if computes else 0.3,
            color=_shade(COLOURS[layer], chunk.get(one.stage, 0) if computes else 0),
            edgecolor="white" if computes else "none",
            linewidth=0.4,
            zorder=3 if computes else 2,
        )
        label = str(one.microbatch)
        if computes and (end - start) / per_unit * room > _POINTS_OF_A_DIGIT * len(label) + 2:
            middle = ((start + end) / 2 - first_ns) / per_unit
            axes.text(middle, place[one.rank], label, ha="center", va="center", fontsize=7.5, zorder=4)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("time (ms)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title or f"Bubble {100 * bubble.bubble:.1f} % of the batch", loc="left", fontsize=10)
    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in used]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    return target


def _chunks(computed: Sequence[Action]) -> dict[int, int]:
    # Of each stage, which one of its rank's it is.
    by_rank: dict[int, set[int]] = {}
    for one in computed:
        by_rank.setdefault(one.rank, set()).add(one.stage)
    return {stage: number for stages in by_rank.values() for number, stage in enumerate(sorted(stages))}


def _shade(colour: str, darker: int) -> tuple[float, ...]:
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return tuple(part * _DARKER**darker for part in parts)


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
