"""The table: on a terminal or another stream, and in a text file."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from deep500_timing._base.warn import warn_once
from deep500_timing._views.reports import report_of_snapshot
from deep500_timing._views.table import render, show
from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._files import SharedFile, create, encode, path_of

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
        self, file: Writable | None = None, *, all_ranks: bool = False, whole_run: bool = True, strict: bool = False
    ) -> None:
        """Note where to print.

        Args:
            file: Anything with a ``write`` method that takes a string; None is ``sys.stdout`` at the
                time of each export, on rank 0 or where no rank is known.
            all_ranks: Print on every rank. A ``file`` that is given gets the table on each rank that gives one.
            whole_run: Show the whole run in each table, instead of the times since the last one.
            strict: Raise ``ExportError`` if it cannot be printed, instead of warning once.
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
            show(stream, report_of_snapshot(snapshot, step, whole=False))
        except BrokenPipeError:
            # The reader, such as head, has closed the pipe.
            if self._strict:
                raise


class TextExporter(BaseExporter):
    """Write the table to a new file, in UTF-8: the first export creates it, later ones append.

    An existing file is left unchanged: the table goes to ``times-2.txt`` and so on, with a warning, and ``path`` has
    the name. The file is closed between exports. A partial report is removed. The first ``export`` raises ``OSError``
    if the file cannot be made, for the reason that the system gives.
    """

    shows_places = True

    def __init__(
        self, path: str | os.PathLike[str], *, overwrite: bool = False, whole_run: bool = True, strict: bool = False
    ) -> None:
        """Check where to write. No file is made yet, so that a run that ends early leaves no empty one.

        Args:
            path: The file; missing folders are made.
            overwrite: Replace a file that is there, instead of taking the next number that is free.
            whole_run: Show the whole run in each table, instead of the times since the last one.
            strict: Raise ``ExportError`` if a table cannot be written, instead of warning once.
        """
        super().__init__(strict=strict, whole_run=whole_run)
        self.path = path_of(path, "TextExporter")
        """Where the tables are written; final once the first is."""
        self._overwrite = overwrite
        self._file: SharedFile | None = None
        if not os.path.exists(self.path) and not os.access(os.path.dirname(self.path), os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", self.path)

    def _where(self) -> str:
        return self.path

    def export(self, snapshot: Snapshot, *, step: int | None = None) -> None:
        """Take one snapshot, as :meth:`BaseExporter.export`, and raise what the system says to the first one's file."""
        if self._file is None:
            asked, self.path = self.path, create(self.path, overwrite=self._overwrite)
            if asked != self.path:
                warn_once(
                    f"Writing times to {asked!r}: the file exists and is left as it is. They are written to "
                    f"{self.path!r}; overwrite=True replaces a file.",
                    key=self.path,
                )
        super().export(snapshot, step=step)

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        file = self._file or SharedFile(self.path)
        try:
            text = render(report_of_snapshot(snapshot, step), whole_names=True)
            file.append(encode(("" if self._file is None else "\n") + text))
        except BaseException:
            if self._file is None and os.path.isfile(self.path):
                with suppress(OSError):
                    os.unlink(self.path)
            raise
        self._file = file
