"""The parts of a page: sections, and figures with their numbers, as plain data; and the data that sections read.

Texts may hold any character: the page escapes them. In a chart's specification a text from outside, such as a region's
name, may stand in the data only: other places are code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from deep500_timing._base.names import BATCH, CPU
from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text
from deep500_timing._summary.text import safe_name
from deep500_timing._views.findings import Evidence, Finding, evidence_of, find, summary_of
from deep500_timing._views.findings._finding import percent
from deep500_timing._views.page._charts import GREY, colours_of
from deep500_timing.runs._tree import tree_of_run

if TYPE_CHECKING:
    from deep500_timing._summary.tree import Tree
    from deep500_timing._views.about import About
    from deep500_timing.runs import Run
    from deep500_timing.runs._goodput import Goodput

GROUP = "deep500_timing.sections"
"""The group of entry points for sections."""
TABLE_GROUP = "deep500_timing.table_sections"
"""The group for sections of one table, registered under its name. They are imported only for runs with that table."""


@dataclass(frozen=True)
class Panel:
    """One chart."""

    spec: dict[str, Any]
    """Vega-Lite with its data inside. The page sets colours of text and background; without ``width`` a chart is as
    wide as the page."""
    title: str = ""
    """The title of one of several charts."""


@dataclass(frozen=True)
class Figure:
    """One chart or several small ones, with their numbers."""

    title: str
    """The subject in a few words."""
    alt: str
    """The content in a sentence, for readers who do not see the chart."""
    panels: tuple[Panel, ...]
    """Charts, side by side if there is room."""
    columns: tuple[str, ...]
    """The headings of the table of its numbers, with units."""
    rows: Sequence[Sequence[object]]
    """The numbers; None is shown as unknown."""
    note: str = ""
    """The text below the chart: how to read it, and omissions."""
    zooms: bool = False
    """Whether to add buttons for the chart's interval selection over x, named ``zoom`` and bound to the scales."""
    legend: tuple[tuple[str, str], ...] = ()
    """Names with their colours, if the chart has no legend."""


@dataclass(frozen=True)
class Content:
    """The content of a section: paragraphs, then figures."""

    figures: tuple[Figure, ...] = ()
    text: tuple[str, ...] = ()
    tables: tuple[tuple[str, tuple[str, ...], Sequence[Sequence[object]]], ...] = field(default=())
    """Tables without a chart: title, headings, rows."""


class Section(Protocol):
    """A part of the page. Entry points of :data:`GROUP` are objects like this, or classes of them without arguments."""

    name: str
    """Its anchor: ``page.html#name``; letters, digits and hyphens."""
    title: str
    """Its heading."""
    place: int
    """The sort key; built-in sections have 30 (the tree) to 110 (missing data)."""
    missing: str
    """The sentence for a run without data for it: "No collectives were recorded." """

    def build(self, context: Context) -> Content | None:
        """The content for a run; None if the run has no data for this section."""
        ...


_PIXELS = 1000
"""The width of a chart: more steps share bars."""


class StepBars(NamedTuple):
    """The steps of a run, and the bars of charts over them."""

    first: int
    last: int
    path: str
    width: int
    """The steps of a bar."""

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
        return self.evidence.about

    @cached_property
    def tree(self) -> Tree:
        """The tree of regions, of all ranks together."""
        return self.evidence.tree if len(self.about.ranks) == 1 else tree_of_run(self.run, buckets=0)

    @cached_property
    def findings(self) -> list[Finding]:
        return find(self.evidence)

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
    def steps(self) -> StepBars | None:
        """The steps timed as BATCH; None without any."""
        for node in self.tree.named(BATCH):
            path = path_text(node.path)
            [row] = self.rows(
                "select min(step) as first, max(step) as last from intervals "
                f"where path = {literal(path)} and device = '{CPU}' and step is not null"
            )
            if row["first"] is not None:
                count = row["last"] - row["first"] + 1
                return StepBars(row["first"], row["last"], path, 1 if count <= _PIXELS else -(-2 * count // _PIXELS))
        return None

    @cached_property
    def _colours(self) -> dict[str, str]:
        nodes = sorted((node for node in self.tree.walk() if not node.is_rest), key=lambda node: -(node.total_s or 0))
        return colours_of(node.name for node in nodes)

    def colour(self, name: str) -> str:
        """The colour of a region; grey for an unknown one."""
        return self._colours.get(name, GREY)


def shown(name: str) -> str:
    """A name for the page, shortened if long."""
    name = safe_name(name)
    return name if len(name) <= 40 else f"{name[:24]}…{name[-15:]}"
