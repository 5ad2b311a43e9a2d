"""The table on a terminal, or on any other stream."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from deep500_timing._views.drawing import draw
from deep500_timing._views.of_snapshot import sheet_of
from deep500_timing._views.terminal import put, width_for
from deep500_timing.exporters._base import BaseExporter

if TYPE_CHECKING:
    from deep500_timing._base.protocols import Writable
    from deep500_timing._summary.snapshot import Snapshot


class TerminalExporter(BaseExporter):
    """Prints the table: with colours on a terminal if rich is installed, as plain text otherwise.

    On a narrow terminal the least important columns are left out, and named. A stream that is no terminal gets the
    whole table, without control characters. Of several ranks rank 0 alone prints to the standard output.
    """

    shows_places = True

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
            file: Anything with a ``write`` method that takes a string; None is ``sys.stdout`` at the
                time of each export, on rank 0 or where no rank is known.
            all_ranks: Print on every rank. A ``file`` that is given gets the table on each rank that gives one.
            whole_run: Show the whole run in each table, instead of the times since the last one.
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
            # The reader, such as head, has closed the pipe.
            if self._strict:
                raise

    def _show(self, stream: Any, snapshot: Snapshot, step: int | None) -> None:
        put(stream, draw(sheet_of(snapshot, step), width=width_for(stream)))
