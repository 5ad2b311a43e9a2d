"""The cause of slow steps: the region and rank that take longer in them, their period, and what precedes each."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deep500_timing._base.names import BATCH
from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text, split_path
from deep500_timing._views.findings._finding import name_of
from deep500_timing.runs._why import Parts, parts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deep500_timing._views.findings._evidence import Evidence, Steps

_MOST = 0.9
"""Share of the steps that must have something in common for it to be said."""
_MOSTLY = 0.6
"""Share of the excess that a cause must explain to be named."""
_PERIODIC = 0.6
"""Share of the steps that must lie on a period, and of its places that must be among them."""
_LOOKED_AT = 40
_ROWS = 20_000
"""Steps times ranks that are read."""


class Cause(NamedTuple):
    """What takes longer."""

    region: str
    """Its name as a sentence can hold it."""
    rank: int | None
    """The rank on which it does, if it is one of several."""
    usual_s: float
    """Its median in usual steps."""
    slow_s: float
    """Its median in slow steps."""
    path: str
    """Its path; empty for the time between the steps."""

    @property
    def text(self) -> str:
        """As ``"IO on rank 3"``."""
        return self.region if self.rank is None else f"{self.region} on rank {self.rank}"


def cause_of(
    evidence: Evidence, steps: Steps, slow: NDArray[Any], usual: NDArray[Any], *, typical: bool = False
) -> Cause | None:
    """The region that explains most of what steps at slow places take beyond those at usual places, if one does.

    Waiting for a rank explains nothing where that rank's own time does. With ``typical``, medians are compared: a few
    outliers among many slow steps explain nothing then.
    """
    if evidence.run is None or not len(slow) or not len(usual):
        return None
    session = int(steps.sessions[slow[0]])
    most = max(min(_LOOKED_AT, _ROWS // max(len(evidence.ranks), 1)), 5)
    sampled = [_some(of[steps.sessions[of] == session], most) for of in (slow, usual)]
    if not all(map(len, sampled)):
        return None
    of_slow, of_usual = (steps.numbers[of].tolist() for of in sampled)
    parts = parts_of(evidence.run, [*of_slow, *of_usual], session)
    ranks = sorted({rank for rank, _ in parts.lengths})
    if not ranks:
        return None
    lengths = {
        step: max((parts.lengths.get((rank, step), 0) for rank in ranks), default=0) for step in (*of_slow, *of_usual)
    }

    def over_usual(of: dict[int, int]) -> float:
        both = [[of.get(step, 0) for step in chosen] for chosen in (of_slow, of_usual)]
        return float((np.median(both[0]) if typical else np.mean(both[0])) - np.median(both[1]))

    excess_ns = over_usual(lengths)
    if excess_ns <= 0:
        return None
    over = {key: over_usual(at) for key, at in parts.own.items()}
    best = _best(evidence, over, excess_ns) or _best(
        evidence, {key: over_usual(at) for key, at in _with_inner(parts).items()}, excess_ns
    )
    if best is None:
        return None
    path, rank = best
    of_part = parts.own.get((rank, path), {})
    usual_s, slow_s = (float(np.median([of_part.get(step, 0) for step in of])) / 1e9 for of in (of_usual, of_slow))
    name = _name(path, parts)
    same = [other for other in ranks if over.get((other, path), 0.0) >= 0.5 * over.get((rank, path), 0.0)]
    is_one = len(ranks) > 1 and len(same) == 1
    return Cause(name, rank if is_one else None, usual_s, slow_s, path)


def _some(places: NDArray[Any], most: int) -> NDArray[Any]:
    chosen: NDArray[Any] = places[np.unique(np.linspace(0, len(places) - 1, min(most, len(places))).astype(int))]
    return chosen


def _with_inner(parts: Parts) -> dict[tuple[int, str], dict[int, int]]:
    # The regions directly in the step, with the regions inside them.
    whole: dict[tuple[int, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    least = min((len(split_path(path)) for path in parts.parents), default=0) + 1
    for (rank, path), at in parts.own.items():
        for step, took in at.items():
            whole[rank, path_text(tuple(split_path(path)[:least]))][step] += took
    return whole


def _best(evidence: Evidence, over: dict[tuple[int, str], float], excess_ns: float) -> tuple[str, int] | None:
    # Work comes before waiting, which is an effect.
    work = {key: ns for key, ns in over.items() if not key[1] or split_path(key[1])[-1] not in evidence.waits}
    for among in (work, over):
        if among:
            (rank, path), ns = max(among.items(), key=lambda item: (item[1], -item[0][0], item[0][1]))
            if ns >= _MOSTLY * excess_ns:
                return path, rank
    return None


def _name(path: str, parts: Parts) -> str:
    if not path:
        return "the time between the steps"
    name = name_of(split_path(path)[-1])
    return f"the rest of {name}" if path in parts.parents else name


def shared_by(evidence: Evidence, steps: Steps, places: NDArray[Any]) -> str:
    """A clause on what the steps at some places have in common: what precedes each, or their period; may be empty."""
    before = _before_each(evidence, steps, places)
    usual = {name for name in before.pop("", set()) if name}
    counts: dict[str, int] = {}
    for names in before.values():
        for name in names - usual:
            counts[name] = counts.get(name, 0) + 1
    # A region that ends before a step says more than a region that begins with it.
    for name, count in sorted(counts.items(), key=lambda item: (item[0].startswith("+"), -item[1], item[0])):
        if count >= _MOST * len(places):
            return f"each the first of {name_of(name[1:])}" if name.startswith("+") else f"each after {name_of(name)}"
    return period_of(steps.numbers[places].tolist(), int(steps.numbers.max()))


def period_of(numbers: list[int], last: int) -> str:
    """A clause on the period of some steps, empty without one: most of them lie on it, and it has few gaps.

    The steps' numbers rise; ``last`` is the number of the last step of all.
    """
    if len(numbers) < 3:
        return ""
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return "one after the other"
    for period, _ in Counter(after - before for before, after in pairwise(numbers) if after > before).most_common(3):
        if period < 2:
            continue
        phase, hits = Counter(number % period for number in numbers).most_common(1)[0]
        first = next(number for number in numbers if number % period == phase)
        expected = (last - first) // period + 1
        if (
            hits >= (3 if hits == len(numbers) else 4)
            and hits >= _PERIODIC * len(numbers)
            and hits >= _PERIODIC * expected
        ):
            return f"every {period} steps" if hits == len(numbers) else f"{hits} of them every {period} steps"
    return ""


def _before_each(evidence: Evidence, steps: Steps, places: NDArray[Any]) -> dict[Any, set[str]]:
    # Names of regions outside BATCH that ended between the start of the step before and this one's; with a plus those
    # around BATCH that began there. Under "" the ones that precede nearly every step.
    node = evidence.step_node
    if node is None:
        return {}
    rows = evidence.rows(
        f"select path, start_ns, dur_ns from intervals where {evidence.mine}"
        f"and depth < {len(node.path)} and region <> {literal(BATCH)}"
    )
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
