"""The traces of slow steps in a run, and the operators in them."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from typing import Any, NamedTuple

from deep500_timing._summary.text import format_time, safe_name

TABLE = "slow_steps"
_MOST = 5


class SlowStep(NamedTuple):
    """The trace of a slow step."""

    file: str
    """In the run's folder."""
    length_s: float
    in_operators_s: float
    """The time in operators on the CPU."""
    operators: list[tuple[str, float, int]]
    """The name, the time without the operators that it calls (s) and the calls of those with most of it. Kernels of a
    device are among them."""

    def __str__(self) -> str:
        said = [f"{safe_name(name)} {format_time(self_s)} ({calls} ×)" for name, self_s, calls in self.operators]
        outside = format_time(max(self.length_s - self.in_operators_s, 0.0))
        return f"{safe_name(self.file)}: {', '.join(said)}; {outside} of {format_time(self.length_s)} in no operator"


def slow_step(run: Any, step: int, rank: int, session: int) -> SlowStep | None:
    """The trace that was kept of a step; None without one, or if its file cannot be read."""
    if TABLE not in run.tables:
        return None
    # A trace lasts from one optimizer's step to the next, and may begin in the BATCH before.
    of = f"where rank = {int(rank)} and session = {int(session)}"
    rows = run.sql(
        "with batch as (select min(start_ns) as first, max(start_ns + dur_ns) as last from intervals "
        f"{of} and step = {int(step)} and region = 'BATCH' and device = 'CPU') select file, dur_ns from {TABLE}, batch "
        f"{of} and 2 * (least(last, start_ns + dur_ns) - greatest(first, start_ns)) > dur_ns"
    ).rows()
    for path, row in ((os.path.join(folder, row["file"]), row) for row in rows for folder in run.folders):
        try:
            with open(path, encoding="utf-8") as file:
                return _read(row["file"], row["dur_ns"] / 1e9, json.load(file)["traceEvents"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def _read(name: str, length_s: float, events: list[dict[str, Any]]) -> SlowStep:
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    in_operators_us = 0.0
    operators = [event for event in events if event.get("ph") == "X" and event.get("cat") == "cpu_op"]
    around: dict[Any, list[tuple[float, str]]] = defaultdict(list)
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        above = around[event["tid"]]
        while above and above[-1][0] <= event["ts"]:
            above.pop()
        if above:
            found[above[-1][1]][0] -= event["dur"]
        else:
            in_operators_us += event["dur"]
        above.append((event["ts"] + event["dur"], event["name"]))
    for event in [*operators, *(event for event in events if event.get("cat") in ("kernel", "gpu_memcpy"))]:
        found[event["name"]][0] += event["dur"]
        found[event["name"]][1] += 1
    ordered = sorted(((of, us / 1e6, int(calls)) for of, (us, calls) in found.items()), key=lambda one: -one[1])
    return SlowStep(name, length_s, in_operators_us / 1e6, ordered[:_MOST])
