"""The layers of a model in a run and its report: a table describes them, and their times are regions of the run.

The table is written twice: as timing begins, so that the run of a killed process has it, and as timing ends, with the
operations and memory that are known by then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing import TimeStats
from deep500_timing.adapters import CPU, GPU, QUANTILES, charts, format_share, format_time, literal, safe_name
from deep500_timing_torch.layers._memory import LayerMemory
from deep500_timing_torch.layers._table import cells_of, headline, notes_of, tree_of
from deep500_timing_torch.layers._times import (
    BACKWARD,
    FORWARD,
    PURPOSES,
    LayerTimes,
    ModelTimes,
    add_times,
    regions_of,
)

if TYPE_CHECKING:
    from deep500_timing.report import Content, Context, Figure
    from deep500_timing.runs import Run, RunLog
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
        sizes = [getattr(layer.memory, name, None) for name in ("kept_bytes", "peak_within_bytes", "unreturned_bytes")]
        known = (math.nan if value is None else float(value) for value in (layer.flops, *sizes, peak_flops_per_s))
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
    known = [one for one in _models(run) if model is None or one[1] == model]
    if not known:
        return None
    first_rank, name = known[0]
    place = first_rank if rank is None else int(rank)
    of = f"from {TABLE} where rank = {place} and model = {literal(name)}"
    written = run.sql(
        f"select * {of} and session = (select max(session) {of}) "
        "qualify row_number() over (partition by position order by version desc) = 1 order by position"
    ).rows()
    if not written:
        return None
    session = int(written[0]["session"])
    layers = [_layer_of(row) for row in written]
    names = ", ".join(literal(f"{region} {purpose}") for region in regions_of(layers) for purpose in PURPOSES)
    intervals = f"from intervals where rank = {place} and session = {session} and region in ({names})"
    stats = {}
    for row in run.sql(f"select region, device, {_STATISTICS} {intervals} group by region, device").rows():
        region, device = str(row.pop("region")), str(row.pop("device"))
        stats[region, device] = TimeStats(**row, median_ci=None)
    device = GPU if any(device == GPU for _, device in stats) else CPU
    newest: dict[str, list[tuple[int, int]]] = {}
    for row in run.sql(
        f"select region, start_ns, start_ns + dur_ns as end_ns {intervals} "
        f"and device = '{device}' order by start_ns desc limit {_NEWEST}"
    ).rows():
        newest.setdefault(str(row["region"]), []).append((int(row["start_ns"]), int(row["end_ns"])))
    timed = add_times(
        layers, stats, lambda region, _: np.array(newest.get(region, [])[::-1], dtype=np.int64).reshape(-1, 2)
    )
    return ModelTimes(tuple(timed), peak_flops_per_s=_known(written[0]["peak_flops_per_s"]))


_STATISTICS = """
    count(*) as count, sum(dur_ns) / 1e9 as total, avg(dur_ns) / 1e9 as mean, min(dur_ns) / 1e9 as min,
    max(dur_ns) / 1e9 as max, coalesce(stddev_samp(dur_ns), 0) / 1e9 as stdev, """ + ", ".join(
    f"quantile_cont(dur_ns, {share}) / 1e9 as {name}" for name, share in QUANTILES.items()
)


def _models(run: Run) -> list[tuple[int, str]]:
    # The models whose layers a run holds, each with the lowest rank that has it, in the order of their ranks.
    if TABLE not in run.tables:
        return []
    found = run.sql(f"select min(rank) as rank, model from {TABLE} group by model order by 1, 2").rows()
    return [(int(row["rank"]), str(row["model"])) for row in found]


def _layer_of(row: Mapping[str, Any]) -> LayerTimes:
    kept, peak, unreturned, flops = (
        _known(row[name]) for name in ("kept_bytes", "peak_bytes", "unreturned_bytes", "flops")
    )
    read = None
    if kept is not None or peak is not None or unreturned is not None:
        read = LayerMemory(0, None, None, None, kept, None if peak is None else round(peak), unreturned)
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


class LayersSection:
    """A section of :func:`deep500_timing.report.write_report`; used for every run that has layers."""

    name, title, place = "layers", "Layers", 74
    missing = "No layers were timed."

    def build(self, context: Context) -> Content | None:
        from deep500_timing.report import Content

        texts: list[str] = []
        figures = []
        for rank, model in _models(context.run):
            times = read_layers(context.run, rank=rank, model=model)
            if times is None or not any(layer.stats for layer in times.layers):
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
        for place, (label, passes) in enumerate(bars.items())
        for what, seconds in passes.items()
    ]
    alt = "No training step was timed."
    if bars:
        seconds_of = {label: sum(passes.values()) for label, passes in bars.items()}
        slowest = max(bars, key=seconds_of.__getitem__)
        share = format_share(seconds_of[slowest] / sum(seconds_of.values()))
        alt = f"{slowest} takes {format_time(seconds_of[slowest])} of a step, {share} of the bars."
    y = {"field": "layer", "type": "nominal", "sort": {"field": "order"}, "title": None, "axis": {"labelLimit": 320}}
    x = charts.quantity("ms", stack="zero", title="time of a training step (ms)")
    order = {"field": "pass", "sort": "descending"}
    tip = [*charts.tooltip(layer="layer", **{"pass": "pass"}), charts.quantity("ms", format=".4~g")]
    spec = {
        "height": {"step": 20},
        **charts.layer("bar", values, y=y, x=x, color=charts.coloured("pass", _COLOURS), order=order, tooltip=tip),
    }
    note = "A bar is the time of a layer's own operations, outside the layers within it, in the model's order."
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


def _bars(times: ModelTimes) -> dict[str, dict[str, float]]:
    """The seconds of a step in each line's own operations, by pass; the shortest together where there are too many."""
    rows = [tree_of(times)]
    for row in rows:  # which grows meanwhile
        rows += row.inner
    order = {layer.path: place for place, layer in enumerate(times.layers)}
    bars = {}
    for row in sorted(rows, key=lambda row: order[row.layers[0].path]):
        own = {what: row.own_s(what) for what in (FORWARD, BACKWARD)}
        passes = {what: seconds / times.steps for what, seconds in own.items() if seconds and times.steps}
        if passes:
            first, last = row.layers[0].path, row.layers[-1].path
            bars[safe_name(first if first == last else f"{first} … {last}")] = passes
    longest = sorted(bars, key=lambda name: sum(bars[name].values()), reverse=True)
    others = [bars.pop(name) for name in longest[_MOST_BARS:]]
    if others:
        together = {what: sum(one.get(what, 0.0) for one in others) for what in (FORWARD, BACKWARD)}
        bars[f"{len(others)} others"] = together
    return bars
