"""The parts of a page: sections, and figures with their numbers. Plain data that any package can build.

Texts may hold any character: the page escapes them. In a chart's specification a text from outside, such as a region's
name, may stand in the data only: other places are code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._views.page._context import Context

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
