"""Append whole reports to files that several processes may share, also on a disk that fills up: CSV and JSON Lines."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import stat
import warnings
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from deep500_timing._base.files import file_mode, link_flag, lock, unlock
from deep500_timing._base.memory_usage import MAXIMA, MemoryUsage, RegionMemory
from deep500_timing._base.warn import stacklevel_of_user
from deep500_timing._summary.distribution import Distribution, dense, unpack
from deep500_timing._summary.snapshot import COUNTERS, ClockAnchor, RegionTimes, Snapshot
from deep500_timing._summary.stats import QUANTILES, TimeStats
from deep500_timing.exceptions import TimingWarning
from deep500_timing.exporters._delivery import BackgroundExporter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _typeshed import DataclassInstance

    from deep500_timing._base.protocols import Writable

Made = TypeVar("Made", bound="DataclassInstance")

_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_APPEND = os.O_APPEND | os.O_CREAT | _BINARY
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def encode(text: str) -> bytes:
    """As UTF-8; a lone surrogate in a name becomes its escape."""
    return text.encode("utf-8", "backslashreplace")


def path_of(destination: Any, caller: str) -> str:
    """The absolute path that a user means, so that a later change of the working directory changes nothing.

    Missing folders are made.
    """
    try:
        text = os.fsdecode(destination)
    except TypeError:
        remedy = "give the name of a file, such as 'times.txt'"
        if callable(getattr(destination, "write", None)):
            remedy = "it is an open file; print_all_time_stats and TerminalExporter take one"
        raise TypeError(f"{caller} was given {destination!r:.100}, which is not a path: {remedy}.") from None
    if not text or "\0" in text:
        what = "holds a NUL character" if text else "is empty"
        raise ValueError(f"{caller} was given the path {text!r:.100}, which {what}; name a file, such as 'times.txt'.")
    path = os.path.abspath(text)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, f"{caller} was given a folder; name a file in it", path)
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        _make_folder(folder, path, caller)
    return path


def _make_folder(folder: str, path: str, caller: str) -> None:
    # The system reports a file in the middle of the path as "file exists".
    there = folder
    while not os.path.lexists(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    if os.path.isfile(there):
        what = f"{caller} was given a path below {there!r}, which is a file and no folder; name another place"
        raise NotADirectoryError(errno.ENOTDIR, what, path)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        error.filename = path
        raise


def create(path: str, *, overwrite: bool = False) -> str:
    """Make an empty file.

    Args:
        path: The file. A device such as ``/dev/null`` is used as it is.
        overwrite: Empty a file that is there, instead of taking the first of ``times-2.txt``, ``times-3.txt`` ... that
            is free.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        return path
    if overwrite:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY | link_flag(path), file_mode()))
        return path
    root, extension = os.path.splitext(path)
    candidate, number = path, 1
    while True:
        with suppress(FileExistsError):
            os.close(os.open(candidate, os.O_WRONLY | _APPEND | os.O_EXCL, file_mode()))
            return candidate
        number += 1
        candidate = f"{root}-{number}{extension}"


class SharedFile:
    """Append whole reports to a file that other processes may append to as well.

    The file is closed between two reports. Reading its size, writing, and undoing a partial write hold one lock.
    """

    def __init__(self, path: str, *, header: bytes = b"") -> None:
        """See that the file can be added to, making it if need be, and that its first line is the header."""
        self.path = path
        self._header = header
        descriptor = self._open()
        try:
            self._what_comes_first(descriptor, self._size(descriptor))
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | _APPEND | link_flag(self.path), file_mode())

    def append(self, data: bytes) -> None:
        """Append a report, starting on a new line.

        If the disk fills up, the partial report is removed.
        """
        try:
            descriptor = self._open()
            try:
                lock(descriptor)
                size = self._size(descriptor)
                self._write(descriptor, self._what_comes_first(descriptor, size) + data, size)
            finally:
                unlock(descriptor)
                os.close(descriptor)
        except OSError as error:
            # Only `open` sets the file name in its errors.
            if error.filename is None:
                error.filename = self.path
            raise

    def _size(self, descriptor: int) -> int:
        status = os.fstat(descriptor)
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    def _what_comes_first(self, descriptor: int, size: int) -> bytes:
        """The header of an empty file, or the end of a line that was cut off. Another header is an error."""
        if size == 0:
            return self._header
        first = _read(descriptor, 0, len(self._header))
        if first.replace(b"\r\n", b"\n") != self._header:
            shown = first.partition(b"\n")[0][:60].decode("utf-8", "backslashreplace").rstrip("\r")
            raise ValueError(
                f"Adding times to {self.path!r}: its first line, {shown!r}, is not the header of these reports; name "
                f"another file, or move this one away."
            )
        return b"" if _read(descriptor, size - 1, 1) == b"\n" else b"\n"

    def _write(self, descriptor: int, data: bytes, size: int) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            with suppress(OSError):
                # Keep a line that another process has written since without the lock.
                if os.fstat(descriptor).st_size == size + written:
                    os.ftruncate(descriptor, size)
            raise


def _read(descriptor: int, at: int, count: int) -> bytes:
    os.lseek(descriptor, at, os.SEEK_SET)
    return os.read(descriptor, count)


# --- CSV --------------------------------------------------------------------------------------------------------------

_IN_SECONDS = ("total", "min", "mean", *QUANTILES, "max", "stdev")
COLUMNS = (
    *("step", "since_unix_time_s", "unix_time_s", "host", "pid", "rank", "world_size", "region", "device", "count"),
    *(f"{name}_s" for name in _IN_SECONDS),
    *("median_ci_low_s", "median_ci_high_s", "quantile_error", "skipped"),
    *COUNTERS,
    *MAXIMA,
)
"""The header. Times are in seconds and their columns say so."""


class CsvExporter(BackgroundExporter):
    """Appends one row for each region and device of each snapshot to a CSV file (RFC 4180 in UTF-8, lines end in LF).

    A row covers the time since the previous report of the same timer and exporter (``since_unix_time_s``), or the whole
    run where that field is empty. A region without times has a row with a count of 0 and its counters; an unknown
    value is an empty field. The rows of a snapshot are written together and in the background, so several processes and
    runs on one machine may share a file. The file is closed between exports.
    """

    def __init__(self, path: str | os.PathLike[str], *, whole_run: bool = False, strict: bool = False) -> None:
        """Open the file.

        Args:
            path: A file, which is made with its folders if it does not exist, and added to if its first line is the
                same header.
            whole_run: Write the times of the whole run in each report.
            strict: Raise ``ExportError`` if rows cannot be written, instead of warning once.
        """
        super().__init__(strict=strict, whole_run=whole_run)
        self._file = SharedFile(path_of(path, "CsvExporter"), header=encode(row_of(COLUMNS) + "\n"))

    def _where(self) -> str:
        return self._file.path

    def _send(self, snapshot: Snapshot, destination: int | None, timeout_s: float | None) -> None:
        rows = [row_of(_values(snapshot, region, destination)) for region in snapshot]
        if rows:
            self._file.append(encode("".join(row + "\n" for row in rows)))


def _values(snapshot: Snapshot, region: RegionTimes, step: int | None) -> list[Any]:
    stats = region.stats
    values: list[Any] = [step, snapshot.since_unix_time_s, snapshot.unix_time_s, snapshot.host, snapshot.pid]
    values += [snapshot.rank, snapshot.world_size, region.name, region.device]
    if stats is None:
        values += [0, *(None for _ in _IN_SECONDS), None, None, None, None]
    else:
        low, high = stats.median_ci or (None, None)
        values += [stats.count, *(getattr(stats, name) for name in _IN_SECONDS)]
        values += [low, high, stats.quantile_error, stats.skipped]
    values += [getattr(region, name) for name in COUNTERS]
    return [*values, *(getattr(region.memory, name, None) for name in MAXIMA)]


def row_of(values: Sequence[Any]) -> str:
    """One record without its line end. Before Python 3.13, csv quotes a lone CR only where lines end in CR and LF."""
    known = [
        ""
        if isinstance(value, float) and not math.isfinite(value)
        # A spreadsheet would run such a text as a formula.
        else f"'{value}"
        if isinstance(value, str) and value.startswith(_FORMULAS)
        else value
        for value in values
    ]
    record = io.StringIO()
    csv.writer(record, lineterminator="\r\n").writerow(known)
    return record.getvalue()[:-2]


# --- JSON Lines -------------------------------------------------------------------------------------------------------

SCHEMA = "deep500-timing/snapshot"
VERSION = 1
_MOST_NAMED = 10
_TYPES: dict[str, Any] = {"str": str, "int": int, "float": int | float}
_NESTED: dict[str, Any] = {
    kind.__name__: kind for kind in (ClockAnchor, Distribution, MemoryUsage, RegionMemory, TimeStats)
}


class JsonLinesExporter(BackgroundExporter):
    """Appends each snapshot to a log as one line of JSON, in ASCII.

    A line is an object with ``schema``, ``version``, ``unit`` (``"s"``, of every time), ``step`` and the fields of
    ``Snapshot``; unknown values, NaN and infinity are null. A line covers the time since the previous one of
    the same timer and exporter (``since_unix_time_s``), or the whole run where that is null. Lines are
    written whole, so several processes and runs on one machine may share a log. A file is written to in the background
    and closed between two exports; an open stream is written to by the exporting thread.
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
            self._is_direct = True  # The user may close it at any time.
        else:
            self._file = SharedFile(path_of(destination, "JsonLinesExporter"))

    def _where(self) -> str:
        return self._file.path if self._file is not None else f"stream {id(self._stream)}"

    def _send(self, snapshot: Snapshot, destination: int | None, timeout_s: float | None) -> None:
        line = to_json(snapshot, destination) + "\n"
        if self._file is not None:
            self._file.append(encode(line))
        else:
            self._stream.write(line)

    def _flush(self) -> None:
        super()._flush()
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
    if not _is_of("int", version) or not 1 <= version <= VERSION:
        raise ValueError(f"of version {version!r}, where {VERSION} is known")
    if unit != "s":
        raise ValueError(f"its times are in {unit!r}, not in 's'")
    if step is not None and not _is_of("int", step):
        raise ValueError(f"step must be an integer, got {step!r:.40}")
    return _made(Snapshot, record), step


def _made(kind: type[Made], values: dict[str, Any]) -> Made:
    """Build a data class from its known fields, checking their types."""
    if not isinstance(values, dict):
        raise TypeError(f"{kind.__name__} must be an object, got {values!r:.40}")
    known = {field.name: field for field in fields(kind) if field.name in values}
    return kind(**{name: _checked(name, str(field.type), values[name]) for name, field in known.items()})


def _checked(name: str, kind: str, value: Any) -> Any:
    """The value of a field of that type, or a ValueError."""
    first, *others = kind.split(" | ")
    if value is None:
        if "None" in others:
            return None
        if kind == "float":
            return math.nan  # JSON has none, so it was written as null.
        raise ValueError(f"{name} is None, not of type {kind}")
    if first == "Distribution" and isinstance(value, dict):
        first_bin, counts = dense(*unpack(value["bins"]))
        value = {**value, "first_bin": first_bin, "counts": counts}
    if first in _NESTED:
        return _made(_NESTED[first], value)
    if name == "regions":
        return tuple(_made(RegionTimes, region) for region in value)
    if name == "median_ci":
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError(f"median_ci must be a pair, got {value!r:.40}")
        return tuple(_checked("an end of median_ci", "float", end) for end in value)
    if not _is_of(first, value):
        raise ValueError(f"{name} is {value!r:.40}, not of type {kind}")
    return value


def _is_of(kind: str, value: Any) -> bool:
    return isinstance(value, _TYPES.get(kind, object)) and (kind not in _TYPES or not isinstance(value, bool))
