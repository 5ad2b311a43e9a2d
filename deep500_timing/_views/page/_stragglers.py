"""The straggler: the verdict in sentences, how late each rank came, and what the late one does longer."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from deep500_timing._distributed.late import FEW_RANKS
from deep500_timing._distributed.verdict import sentences
from deep500_timing._summary.text import format_time
from deep500_timing._views.page._context import shown
from deep500_timing._views.page._parts import data, rounded, time_axis, tooltip
from deep500_timing._views.page._section import Content, Figure, Panel

if TYPE_CHECKING:
    from deep500_timing._distributed.verdict import Stragglers as Verdict
    from deep500_timing._views.page._context import Context

_ROWS = 32
"""Ranks that are drawn: the latest, and the earliest."""
_LATE, _OTHER = "#d55e00", "#0072b2"


class Stragglers:
    """Which rank the others wait for, and why."""

    name, title, place = "stragglers", "Who is late, and why", 65
    missing = "There is one rank."

    def build(self, context: Context) -> Content | None:
        """See :class:`Section`."""
        found = context.stragglers
        if len(context.about.ranks) < 2:
            return None
        figures = [_of_ranks(found)] if found.lateness else []
        if found.ranks and found.excess:
            figures.append(_of_regions(found))
        said = sentences(found)
        verdict = 2 if found.ranks else 1
        text = (" ".join(said[:verdict]), " ".join(said[verdict:]))
        return Content(tuple(figures), text=tuple(part for part in text if part))


def signed(seconds: float) -> str:
    """A time with its sign."""
    return ("+" if seconds > 0 else "−" if seconds < 0 else "") + format_time(abs(seconds))


def against_others(values: dict[int, float]) -> dict[int, float]:
    """Each rank's value against the median of the other ranks: the page's one definition of lateness."""
    found = {}
    for rank, value in values.items():
        others = [other for of, other in values.items() if of != rank]
        found[rank] = value - median(others) if others else 0.0
    return found


def _of_ranks(found: Verdict) -> Figure:
    lateness = against_others(found.lateness)
    each = "an operation" if found.operations is not None else "a step"
    order = sorted(lateness, key=lambda rank: (-lateness[rank], rank))
    drawn = order if len(order) <= _ROWS else [*order[: _ROWS // 2], *order[-_ROWS // 2 :]]
    rows = [
        {"rank": f"rank {rank}", "s": rounded(lateness[rank]), "late": signed(lateness[rank])}
        | {"colour": _LATE if rank in found.ranks else _OTHER}
        for rank in drawn
    ]
    bars = _bars(rows, "rank", time_axis(f"later than the median of the other ranks, {each}"))
    layers: list[dict[str, Any]] = [bars]
    note = "How long after the median of the other ranks each typically came to where they meet."
    # With fewer ranks a test decides, and no bound.
    if found.bound_s > 0 and len(order) >= FEW_RANKS:
        line = {"type": "rect", "width": 2, "color": "#7f8a93"}  # A rule would have the colour of the page.
        layers.append({"mark": line, "data": data([{"s": found.bound_s}]), "encoding": {"x": _seconds(None)}})
        note += f" A rank is called late beyond the grey line, at {format_time(found.bound_s)}."
    if len(drawn) < len(order):
        note += f" Of {len(order)} ranks the {_ROWS // 2} latest and the {_ROWS // 2} earliest are drawn."
    return Figure(
        "How late each rank came",
        f"Rank {order[0]} came latest: {signed(lateness[order[0]])} {each} against the median of the others.",
        (Panel({"height": max(18 * len(rows), 60), "layer": layers}),),
        ("rank", f"typically, {each}", "called late"),
        [(rank, signed(lateness[rank]), "yes" if rank in found.ranks else "no") for rank in order],
        note=note,
        legend=(("called late", _LATE), ("not late", _OTHER)) if found.ranks else (),
    )


def _of_regions(found: Verdict) -> Figure:
    rank = found.ranks[0]
    over = {region: against_others(of)[rank] for region, of in found.excess.items()}
    order = sorted(over, key=lambda region: (-over[region], region))
    rows = [
        {"region": shown(region), "s": rounded(over[region]), "over": signed(over[region])}
        | {"colour": _LATE if region == found.region else _OTHER}
        for region in order
    ]
    return Figure(
        f"What rank {rank} does longer",
        f"{shown(order[0])} takes {signed(over[order[0]])} a step against the median of the other ranks.",
        (Panel({"height": max(22 * len(rows), 60), "layer": [_bars(rows, "region", time_axis("a step"))]}),),
        ("region", "against the median of the other ranks, a step"),
        [(row["region"], row["over"]) for row in rows],
        note="Own times: the waits for other ranks inside a region are left out.",
        legend=(("the cause", _LATE), ("no cause", _OTHER)) if found.region is not None else (),
    )


def _bars(rows: list[dict[str, Any]], named_by: str, axis: dict[str, Any]) -> dict[str, Any]:
    said = {name: name for name in ("late", "over") if name in rows[0]}
    return {
        "data": data(rows),
        "mark": {"type": "bar"},
        "encoding": {
            "y": {"field": named_by, "type": "nominal", "sort": None, "axis": {"title": None, "labelLimit": 200}},
            "x": _seconds(axis),
            "color": {"field": "colour", "type": "nominal", "scale": None, "legend": None},
            "tooltip": tooltip(**{named_by: named_by}, **said),
        },
    }


def _seconds(axis: dict[str, Any] | None) -> dict[str, Any]:
    return {"field": "s", "type": "quantitative"} | ({"axis": axis} if axis else {})
