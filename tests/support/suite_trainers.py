"""What the tests of the trainers ask of a timer."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from deep500_timing_torch._autolog._steps import BETWEEN

if TYPE_CHECKING:
    from deep500_timing import Timer

PARTS = ("IO", "copy", "FORWARD", "BACKWARD", "clip", "optimizer", "signal check", *BETWEEN)


def counts(timer: Timer) -> dict[str, int]:
    """The number of times of each region that is no gap."""
    gaps = (*BETWEEN, "between batches")
    return {one.name: one.stats.count for one in timer.snapshot() if one.stats and one.name not in gaps}


def seconds(timer: Timer, name: str) -> float:
    """The total time of a region."""
    return sum(timer.get_time(name))


def share(timer: Timer, whole: str, *parts: str) -> float:
    """The share of a region that its parts fill, in the median: a rank that lost its core between two is no fault."""
    known = {one.name for one in timer.snapshot()}
    inner = [span for part in parts if part in known for span in timer.intervals(part).tolist()]
    shares = [
        sum(end - start for start, end in inner if start >= begun and end <= ended) / (ended - begun)
        for begun, ended in timer.intervals(whole).tolist()
    ]
    return statistics.median(shares)
