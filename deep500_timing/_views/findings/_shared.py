"""What slow steps have in common: their distance, or what happened just before each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.require import require
from deep500_timing._summary.nesting import split_path
from deep500_timing._views.findings._evidence import STEP, name_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deep500_timing._views.findings._evidence import Evidence

_MOST = 0.9
"""Of the steps that must share it, for it to be said."""


def what_they_share(evidence: Evidence, places: NDArray[np.int64]) -> str:
    """A clause, or nothing.

    Args:
        evidence: Of a run.
        places: Of the steps, among the steady ones.
    """
    steps = evidence.steady
    assert steps is not None
    before = _before_each(evidence, places)
    usual = {name for name in before.pop("", set()) if name}
    counts: dict[str, int] = {}
    for names in before.values():
        for name in names - usual:
            counts[name] = counts.get(name, 0) + 1
    # What happens before one is more telling than what begins with one.
    for name, count in sorted(counts.items(), key=lambda item: (item[0].startswith("+"), -item[1], item[0])):
        if count >= _MOST * len(places):
            return f"each the first of {name_of(name[1:])}" if name.startswith("+") else f"each after {name_of(name)}"
    gaps = set(np.diff(steps.numbers[places]).tolist())
    return f"every {gaps.pop()} steps" if len(gaps) == 1 and len(places) >= 3 else ""


def _before_each(evidence: Evidence, places: NDArray[np.int64]) -> dict[Any, set[str]]:
    # The regions beside BATCH that ended between the start of the step before and this one's, and those around it that
    # began there, with a plus. Under "" what lies before nearly every step.
    run, node, steps = evidence.run, evidence.step_node, evidence.steady
    if run is None or node is None or steps is None:
        return {}
    nw = require("narwhals", extra="runs", caller="Looking for what slow steps share")
    frame = run.intervals(rank=evidence.rank, session=evidence.session).frame
    frame = frame.filter((nw.col("device") == "CPU") & (nw.col("depth") < len(node.path)) & (nw.col("region") != STEP))
    rows = frame.select("path", "start_ns", "dur_ns").collect("pyarrow").to_native().to_pylist()
    starts: dict[str, list[float]] = {}
    for row in rows:
        path = tuple(split_path(row["path"]))
        if path == node.path[: len(path)]:
            starts.setdefault(f"+{path[-1]}", []).append(row["start_ns"] / 1e9)
        else:
            starts.setdefault(path[-1], []).append((row["start_ns"] + row["dur_ns"]) / 1e9)
    found: dict[Any, set[str]] = {int(place): set() for place in places}
    found[""] = set()
    for name, moments in starts.items():
        if len(moments) > 0.5 * len(steps.starts_s):
            found[""].add(name)
            continue
        ordered = np.sort(np.array(moments))
        for place in places.tolist():
            low = float(steps.starts_s[place - 1]) if place else -np.inf
            at = np.searchsorted(ordered, np.array([low, float(steps.starts_s[place]) + 1e-9]))
            if at[1] > at[0]:
                found[int(place)].add(name)
    return found
