"""Adds a trace of ``torch.profiler`` to a timeline, on the same clock.

``baseTimeNanoseconds`` plus ``ts`` of its events is Unix time, as is a run's.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from typing import TYPE_CHECKING, Any

from deep500_timing._summary.text import safe_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from deep500_timing._views.timeline._writer import TraceWriter


class Trace:
    """The events of a trace. Its format is that of the timeline, so they keep their form."""

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
