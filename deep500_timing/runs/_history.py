"""Replaces the intervals of old log files by histograms (``keep_bytes``)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._summary.distribution import bin_of
from deep500_timing._summary.nesting import ENDLESS, Paths
from deep500_timing.runs._format import EVENT, HEADER, NO_STEP, SUFFIX, LogFile, name_of
from deep500_timing.runs._read import CHUNK_ROWS, INTERVALS, Log, chunk_of, open_log, read_log
from deep500_timing.runs._writer import Encoder

if TYPE_CHECKING:
    from deep500_timing.runs._read import Batch
    from deep500_timing.runs._writer import Writer

HISTORY = ".history"
SUMMARIZED = "summarized"
"""The event that names a file whose intervals are in the histograms. Readers skip the file."""


class History:
    """Replaces the oldest files of a session by histograms, to limit their size."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._file: LogFile | None = None
        self._encoder = Encoder()

    def keep_within(self, writer: Writer, rank: int) -> None:
        """Summarize and remove files until the rest fits. Called after each rotation."""
        while writer.sealed and self._size_of(writer) > self._keep_bytes:
            path, _ = writer.sealed[0]
            log = open_log(path)
            rows = summarize(log)
            data = b"".join(self._frames(log, rows, os.path.basename(path)))
            if self._file is None:
                stem = name_of(rank, writer.session, 0).removesuffix(SUFFIX)
                self._file = LogFile(os.path.join(writer.folder, stem + HISTORY + SUFFIX))
            # The histograms first, so that a reader in between knows that they include the file.
            self._file.append(data)
            os.unlink(path)
            writer.sealed.pop(0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _size_of(self, writer: Writer) -> int:
        own = 0 if self._file is None else self._file.size
        return own + sum(size for _, size in writer.sealed)

    def _frames(self, log: Log, rows: list[tuple[Any, ...]], name: str) -> list[bytes]:
        frames = []
        if self._file is None:
            frames.append(self._encoder.document(HEADER, {**log.header, "segment": -1}))
        frames += self._encoder.tuples("windows", rows)
        text = f"{log.intervals} intervals are kept as histograms"
        frames.append(self._encoder.document(EVENT, {"time_ns": 0, "what": SUMMARIZED, "text": text, "file": name}))
        return frames


@dataclass
class _Window:
    """One path on one device."""

    bins: dict[int, list[int]]
    first_ns: int
    last_ns: int
    first_step: int
    last_step: int


def summarize(log: Log) -> list[tuple[Any, ...]]:
    """The histograms of a log's intervals as rows of the table ``windows``."""
    paths = Paths()
    windows: dict[tuple[int, int], _Window] = {}
    chunk: list[Batch] = []
    still_open: Batch | None = None
    for batch in read_log(log):
        if batch.table in INTERVALS:
            chunk.append(batch)
        elif batch.table == "open":
            still_open = batch
        elif batch.table == "flushes" and sum(batch.rows for batch in chunk) >= CHUNK_ROWS:
            _add(windows, paths, chunk, still_open, log)
            chunk, still_open = [], None
    _add(windows, paths, chunk, still_open, log)
    names = [log.text(number) for number in range(max(log.names) + 1)]
    return [
        (
            *(window.first_ns, window.last_ns, window.first_step, window.last_step),
            *(paths.text_of(path, names), log.text(device), bin_),
            *numbers,
        )
        for (path, device), window in windows.items()
        for bin_, numbers in sorted(window.bins.items())
    ]


def _add(
    windows: dict[tuple[int, int], _Window], paths: Paths, chunk: list[Batch], still_open: Batch | None, log: Log
) -> None:
    if not chunk:
        return
    columns, begun = chunk_of(log, chunk, still_open)
    nested = paths.nest(columns, begun)
    starts, durations = columns["start_ns"], columns["dur_ns"]
    ends = starts + durations
    keys = np.stack((nested.paths, columns["device"]))
    for path, device in np.unique(keys, axis=1).T.tolist():
        rows = (keys[0] == path) & (keys[1] == device)
        steps = columns["step"][rows]
        numbered = steps[steps != NO_STEP]
        window = windows.setdefault((path, device), _Window({}, ENDLESS, -ENDLESS, NO_STEP, NO_STEP))
        window.first_ns = min(window.first_ns, int(starts[rows].min()))
        window.last_ns = max(window.last_ns, int(ends[rows].max()))
        if len(numbered):
            first = int(numbered.min())
            window.first_step = first if window.first_step == NO_STEP else min(window.first_step, first)
            window.last_step = max(window.last_step, int(numbered.max()))
        _add_durations(window.bins, durations[rows])


def _add_durations(bins: dict[int, list[int]], durations: Any) -> None:
    order = np.argsort(durations, kind="stable")
    ordered = durations[order]
    numbers, first = np.unique(bin_of(ordered), return_index=True)
    totals = np.add.reduceat(ordered, first)
    ends = [*first[1:].tolist(), len(ordered)]
    for number, begin, end, total in zip(numbers.tolist(), first.tolist(), ends, totals.tolist(), strict=True):
        low, high = int(ordered[begin]), int(ordered[end - 1])
        known = bins.get(number)
        if known is None:
            bins[number] = [end - begin, total, low, high]
        else:
            known[:] = [known[0] + end - begin, known[1] + total, min(known[2], low), max(known[3], high)]


def summarized_files(paths: list[str]) -> set[str]:
    """The names of files that a history includes. Such a file may still exist for a moment."""
    found: set[str] = set()
    for path in paths:
        if path.endswith(HISTORY + SUFFIX):
            log = open_log(path)
            for _ in read_log(log):
                pass
            found |= {str(event.get("file")) for event in log.events if event.get("what") == SUMMARIZED}
    return found
