"""Ranks: how late each came, over the run."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from deep500_timing._base.sql import literal
from deep500_timing._views.page._parts import TIME_LABELS, data, rounded, step_axis, tooltip
from deep500_timing._views.page._section import Content, Figure, Panel
from deep500_timing._views.page._stragglers import against_others, signed

if TYPE_CHECKING:
    from deep500_timing._distributed.late import Steps as RankSteps
    from deep500_timing._views.page._context import Context, Steps

_ROWS = 64
"""Rows of the map; more ranks share them."""
_BUCKETS = 80


class Ranks:
    """The lateness of ranks over the run."""

    name, title, place = "ranks", "Ranks", 70
    missing = "There is one rank."

    def build(self, context: Context) -> Content | None:
        """See :class:`Section`."""
        steps, ranks = context.steps, context.about.ranks
        if steps is None or len(ranks) < 2:
            return None
        width = max(-(-(steps.last - steps.first + 1) // _BUCKETS), 1)
        meeting = context.evidence.rank_steps
        late = _of_meetings(meeting, steps, width) if meeting is not None else _of_lengths(context, steps, width)
        if not late:
            return None
        by_rank: dict[int, list[float]] = defaultdict(list)
        for (rank, _), seconds in late.items():
            by_rank[rank].append(seconds)
        mean = {rank: sum(values) / len(values) for rank, values in by_rank.items()}
        latest = sorted(mean, key=lambda rank: (-mean[rank], rank))
        share = -(-len(ranks) // _ROWS)
        if meeting is not None:
            title, verb = "How late each rank came, by step", "came latest"
            note = "How long after the median of the other ranks each came to where they meet."
        else:
            title, verb = "How much longer each rank's steps took", "has the longest steps"
            note = "The ranks do not meet in the steps, or nothing says where: lengths of BATCH are compared."
        figure = Figure(
            title,
            f"Rank {latest[0]} {verb}: {signed(mean[latest[0]])} a step against the median of the others.",
            (Panel(_spec(late, ranks, share, width)),),
            ("rank", "against the median of the others, mean of a step", "stretches in which it was the latest"),
            [(rank, signed(mean[rank]), firsts) for rank, firsts in _counts(late, latest)],
            note=f"{note} Orange is later, blue is earlier. The findings say whether it is more than chance."
            + (f" Each row is {share} ranks, and shows the one that is furthest off." if share > 1 else ""),
        )
        return Content((figure,))


def _of_meetings(found: RankSteps, steps: Steps, width: int) -> dict[tuple[int, int], float]:
    # The verdict's own lateness, as means over stretches of steps.
    buckets: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(found.numbers):
        buckets[number - (number - steps.first) % width].append(place)
    late = {}
    for bucket, places in buckets.items():
        means = found.lateness[places].mean(axis=0).tolist()
        of = against_others(dict(zip(found.ranks, means, strict=True)))
        late.update({(rank, bucket): seconds for rank, seconds in of.items()})
    return late


def _of_lengths(context: Context, steps: Steps, width: int) -> dict[tuple[int, int], float]:
    bucket = f"(step - ((step - {steps.first}) % {width}))"
    rows = context.rows(
        f"select rank, {bucket} as bucket, avg(dur_ns) / 1e9 as mean from intervals "
        f"where device = 'CPU' and step is not null and path = {literal(steps.path)} group by 1, 2"
    )
    by_bucket: dict[int, dict[int, float]] = defaultdict(dict)
    for row in rows:
        by_bucket[row["bucket"]][row["rank"]] = row["mean"]
    return {
        (rank, bucket): seconds
        for bucket, of in by_bucket.items()
        if len(of) > 1
        for rank, seconds in against_others(of).items()
    }


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
    # The scale ends at the 98th percentile: a few extremes would make all others look alike.
    most = max(sizes[int(len(sizes) * 0.98)] if len(sizes) > 50 else sizes[-1], 1e-9)
    rows = [
        {"step": bucket, "end": bucket + width, "row": row, "below": row + 1, "s": rounded(seconds, 3), "rank": rank}
        | {"late": signed(seconds)}
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
