"""The data that sections read: the run, and results that several sections share."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import BATCH
from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text
from deep500_timing._summary.text import safe_name
from deep500_timing._views.about import About, about_run
from deep500_timing._views.findings import Finding, evidence_of, find, summary_of
from deep500_timing._views.findings._finding import percent
from deep500_timing._views.page._colours import Colours
from deep500_timing._views.tree_of_run import tree_of_run

if TYPE_CHECKING:
    from deep500_timing._distributed.verdict import Stragglers
    from deep500_timing._summary.tree import Tree
    from deep500_timing._views.findings import Evidence
    from deep500_timing.runs import Run
    from deep500_timing.runs._goodput import Goodput

PIXELS = 1000
"""The width of a chart: more steps share bars."""


class Steps:
    """The steps of a run, and the bars of charts over them."""

    def __init__(self, first: int, last: int, path: str) -> None:
        self.first, self.last, self.path = first, last, path
        count = last - first + 1
        self.width = 1 if count <= PIXELS else -(-2 * count // PIXELS)

    @property
    def bucket_sql(self) -> str:
        """The first step of a step's bar, in SQL."""
        return f"(step - ((step - {self.first}) % {self.width}))"


class Context:
    """One run for the sections. Results are computed on first use.

    Args:
        run: The run, read by DuckDB.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.missing: list[tuple[str, str]] = []
        """Sections without content: title and reason."""

    def rows(self, query: str) -> list[dict[str, Any]]:
        """The rows of a query over the run's tables; see ``docs/runs.md``."""
        return self.run.sql(query).rows()

    @cached_property
    def about(self) -> About:
        return about_run(self.run)

    @cached_property
    def tree(self) -> Tree:
        """The tree of regions, of all ranks together."""
        return tree_of_run(self.run, rank=self.about.ranks[0] if len(self.about.ranks) == 1 else None, buckets=0)

    @cached_property
    def findings(self) -> list[Finding]:
        return find(self.evidence)

    @cached_property
    def stragglers(self) -> Stragglers:
        found = self.evidence.stragglers
        assert found is not None
        return found

    @cached_property
    def evidence(self) -> Evidence:
        return evidence_of(self.run)

    @cached_property
    def goodput(self) -> Goodput:
        return self.run.goodput()

    @cached_property
    def summary(self) -> list[tuple[str, str]]:
        """The run in a row of numbers: names and values."""
        found = summary_of(self.evidence)
        if self.about.sessions > 1:
            found.append(("of the wall clock is goodput", percent(self.goodput.goodput)))
        return found

    @cached_property
    def colours(self) -> Colours:
        nodes = sorted((node for node in self.tree.walk() if not node.is_rest), key=lambda node: -(node.total_s or 0))
        return Colours(node.name for node in nodes)

    @cached_property
    def steps(self) -> Steps | None:
        """The steps timed as BATCH; None without any."""
        found = self.tree.named(BATCH)
        for node in found:
            path = path_text(node.path)
            row = self.rows(
                "select min(step) as first, max(step) as last from intervals "
                f"where path = {literal(path)} and device = 'CPU' and step is not null"
            )[0]
            if row["first"] is not None:
                return Steps(row["first"], row["last"], path)
        return None

    def colour(self, name: str) -> str:
        return self.colours.of(name)


def shown(name: str) -> str:
    """A name for the page, shortened if long."""
    name = safe_name(name)
    return name if len(name) <= 40 else f"{name[:24]}…{name[-15:]}"
