"""The table as lines of text with styles: a pipe gets the text, a terminal the colours too."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from deep500_timing._summary.text import GAP, pad, width_of, wrap
from deep500_timing._views.findings import CALM
from deep500_timing._views.table import COURSE, lay_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._views.findings import Finding
    from deep500_timing._views.table import Sheet, Table


class Span(NamedTuple):
    """A part of a line in one style."""

    text: str
    style: str = ""
    """A style of rich: ``"bold"``, ``"dim"``; empty for none."""


Line = list[Span]
_INDENT = 2
_GLUE = "\u00a0"
_COMMAND = re.compile("deep500-timing .*")
_NUMBER_STYLE = "bold yellow"
_LOST_STYLE = "bold red"
_NOTE_STYLES = {"failed": "red", "running": "yellow", "pending": "yellow"}


def draw(sheet: Sheet, *, width: int | None = None, whole_names: bool = False) -> list[Line]:
    """The lines of a sheet for a terminal of ``width`` columns; without a limit if None."""
    return draw_table(lay_out(sheet, width=width, whole_names=whole_names), width=width)


def draw_table(table: Table, *, width: int | None = None) -> list[Line]:
    """The lines of a table that is laid out."""
    sheet = table.sheet
    lines = list(_title(sheet, width))
    if sheet.findings or sheet.verdict:
        lines.append([])
        lines += _findings(sheet, width)
    if table.rows:
        lines.append([])
        lines += _rows(table)
    if table.notes:
        lines.append([])
        lines += _notes(table, width)
    return [_trimmed(line) for line in lines]


def _trimmed(line: Line) -> Line:
    # A terminal of exactly the line's width would break blanks at its end.
    while line and not (text := line[-1].text.rstrip()):
        line = line[:-1]
    return [*line[:-1], line[-1]._replace(text=text)] if line else line


def plain(lines: list[Line]) -> str:
    """The text alone, with a line end at its end."""
    return "".join("".join(span.text for span in line) + "\n" for line in lines)


def render(sheet: Sheet, *, width: int | None = None, whole_names: bool = False) -> str:
    """A sheet as plain text."""
    return plain(draw(sheet, width=width, whole_names=whole_names))


def _wrapped(text: str, width: int | None, indent: int) -> list[str]:
    if width is None:
        return [text]
    # A command stays whole, to be copied.
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", _GLUE), text)
    return wrap(whole, max(width - indent, 12), indent).replace(_GLUE, " ").split("\n")


def _title(sheet: Sheet, width: int | None) -> Iterator[Line]:
    parts = list(sheet.title)
    if width is not None:
        # Lines are broken between parts, where each fits on one.
        mark = sheet.separator.rstrip()
        parts = [part + _GLUE + mark.strip() if mark else part for part in parts[:-1]] + parts[-1:]
        parts = [part.replace(" ", _GLUE) if width_of(part) <= width else part for part in parts]
    separator = sheet.separator if width is None else sheet.separator[len(sheet.separator.rstrip()) :]
    text = separator.join(parts)
    first, *rest = (text if width is None else wrap(text, max(width, 12), 0).replace(_GLUE, " ")).split("\n")
    name = sheet.title[0]
    yield [Span(name, "bold"), Span(first[len(name) :], "dim")] if first.startswith(name) else [Span(first, "bold")]
    for line in rest:
        yield [Span(line, "dim")]


def _findings(sheet: Sheet, width: int | None) -> Iterator[Line]:
    if not sheet.findings:
        indent, colour = " " * _INDENT, "green" if sheet.verdict.startswith(CALM) else ""
        for place, line in enumerate(_wrapped(sheet.verdict, width, _INDENT)):
            yield [Span((indent if place == 0 else "") + line, f"bold {colour}".strip() if place == 0 else colour)]
        return
    digits = len(str(len(sheet.findings)))
    for number, finding in enumerate(sheet.findings, 1):
        yield from _finding(finding, number, _INDENT + digits + len(GAP), width)


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
            lines.append([Span(" " * indent + arrow, "cyan")])
    lines[0].insert(0, head)
    yield from lines


def _rows(table: Table) -> Iterator[Line]:
    widths = table.widths
    # Time runs from the left; numbers end in one column.
    to_the_left = [place == 0 or name == COURSE for place, name in enumerate(table.headers)]
    headings = [
        pad(name, width, right=not left) for name, width, left in zip(table.headers, widths, to_the_left, strict=True)
    ]
    yield [Span(GAP.join(headings).rstrip(), "bold")]
    for row in table.rows:
        blanks = " " * (widths[0] - width_of(row.indent + row.name))
        line = [Span(row.indent, "dim"), Span(row.name, "dim" if row.is_rest else "bold"), Span(blanks)]
        for cell, width, left in zip(row.cells, widths[1:], to_the_left[1:], strict=True):
            padded = pad(cell, width, right=not left)
            if left:
                line.append(Span(GAP + padded, "cyan"))
                continue
            # Units are dim: the numbers are what is compared.
            number, space, unit = padded.rstrip().rpartition(" ")
            line.append(Span(GAP + number + space, "dim" if row.is_rest else ""))
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
