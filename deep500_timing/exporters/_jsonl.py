"""Snapshots as lines of JSON."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._files import SharedFile, encode, path_of

if TYPE_CHECKING:
    import os

    from deep500_timing._base.protocols import Writable
    from deep500_timing._summary.snapshot import Snapshot

SCHEMA = "deep500-timing/snapshot"
VERSION = 1


class JsonLinesExporter(BaseExporter):
    """Appends each snapshot to a log as one line of JSON, in ASCII.

    A line is an object with ``schema``, ``version``, ``unit`` (``"s"``, of every time), ``step`` and the fields of
    ``Snapshot``; unknown values, NaN and infinity are null. A line covers the time since the previous one of
    the same timer and exporter (``since_unix_time_s``), or the whole run where that is null. Lines are
    written whole, so several processes and runs on one machine may share a log. Between two exports the file is closed.
    """

    def __init__(
        self, destination: str | os.PathLike[str] | Writable, *, whole_run: bool = False, strict: bool = False
    ) -> None:
        """Open the log.

        Args:
            destination: A file, which is made with its folders if it does not exist, and added to if it does; or an
                open text stream, which is left open.
            whole_run: Write the times of the whole run in each line.
            strict: Raise ``ExportError`` if a line cannot be written, instead of warning once.

        Raises:
            TypeError: It is neither.
            ValueError: The path is empty, or holds a NUL.
            OSError: The file cannot be added to, for the reason that the system gives.
        """
        super().__init__(strict=strict, whole_run=whole_run)
        self._stream: Any = None
        self._file: SharedFile | None = None
        if callable(getattr(destination, "write", None)):
            self._stream = destination
        else:
            self._file = SharedFile(path_of(destination, "JsonLinesExporter"))

    def _where(self) -> str:
        return self._file.path if self._file is not None else f"stream {id(self._stream)}"

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        line = to_json(snapshot, step) + "\n"
        if self._file is not None:
            self._file.append(encode(line))
        else:
            self._stream.write(line)

    def _flush(self) -> None:
        flush = getattr(self._stream, "flush", None)
        if flush is not None:
            flush()


def to_json(snapshot: Snapshot, step: int | None) -> str:
    """A snapshot as one line of JSON, without a line end."""
    record = {"schema": SCHEMA, "version": VERSION, "unit": "s", "step": step, **snapshot.to_dict()}
    return json.dumps(_finite(record), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
