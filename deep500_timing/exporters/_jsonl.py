"""Snapshots as lines of JSON."""

from __future__ import annotations

import json
import math
import os
import warnings
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from deep500_timing._base.memory_usage import MemoryUsage, RegionMemory
from deep500_timing._base.warn import stacklevel_of_user
from deep500_timing._summary.distribution import Distribution
from deep500_timing._summary.snapshot import ClockAnchor, RegionTimes, Snapshot
from deep500_timing._summary.stats import TimeStats
from deep500_timing.exceptions import TimingWarning
from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._files import SharedFile, encode, path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import DataclassInstance

    from deep500_timing._base.protocols import Writable

Made = TypeVar("Made", bound="DataclassInstance")

SCHEMA = "deep500-timing/snapshot"
VERSION = 1
_MOST_NAMED = 10
_KINDS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "None": lambda value: value is None,
}


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


def read_json_lines(path: str | os.PathLike[str]) -> list[tuple[Snapshot, int | None]]:
    """Read a log of ``JsonLinesExporter``.

    A call skips lines that are broken, of another schema, or with values of a wrong type or unit, and lists them with
    their numbers and reasons in one warning. Unknown fields are ignored. Two snapshots on one line are both read.

    Returns:
        Each snapshot with its step, in the order of the lines.

    Raises:
        OSError: The file cannot be read.
    """
    found: list[tuple[Snapshot, int | None]] = []
    wrong: list[str] = []
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                found += [_report(record) for record in _objects(line.strip())]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                wrong.append(f"line {number} ({_reason(error)})")
    if wrong:
        named = "; ".join(wrong[:_MOST_NAMED])
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        warnings.warn(
            f"Reading times from {os.fsdecode(path)!r}: {len(wrong)} line(s) are left out: {named}{more}.",
            TimingWarning,
            stacklevel=stacklevel_of_user(),
        )
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _objects(line: str) -> Iterator[Any]:
    decoder, at = json.JSONDecoder(), 0
    while at < len(line):
        found, at = decoder.raw_decode(line, at)
        yield found


def _report(record: Any) -> tuple[Snapshot, int | None]:
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"not of {SCHEMA}")
    version, unit, step = record["version"], record["unit"], record["step"]
    if not _KINDS["int"](version) or not 1 <= version <= VERSION:
        raise ValueError(f"of version {version!r}, where {VERSION} is known")
    if unit != "s":
        raise ValueError(f"its times are in {unit!r}, not in 's'")
    if step is not None and not _KINDS["int"](step):
        raise ValueError(f"step must be an integer, got {step!r:.40}")
    return _snapshot(record), step


def _snapshot(record: dict[str, Any]) -> Snapshot:
    anchor = record.get("anchor")
    known = {
        "regions": tuple(_region(region) for region in record["regions"]),
        "anchor": None if anchor is None else _made(ClockAnchor, anchor),
    }
    return _made(Snapshot, {**record, **known})


def _region(record: dict[str, Any]) -> RegionTimes:
    stats, memory, distribution = record["stats"], record.get("memory"), record.get("distribution")
    known = {
        "stats": None if stats is None else _stats(stats),
        "memory": None
        if memory is None
        else _made(RegionMemory, {**memory, "last": _made(MemoryUsage, memory["last"])}),
        "distribution": None if distribution is None else _made(Distribution, distribution),
    }
    return _made(RegionTimes, {**record, **known})


def _stats(record: dict[str, Any]) -> TimeStats:
    interval = record["median_ci"]
    if interval is not None:
        if not isinstance(interval, list) or len(interval) != 2:
            raise ValueError(f"median_ci must be a pair, got {interval!r:.40}")
        interval = tuple(math.nan if end is None else end for end in interval)
        if not all(map(_KINDS["float"], interval)):
            raise ValueError(f"median_ci must be a pair of numbers, got {interval!r:.40}")
    return _made(TimeStats, {**record, "median_ci": interval})


def _made(kind: type[Made], values: dict[str, Any]) -> Made:
    """Build a data class from its known fields, checking their types."""
    if not isinstance(values, dict):
        raise TypeError(f"{kind.__name__} must be an object, got {values!r:.40}")
    known = {}
    for field in fields(kind):
        if field.name not in values:
            continue
        value = values[field.name]
        allowed = str(field.type).split(" | ")
        if value is None and allowed == ["float"]:
            value = math.nan  # JSON has none, so it was written as null.
        if set(allowed) <= _KINDS.keys() and not any(_KINDS[name](value) for name in allowed):
            raise ValueError(f"{field.name} is {value!r:.40}, not of type {field.type}")
        known[field.name] = value
    return kind(**known)
