"""What a page is made of: sections, and in them figures with their numbers. Plain data, to be built by anybody.

Texts may hold any character: they are escaped where they are shown. In a chart's specification a stranger's text, such
as a region's name, may stand in the data and nowhere else: other places are code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._views.page._context import Context

GROUP = "deep500_timing.sections"
"""Entry points whose objects are sections."""
TABLE_GROUP = "deep500_timing.table_sections"
"""The same for sections of one table of a run, by whose name they are registered: they are imported for runs that have
it, so that a section that needs a framework costs other reports nothing."""


@dataclass(frozen=True)
class Panel:
    """One chart."""

    spec: dict[str, Any]
    """Vega-Lite with its data inside; without colours of text, background and size, which are the page's. What has no
    ``width`` is as wide as there is room."""
    title: str = ""
    """Over the chart, where a figure has several."""


@dataclass(frozen=True)
class Figure:
    """One chart or several small ones, with their numbers."""

    title: str
    """What is seen, in a few words."""
    alt: str
    """What it says, in a sentence, for those who do not see it."""
    panels: tuple[Panel, ...]
    """Charts, beside each other where there is room."""
    columns: tuple[str, ...]
    """The heads of the table of its numbers, with units."""
    rows: Sequence[Sequence[object]]
    """The numbers; None is shown as unknown."""
    note: str = ""
    """Below the chart: what is left out, how to read it."""
    zooms: bool = False
    """Whether the chart has an interval selection over x, named ``zoom`` and bound to the scales: it gets buttons."""
    legend: tuple[tuple[str, str], ...] = ()
    """Names with their colours, where the chart has no legend of its own."""


@dataclass(frozen=True)
class Content:
    """What stands in a section. Paragraphs, then figures."""

    figures: tuple[Figure, ...] = ()
    text: tuple[str, ...] = ()
    tables: tuple[tuple[str, tuple[str, ...], Sequence[Sequence[object]]], ...] = field(default=())
    """Tables without a chart: title, heads, rows."""


class Section(Protocol):
    """A part of the page. Entry points of :data:`GROUP` are objects like this, or classes of them without arguments."""

    name: str
    """Its anchor: ``page.html#name``; letters, digits and hyphens."""
    title: str
    """Its heading."""
    place: int
    """By which sections are sorted; the built-in ones have 30 (the tree) to 110 (what was not measured)."""
    missing: str
    """What is said of it where there is nothing to show: "No collectives were recorded." """

    def build(self, context: Context) -> Content | None:
        """Read the run and say what to show; None if it has nothing for this section."""
        ...
