"""Snapshots as lines of JSON, written and read back."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from deep500_timing._ground.memory_usage import MemoryUsage, RegionMemory
from deep500_timing._ground.warn import warn_once
from deep500_timing._summary.anchor import ClockAnchor
from deep500_timing._summary.distribution import Distribution
from deep500_timing._summary.snapshot import RegionTimes, Snapshot
from deep500_timing._summary.stats import TimeStats
from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._files import append, check_appendable, encode, ends_amid_line

if TYPE_CHECKING:
    from deep500_timing._ground.protocols import Writable

SCHEMA = "deep500-timing/snapshot"
VERSION = 1


class JsonLinesExporter(BaseExporter):
    """Appends each snapshot to a log as one line of JSON, in ASCII.

    A line is an object with ``schema``, ``version``, ``unit`` (``"s"``, of every time), ``step`` and the fields of
    ``Snapshot``; what is unknown is null, and so is what JSON cannot hold. Lines are written whole, by one system
    call each, so several runs on one machine may share a log. Between two exports the file is closed.
    """

    def __init__(self, destination: str | os.PathLike[str] | Writable, *, strict: bool = False) -> None:
        """Open the log.

        Args:
            destination: A file, which is made if it does not exist; or an open text stream, which is left open.
            strict: Raise ``ExportError`` if a line cannot be written, instead of warning once.

        Raises:
            OSError: The file cannot be appended to, for the reason that the system gives.
        """
        super().__init__(strict=strict)
        self._stream: Writable | None = None
        self._path = ""
        self._mend = False
        if not isinstance(destination, str | os.PathLike):
            self._stream = destination
            return
        self._path = os.path.abspath(os.fspath(destination))
        check_appendable(self._path)
        # A run that was killed amid a line must not take this run's first line with it.
        self._mend = ends_amid_line(self._path)

    def _where(self) -> str:
        return self._path or f"stream {id(self._stream)}"

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        line = to_json(snapshot, step) + "\n"
        if self._stream is not None:
            self._stream.write(line)
            return
        append(self._path, encode("\n" + line if self._mend else line))
        self._mend = False

    def _flush(self) -> None:
        flush = getattr(self._stream, "flush", None)
        if flush is not None:
            flush()


def to_json(snapshot: Snapshot, step: int | None) -> str:
    """A snapshot as one line of JSON, without a line end."""
    record = {"schema": SCHEMA, "version": VERSION, "unit": "s", "step": step, **snapshot.to_dict()}
    return json.dumps(_finite(record), allow_nan=False, default=_plain, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    # A numpy integer as the step; anything else is an error that says so.
    if hasattr(value, "item"):
        return _finite(value.item())
    raise TypeError(f"{value!r} cannot be written as JSON")


def read_json_lines(path: str | os.PathLike[str]) -> list[tuple[Snapshot, int | None]]:
    """Read what a :class:`JsonLinesExporter` wrote.

    Lines that are broken or were written by something else are left out, with one warning that says how many. Fields
    that a later version has added are ignored.

    Returns:
        Each snapshot with its step, in the order of the lines.

    Raises:
        OSError: The file cannot be read.
    """
    found, others = [], 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if record["schema"] != SCHEMA or record["version"] > VERSION:
                    raise ValueError("another format")
                found.append((_snapshot(record), record["step"]))
            except (ValueError, KeyError, TypeError):
                others += 1
    if others:
        warn_once(
            f"Reading times from {os.fspath(path)!r}: {others} line(s) are broken, or not of version {VERSION} of "
            f"{SCHEMA}, and left out."
        )
    return found


def _snapshot(record: dict[str, Any]) -> Snapshot:
    regions = []
    for region in record["regions"]:
        stats = region["stats"]
        if stats is not None:
            interval = stats["median_ci"]
            stats = TimeStats(
                **_known(TimeStats, {**stats, "median_ci": None if interval is None else tuple(interval)})
            )
        memory = _memory(region.get("memory"))
        known = {"stats": stats, "memory": memory, "distribution": _distribution(region.get("distribution"))}
        regions.append(RegionTimes(**_known(RegionTimes, {**region, **known})))
    anchor = record.get("anchor")
    anchor = None if anchor is None else ClockAnchor(**_known(ClockAnchor, anchor))
    return Snapshot(**_known(Snapshot, {**record, "regions": tuple(regions), "anchor": anchor}))


def _distribution(record: dict[str, Any] | None) -> Distribution | None:
    return None if record is None else Distribution(**_known(Distribution, record))


def _memory(record: dict[str, Any] | None) -> RegionMemory | None:
    if record is None:
        return None
    return RegionMemory(**_known(RegionMemory, {**record, "last": MemoryUsage(**_known(MemoryUsage, record["last"]))}))


def _known(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
