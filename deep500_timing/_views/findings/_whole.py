"""lost, unnamed: what is missing from the numbers, and what no region covers."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from deep500_timing._base.require import require
from deep500_timing._summary.nesting import path_text
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._evidence import COMMUNICATION, STEP, WAIT, name_of, percent, took
from deep500_timing._views.findings._finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._views.findings._evidence import Evidence
    from deep500_timing._views.tree import Node

_LOOKED_AT = 50
_MOSTLY = 0.6
_WAITS = (WAIT, COMMUNICATION)


def lost(evidence: Evidence) -> Iterator[Finding]:
    """Something was dropped, is damaged, is missing or has failed: the numbers leave it out."""
    parts = []
    if evidence.run is not None:
        about = evidence.about
        for number, what in (
            (about.dropped, "intervals dropped"),
            (about.damaged_bytes, "bytes of logs damaged"),
            (about.missing_frames, "frames of logs missing"),
        ):
            if number:
                parts.append(f"{number} {what}")
        missing = about.missing_ranks
        if missing:
            shown = ", ".join(map(str, missing[:6])) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
            parts.append(f"nothing of rank {shown}" if len(missing) == 1 else f"nothing of ranks {shown}")
    counts: dict[str, dict[str, int]] = {}
    for (name, _), counted in evidence.tree.counters.items():
        for counter in ("failed", "discarded"):
            if counted.get(counter):
                of_counter = counts.setdefault(counter, {})
                of_counter[name] = of_counter.get(name, 0) + counted[counter]
    for counter, by_name in counts.items():
        most = sorted(by_name, key=lambda name: (-by_name[name], name))
        total = sum(by_name.values())
        if len(most) < 3:
            of = " and ".join(map(name_of, most))
        elif by_name[most[0]] > by_name[most[1]]:
            of = f"most in {name_of(most[0])}"
        else:
            of = f"{name_of(most[0])} and {len(most) - 1} others"
        parts.append(f"{total} {'region' if total == 1 else 'regions'} {counter} ({of})")
    if parts:
        yield Finding(
            "lost", f"Not in the numbers: {'; '.join(parts)}", is_first=True, anchor="not-measured", rank=evidence.rank
        )


def unnamed(evidence: Evidence) -> Iterator[Finding]:
    """A large part of a region lies in none of those inside it."""
    worst: Node | None = None
    for node in evidence.tree.walk():
        if node.rest_s is None or not node.total_s or node.name == f"{STEP} (first)":
            continue
        holds_steps = any(inner.name == STEP for inner in node.walk()) and node.name != STEP
        waits_s = sum((child.total_s or 0.0) - child.overlap_s for child in node.children if child.name in _WAITS)
        # What waits inside a region does not divide it: the work around them is what it is named for.
        covered = 1 - node.rest_s / (node.total_s - waits_s) if node.total_s > waits_s else 1.0
        least_s = max(at_least.UNNAMED_SHARE * node.total_s, at_least.UNNAMED_OF_RUN * evidence.whole_s)
        if node.rest_s < least_s:
            continue
        if not holds_steps and (covered < at_least.NAMED_SHARE or node.count < at_least.LEAST_STEPS):
            continue
        if worst is None or worst.rest_s is None or node.rest_s > worst.rest_s:
            worst = node
    if worst is not None and worst.rest_s is not None and worst.total_s:
        yield Finding(
            "unnamed",
            f"{percent(worst.rest_s / worst.total_s)} of {name_of(worst.name)} lies in no region, {took(worst.rest_s)}",
            where=_where(evidence, worst),
            cost_s=worst.rest_s,
            anchor="tree",
            region=worst.path,
            rank=evidence.rank,
        )


def _where(evidence: Evidence, node: Node) -> str:
    # Of some intervals from the middle of the run: before what lies in them, between, or after.
    if evidence.run is None:
        return ""
    nw = require("narwhals", extra="runs", caller="Looking for what no region covers")
    path = path_text(node.path)
    frame = evidence.run.intervals(rank=evidence.rank, session=evidence.session).frame
    frame = frame.filter((nw.col("device") == "CPU") & (nw.col("thread") == 0))
    outer = frame.filter(nw.col("path") == path).select("start_ns", "dur_ns").collect("pyarrow").to_native().to_pylist()
    outer.sort(key=lambda row: row["start_ns"])
    middle = max(len(outer) // 2 - _LOOKED_AT // 2, 0)
    chosen = outer[middle : middle + _LOOKED_AT]
    if not chosen:
        return ""
    low, high = chosen[0]["start_ns"], max(row["start_ns"] + row["dur_ns"] for row in chosen)
    names = [path_text(child.path) for child in node.children if not child.is_rest]
    inner = frame.filter(nw.col("path").is_in(names) & (nw.col("start_ns") >= low) & (nw.col("start_ns") <= high))
    found = inner.select("region", "start_ns", "dur_ns").collect("pyarrow").to_native().to_pylist()
    spans = sorted((row["start_ns"], row["start_ns"] + row["dur_ns"], row["region"]) for row in found)
    gaps: dict[str, int] = {}
    for row in chosen:
        start, end = row["start_ns"], row["start_ns"] + row["dur_ns"]
        inside = [span for span in spans if start <= span[0] and span[1] <= end]
        if not inside:
            continue
        for what, length in (
            (f"before {name_of(inside[0][2])}", inside[0][0] - start),
            (f"after {name_of(inside[-1][2])}", end - max(span[1] for span in inside)),
        ):
            gaps[what] = gaps.get(what, 0) + length
        for one, next_one in pairwise(inside):
            what = f"between {name_of(one[2])} and {name_of(next_one[2])}"
            gaps[what] = gaps.get(what, 0) + max(next_one[0] - one[1], 0)
    total = sum(gaps.values())
    largest = max(gaps, key=lambda what: (gaps[what], what), default="")
    return f"most of it {largest}" if total and gaps[largest] >= _MOSTLY * total else ""
