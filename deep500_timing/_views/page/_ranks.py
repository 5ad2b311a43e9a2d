"""Several ranks: the straggler and its cause, how late each rank came over the run, and their communication."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from deep500_timing._distributed.late import FEW_RANKS
from deep500_timing._distributed.verdict import sentences
from deep500_timing._summary.text import format_bytes, format_time
from deep500_timing._views.page._charts import (
    ACCENT,
    ALARM,
    TIME_LABELS,
    bars,
    by_step,
    colours_of,
    layer,
    quantity,
    rounded,
    time_axis,
    tooltip,
)
from deep500_timing._views.page._section import Content, Figure, Panel, shown

if TYPE_CHECKING:
    from deep500_timing._distributed.late import Steps as RankSteps
    from deep500_timing._distributed.verdict import Stragglers as Verdict
    from deep500_timing._views.page._section import Context, Steps

_DRAWN = 32
"""Ranks that have a bar: the latest, and the earliest."""
_ROWS = 64
"""Rows of the map; more ranks share them."""
_BUCKETS = 80
_MOST = 200
"""Rows of the table of communication."""


def stragglers(context: Context) -> Content | None:
    """The late rank and the cause: the sentences of ``deep500-timing stragglers``, with charts."""
    if len(context.about.ranks) < 2:
        return None
    found = context.evidence.stragglers
    assert found is not None
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
        | {"colour": ALARM if rank in found.ranks else ACCENT}
        for rank in drawn
    ]
    x = quantity("s", axis=time_axis(f"later than the median of the other ranks, {each}"))
    bar = bars(rows, "rank", x, rank="rank", late="late")
    layers: list[dict[str, Any]] = [bar]
    note = "How long after the median of the other ranks each typically came to where they meet."
    # With fewer ranks a test decides, and no bound.
    if found.bound_s > 0 and len(order) >= FEW_RANKS:
        line = {"type": "rect", "width": 2, "color": "#7f8a93"}  # A rule would have the colour of the page.
        layers.append(layer(line, [{"s": found.bound_s}], x=quantity("s")))
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
        legend=(("called late", ALARM), ("not late", ACCENT)) if found.ranks else (),
    )


def _of_regions(found: Verdict) -> Figure:
    rank = found.ranks[0]
    over = {region: against_others(of)[rank] for region, of in found.excess.items()}
    order = sorted(over, key=lambda region: (-over[region], region))
    rows = [
        {"region": shown(region), "s": rounded(over[region]), "over": signed(over[region])}
        | {"colour": ALARM if region == found.region else ACCENT}
        for region in order
    ]
    return Figure(
        f"What rank {rank} does longer",
        f"{shown(order[0])} takes {signed(over[order[0]])} a step against the median of the other ranks.",
        (Panel(bars(rows, "region", quantity("s", axis=time_axis("a step")), region="region", over="over")),),
        ("region", "against the median of the other ranks, a step"),
        [(row["region"], row["over"]) for row in rows],
        note="Own times: the waits for other ranks inside a region are left out.",
        legend=(("the cause", ALARM), ("no cause", ACCENT)) if found.region is not None else (),
    )


def ranks_over_run(context: Context) -> Content | None:
    steps, ranks = context.steps, context.about.ranks
    meeting = context.evidence.rank_steps if steps is not None and len(ranks) > 1 else None
    if steps is None or meeting is None:
        return None
    width = max(-(-(steps.last - steps.first + 1) // _BUCKETS), 1)
    late = _by_bucket(meeting, steps, width)
    mean = {rank: sum(of[rank] for of in late.values()) / len(late) for rank in meeting.ranks}
    firsts = Counter(max(of, key=lambda rank: (of[rank], -rank)) for of in late.values())
    latest = sorted(mean, key=lambda rank: (-mean[rank], rank))
    share = -(-len(ranks) // _ROWS)
    figure = Figure(
        "How late each rank came, by step",
        f"Rank {latest[0]} came latest: {signed(mean[latest[0]])} a step against the median of the others.",
        (Panel(_map(late, ranks, share, width)),),
        ("rank", "against the median of the others, mean of a step", "stretches in which it was the latest"),
        [(rank, signed(mean[rank]), firsts[rank]) for rank in latest],
        note="How long after the median of the other ranks each came to where they meet. Orange is later, blue is "
        "earlier. The findings say whether it is more than chance."
        + (f" Each row is {share} ranks, and shows the one that is furthest off." if share > 1 else ""),
    )
    return Content((figure,))


def _by_bucket(found: RankSteps, steps: Steps, width: int) -> dict[int, dict[int, float]]:
    # The verdict's own lateness of each rank, as means over stretches of steps.
    buckets: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(found.numbers):
        buckets[number - (number - steps.first) % width].append(place)
    means = {bucket: found.lateness[places].mean(axis=0).tolist() for bucket, places in buckets.items()}
    return {bucket: against_others(dict(zip(found.ranks, of, strict=True))) for bucket, of in means.items()}


def _map(late: dict[int, dict[int, float]], ranks: tuple[int, ...], share: int, width: int) -> dict[str, Any]:
    row_of = {rank: place // share for place, rank in enumerate(ranks)}
    cells: dict[tuple[int, int], tuple[float, int]] = {}
    for rank, bucket, seconds in ((rank, bucket, of[rank]) for bucket, of in late.items() for rank in of):
        cell = row_of[rank], bucket
        if cell not in cells or abs(seconds) > abs(cells[cell][0]):
            cells[cell] = seconds, rank
    sizes = sorted(abs(seconds) for seconds, _ in cells.values())
    # The scale ends at the 98th percentile: a few extremes would make all others look alike.
    most = max(sizes[int(len(sizes) * 0.98)] if len(sizes) > 50 else sizes[-1], 1e-9)
    rows = [
        {"step": bucket, "end": bucket + width, "row": row, "below": row + 1, "s": rounded(seconds, 3), "rank": rank}
        | {"late": signed(seconds)}
        for (row, bucket), (seconds, rank) in sorted(cells.items())
    ]
    number = max(row_of.values()) + 1
    height = max(min(number * 18, 420), 60)
    axis = {"title": "rank", "grid": False, "tickMinStep": 1, "labelOffset": 9 if number <= 20 else 0}
    axis["labelExpr"] = f"datum.value < {number} ? format(datum.value * {share}, 'd') : ''"
    scale = {"domain": [-most, 0, most], "range": [ACCENT, "#dfe3e6", ALARM]}
    legend = {"title": None, "labelExpr": TIME_LABELS.replace("~s", ".2~s"), "gradientLength": min(height - 10, 100)}
    y = quantity("row", scale={"domain": [0, number], "reverse": True, "nice": False}, axis=axis)
    colour = quantity("s", scale=scale | {"clamp": True, "interpolate": "lab"}, legend=legend)
    tip = tooltip(rank="rank", step="from step", late="against the median")
    return {"height": height, **layer("rect", rows, **by_step(), y=y, y2="below", color=colour, tooltip=tip)}


def communication(context: Context) -> Content | None:
    rows = context.rows(
        'select op, "group", case when bytes < 0 then null else bytes end as size, count(*) as n, '
        "sum(dur_ns)::double as total, median(dur_ns) as middle, min(dur_ns) as low, max(dur_ns) as high "
        f"from collectives group by all order by total desc, op, 2, 3 limit {_MOST}"
    )
    if not rows:
        return None
    totals: dict[str, float] = {}
    for row in rows:
        row["op"] = row["op"] or ""
        totals[row["op"]] = totals.get(row["op"], 0.0) + row["total"]
        rate = row["size"] / row["middle"] * 1e9 if row["size"] and row["middle"] else None
        row["said"] = None if rate is None else f"{format_bytes(rate)}/s"
    table = [
        (
            *(shown(row["op"]), shown(row["group"] or ""), format_bytes(row["size"]), row["n"]),
            *(format_time(row[what] / 1e9) for what in ("total", "low", "middle", "high")),
            row["said"],
        )
        for row in rows
    ]
    heads = ("operation", "group", "size", "count", "total", "shortest", "median", "longest", "size over median")
    return Content((_totals(totals),), tables=(("By operation, group and size", heads, table),))


def _totals(totals: dict[str, float]) -> Figure:
    colours = colours_of(totals)
    rows = [
        {"op": shown(op), "s": rounded(total / 1e9), "time": format_time(total / 1e9), "colour": colours[op]}
        for op, total in sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    ]
    return Figure(
        "Time by operation, all ranks together",
        f"{rows[0]['op']} takes most: {rows[0]['time']}.",
        (Panel(bars(rows, "op", quantity("s", axis=time_axis(None)), op="operation", time="total")),),
        ("operation", "total"),
        [(row["op"], row["time"]) for row in rows],
        note="A rank's time in a collective includes its wait for the others.",
    )
