"""The table in a new text file."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from deep500_timing._views.table import render, table_of
from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._files import append, create, encode

if TYPE_CHECKING:
    from deep500_timing._summary.snapshot import Snapshot


class TextExporter(BaseExporter):
    """Writes the table to a file of its own, in UTF-8: the first export makes it, later ones add to it.

    Between two exports the file is closed. A report that cannot be written whole is taken back.
    """

    def __init__(self, path: str | os.PathLike[str], *, strict: bool = False) -> None:
        """Note where to write. Nothing is made yet, so that a run that ends early leaves no empty file.

        Args:
            path: A file that must not exist when the first table is written.
            strict: Raise ``ExportError`` if a table cannot be written, instead of warning once.
        """
        super().__init__(strict=strict)
        # The directory may change between two exports.
        self._path = os.path.abspath(os.fspath(path))
        self._ours = False

    def _where(self) -> str:
        return self._path

    def export(self, snapshot: Snapshot, *, step: int | None = None) -> None:
        """Write one table.

        Raises:
            FileExistsError: At the first table: the file exists; it is left as it is.
            OSError: At the first table: the file cannot be made, for the reason that the system gives.
            ExportError: It could not be written and the exporter is strict.
        """
        super().export(snapshot, step=step)

    def _open(self) -> None:
        if not self._ours:
            create(self._path)

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        first = not self._ours
        try:
            append(self._path, encode(("" if first else "\n") + render(table_of(snapshot, step))))
        except BaseException:
            if first:
                with suppress(OSError):
                    os.unlink(self._path)
            raise
        self._ours = True
