"""The layers of a model in the HTML report: the table as a tree, and a chart of the lines that take the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import REGION_COLOURS, format_share, format_time, safe_name
from deep500_timing_torch.layers._call import BACKWARD, FORWARD
from deep500_timing_torch.layers._of_run import TABLE, layers_of_rows, models_of_rows
from deep500_timing_torch.layers._table import cells_of, headline, notes_of, tree_of

if TYPE_CHECKING:
    from deep500_timing.report import Content, Context, Figure
    from deep500_timing_torch.layers._table import Row
    from deep500_timing_torch.layers._times import ModelTimes

_MOST_BARS = 30
_MOST_LINES = 400
_COLOURS = {"forward": REGION_COLOURS["FORWARD"], "backward": REGION_COLOURS["BACKWARD"]}


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
    spec: dict[str, Any] = {
        "height": {"step": 20},
        "data": {"values": values},
        "mark": {"type": "bar"},
        "encoding": {
            "y": {
                "field": "layer",
                "type": "nominal",
                "sort": {"field": "order"},
                "title": None,
                "axis": {"labelLimit": 320},
            },
            "x": {"field": "ms", "type": "quantitative", "stack": "zero", "title": "time of a training step (ms)"},
            "color": {
                "field": "pass",
                "type": "nominal",
                "title": None,
                "scale": {"domain": list(_COLOURS), "range": list(_COLOURS.values())},
            },
            "order": {"field": "pass", "sort": "descending"},
            "tooltip": [
                {"field": "layer", "type": "nominal"},
                {"field": "pass", "type": "nominal"},
                {"field": "ms", "type": "quantitative", "format": ".4~g"},
            ],
        },
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
            if id(row) in own:
                known = [layer.self_s[what] for layer in row.layers if what in layer.self_s]
            else:
                known = [total for layer in row.layers if (total := layer.total_s(what)) is not None]
            if known:
                passes[what] = sum(known) / steps
        if id(row) in own and sum(passes.values()) <= 0.005 * (times.step_s or 0.0) / steps:
            continue  # A container without its own operations is no bar.
        label = (f"{row.label}, its own" if id(row) in own else row.label) or "?"
        # Layers of one name in different blocks have a bar each.
        labels[label] = labels.get(label, 0) + 1
        if passes:
            bars.append((label if labels[label] == 1 else f"{label} ({labels[label]})", passes))
    return bars
