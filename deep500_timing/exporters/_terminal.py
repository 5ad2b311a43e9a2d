"""The table on a terminal, or on any other stream."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from deep500_timing._summary.text import GAP, cells_of, fit_encoding, line_of, pad, wrap
from deep500_timing._views.table import Table, note_indent, render, table_of
from deep500_timing.exporters._base import BaseExporter

if TYPE_CHECKING:
    from deep500_timing._ground.protocols import Writable
    from deep500_timing._summary.snapshot import Snapshot


class TerminalExporter(BaseExporter):
    """Prints the table: with colours on a terminal if rich is installed, as plain text otherwise.

    On a narrow terminal the least important columns are left out, and named. A stream that is no terminal gets the
    whole table, without control characters. Of several ranks rank 0 alone prints to the standard output.
    """

    def __init__(
        self,
        file: Writable | None = None,
        *,
        all_ranks: bool = False,
        whole_run: bool = True,
        strict: bool = False,
    ) -> None:
        """Note where to print.

        Args:
            file: Anything with a ``write`` method that takes a string; what is ``sys.stdout`` at the time of each
                export if None, on rank 0 or where no rank is known.
            all_ranks: Print on every rank. A ``file`` that is given gets the table on each rank that gives one.
            whole_run: Show the times of the whole run in each table, not what came since the last one.
            strict: Raise ``ExportError`` if it cannot be printed, instead of warning once.

        Raises:
            TypeError: ``file`` has no ``write`` method.
        """
        super().__init__(strict=strict, whole_run=whole_run)
        self._all_ranks = all_ranks
        if file is not None and not callable(getattr(file, "write", None)):
            raise TypeError(
                f"Printing times to {file!r}: it has no write method. Give an open stream, such as sys.stderr, or use "
                f"save_all_time_stats for a file that is named."
            )
        self._file = file

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        stream: Any = self._file
        if stream is None:
            if sys.stdout is None or not (self._all_ranks or snapshot.rank in (None, 0)):
                return  # As print() does in a program that has no standard output.
            stream = sys.stdout
        try:
            self._show(stream, snapshot, step)
        except BrokenPipeError:
            # Whoever read it, such as head, has read enough.
            if self._strict:
                raise

    def _show(self, stream: Any, snapshot: Snapshot, step: int | None) -> None:
        if not _is_terminal(stream):
            self._print(stream, render(table_of(snapshot, step)))
            return
        width = _width_of_terminal(stream)
        table = table_of(snapshot, step, width=width)
        try:
            import rich.console  # noqa: F401
        except ImportError:
            self._print(stream, render(table, width=width))
        else:
            _print_rich(stream, table, width)

    def _print(self, stream: Any, text: str) -> None:
        stream.write(fit_encoding(text, getattr(stream, "encoding", None)))
        if (flush := getattr(stream, "flush", None)) is not None:
            flush()


def _is_terminal(stream: Any) -> bool:
    isatty = getattr(stream, "isatty", None)
    return isatty is not None and bool(isatty())


def _width_of_terminal(stream: Any) -> int:
    if not os.environ.get("COLUMNS"):
        try:
            columns = os.get_terminal_size(stream.fileno()).columns
        except (AttributeError, OSError, ValueError):
            columns = 0
        if columns > 0:
            return columns
    return shutil.get_terminal_size().columns


def _print_rich(stream: Any, table: Table, width: int) -> None:
    from rich.console import Console
    from rich.text import Text

    encoding = getattr(stream, "encoding", None)
    lines = Text()

    # Not rich's own tables: their cells cannot be pushed to the right and left whole at once. Nor its markup, which
    # a region's name may look like.
    def add(content: str, style: str = "") -> None:
        lines.append(fit_encoding(content, encoding), style)

    title, *where = table.title
    add(title, "bold")
    add("".join(GAP + part for part in where) + "\n", "dim")
    if table.rows:
        add("\n")
        widths = table.widths
        add(line_of(table.headers, widths) + "\n", "bold")
        add(line_of(tuple("─" * column for column in widths), widths) + "\n", "dim")
        for row in table.rows:
            name, device, count, *times = cells_of(row, widths)
            add(name + GAP, "bold")
            add(device, "magenta" if row[1] == "GPU" else "cyan")
            add(GAP + count)
            for time in times:
                # The unit steps back, so that the eye runs down the numbers.
                number, space, unit = time.rstrip().rpartition(" ")
                add(GAP + number + space)
                add(unit + " " * (len(time) - len(time.rstrip())), "dim")
            add("\n")
    if table.notes:
        add("\n")
        indent = note_indent(table)
        for label, sentence in table.notes:
            add(pad(label, indent) + GAP, _NOTE_STYLES.get(label, "dim"))
            add(wrap(sentence, width - indent - len(GAP), indent + len(GAP)) + "\n")
    Console(file=stream, width=width, highlight=False).print(lines, end="", soft_wrap=True)


_NOTE_STYLES = {"failed": "red", "running": "yellow", "pending": "yellow"}
