"""Several ranks: how late each came, the straggler and its cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._distributed.late import FEW_RANKS
from deep500_timing._distributed.verdict import sentences
from deep500_timing._summary.text import format_time
from deep500_timing._views.page._context import shown
from deep500_timing._views.page._parts import bars, data, quantity, rounded, time_axis
from deep500_timing._views.page._section import Content, Figure, Panel

if TYPE_CHECKING:
    from deep500_timing._distributed.verdict import Stragglers as Verdict
    from deep500_timing._views.page._context import Context

_DRAWN = 32
"""Ranks that have a bar: the latest, and the earliest."""
_LATE, _OTHER = "#d55e00", "#0072b2"


def stragglers(context: Context) -> Content | None:
    """The late rank and the cause: the sentences of ``deep500-timing stragglers``, with charts."""
    if len(context.about.ranks) < 2:
        return None
    found = context.stragglers
    figures = [_of_ranks(found)] if found.lateness else []
    if found.ranks and found.excess:
        figures.append(_of_regions(found))
    said = sentences(found)
    verdict = 2 if found.ranks else 1
    text = (" ".join(said[:verdict]), " ".join(said[verdict:]))
    return Content(tuple(figures), text=tuple(part for part in text if part))


def signed(seconds: float) -> str:
    return ("+" if seconds > 0 else "−" if seconds < 0 else "") + format_time(abs(seconds))


def against_others(values: dict[int, float]) -> dict[int, float]:
    """Each rank's value against the median of the other ranks: the page's one definition of lateness."""
    order = sorted(values, key=lambda rank: values[rank])
    others = len(order) - 1

    def without(place: int, number: int) -> float:
        return values[order[number if number < place else number + 1]]

    found = {}
    for place, rank in enumerate(order):
        # Sorted once: thousands of ranks would else be sorted thousands of times.
        middle = (without(place, (others - 1) // 2) + without(place, others // 2)) / 2 if others else values[rank]
        found[rank] = values[rank] - middle
    return {rank: found[rank] for rank in values}


def _of_ranks(found: Verdict) -> Figure:
    lateness = against_others(found.lateness)
    each = "an operation" if found.operations is not None else "a step"
    order = sorted(lateness, key=lambda rank: (-lateness[rank], rank))
    drawn = order if len(order) <= _DRAWN else [*order[: _DRAWN // 2], *order[-_DRAWN // 2 :]]
    rows = [
        {"rank": f"rank {rank}", "s": rounded(lateness[rank]), "late": signed(lateness[rank])}
        | {"colour": _LATE if rank in found.ranks else _OTHER}
        for rank in drawn
    ]
    x = quantity("s", axis=time_axis(f"later than the median of the other ranks, {each}"))
    bar = bars(rows, "rank", x, rank="rank", late="late")
    layers: list[dict[str, Any]] = [bar]
    note = "How long after the median of the other ranks each typically came to where they meet."
    # With fewer ranks a test decides, and no bound.
    if found.bound_s > 0 and len(order) >= FEW_RANKS:
        line = {"type": "rect", "width": 2, "color": "#7f8a93"}  # A rule would have the colour of the page.
        layers.append({"mark": line, "data": data([{"s": found.bound_s}]), "encoding": {"x": quantity("s")}})
        note += f" A rank is called late beyond the grey line, at {format_time(found.bound_s)}."
    if len(drawn) < len(order):
        note += f" Of {len(order)} ranks the {_DRAWN // 2} latest and the {_DRAWN // 2} earliest are drawn."
    return Figure(
        "How late each rank came",
        f"Rank {order[0]} came latest: {signed(lateness[order[0]])} {each} against the median of the others.",
        (Panel({"height": bar.pop("height"), "layer": layers}),),
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
        (Panel(bars(rows, "region", quantity("s", axis=time_axis("a step")), region="region", over="over")),),
        ("region", "against the median of the other ranks, a step"),
        [(row["region"], row["over"]) for row in rows],
        note="Own times: the waits for other ranks inside a region are left out.",
        legend=(("the cause", _LATE), ("no cause", _OTHER)) if found.region is not None else (),
    )
