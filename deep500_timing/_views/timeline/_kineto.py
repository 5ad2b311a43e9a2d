"""Adds a trace of ``torch.profiler`` to a timeline, on the same clock.

``baseTimeNanoseconds`` plus ``ts`` of its events is Unix time, as is a run's.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from deep500_timing._summary.text import safe_name
from deep500_timing._views.timeline._formats import Lanes, Slice, Writer

if TYPE_CHECKING:
    from os import PathLike

_FLOWS = {"s": "out", "f": "in"}
_OWN = 1 << 63
"""Flows of a trace have numbers above those of the run's own."""


class Trace:
    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = os.fspath(path)
        what = f"Merging the trace {self.path!r}"
        try:
            with open(self.path, "rb") as file:
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
        self._events: list[dict[str, Any]] = [event for event in trace["traceEvents"] if isinstance(event, dict)]
        self.rank = (trace.get("distributedInfo") or {}).get("rank")

    def _ns(self, microseconds: float) -> int:
        # In integers: seconds since 1970 as a double are right to a quarter of a microsecond only.
        return self._base_ns + round(microseconds * 1000)

    def first_time_ns(self) -> int | None:
        """When its first event began; None if it has none."""
        times = [event["ts"] for event in self._events if event.get("ph") == "X" and _is_time(event.get("ts"))]
        return self._ns(min(times)) if times else None

    def add(self, writer: Writer, first_flow: int = 1) -> int:
        """Write the trace's processes below the others."""
        process_names, thread_names = self._names()
        flows, count = self._flows(first_flow)
        by_track: dict[Any, dict[Any, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        memory: dict[tuple[Any, str], list[tuple[int, float]]] = defaultdict(list)
        for event in self._events:
            if event.get("ph") == "X" and _is_time(event.get("ts")) and _is_time(event.get("dur")):
                by_track[event.get("pid")][event.get("tid")].append(event)
            elif event.get("name") == "[memory]" and _is_time(event.get("ts")):
                args = event.get("args") or {}
                for key in ("Total Allocated", "Total Reserved"):
                    if _is_time(args.get(key)):
                        where = f"{key.lower()} of device {args.get('Device Type')}:{args.get('Device Id')}"
                        memory[event.get("pid"), where].append((self._ns(event["ts"]), float(args[key])))
        source = "torch.profiler" if self.rank is None else f"torch.profiler of rank {self.rank}"
        for pid in by_track:
            name = process_names.get(pid) or str(pid)
            process = writer.process(f"{source} · {safe_name(name)}")
            for tid, events in by_track[pid].items():
                lanes = Lanes(writer, process, safe_name(thread_names.get((pid, tid)) or f"thread {tid}"))
                for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
                    out, into = flows.get((pid, tid, event["ts"]), (0, 0))
                    start = self._ns(event["ts"])
                    args = {"category": safe_name(event["cat"])} if isinstance(event.get("cat"), str) else {}
                    end = start + round(event["dur"] * 1000)
                    lanes.slice(Slice(start, end, safe_name(str(event.get("name"))), args, out, into))
                lanes.close()
            for (of_pid, where), values in memory.items():
                if of_pid == pid:
                    counter = writer.counter(process, safe_name(where), "bytes")
                    for at, value in sorted(values):
                        writer.value(counter, at, value)
        return count

    def _names(self) -> tuple[dict[Any, str], dict[tuple[Any, Any], str]]:
        processes: dict[Any, str] = {}
        threads: dict[tuple[Any, Any], str] = {}
        for event in self._events:
            if event.get("ph") == "M":
                said = (event.get("args") or {}).get("name")
                if event.get("name") == "process_name":
                    processes[event.get("pid")] = str(said)
                elif event.get("name") == "thread_name":
                    threads[event.get("pid"), event.get("tid")] = str(said)
        return processes, threads

    def _flows(self, first: int) -> tuple[dict[tuple[Any, Any, float], tuple[int, int]], int]:
        # An arrow from a launch to its kernel begins and ends at the starts of the two.
        numbers: dict[tuple[Any, Any], int] = {}
        flows: dict[tuple[Any, Any, float], tuple[int, int]] = {}
        for event in self._events:
            side = _FLOWS.get(str(event.get("ph")))
            if side is not None and _is_time(event.get("ts")):
                number = _OWN + numbers.setdefault((event.get("cat"), event.get("id")), first + len(numbers))
                at = (event.get("pid"), event.get("tid"), event["ts"])
                out, into = flows.get(at, (0, 0))
                flows[at] = (number, into) if side == "out" else (out, number)
        return flows, first + len(numbers)


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
