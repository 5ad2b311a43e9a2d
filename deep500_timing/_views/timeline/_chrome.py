"""Chrome's trace event format: JSON that many viewers read.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any

from deep500_timing._views.timeline._tracks import NOTHING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deep500_timing._views.timeline._tracks import Slice

_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode


class ChromeWriter:
    """Writes trace events, each on its line."""

    def __init__(self, file: IO[bytes], origin_ns: int) -> None:
        self._file = file
        self._origin_ns = origin_ns
        self._processes = 0
        self._threads: list[tuple[int, str]] = []
        self._separator = ""
        head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": origin_ns}
        self._file.write((_encode(head)[:-1] + ',"traceEvents":[\n').encode())

    def process(self, name: str) -> int:
        """See :class:`Writer`."""
        self._processes += 1
        for what, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": self._processes})):
            self._write({"ph": "M", "name": what, "pid": self._processes, "tid": 0, "args": value})
        return self._processes

    def track(self, process: int, name: str) -> int:
        """See :class:`Writer`."""
        self._threads.append((process, name))
        number = len(self._threads)
        for what, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": number})):
            self._write({"ph": "M", "name": what, "pid": process, "tid": number, "args": value})
        return number

    def counter(self, process: int, name: str, unit: str) -> int:
        """See :class:`Writer`."""
        # In this format a counter is identified by its name and process.
        self._threads.append((process, f"{name} ({unit})" if unit else name))
        return len(self._threads)

    def begin(self, track: int, of: Slice) -> None:
        """See :class:`Writer`."""
        place: dict[str, Any] = {"pid": self._threads[track - 1][0], "tid": track, "ts": self._time(of.start_ns)}
        args = {"args": of.args} if of.args else {}
        self._write({"ph": "X", "name": of.name, **place, "dur": (of.end_ns - of.start_ns) / 1000, **args})
        # An arrow ends in the slice around its end: a nanosecond inside it, where no other one ends as it begins.
        place["ts"] = self._time(min(of.start_ns + 1, of.end_ns))
        for phase, flow in (("s", of.flow_out), ("f", of.flow_in)):
            if flow:
                self._write({"ph": phase, "bp": "e", "id": flow, "cat": "launch", "name": "launch", **place})

    def end(self, track: int, time_ns: int) -> None:
        """See :class:`Writer`: a slice said when it ends as it began."""

    def instant(self, track: int, time_ns: int, name: str, args: Mapping[str, int | float | str] = NOTHING) -> None:
        """See :class:`Writer`."""
        place = {"pid": self._threads[track - 1][0], "tid": track, "ts": self._time(time_ns)}
        self._write({"ph": "i", "s": "t", "name": name, **place, **({"args": args} if args else {})})

    def value(self, counter: int, time_ns: int, value: float) -> None:
        """See :class:`Writer`."""
        pid, name = self._threads[counter - 1]
        self._write({"ph": "C", "name": name, "pid": pid, "ts": self._time(time_ns), "args": {"value": value}})

    def close(self) -> None:
        """See :class:`Writer`."""
        self._file.write(b"\n]}\n")

    def _time(self, time_ns: int) -> float:
        return (time_ns - self._origin_ns) / 1000

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write((self._separator + _encode(event)).encode())
        self._separator = ",\n"
