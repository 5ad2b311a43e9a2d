"""Snapshots as rows of a CSV file."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from deep500_timing._ground.memory_usage import MAXIMA
from deep500_timing._summary.snapshot import COUNTERS
from deep500_timing._summary.stats import QUANTILES
from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._files import append, check_appendable, encode, ends_amid_line

if TYPE_CHECKING:
    from deep500_timing._summary.snapshot import RegionTimes, Snapshot

_IN_SECONDS = ("total", "min", "mean", *QUANTILES, "max", "stdev")
COLUMNS = (
    *("step", "unix_time_s", "host", "pid", "rank", "region", "device", "count"),
    *(f"{name}_s" for name in _IN_SECONDS),
    *("median_ci_low_s", "median_ci_high_s", "quantile_error", "skipped"),
    *COUNTERS,
    *MAXIMA,
)
"""The header. Times are in seconds and their columns say so."""


class CsvExporter(BaseExporter):
    """Appends one row for each region and device of each snapshot to a CSV file (RFC 4180 in UTF-8, lines end in LF).

    A region without times has a row with a count of 0 and its counters; what is unknown is an empty field. The rows
    of a snapshot are written together. Between two exports the file is closed. Several processes that start an empty
    file at once may write two headers; give each a file of its own, or use JSON Lines.
    """

    def __init__(self, path: str | os.PathLike[str], *, strict: bool = False) -> None:
        """Open the file.

        Args:
            path: A file, which is made if it does not exist, and added to if its first line is the same header.
            strict: Raise ``ExportError`` if rows cannot be written, instead of warning once.

        Raises:
            OSError: The file cannot be appended to, for the reason that the system gives.
            ValueError: It holds something else.
        """
        super().__init__(strict=strict)
        self._path = os.path.abspath(os.fspath(path))
        check_appendable(self._path)
        self._mend = False
        if os.path.getsize(self._path):
            self._check_header()
            self._mend = ends_amid_line(self._path)

    def _check_header(self) -> None:
        with open(self._path, "rb") as file:
            first = file.readline().rstrip(b"\r\n")
        if first != encode(row_of(COLUMNS)):
            raise ValueError(
                f"Adding times to {self._path!r}: its first line, {first[:60].decode('utf-8', 'backslashreplace')!r}, "
                f"is not the header of CsvExporter; name another file, or move this one away."
            )

    def _where(self) -> str:
        return self._path

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        lines = [row_of(_values(snapshot, region, step)) for region in snapshot]
        if not os.path.exists(self._path) or os.path.getsize(self._path) == 0:
            lines.insert(0, row_of(COLUMNS))
        elif self._mend:
            lines.insert(0, "")
        append(self._path, encode("".join(line + "\n" for line in lines)))
        self._mend = False


def _values(snapshot: Snapshot, region: RegionTimes, step: int | None) -> list[Any]:
    stats = region.stats
    values: list[Any] = [step, snapshot.unix_time_s, snapshot.host, snapshot.pid]
    values += [snapshot.rank, region.name, region.device]
    if stats is None:
        values += [0, *(None for _ in _IN_SECONDS), None, None, None, None]
    else:
        low, high = stats.median_ci or (None, None)
        values += [stats.count, *(getattr(stats, name) for name in _IN_SECONDS)]
        values += [low, high, stats.quantile_error, stats.skipped]
    values += [getattr(region, name) for name in COUNTERS]
    return [*values, *(getattr(region.memory, name, None) for name in MAXIMA)]


def row_of(values: Any) -> str:
    """One record without its line end; not by the csv module, which before Python 3.13 left a lone CR unquoted."""
    return ",".join(map(_field, values))


def _field(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    text = str(value)
    if any(character in text for character in ',"\r\n'):
        text = '"' + text.replace('"', '""') + '"'
    return text
