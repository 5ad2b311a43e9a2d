"""The layers of a model in a run and its report: a table describes them, and their times are regions of the run.

The table is written twice: as timing begins, so that the run of a killed process has it, and as timing ends, with the
operations and memory that are known by then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing import TimeStats
from deep500_timing.adapters import QUANTILES, charts, format_share, format_time, safe_name
from deep500_timing_torch.layers._memory import LayerMemory
from deep500_timing_torch.layers._table import cells_of, headline, notes_of, tree_of
from deep500_timing_torch.layers._times import (
    BACKWARD,
    FORWARD,
    PURPOSES,
    LayerTimes,
    ModelTimes,
    add_times,
    region_of,
    sum_known,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deep500_timing.report import Content, Context, Figure
    from deep500_timing.runs import Run, RunLog
    from deep500_timing_torch.layers._table import Row

    Rows = Callable[[str], list[dict[str, Any]]]

TABLE = "layers"
"""The table of a run that has a row for each layer."""
_COLUMNS = {
    **dict.fromkeys(("model", "layer", "kind"), "name"),
    **dict.fromkeys(("position", "parent", "depth", "shared", "parameters"), "int"),
    **dict.fromkeys(("flops", "kept_bytes", "peak_bytes", "unreturned_bytes", "peak_flops_per_s"), "float"),
    "version": "int",
}
_NEWEST = 200_000
"""Intervals that the time of a layer's own is measured by; its share in them holds for all."""
_NONE = float("nan")
_MOST_BARS = 30
_MOST_LINES = 400
_COLOURS = {"forward": charts.REGION_COLOURS["FORWARD"], "backward": charts.REGION_COLOURS["BACKWARD"]}


def write_layers(
    log: RunLog, found: Sequence[LayerTimes], *, version: int, peak_flops_per_s: float | None = None
) -> None:
    rows = []
    for position, layer in enumerate(found):
        parent = -1 if layer.parent is None else layer.parent
        counts = position, parent, layer.depth, int(layer.shared), layer.parameters
        read = layer.memory
        sizes = (read.kept_bytes, read.peak_within_bytes, read.unreturned_bytes) if read is not None else (None,) * 3
        known = (_NONE if value is None else float(value) for value in (layer.flops, *sizes, peak_flops_per_s))
        rows.append((found[0].path, layer.path, layer.kind, *counts, *known, version))
    log.declare(TABLE, **_COLUMNS)
    log.add(TABLE, *rows)


def read_layers(run: Run, *, rank: int | None = None, model: str | None = None) -> ModelTimes | None:
    """The layers of a model that a run holds, with their times; None if it holds none.

    Args:
        run: An open run, read by DuckDB.
        rank: Of this rank; None for the lowest that has layers.
        model: Of the model of this name; None for the one that was timed first.
    """
    return layers_of_rows(lambda query: run.sql(query).rows(), run.tables, rank=rank, model=model)


def models_of_rows(rows: Rows) -> list[tuple[int, str]]:
    """The models whose layers a run holds, each with the lowest rank that has it, in the order of their ranks."""
    found = rows(f"select min(rank) as rank, model from {TABLE} group by model order by 1, 2")
    return [(int(row["rank"]), str(row["model"])) for row in found]


def layers_of_rows(
    rows: Rows, tables: Mapping[str, object], *, rank: int | None = None, model: str | None = None
) -> ModelTimes | None:
    """The same, by a function that answers DuckDB's SQL over the run's tables."""
    if TABLE not in tables:
        return None
    known = [one for one in models_of_rows(rows) if model is None or one[1] == model]
    if not known:
        return None
    name = known[0][1]
    place = known[0][0] if rank is None else int(rank)
    of = f"from {TABLE} where rank = {place} and model = {_literal(name)}"
    written = rows(
        f"select * {of} and session = (select max(session) {of}) "
        "qualify row_number() over (partition by position order by version desc) = 1 order by position"
    )
    if not written:
        return None
    session = int(written[0]["session"])
    layers = [_layer_of(row) for row in written]
    regions = [region_of(position, layers) for position in range(len(layers))]
    names = ", ".join(_literal(f"{region} {purpose}") for region in regions for purpose in PURPOSES)
    intervals = f"from intervals where rank = {place} and session = {session} and region in ({names})"
    stats = {
        (str(row["region"]), str(row["device"])): _stats_of(row)
        for row in rows(_STATISTICS.format(of=intervals, shares=list(QUANTILES.values())))
    }
    on_device = any(device == "GPU" for _, device in stats)
    newest: dict[str, list[tuple[int, int]]] = {}
    for row in rows(
        f"select region, start_ns, start_ns + dur_ns as end_ns {intervals} "
        f"and device = '{'GPU' if on_device else 'CPU'}' order by start_ns desc limit {_NEWEST}"
    ):
        newest.setdefault(str(row["region"]), []).append((int(row["start_ns"]), int(row["end_ns"])))
    timed = add_times(
        layers, stats, lambda region, _: np.array(newest.get(region, [])[::-1], dtype=np.int64).reshape(-1, 2)
    )
    return ModelTimes(tuple(timed), peak_flops_per_s=_known(written[0]["peak_flops_per_s"]))


_STATISTICS = """
select region, device, count(*) as n, sum(dur_ns) / 1e9 as total, min(dur_ns) / 1e9 as low, max(dur_ns) / 1e9 as high,
    coalesce(stddev_samp(dur_ns), 0) / 1e9 as stdev, quantile_cont(dur_ns, {shares}) as quantiles
{of} group by region, device
"""


def _stats_of(row: Mapping[str, Any]) -> TimeStats:
    quantiles: Any = {name: float(value) / 1e9 for name, value in zip(QUANTILES, row["quantiles"], strict=True)}
    low, high, stdev, total, count = (float(row[name]) for name in ("low", "high", "stdev", "total", "n"))
    return TimeStats(
        min=low,
        mean=total / count,
        max=high,
        stdev=stdev,
        count=int(count),
        total=total,
        median_ci=None,
        **quantiles,
    )


def _layer_of(row: Mapping[str, Any]) -> LayerTimes:
    kept, peak, unreturned = (_known(row[name]) for name in ("kept_bytes", "peak_bytes", "unreturned_bytes"))
    read = None
    if kept is not None or peak is not None or unreturned is not None:
        read = LayerMemory(0, None, None, None, kept, None if peak is None else round(peak), unreturned)
    flops = _known(row["flops"])
    return LayerTimes(
        str(row["layer"]),
        str(row["kind"]),
        int(row["depth"]),
        None if row["parent"] < 0 else int(row["parent"]),
        shared=bool(row["shared"]),
        parameters=int(row["parameters"]),
        flops=None if flops is None else round(flops),
        memory=read,
    )


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


class LayersSection:
    """A section of :func:`deep500_timing.report.write_report`; used for every run that has layers."""

    name, title, place = "layers", "Layers", 74
    missing = "No layers were timed."

    def build(self, context: Context) -> Content | None:
        from deep500_timing.report import Content

        if TABLE not in context.run.tables:
            return None
        texts: list[str] = []
        figures = []
        for rank, model in models_of_rows(context.rows):
            times = layers_of_rows(context.rows, context.run.tables, rank=rank, model=model)
            if times is None or (not times.model.stats and not any(layer.stats for layer in times.layers)):
                continue
            texts += [f"{headline(times)}, rank {rank}.", *notes_of(times)]
            figures.append(_figure(times))
        return Content(tuple(figures), text=tuple(texts)) if figures else None


def _figure(times: ModelTimes) -> Figure:
    from deep500_timing.report import Figure, Panel

    header, lines = cells_of(times)
    bars = _bars(times)
    values = [
        {"layer": label, "pass": what, "ms": round(seconds * 1e3, 6), "order": place}
        for place, (label, passes) in enumerate(bars)
        for what, seconds in passes.items()
    ]
    slowest = max(bars, key=lambda bar: sum(bar[1].values()), default=None)
    whole = sum(sum(passes.values()) for _, passes in bars)
    if slowest is None or not whole:
        alt = "No training step was timed."
    else:
        took = sum(slowest[1].values())
        alt = f"{slowest[0]} takes {format_time(took)} of a step, {format_share(took / whole)} of the bars."
    y = {"field": "layer", "type": "nominal", "sort": {"field": "order"}, "title": None, "axis": {"labelLimit": 320}}
    x = charts.quantity("ms", stack="zero", title="time of a training step (ms)")
    order = {"field": "pass", "sort": "descending"}
    tip = [*charts.tooltip(layer="layer", **{"pass": "pass"}), charts.quantity("ms", format=".4~g")]
    spec = {
        "height": {"step": 20},
        **charts.layer("bar", values, y=y, x=x, color=charts.coloured("pass", _COLOURS), order=order, tooltip=tip),
    }
    note = (
        "In the order in which the model names them; a layer's own operations are those outside the layers within it."
    )
    if len(lines) > _MOST_LINES:
        note += f" The table has the first {_MOST_LINES} of {len(lines)} lines."
    return Figure(
        f"Where a step of {safe_name(times.model.path)} goes",
        alt,
        (Panel(spec),) if values else (),
        tuple(header),
        lines[:_MOST_LINES],
        note=note,
    )


def _bars(times: ModelTimes) -> list[tuple[str, dict[str, float]]]:
    """Lines that together are the whole model: the tree is opened where it takes the most time, while there is room."""
    steps = times.steps
    if not steps:
        return []
    opened: list[Row] = [tree_of(times)]
    own: set[int] = set()
    while True:
        closed = [row for row in opened if row.inner and id(row) not in own]
        largest = max(closed, key=lambda row: row.step_s or 0.0, default=None)
        if largest is None or len(opened) + len(largest.inner) > _MOST_BARS:
            break
        place = opened.index(largest)
        own.add(id(largest))
        opened[place + 1 : place + 1] = largest.inner
    bars = []
    labels: dict[str, int] = {}
    for row in opened:
        passes = {}
        for what in (FORWARD, BACKWARD):
            is_own = id(row) in own
            total_s = sum_known(layer.self_s.get(what) if is_own else layer.total_s(what) for layer in row.layers)
            if total_s is not None:
                passes[what] = total_s / steps
        if id(row) in own and sum(passes.values()) <= 0.005 * (times.step_s or 0.0) / steps:
            continue  # A container without its own operations is no bar.
        label = (f"{row.label}, its own" if id(row) in own else row.label) or "?"
        # Layers of one name in different blocks have a bar each.
        labels[label] = labels.get(label, 0) + 1
        if passes:
            bars.append((label if labels[label] == 1 else f"{label} ({labels[label]})", passes))
    return bars
