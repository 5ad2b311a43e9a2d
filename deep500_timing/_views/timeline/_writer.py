"""Chrome's trace format, which Perfetto and chrome://tracing read: written as a stream, and read from a profiler.

``baseTimeNanoseconds`` plus ``ts`` of an event is Unix time, in a timeline as in a trace of ``torch.profiler``.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from typing import IO, TYPE_CHECKING, Any

from deep500_timing._summary.text import safe_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

    Args = Mapping[str, int | float | str]

_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode


class TraceWriter:
    """Writes a timeline as a stream. Times are in ns, mostly Unix time."""

    def __init__(self, file: IO[bytes], origin_ns: int) -> None:
        self._file, self._origin_ns = file, origin_ns
        self._processes = self._tracks = 0
        self._separator = ""
        head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": origin_ns}
        self._file.write((_encode(head)[:-1] + ',"traceEvents":[\n').encode())

    def process(self, name: str) -> int:
        """Add a process below the others."""
        number = self.process_number()
        for what, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": number})):
            self.write({"ph": "M", "name": what, "pid": number, "tid": 0, "args": value})
        return number

    def process_number(self) -> int:
        self._processes += 1
        return self._processes

    def track(self, process: int, name: str) -> int:
        """Add a track below the others of its process."""
        self._tracks += 1
        for what, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": self._tracks})):
            self.write({"ph": "M", "name": what, "pid": process, "tid": self._tracks, "args": value})
        return self._tracks

    def value(self, process: int, name: str, time_ns: int, value: float) -> None:
        """Set a counter, which holds until its next value."""
        self.write({"ph": "C", "name": name, "pid": process, "ts": self.time(time_ns), "args": {"value": value}})

    def time(self, time_ns: int) -> float:
        """A time in the unit of the file."""
        return (time_ns - self._origin_ns) / 1000

    def write(self, event: dict[str, Any]) -> None:
        self._file.write((self._separator + _encode(event)).encode())
        self._separator = ",\n"

    def close(self) -> None:
        self._file.write(b"\n]}\n")


class Lanes:
    """A track with lanes for overlapping slices.

    Viewers draw a track as a stack, in which a slice ends before the slices around it. A slice that overlaps goes to
    another lane.
    """

    def __init__(self, writer: TraceWriter, process: int, name: str) -> None:
        self._writer, self._process, self._name = writer, process, name
        self._lanes: list[tuple[dict[str, int], list[int]]] = []

    def slice(self, start_ns: int, end_ns: int, name: str, args: Args, arrow: tuple[str, int] = ("", 0)) -> None:
        """Add a slice. Slices must come by rising start; for equal starts the longest first.

        Viewers show ``args`` for a selected slice. An arrow has a number, and begins (``"s"``) or ends (``"f"``) here.
        """
        lane = next((lane for lane in self._lanes if _fits(lane[1], start_ns, end_ns)), None) or self._add()
        place, open_ends = lane
        open_ends.append(end_ns)
        event = {"ph": "X", "name": name, **place, "ts": self._writer.time(start_ns), "dur": (end_ns - start_ns) / 1000}
        self._writer.write({**event, "args": args} if args else event)
        side, number = arrow
        if number:
            # An arrow ends in the slice around its end: a nanosecond inside it, where no other one ends as it begins.
            at = self._writer.time(min(start_ns + 1, end_ns))
            self._writer.write(
                {"ph": side, "bp": "e", "id": number, "cat": "launch", "name": "launch", **place, "ts": at}
            )

    def instant(self, time_ns: int, name: str, args: Args) -> None:
        """Add an event to the first lane."""
        place, _ = self._lanes[0] if self._lanes else self._add()
        self._writer.write({"ph": "i", "s": "t", "name": name, **place, "ts": self._writer.time(time_ns), "args": args})

    def _add(self) -> tuple[dict[str, int], list[int]]:
        place = {"pid": self._process, "tid": self._writer.track(self._process, self._name)}
        self._lanes.append((place, []))
        return self._lanes[-1]


def _fits(open_ends: list[int], start_ns: int, end_ns: int) -> bool:
    while open_ends and open_ends[-1] <= start_ns:
        open_ends.pop()
    return not open_ends or open_ends[-1] >= end_ns


class Trace:
    """The events of a trace of ``torch.profiler``. Its format is that of the timeline, so they keep their form."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = os.fspath(path)
        what = f"Merging the trace {self._path!r}"
        try:
            with open(self._path, "rb") as file:
                data = file.read()
            trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        except (ValueError, EOFError) as error:
            raise ValueError(
                f"{what}: it is no JSON ({error}). Export it with profiler.export_chrome_trace()."
            ) from error
        if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
            raise ValueError(  # noqa: TRY004 (the file is wrong, not a type)
                f"{what}: it has no traceEvents. Export it with profiler.export_chrome_trace()."
            )
        base = trace.get("baseTimeNanoseconds")
        if not isinstance(base, int):
            raise ValueError(  # noqa: TRY004
                f"{what}: it has no baseTimeNanoseconds, so its time is unknown. PyTorch 2.1 or later writes it."
            )
        self._base_ns = base
        self._events = [event for event in trace["traceEvents"] if isinstance(event, dict)]
        self._rank = (trace.get("distributedInfo") or {}).get("rank")

    def first_time_ns(self) -> int | None:
        """When its first event began; None if it has none."""
        times = [event["ts"] for event in self._events if event.get("ph") == "X" and _is_time(event.get("ts"))]
        return self._ns(min(times)) if times else None

    def add(self, writer: TraceWriter, numbers: Iterator[int]) -> None:
        """Write the trace's processes below the others. Its arrows get the next numbers."""
        source = "torch.profiler" if self._rank is None else f"torch.profiler of rank {self._rank}"
        processes: dict[str, int] = {}
        arrows: dict[tuple[str, str], int] = {}
        for event in self._events:
            pid = event.get("pid")
            number = processes.get(str(pid)) or processes.setdefault(str(pid), writer.process_number())
            moved = {**event, "pid": number}
            if event.get("ph") != "M":
                if not (_is_time(event.get("ts")) and _is_time(event.get("dur", 0))):
                    continue
                moved["ts"] = writer.time(self._ns(event["ts"]))
            elif event.get("name") == "process_name":
                name = (event.get("args") or {}).get("name") or pid
                moved["args"] = {"name": f"{source} · {safe_name(str(name))}"}
            if "id" in event:
                key = str(event.get("cat")), str(event["id"])
                moved["id"] = arrows.get(key) or arrows.setdefault(key, next(numbers))
            writer.write(moved)

    def _ns(self, microseconds: float) -> int:
        # In integers: seconds since 1970 as a double are right to a quarter of a microsecond only.
        return self._base_ns + round(microseconds * 1000)


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
