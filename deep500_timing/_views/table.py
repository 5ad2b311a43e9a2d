"""The table of regions as lines of text with styles: a pipe gets the text, a terminal the colours too.

A :class:`TextReport` holds heading, findings, tree and notes. :func:`build_table` arranges it in columns for a width,
:func:`draw` draws them, and :func:`put` prints them.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing._summary.text import (
    GAP,
    UNKNOWN,
    align_units,
    fit_encoding,
    format_share,
    pad,
    safe_name,
    shorten,
    times,
    width_of,
    widths_of,
    wrap,
)
from deep500_timing._summary.tree import Node, Tree

if TYPE_CHECKING:
    from deep500_timing._views.findings import Evidence, Finding

LONGEST_NAME = 48
"""Largest width of a region's name on a terminal. Files and trackers have the whole name."""
SHORTEST_NAME = 8
NARROW = 60
"""On terminals below this width each level of the tree is indented by one column."""
LEAST_FOR_MEDIAN, FEW = 3, 20
"""Fewest intervals for a median and for a percentile."""


@dataclass(frozen=True)
class TextReport:
    """The content of a report."""

    title: tuple[str, ...]
    """Parts of the heading."""
    separator: str
    """Between the parts."""
    tree: Tree
    findings: tuple[Finding, ...] = ()
    """The findings, the most important first."""
    verdict: str = ""
    """The sentence for a report without findings; may be empty."""
    is_calm: bool = False
    """Whether it says that nothing stands out."""
    notes: tuple[tuple[str, str], ...] = ()
    """Notes: a short label, which may be empty, and a sentence."""
    ended: bool = True
    """Whether nothing follows: a run that is being written has not ended."""
    evidence: Evidence | None = field(default=None, compare=False, repr=False)
    """The evidence of a run's findings; None for a snapshot."""


class Span(NamedTuple):
    """A part of a line in one style."""

    text: str
    style: str = ""
    """A style of rich: ``"bold"``, ``"dim"``; empty for none."""


Line = list[Span]
_OVERLAP = ("*", "at the same time as the rows beside it: their shares may add up to more than 100 %")
"""The note of a region that ran at the same time as another one."""
_INDENT = 2
_GLUE = "\u00a0"
_COMMAND = re.compile(r"deep500-timing (?:(?!\. ).)*")
_PLACE = re.compile(r"\d+ % of it in .*?:\d+\)")
"""The first place in the program that a cause names."""
_LISTED = re.compile(r": (?:after steps? )?\d[\d, ]*(?:and \d+ more)?$")
_LAST = re.compile(r",?(?:\s+(?:a|and|in|of|or|the|to))*\s+\S*$|\S+$")  # the last word, and what leads to it
_NUMBER_STYLE = "bold yellow"
_LOST_STYLE = "bold red"
_NOTE_STYLES = {"failed": "red", "running": "yellow", "pending": "yellow"}
_BARS = "▁▂▃▄▅▆▇█"
_SMALL, _FEWEST_SMALL = 0.02, 2
"""The share of its parent below which a region is drawn with others, and the fewest that are."""
_ALL = 0.9
"""The share of its parent from which on the rest is no part of it."""
_COLUMNS, _LINES = 80, 2
"""The room of a finding; one more line if it names a line of the program."""
_LEAST_CUT = 24
"""Columns below which nothing is left of a cause."""
_USUAL = 3 / 8
"""Height of a constant value, which leaves room for longer times."""


class Row(NamedTuple):
    """One line of the tree."""

    indent: str
    """Blanks and lines before the name."""
    name: str
    node: Node
    cells: Sequence[str] = ()
    """Under the headings after the first."""


@dataclass(frozen=True)
class Table:
    """A report in columns."""

    headers: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[tuple[str, str], ...] = ()
    """The report's notes, and one about columns that did not fit."""

    @property
    def widths(self) -> list[int]:
        """Of each column, on a terminal."""
        return widths_of([self.headers, *((row.indent + row.name, *row.cells) for row in self.rows)])

    @property
    def width(self) -> int:
        return sum(self.widths) + len(GAP) * (len(self.headers) - 1)


COURSE = "over the run"
OVER_RANKS = "ranks min / median / max"
_BEFORE_NAMES = (OVER_RANKS, COURSE, "p95")
_AFTER_NAMES = ("count", "GPU share", "GPU total", "median")
"""Columns that a narrow terminal leaves out, in this order: before names are shortened, and after."""


def build_table(report: TextReport, *, width: int | None = None, whole_names: bool = False) -> Table:
    """Arrange a report in columns."""
    depth = max((len(node.path) for node in report.tree.walk()), default=0)
    is_narrow = width is not None and (width < NARROW or 9 * depth > width)
    rows = [row for root in report.tree.roots for row in _rows(root, "", "", is_narrow)]
    if not rows:
        return Table((), (), report.notes)
    cells = _cells([row.node for row in rows])
    longest = sys.maxsize if whole_names else LONGEST_NAME
    table = _table(rows, cells, longest)
    notes = [_OVERLAP] * any(row.node.overlaps for row in rows) + list(report.notes)
    if width is None:
        return replace(table, notes=tuple(notes))
    # Two fifths of a narrow terminal: a name leaves room for the columns that are always shown.
    deepest = max(width_of(row.indent) for row in rows)
    least = min(max(width * 2 // 5, SHORTEST_NAME), deepest + max(SHORTEST_NAME, width // 6))
    columns = list(cells)
    for column in [name for name in (*_BEFORE_NAMES, "", *_AFTER_NAMES) if name in cells or not name]:
        if table.width <= width:
            break
        if column:
            del cells[column]
            table = _table(rows, cells, longest)
        over = table.width - width
        if over > 0 and not whole_names and column not in _BEFORE_NAMES:
            table = _table(rows, cells, min(longest, max(table.widths[0] - over, least)))
    left_out = [name for name in columns if name not in cells]
    if left_out:
        # A note without a label closes the report.
        end = next((place for place, (label, _) in enumerate(notes) if not label), len(notes))
        notes.insert(end, ("not shown", f"{', '.join(left_out)}: the terminal is {width} columns wide"))
    return replace(table, notes=tuple(notes))


def _table(rows: list[Row], cells: dict[str, list[str]], longest: int) -> Table:
    shown = (
        row._replace(name=shorten(row.name, max(longest - width_of(row.indent), 4)), cells=of_row)
        for row, *of_row in zip(rows, *map(align_units, cells.values()), strict=True)
    )
    return Table(("region", *cells), tuple(shown))


def folded(tree: Tree, kept: Iterable[tuple[str, ...]] = (), rows: int = 0) -> Tree:
    """A tree in which regions below 2 % of their parent are one row, as ``"9 more regions"``.

    Args:
        tree: The tree.
        kept: Paths that keep their rows, with those around them: findings are about them.
        rows: How many of a group of siblings keep their rows in any case.
    """
    paths = {path[:end] for path in kept for end in range(1, len(path) + 1)}
    # Rows without a count are the start of a run and its end: of a short run they are nearly all of it.
    whole_s = sum(root.total_s or 0.0 for root in tree.roots if root.count)
    return replace(tree, roots=_folded(tree.roots, whole_s, paths, rows))


def _folded(nodes: tuple[Node, ...], whole_s: float, kept: set[tuple[str, ...]], rows: int) -> tuple[Node, ...]:
    def is_small(node: Node) -> bool:
        is_known = node.total_s is not None and not (node.is_rest or node.failed or node.running or node.gpu)
        return is_known and (node.total_s or 0.0) < _SMALL * whole_s and node.path not in kept

    small = [node for node in nodes[rows:] if is_small(node)]
    shown = [*nodes[:rows], *(node for node in nodes[rows:] if len(small) < _FEWEST_SMALL or not is_small(node))]
    found = [replace(node, children=_folded(node.children, node.total_s or 0.0, kept, rows)) for node in shown]
    if len(shown) < len(nodes):
        total_s = sum(node.total_s or 0.0 for node in small)
        share = total_s / whole_s if small[0].share is not None else None
        more = Node(f"{len(small)} more regions", (*small[0].parent, ""), is_rest=True, total_s=total_s, share=share)
        found.insert(len(found) - sum(node.is_rest for node in found), more)
    return tuple(found)


def _rows(node: Node, indent: str, below: str, is_narrow: bool, warm_up_indent: str = "") -> Iterator[Row]:
    # The rows of a node, with `below` before its children.
    name = safe_name(node.name)
    if node.warm_up and node.warm_up_s is not None:
        warm_up = Node(node.name, node.path, total_s=node.warm_up_s, count=node.warm_up)
        yield Row(warm_up_indent or indent, f"{name} (warm-up)", warm_up)
    yield Row(indent, name + (" *" if node.overlaps else "") + (" …" if node.running else ""), node)
    # A rest that is nearly all of a region which nothing divides: a row of it would say nothing.
    divided = any(inner.divides for inner in node.children)
    children = [child for child in node.children if divided or not child.is_rest or (child.share or 0.0) < _ALL]
    for child in children:
        is_last = child is children[-1]
        branch, deeper = (" ", " ") if is_narrow else ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        yield from _rows(child, below + branch, below + deeper, is_narrow, below + (" " if is_narrow else "├─ "))


def _cells(nodes: list[Node]) -> dict[str, list[str]]:
    on_device = [node.gpu for node in nodes]
    found = {
        "total": times([node.total_s for node in nodes], by_largest=True),
        "share": [_share(node.share) for node in nodes],
        "count": [str(node.count) if node.count and not node.is_rest else "" for node in nodes],
        "median": times([node.median_s if node.count >= LEAST_FOR_MEDIAN else None for node in nodes]),
        "p95": times([_p95(node) for node in nodes]),
        "GPU total": times([None if gpu is None else gpu.total_s for gpu in on_device], by_largest=True),
        "GPU share": ["" if gpu is None else _share(gpu.share) for gpu in on_device],
        OVER_RANKS: [over_ranks(node) for node in nodes],
        COURSE: [_sparkline(node) for node in nodes],
    }
    return {name: cells for name, cells in found.items() if {*cells} - {"", UNKNOWN} or name == "total"}


def _share(value: float | None) -> str:
    return "" if value is None else format_share(value)


def _p95(node: Node) -> float | None:
    # NaN for a dash.
    if node.count < LEAST_FOR_MEDIAN or node.median_s is None:
        return None
    return math.nan if node.count < FEW else node.p95_s


def over_ranks(node: Node) -> str:
    """The smallest, median and largest total of the ranks, such as ``"1.02 / 1.05 / 1.31 s"``."""
    if node.over_ranks_s is None:
        return ""
    cells = times(node.over_ranks_s, by_largest=True)
    unit = cells[-1].partition(" ")[2]
    return " / ".join([*(cell.removesuffix(f" {unit}") for cell in cells[:-1]), cells[-1]])


def _sparkline(node: Node) -> str:
    # The trend as a bar chart of one character for each part of the run, starting at zero. For few intervals, parts
    # without any are left out: three EPOCHs are three characters.
    known = [value for value in node.trend if value is not None]
    if node.count < LEAST_FOR_MEDIAN or not any(known):
        return ""
    top = max(sorted(known)[len(known) // 2] / _USUAL, *known)
    shown = known if node.count < 2 * len(node.trend) else node.trend
    signs = (" " if value is None else _BARS[min(round(value / top * 8 + 1e-9) or 1, 8) - 1] for value in shown)
    return "".join(signs).rstrip()


def draw(report: TextReport, *, width: int | None = None, whole_names: bool = False) -> list[Line]:
    """The lines of a report for a terminal of ``width`` columns; without a limit if None."""
    table = build_table(report, width=width, whole_names=whole_names)
    lines = list(_title(report, width))
    said = _findings(report, width) if report.findings or report.verdict else ()
    for part in (said, _drawn_rows(table) if table.rows else (), _notes(table, width)):
        drawn = list(part)
        lines += [[], *drawn] if drawn else []
    return [_trimmed(line) for line in lines]


def _trimmed(line: Line) -> Line:
    # A terminal of exactly the line's width would break blanks at its end.
    while line and not (text := line[-1].text.rstrip()):
        line = line[:-1]
    return [*line[:-1], line[-1]._replace(text=text)] if line else line


def render(report: TextReport, *, width: int | None = None, whole_names: bool = False) -> str:
    """A report as plain text."""
    return plain(draw(report, width=width, whole_names=whole_names))


def plain(lines: list[Line]) -> str:
    """The text alone, with a line end at its end."""
    return "".join("".join(span.text for span in line) + "\n" for line in lines)


def _wrapped(text: str, width: int | None, indent: int) -> list[str]:
    if width is None:
        return [text.replace(_GLUE, " ")]
    # A command stays whole, to be copied.
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", _GLUE), text)
    return wrap(whole, max(width - indent, 12), indent).replace(_GLUE, " ").split("\n")


def _title(report: TextReport, width: int | None) -> Iterator[Line]:
    mark = report.separator.rstrip()
    parts = [part + mark.replace(" ", _GLUE) for part in report.title[:-1]] + [report.title[-1]]
    if width is not None:
        # Lines are broken between parts, where each fits on one.
        parts = [part.replace(" ", _GLUE) if width_of(part) <= width else part for part in parts]
    first, *rest = _wrapped(report.separator[len(mark) :].join(parts), width, 0)
    name = report.title[0]
    yield [Span(name, "bold"), Span(first[len(name) :], "dim")] if first.startswith(name) else [Span(first, "bold")]
    for line in rest:
        yield [Span(line, "dim")]


def _findings(report: TextReport, width: int | None) -> Iterator[Line]:
    if not report.findings:
        indent, colour = " " * _INDENT, "green" if report.is_calm else ""
        for place, line in enumerate(_wrapped(report.verdict, width, _INDENT)):
            yield [Span((indent if place == 0 else "") + line, f"bold {colour}".strip() if place == 0 else colour)]
        return
    digits = len(str(len(report.findings)))
    for number, finding in enumerate(report.findings, 1):
        yield from _finding(finding, number, _INDENT + digits + len(GAP), width)


def brief(finding: Finding) -> Finding:
    """A finding in two lines, or in three with a line of the program: as much as has room with the remedy."""
    place = _PLACE.search(finding.why)

    def fits(one: Finding) -> bool:
        return len(list(_finding(one, 1, _INDENT + 1 + len(GAP), _COLUMNS))) <= _LINES + (place is not None)

    without = replace(finding, where="")
    shorter = replace(without, remedy=re.split("[,;] ", finding.remedy)[0])
    # A cause says more than numbers of steps, and than the command that finds it.
    unlisted = replace(shorter, fact=_LISTED.sub("", finding.fact)) if finding.why else shorter
    bare = replace(unlisted, command="") if finding.why else shorter
    shortest = replace(bare, why=place[0]) if place is not None else bare
    for one in (finding, without, shorter, unlisted, bare):
        if fits(one):
            return one
    while shortest.why and not fits(shortest):
        why = _LAST.sub("", shortest.why.removesuffix("…"))
        shortest = replace(shortest, why=f"{why}…" if len(why) >= _LEAST_CUT else "")
    return shortest


def _finding(finding: Finding, number: int, indent: int, width: int | None) -> Iterator[Line]:
    style = _LOST_STYLE if finding.is_first else _NUMBER_STYLE
    head = Span(f"{number}".rjust(indent - len(GAP)) + GAP, style)
    text = _wrapped(finding.text, width, indent)
    lines: list[Line] = [[Span(line, "bold" if number == 1 else "")] for line in text]
    if finding.help:
        arrow = f"→ {finding.help}"
        used = width_of(text[-1]) + (indent if len(text) == 1 else 0)
        if width is None or used + len(GAP) + width_of(arrow) <= width:
            lines[-1].append(Span(GAP + arrow, "cyan"))
        else:
            first, *rest = _wrapped(arrow, width, indent + len("→ "))
            lines += [[Span(line, "cyan")] for line in (" " * indent + first, *rest)]
    lines[0].insert(0, head)
    yield from lines


def _drawn_rows(table: Table) -> Iterator[Line]:
    widths = table.widths
    # Time runs from the left; numbers end in one column.
    to_the_left = [place == 0 or name == COURSE for place, name in enumerate(table.headers)]
    headings = [
        pad(name, width, right=not left) for name, width, left in zip(table.headers, widths, to_the_left, strict=True)
    ]
    yield [Span(GAP.join(headings).rstrip(), "bold")]
    for row in table.rows:
        blanks = " " * (widths[0] - width_of(row.indent + row.name))
        line = [Span(row.indent, "dim"), Span(row.name, "dim" if row.node.is_rest else "bold"), Span(blanks)]
        for cell, width, left in zip(row.cells, widths[1:], to_the_left[1:], strict=True):
            padded = pad(cell, width, right=not left)
            if left:
                line.append(Span(GAP + padded, "cyan"))
                continue
            # Units are dim: readers compare the numbers.
            number, space, unit = padded.rstrip().rpartition(" ")
            line.append(Span(GAP + number + space, "dim" if row.node.is_rest else ""))
            line.append(Span(unit + " " * (len(padded) - len(padded.rstrip())), "dim" if number.strip() else ""))
        yield line


def _notes(table: Table, width: int | None) -> Iterator[Line]:
    indent = max((width_of(label) for label, _ in table.notes if label), default=0)
    for label, sentence in table.notes:
        at = indent + len(GAP) if label else 0
        lines = _wrapped(sentence, width, at)
        start = [Span(pad(label, indent) + GAP, _NOTE_STYLES.get(label, "dim"))] if label else []
        yield [*start, Span(lines[0], "" if label else "dim")]
        for line in lines[1:]:
            yield [Span(line, "" if label else "dim")]


# --- on a stream ------------------------------------------------------------------------------------------------------


def is_terminal(stream: Any) -> bool:
    """Whether a stream says that it is a terminal."""
    isatty = getattr(stream, "isatty", None)
    return isatty is not None and bool(isatty())


def width_for(stream: Any) -> int | None:
    """The columns of a terminal, 80 if unknown; None on any other stream, where lines have no limit."""
    if not is_terminal(stream):
        return None
    if not os.environ.get("COLUMNS"):
        try:
            columns = os.get_terminal_size(stream.fileno()).columns
        except (AttributeError, OSError, ValueError):
            columns = 0
        if columns > 0:
            return columns
    return shutil.get_terminal_size().columns


def show(stream: Any, report: TextReport) -> None:
    """Print a report to a stream, as wide as it is."""
    put(stream, draw(report, width=width_for(stream)))


def put(stream: Any, lines: list[Line]) -> None:
    """Print lines: in colour on a terminal, or with FORCE_COLOR, if rich is installed; else as plain text."""
    encoding = getattr(stream, "encoding", None)
    if is_terminal(stream) or os.environ.get("FORCE_COLOR"):
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            # Without rich's markup: a region's name may look like it.
            text = Text()
            for span in (span for line in lines for span in (*line, Span("\n"))):
                text.append(fit_encoding(span.text, encoding), span.style)
            console = Console(file=stream, width=width_for(stream), highlight=False)
            console.print(text, end="", soft_wrap=True)
            return
    stream.write(fit_encoding(plain(lines), encoding))
    if (flush := getattr(stream, "flush", None)) is not None:
        flush()
