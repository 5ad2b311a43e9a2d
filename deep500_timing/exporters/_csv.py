"""Snapshots as rows of a CSV file."""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING, Any

from deep500_timing._base.memory_usage import MAXIMA
from deep500_timing._summary.snapshot import COUNTERS
from deep500_timing._summary.stats import QUANTILES
from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._files import SharedFile, encode, path_of

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from deep500_timing._summary.snapshot import RegionTimes, Snapshot

_IN_SECONDS = ("total", "min", "mean", *QUANTILES, "max", "stdev")
COLUMNS = (
    *("step", "since_unix_time_s", "unix_time_s", "host", "pid", "rank", "world_size", "region", "device", "count"),
    *(f"{name}_s" for name in _IN_SECONDS),
    *("median_ci_low_s", "median_ci_high_s", "quantile_error", "skipped"),
    *COUNTERS,
    *MAXIMA,
)
"""The header. Times are in seconds and their columns say so."""


class CsvExporter(BaseExporter):
    """Appends one row for each region and device of each snapshot to a CSV file (RFC 4180 in UTF-8, lines end in LF).

    A row covers the time since the previous report of the same timer and exporter (``since_unix_time_s``), or the whole
    run where that field is empty. A region without times has a row with a count of 0 and its counters; an unknown
    value is an empty field. The rows of a snapshot are written together, so several processes and runs on one machine
    may share a file. The file is closed between exports.
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

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        rows = [row_of(_values(snapshot, region, step)) for region in snapshot]
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
    known = ["" if isinstance(value, float) and not math.isfinite(value) else value for value in values]
    record = io.StringIO()
    csv.writer(record, lineterminator="\r\n").writerow(known)
    return record.getvalue()[:-2]
