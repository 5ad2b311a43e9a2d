"""The table of a snapshot: what it says, independent of how it is drawn, and its drawing as plain text."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from deep500_timing._ground.memory_usage import SHOWN
from deep500_timing._summary.snapshot import COUNTERS
from deep500_timing._summary.stats import SHOWN_QUANTILES
from deep500_timing._summary.text import (
    GAP,
    align_units,
    format_bytes,
    format_interval,
    format_time,
    line_of,
    pad,
    safe_name,
    shorten,
    width_of,
    widths_of,
    wrap,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing._summary.snapshot import RegionTimes, Snapshot
    from deep500_timing._summary.stats import TimeStats


class Column(NamedTuple):
    """One column; what is in it is pushed to the right, except names."""

    header: str
    cell: Callable[[TimeStats], str]
    rank: int
    """On a narrow terminal the columns with the highest rank go first, those below 3 only after names are shortened."""


_PERCENTILES = tuple(name for name in SHOWN_QUANTILES if name != "median")


def _time_column(field: str, rank: int) -> Column:
    return Column(field, lambda stats: format_time(getattr(stats, field)), rank)


_COLUMNS = (
    Column("count", lambda stats: str(stats.count), 1),
    _time_column("total", 0),
    _time_column("mean", 0),
    _time_column("stdev", 6),
    _time_column("median", 3),
    Column("95 % CI of median", lambda stats: format_interval(stats.median_ci), 7),
    _time_column("min", 5),
    *(_time_column(name, 4) for name in _PERCENTILES),
    _time_column("max", 2),
)


_LONGEST_NAME = 48
"""Columns of a terminal that a region's name takes up at most; files and trackers have it whole."""
_SHORTEST_NAME = 8


def _name_width(width: int | None) -> int:
    # Two fifths of a narrow terminal at most, so that a name leaves room for the columns that are always shown.
    return _LONGEST_NAME if width is None else max(min(_LONGEST_NAME, width * 2 // 5), _SHORTEST_NAME)


@dataclass(frozen=True)
class Table:
    """What a report shows."""

    title: tuple[str, ...]
    """What it is, where and when: parts of one line."""
    headers: tuple[str, ...]
    """Region, device, and the columns that were kept."""
    rows: tuple[tuple[str, ...], ...]
    """One row for each region and device that has times."""
    notes: tuple[tuple[str, str], ...]
    """A short label and a sentence for each thing that the reader must know."""

    @property
    def widths(self) -> list[int]:
        """Of each column, on a terminal."""
        return widths_of([self.headers, *self.rows])

    @property
    def width(self) -> int:
        """Of the whole table, on a terminal."""
        return sum(self.widths) + len(GAP) * (len(self.headers) - 1)


def table_of(
    snapshot: Snapshot, step: int | None = None, *, width: int | None = None, whole_names: bool = False
) -> Table:
    """Lay out a snapshot.

    Args:
        snapshot: The times.
        step: The training step, for the title.
        width: How many columns there are on the terminal; what does not fit is left out, and that is noted.
            Nothing is left out if None, nor are the columns without which a table says little.
        whole_names: Shorten no name, however long.
    """
    name_width = sys.maxsize if whole_names else _name_width(width)
    timed = [(region, region.stats) for region in snapshot if region.stats is not None]
    columns = list(_COLUMNS)
    title, notes = _title(snapshot, step), _notes(snapshot, name_width, any_times=bool(timed))
    dropped: list[Column] = []
    while True:
        headers = ("region", "device", *(column.header for column in columns))
        cells = [
            (shorten(safe_name(region.name), name_width), region.device, *(column.cell(stats) for column in columns))
            for region, stats in timed
        ]
        rows = align_units(cells)
        shown = [*notes]
        if dropped:
            names = ", ".join(column.header for column in _COLUMNS if column in dropped)
            shown.append(("not shown", f"{names}: the terminal is {width} columns wide"))
        table = Table(title, headers, rows, tuple(shown))
        last = max(columns, key=lambda column: column.rank)
        if width is None or table.width <= width or not timed:
            return table
        if last.rank < 3 and not whole_names and table.widths[0] > _SHORTEST_NAME:
            name_width = max(table.widths[0] - (table.width - width), _SHORTEST_NAME)
        elif last.rank > 0:
            columns.remove(last)
            dropped.append(last)
        else:
            return table


def render(table: Table, *, width: int | None = None) -> str:
    """Draw a table as plain text, with a line end at its end; notes are wrapped to a width if there is one."""
    lines = [GAP.join(table.title)]
    if table.rows:
        widths = table.widths
        rule = tuple("─" * column for column in widths)
        lines.append("")
        lines += [line_of(row, widths).rstrip() for row in (table.headers, rule, *table.rows)]
    if table.notes:
        indent = note_indent(table)
        lines.append("")
        for label, sentence in table.notes:
            wrapped = sentence if width is None else wrap(sentence, width - indent - len(GAP), indent + len(GAP))
            lines.append(pad(label, indent) + GAP + wrapped)
    return "\n".join(lines) + "\n"


def note_indent(table: Table) -> int:
    """The width of the longest label of a table's notes."""
    return max(width_of(label) for label, _ in table.notes)


def _title(snapshot: Snapshot, step: int | None) -> tuple[str, ...]:
    taken = datetime.fromtimestamp(snapshot.unix_time_s).astimezone()
    process = f"{safe_name(snapshot.host)}, process {snapshot.pid}"
    if snapshot.rank is not None:
        process += f", rank {snapshot.rank} of {snapshot.world_size}"
    parts = ["Times by region", process, f"{taken:%Y-%m-%d %H:%M:%S %z}"]
    if snapshot.since_unix_time_s is not None:
        since = datetime.fromtimestamp(snapshot.since_unix_time_s).astimezone()
        parts.append(f"since {since:%Y-%m-%d %H:%M:%S %z}")
    if step is not None:
        parts.append(f"step {step}")
    return tuple(parts)


def _notes(snapshot: Snapshot, name_width: int, *, any_times: bool) -> list[tuple[str, str]]:
    notes = []
    if not any_times:
        notes.append(("no times", "nothing has been recorded yet"))
    told: set[tuple[str, str]] = set()

    def note(label: str, text: str, count: Callable[[RegionTimes], int], *, show_count: bool = True) -> None:
        concerned = [(region, count(region)) for region in snapshot if count(region)]
        if concerned:
            told.update((region.name, region.device) for region, _ in concerned)
            named = [
                f"{f'{number} × ' if show_count else ''}{shorten(safe_name(region.name), name_width)} ({region.device})"
                for region, number in concerned
            ]
            notes.append((label, f"{', '.join(named)}: {text}"))

    threads = any(region.running > 1 for region in snapshot)
    for counter, text in COUNTERS.items():
        if counter == "running":
            open_text = "open now, by threads; the time so far is not included" if threads else text
            note(counter, open_text, attrgetter(counter), show_count=threads)
        else:
            note(counter, text, attrgetter(counter))
    note("warm-up", "left out by skip_first", lambda region: region.stats.skipped if region.stats else 0)
    note(
        "rounded",
        f"{' and '.join(['median, its interval', *_PERCENTILES])} are from a histogram, within ±1 %",
        lambda region: int(region.stats is not None and region.stats.quantile_error > 0),
        show_count=False,
    )
    note(
        "no times",
        "used, but nothing is recorded, or nothing but warm-up",
        lambda region: int(region.stats is None and (region.name, region.device) not in told),
        show_count=False,
    )
    notes += [("memory", text) for region in snapshot if (text := _memory(region, name_width))]
    return notes


def _memory(region: RegionTimes, name_width: int) -> str:
    memory = region.memory
    if memory is None:
        return ""
    parts = []
    for name, shown_as in SHOWN.items():
        now = getattr(memory.last, name)
        if now is not None:
            most = getattr(memory, f"max_{name}", None)
            what = shown_as.format(device=memory.last.device or "device")
            parts.append(f"{format_bytes(now)} {what} (at most {format_bytes(now if most is None else most)})")
    return f"{shorten(safe_name(region.name), name_width)} at its last end: {', '.join(parts)}" if parts else ""
