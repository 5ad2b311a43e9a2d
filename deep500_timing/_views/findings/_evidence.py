"""What rules look at: a tree, and of a run its steps, samples, collectives and ranks, read once and when asked for."""

from __future__ import annotations

import shlex
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deep500_timing._base.require import require
from deep500_timing._summary.text import safe_name, shorten
from deep500_timing._views.columns import times
from deep500_timing._views.tree_of_run import tree_of_run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deep500_timing._distributed.verdict import Stragglers
    from deep500_timing._views.about import About
    from deep500_timing._views.tree import Node, Tree
    from deep500_timing.runs import Run

    Floats = NDArray[np.float64]

STEP = "BATCH"
WAIT = "IO"
COMMUNICATION = "COMM"


class Steps(NamedTuple):
    """The steps of a rank in the order of time, each by its BATCHes; times in seconds."""

    numbers: NDArray[np.int64]
    starts_s: Floats
    durations_s: Floats


class Evidence:
    """Of a run, or of a tree alone (``run`` is None then)."""

    def __init__(self, tree: Tree, run: Run | None, rank: int | None, session: int | None) -> None:
        self.tree = tree
        self.run = run
        self.rank = rank
        self.session = session

    @cached_property
    def whole_s(self) -> float:
        """What the outermost regions take together: all that was timed, or since when something is."""
        total = sum(root.total_s or 0.0 for root in self.tree.roots)
        if self.tree.span_s is not None:
            total = max(total if len(self.tree.roots) == 1 else 0.0, self.tree.span_s[1] - self.tree.span_s[0])
        return total

    @cached_property
    def step_node(self) -> Node | None:
        """Where most of the BATCHes are."""
        return next((node for node in self.tree.named(STEP) if node.total_s), None)

    @cached_property
    def about(self) -> About:
        """The facts of the run."""
        from deep500_timing._views.about import about_run

        assert self.run is not None
        return about_run(self.run)

    @cached_property
    def steps(self) -> Steps | None:
        """The steps, None without a run or without any that is timed."""
        if self.run is None:
            return None
        table = self.run.steps(rank=self.rank, session=self.session).arrow()
        table = table.filter(require("pyarrow.compute", extra="runs", caller="Reading a run").is_valid(table["dur_ns"]))
        if not len(table):
            return None
        numbers, starts, durations = (table[name].to_numpy() for name in ("step", "start_ns", "dur_ns"))
        return Steps(numbers, starts / 1e9, durations / 1e9)

    @cached_property
    def steady(self) -> Steps | None:
        """The steps after the warm-up."""
        if self.steps is None:
            return None
        first = self.warm_up_steps
        numbers, starts_s, durations_s = self.steps
        return Steps(numbers[first:], starts_s[first:], durations_s[first:])

    @cached_property
    def warm_up_steps(self) -> int:
        """How many steps there are before the steady state."""
        from deep500_timing._views.findings._thresholds import WARM_UP_CALM, WARM_UP_OF, WARM_UP_RATIO

        if self.steps is None:
            return 0
        durations = self.steps.durations_s
        usual = float(np.median(durations[len(durations) // 2 :]))
        calm = durations <= WARM_UP_RATIO * usual
        many = min(WARM_UP_OF, len(calm) // 2)
        if many < WARM_UP_OF // 2:
            return 0
        # Not all of them: on a busy machine one step in ten is slow for no reason of the program's.
        settled = np.convolve(calm, np.ones(many), mode="valid") >= WARM_UP_CALM * many
        begins = calm[: len(settled)] & settled
        return int(begins.argmax()) if begins.any() else 0

    @cached_property
    def by_rank(self) -> dict[int, dict[tuple[str, str], dict[str, Any]]]:
        """For each rank and for path and device a row of ``run.regions(by_rank=True)``."""
        found: dict[int, dict[tuple[str, str], dict[str, Any]]] = {}
        if self.run is not None:
            for row in self.run.regions(session=self.session, by_rank=True).rows():
                found.setdefault(row["rank"], {})[row["path"], row["device"]] = row
        return found

    @cached_property
    def stragglers(self) -> Stragglers | None:
        """Which rank the others wait for, and why; None without a run."""
        from deep500_timing._distributed.stragglers import find_stragglers

        return None if self.run is None else find_stragglers(self.run, session=self.session)

    @cached_property
    def samples(self) -> dict[tuple[int, str, str], tuple[Floats, Floats]]:
        """For rank, metric and region when it was read (s of the timers' clock) and what; NaN left out."""
        if self.run is None:
            return {}
        table = self.run.table("samples").arrow()
        found: dict[tuple[int, str, str], tuple[list[float], list[float]]] = {}
        columns = (table[name].to_pylist() for name in ("rank", "session", "metric", "region", "time_ns", "value"))
        for rank, session, metric, region, time, value in zip(*columns, strict=True):
            if value is not None and (self.session is None or session == self.session):
                at, values = found.setdefault((rank, metric, region or ""), ([], []))
                at.append(time / 1e9)
                values.append(value)
        return {key: (np.array(at), np.array(values)) for key, (at, values) in found.items()}

    def command(self, name: str, *more: object) -> str:
        """A command to type next, empty without a run."""
        if self.run is None:
            return ""
        words = [name, shlex.quote(safe_name(self.run.folders[0])), *map(str, more)]
        return f"deep500-timing {' '.join(words)}"


def evidence_of(source: Run | Tree, rank: int | None = None, session: int | None = None) -> Evidence:
    """The evidence of a run or of a tree."""
    from deep500_timing._views.tree import Tree

    if isinstance(source, Tree):
        return Evidence(source, None, source.rank, None)
    if rank is None:
        ranks = source.sql("select min(rank) as lowest from logs").rows()
        rank = ranks[0]["lowest"] if ranks else None
    return Evidence(tree_of_run(source, rank=rank, session=session), source, rank, session)


def name_of(text: str) -> str:
    """A region's name as a sentence can hold it."""
    return shorten(safe_name(text), 32)


def percent(share: float) -> str:
    """As ``"37 %"``; of less than ten with a digit more."""
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def took(seconds: float) -> str:
    """A time in a sentence."""
    return times([seconds])[0]


def how_many(count: int, total: int) -> str:
    """``"on both ranks"``, ``"on all 64 ranks"``, ``"on 3 of 64 ranks"``."""
    if count == total:
        return "on both ranks" if total == 2 else f"on all {total} ranks"
    return f"on {count} of {total} ranks"
