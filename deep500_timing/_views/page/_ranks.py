"""Ranks: who worked longer than the others, and when."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, Any

from deep500_timing._summary.text import format_time
from deep500_timing._views.page._context import literal
from deep500_timing._views.page._parts import TIME_LABELS, data, rounded, step_axis, tooltip
from deep500_timing._views.page._section import Content, Figure, Panel

if TYPE_CHECKING:
    from deep500_timing._views.page._context import Context, Steps

_ROWS = 64
"""Rows of the map; more ranks share them."""
_BUCKETS = 80


class Ranks:
    """The lateness of ranks."""

    name, title, place = "ranks", "Ranks", 70
    missing = "There is one rank."

    def build(self, context: Context) -> Content | None:
        """See :class:`Section`."""
        steps, ranks = context.steps, context.about.ranks
        if steps is None or len(ranks) < 2:
            return None
        width = max(-(-(steps.last - steps.first + 1) // _BUCKETS), 1)
        own = _own_times(context, steps, width)
        late = _lateness(own)
        if not late:
            return None
        by_rank: dict[int, list[float]] = defaultdict(list)
        for (rank, _), seconds in late.items():
            by_rank[rank].append(seconds)
        mean = {rank: sum(values) / len(values) for rank, values in by_rank.items()}
        latest = sorted(mean, key=lambda rank: (-mean[rank], rank))
        share = -(-len(ranks) // _ROWS)
        figure = Figure(
            "How much longer than the median of the ranks each rank worked, by step",
            f"Rank {latest[0]} worked longest: {_signed(mean[latest[0]])} a step against the median of the ranks.",
            (Panel(_spec(late, ranks, share, width)),),
            ("rank", "against the median, mean of a step", "stretches in which it was the latest"),
            [(rank, _signed(mean[rank]), firsts) for rank, firsts in _counts(late, latest)],
            note="Time in BATCH without communication, in which ranks wait for each other. Orange is longer than the "
            "median of the ranks, blue is shorter. Whether a rank is late by more than chance is said by the findings."
            + (f" Each row is {share} ranks, and shows the one that is furthest off." if share > 1 else ""),
        )
        return Content((figure,))


def _own_times(context: Context, steps: Steps, width: int) -> dict[tuple[int, int], float]:
    bucket = f"(step - ((step - {steps.first}) % {width}))"
    depth = steps.path.count("/") - steps.path.count("\\/") + 1
    is_step = f"path = {literal(steps.path)}"
    is_part = f"depth = {depth} and starts_with(path, {literal(steps.path + '/')})"
    is_waiting = f"{is_part} and (region = 'COMM' or region in (select distinct op from collectives))"
    rows = context.rows(
        f"select rank, {bucket} as bucket, sum(case when {is_step} then dur_ns else 0 end)::double as whole, "
        f"sum(case when {is_step} then 1 else 0 end)::bigint as n, "
        f"sum(case when {is_waiting} then dur_ns else 0 end)::double as waited from intervals "
        f"where device = 'CPU' and step is not null and ({is_step} or ({is_part})) group by 1, 2"
    )
    return {(row["rank"], row["bucket"]): (row["whole"] - row["waited"]) / row["n"] / 1e9 for row in rows if row["n"]}


def _lateness(own: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    by_bucket: dict[int, dict[int, float]] = defaultdict(dict)
    for (rank, bucket), seconds in own.items():
        by_bucket[bucket][rank] = seconds
    late = {}
    for bucket, of in by_bucket.items():
        if len(of) > 1:
            middle = median(of.values())
            late.update({(rank, bucket): seconds - middle for rank, seconds in of.items()})
    return late


def _counts(late: dict[tuple[int, int], float], order: list[int]) -> list[tuple[int, int]]:
    latest: dict[int, tuple[float, int]] = {}
    for (rank, bucket), seconds in late.items():
        known = latest.get(bucket)
        if known is None or (seconds, -rank) > (known[0], -known[1]):
            latest[bucket] = seconds, rank
    counts: dict[int, int] = defaultdict(int)
    for _, rank in latest.values():
        counts[rank] += 1
    return [(rank, counts[rank]) for rank in order]


def _spec(late: dict[tuple[int, int], float], ranks: tuple[int, ...], share: int, width: int) -> dict[str, Any]:
    row_of = {rank: place // share for place, rank in enumerate(ranks)}
    cells: dict[tuple[int, int], tuple[float, int]] = {}
    for (rank, bucket), seconds in late.items():
        cell = row_of[rank], bucket
        if cell not in cells or abs(seconds) > abs(cells[cell][0]):
            cells[cell] = seconds, rank
    sizes = sorted(abs(seconds) for seconds, _ in cells.values())
    # A few that are far off would leave the others all the same; beyond the scale is as dark as it gets.
    most = max(sizes[int(len(sizes) * 0.98)] if len(sizes) > 50 else sizes[-1], 1e-9)
    rows = [
        {"step": bucket, "end": bucket + width, "row": row, "below": row + 1, "s": rounded(seconds, 3), "rank": rank}
        | {"late": _signed(seconds)}
        for (row, bucket), (seconds, rank) in sorted(cells.items())
    ]
    number = max(row_of.values()) + 1
    height = max(min(number * 18, 420), 60)
    return {
        "height": height,
        "data": data(rows),
        "mark": {"type": "rect"},
        "encoding": {
            "x": {
                "field": "step",
                "type": "quantitative",
                "bin": {"binned": True},
                "scale": {"nice": False, "zero": False},
                "axis": step_axis(),
            },
            "x2": {"field": "end"},
            "y": {
                "field": "row",
                "type": "quantitative",
                "scale": {"domain": [0, number], "reverse": True, "nice": False},
                "axis": {
                    "title": "rank",
                    "grid": False,
                    "tickMinStep": 1,
                    "labelExpr": f"datum.value < {number} ? format(datum.value * {share}, 'd') : ''",
                    "labelOffset": 9 if number <= 20 else 0,
                },
            },
            "y2": {"field": "below"},
            "color": {
                "field": "s",
                "type": "quantitative",
                "scale": {
                    "domain": [-most, 0, most],
                    "range": ["#0072b2", "#dfe3e6", "#d55e00"],
                    "clamp": True,
                    "interpolate": "lab",
                },
                "legend": {
                    "title": None,
                    "labelExpr": TIME_LABELS.replace("~s", ".2~s"),
                    "gradientLength": min(height - 10, 100),
                },
            },
            "tooltip": tooltip(rank="rank", step="from step", late="against the median"),
        },
    }


def _signed(seconds: float) -> str:
    return ("+" if seconds > 0 else "−" if seconds < 0 else "") + format_time(abs(seconds))
