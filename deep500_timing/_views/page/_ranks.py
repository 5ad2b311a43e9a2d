"""Several ranks: the straggler and its cause, how late each rank came over the run, and their communication."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from deep500_timing._distributed.late import FEW_RANKS
from deep500_timing._distributed.verdict import Stragglers as Verdict
from deep500_timing._distributed.verdict import sentences
from deep500_timing._summary.text import format_bytes, format_time
from deep500_timing._views.page._charts import (
    ACCENT,
    ALARM,
    GREY,
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
from deep500_timing._views.page._section import Content, Context, Figure, Panel, shown

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
    return Content(tuple(figures), text=tuple(filter(None, text)))


def _signed(seconds: float) -> str:
    return ("+" if seconds > 0 else "−" if seconds < 0 else "") + format_time(abs(seconds))


def _against_others(values: ArrayLike) -> Any:
    """Each rank's value against the median of the other ranks: the page's one definition of lateness."""
    of_rank = np.asarray(values, dtype=np.float64)
    ordered, place = np.sort(of_rank), of_rank.argsort().argsort()
    low, high = (len(of_rank) - 2) // 2, (len(of_rank) - 1) // 2
    # Without the rank itself, the values from its place on move up by one.
    return of_rank - (ordered[low + (place <= low)] + ordered[high + (place <= high)]) / 2


def _of_ranks(found: Verdict) -> Figure:
    lateness = dict(zip(found.lateness, _against_others([*found.lateness.values()]).tolist(), strict=True))
    each = "an operation" if found.operations is not None else "a step"
    order = sorted(lateness, key=lambda rank: (-lateness[rank], rank))
    drawn = order if len(order) <= _DRAWN else [*order[: _DRAWN // 2], *order[-_DRAWN // 2 :]]
    rows = [
        (f"rank {rank}", lateness[rank], _signed(lateness[rank]), ALARM if rank in found.ranks else ACCENT)
        for rank in drawn
    ]
    bar = bars(rows, time_axis(f"later than the median of the other ranks, {each}"), "rank", "late")
    layers: list[dict[str, Any]] = [bar]
    note = "How long after the median of the other ranks each typically came to where they meet."
    # With fewer ranks a test decides, and no bound.
    if found.bound_s > 0 and len(order) >= FEW_RANKS:
        line = {"type": "rect", "width": 2, "color": GREY}  # A rule would have the colour of the page.
        layers.append(layer(line, [{"s": found.bound_s}], x=quantity("s")))
        note += f" A rank is called late beyond the grey line, at {format_time(found.bound_s)}."
    if len(drawn) < len(order):
        note += f" Of {len(order)} ranks the {_DRAWN // 2} latest and the {_DRAWN // 2} earliest are drawn."
    return Figure(
        "How late each rank came",
        f"Rank {order[0]} came latest: {_signed(lateness[order[0]])} {each} against the median of the others.",
        (Panel({"height": bar.pop("height"), "layer": layers}),),
        ("rank", f"typically, {each}", "called late"),
        [(rank, _signed(lateness[rank]), "yes" if rank in found.ranks else "no") for rank in order],
        note=note,
        legend=(("called late", ALARM), ("not late", ACCENT)) if found.ranks else (),
    )


def _of_regions(found: Verdict) -> Figure:
    rank = found.ranks[0]
    over = {}
    for region, of_rank in found.excess.items():
        over[region] = float(_against_others([*of_rank.values()])[[*of_rank].index(rank)])
    order = sorted(over, key=lambda region: (-over[region], region))
    rows = [
        (shown(region), over[region], _signed(over[region]), ALARM if region == found.region else ACCENT)
        for region in order
    ]
    return Figure(
        f"What rank {rank} does longer",
        f"{rows[0][0]} takes {rows[0][2]} a step against the median of the other ranks.",
        (Panel(bars(rows, time_axis("a step"), "region", "over")),),
        ("region", "against the median of the other ranks, a step"),
        [(region, said) for region, _, said, _ in rows],
        note="Own times: the waits for other ranks inside a region are left out.",
        legend=(("the cause", ALARM), ("no cause", ACCENT)) if found.region is not None else (),
    )


def ranks_over_run(context: Context) -> Content | None:
    steps, ranks = context.steps, context.about.ranks
    meeting = context.evidence.rank_steps if steps is not None and len(ranks) > 1 else None
    if steps is None or meeting is None:
        return None
    width = max(-(-(steps.last - steps.first + 1) // _BUCKETS), 1)
    numbers = np.array(meeting.numbers)
    of_step = numbers - (numbers - steps.first) % width
    buckets = np.unique(of_step)
    # The verdict's own lateness of each rank, as means over stretches of steps.
    late = np.array([_against_others(meeting.lateness[of_step == bucket].mean(axis=0)) for bucket in buckets])
    mean, latest_in = late.mean(axis=0), np.bincount(late.argmax(axis=1), minlength=len(meeting.ranks))
    order = (-mean).argsort(kind="stable")
    share = -(-len(meeting.ranks) // _ROWS)
    rows = [(meeting.ranks[place], _signed(mean[place]), int(latest_in[place])) for place in order]
    figure = Figure(
        "How late each rank came, by step",
        f"Rank {rows[0][0]} came latest: {rows[0][1]} a step against the median of the others.",
        (Panel(_map(late, meeting.ranks, buckets.tolist(), share, width)),),
        ("rank", "against the median of the others, mean of a step", "stretches in which it was the latest"),
        rows,
        note="How long after the median of the other ranks each came to where they meet. Orange is later, blue is "
        "earlier. The findings say whether it is more than chance."
        + (f" Each row is {share} ranks, and shows the one that is furthest off." if share > 1 else ""),
    )
    return Content((figure,))


def _map(late: Any, ranks: tuple[int, ...], buckets: list[int], share: int, width: int) -> dict[str, Any]:
    rows = []
    for row, first in enumerate(range(0, len(ranks), share)):
        of_row = late[:, first : first + share]
        for bucket, seconds, furthest in zip(buckets, of_row, np.abs(of_row).argmax(axis=1), strict=True):
            cell = {"step": bucket, "end": bucket + width, "row": row, "below": row + 1}
            s = float(seconds[furthest])
            rows.append(cell | {"s": rounded(s, 3), "rank": ranks[first + furthest], "late": _signed(s)})
    # A few extremes would make all others look alike.
    most = max(float(np.quantile([abs(row["s"]) for row in rows], 0.98)), 1e-9)
    number = rows[-1]["below"]
    height = max(min(number * 18, 420), 60)
    axis = {"title": "rank", "grid": False, "tickMinStep": 1, "labelOffset": 9 if number <= 20 else 0}
    axis["labelExpr"] = f"datum.value < {number} ? format(datum.value * {share}, 'd') : ''"
    scale = {"domain": [-most, 0, most], "range": [ACCENT, "#dfe3e6", ALARM], "clamp": True, "interpolate": "lab"}
    legend = {"title": None, "labelExpr": TIME_LABELS.replace("~s", ".2~s"), "gradientLength": min(height - 10, 100)}
    y = quantity("row", scale={"domain": [0, number], "reverse": True, "nice": False}, axis=axis)
    colour = quantity("s", scale=scale, legend=legend)
    tip = tooltip(rank="rank", step="from step", late="against the median")
    return {"height": height, **layer("rect", rows, **by_step(), y=y, y2="below", color=colour, tooltip=tip)}


def communication(context: Context) -> Content | None:
    rows = context.rows(
        "select coalesce(op, '') as op, coalesce(\"group\", '') as of_group, "
        "case when bytes < 0 then null else bytes end as size, count(*) as n, "
        "sum(dur_ns) / 1e9 as total, median(dur_ns) / 1e9 as middle, min(dur_ns) / 1e9 as low, "
        f"max(dur_ns) / 1e9 as high from collectives group by 1, 2, 3 order by total desc, 1, 2, 3 limit {_MOST}"
    )
    if not rows:
        return None
    totals: dict[str, float] = {}
    table = []
    for row in rows:
        totals[row["op"]] = totals.get(row["op"], 0.0) + row["total"]
        rate = f"{format_bytes(row['size'] / row['middle'])}/s" if row["size"] and row["middle"] else None
        times = (format_time(row[what]) for what in ("total", "low", "middle", "high"))
        table.append((shown(row["op"]), shown(row["of_group"]), format_bytes(row["size"]), row["n"], *times, rate))
    heads = ("operation", "group", "size", "count", "total", "shortest", "median", "longest", "size over median")
    colours = colours_of(totals)
    drawn = [
        (shown(op), total, format_time(total), colours[op])
        for op, total in sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    ]
    figure = Figure(
        "Time by operation, all ranks together",
        f"{drawn[0][0]} takes most: {drawn[0][2]}.",
        (Panel(bars(drawn, time_axis(None), "operation", "total")),),
        ("operation", "total"),
        [(op, said) for op, _, said, _ in drawn],
        note="A rank's time in a collective includes its wait for the others.",
    )
    return Content((figure,), tables=(("By operation, group and size", heads, table),))
