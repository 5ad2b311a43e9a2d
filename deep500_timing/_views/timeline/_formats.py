"""The two formats of a timeline, Chrome's JSON and Perfetto's TrackEvent, over one set of tracks and slices."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from deep500_timing._base.require import require

if TYPE_CHECKING:
    from collections.abc import Mapping


NOTHING: Mapping[str, int | float | str] = {}


class Slice(NamedTuple):
    """A stretch of time with a name."""

    start_ns: int
    end_ns: int
    name: str
    args: Mapping[str, int | float | str] = NOTHING
    flow_out: int = 0
    """The number of an arrow that begins here; 0 for none."""
    flow_in: int = 0
    """The number of an arrow that ends here."""


class Lanes:
    """A track with lanes for overlapping slices.

    Viewers draw a track as a stack, in which a slice ends before the slices around it. A slice that overlaps goes to
    another lane.
    """

    def __init__(self, writer: Writer, process: int, name: str) -> None:
        self._writer, self._process, self._name = writer, process, name
        self._lanes: list[tuple[int, list[int]]] = []

    def slice(self, of: Slice) -> None:
        """Add a slice. Slices must come by rising start; for equal starts the longest first."""
        for track, open_ends in self._lanes:
            while open_ends and open_ends[-1] <= of.start_ns:
                self._writer.end(track, open_ends.pop())
            if not open_ends or open_ends[-1] >= of.end_ns:
                break
        else:
            track, open_ends = self._writer.track(self._process, self._name), []
            self._lanes.append((track, open_ends))
        open_ends.append(of.end_ns)
        self._writer.begin(track, of)

    def instant(self, time_ns: int, name: str, args: Mapping[str, int | float | str] = NOTHING) -> None:
        """Add an event to the first lane."""
        if not self._lanes:
            self._lanes.append((self._writer.track(self._process, self._name), []))
        self._writer.instant(self._lanes[0][0], time_ns, name, args)

    def close(self) -> None:
        for track, open_ends in self._lanes:
            while open_ends:
                self._writer.end(track, open_ends.pop())


def unit_of(metric: str) -> str:
    """The unit at the end of a metric's name, as text; empty without one."""
    for suffix, unit in _UNITS.items():
        if metric.endswith(suffix):
            return unit
    return ""


_UNITS = {
    "_bytes_per_s": "bytes/s",
    "_per_s": "1/s",
    "_bytes": "bytes",
    "_percent": "%",
    "_mhz": "MHz",
    "_w": "W",
    "_c": "°C",
}
"""Longer suffixes first."""


_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode


class ChromeWriter:
    def __init__(self, file: IO[bytes], origin_ns: int) -> None:
        self._file = file
        self._origin_ns = origin_ns
        self._processes = 0
        self._threads: list[tuple[int, str]] = []
        self._separator = ""
        head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": origin_ns}
        self._file.write((_encode(head)[:-1] + ',"traceEvents":[\n').encode())

    def process(self, name: str) -> int:
        self._processes += 1
        for what, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": self._processes})):
            self._write({"ph": "M", "name": what, "pid": self._processes, "tid": 0, "args": value})
        return self._processes

    def track(self, process: int, name: str) -> int:
        self._threads.append((process, name))
        number = len(self._threads)
        for what, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": number})):
            self._write({"ph": "M", "name": what, "pid": process, "tid": number, "args": value})
        return number

    def counter(self, process: int, name: str, unit: str) -> int:
        # In this format a counter is identified by its name and process.
        self._threads.append((process, f"{name} ({unit})" if unit else name))
        return len(self._threads)

    def begin(self, track: int, of: Slice) -> None:
        place: dict[str, Any] = {"pid": self._threads[track - 1][0], "tid": track, "ts": self._time(of.start_ns)}
        args = {"args": of.args} if of.args else {}
        self._write({"ph": "X", "name": of.name, **place, "dur": (of.end_ns - of.start_ns) / 1000, **args})
        # An arrow ends in the slice around its end: a nanosecond inside it, where no other one ends as it begins.
        place["ts"] = self._time(min(of.start_ns + 1, of.end_ns))
        for phase, flow in (("s", of.flow_out), ("f", of.flow_in)):
            if flow:
                self._write({"ph": phase, "bp": "e", "id": flow, "cat": "launch", "name": "launch", **place})

    def end(self, track: int, time_ns: int) -> None:
        """Nothing: a slice said when it ends as it began."""

    def instant(self, track: int, time_ns: int, name: str, args: Mapping[str, int | float | str] = NOTHING) -> None:
        place = {"pid": self._threads[track - 1][0], "tid": track, "ts": self._time(time_ns)}
        self._write({"ph": "i", "s": "t", "name": name, **place, **({"args": args} if args else {})})

    def value(self, counter: int, time_ns: int, value: float) -> None:
        pid, name = self._threads[counter - 1]
        self._write({"ph": "C", "name": name, "pid": pid, "ts": self._time(time_ns), "args": {"value": value}})

    def close(self) -> None:
        self._file.write(b"\n]}\n")

    def _time(self, time_ns: int) -> float:
        return (time_ns - self._origin_ns) / 1000

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write((self._separator + _encode(event)).encode())
        self._separator = ",\n"


_SEQUENCE = 1
_PIECE = 4096
"""Packets that are held before they are written; pieces of a trace that follow each other are a trace."""
_REALTIME, _BOOTTIME = 1, 6
"""Clocks of Perfetto's ClockSnapshot."""
_NAME_FIELDS = {"int": "int_value", "float": "double_value", "str": "string_value"}


class PerfettoWriter:
    def __init__(self, file: IO[bytes], origin_ns: int) -> None:
        self._pb: Any = require(
            "perfetto.protos.perfetto.trace.perfetto_trace_pb2", extra="report", caller="Writing a Perfetto timeline"
        )
        self._file = file
        self._trace = self._pb.Trace()
        self._held = 0
        self._tracks = 0
        self._ranks: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._arg_names: dict[str, int] = {}
        event = self._pb.TrackEvent
        self._begin_type, self._end_type = event.TYPE_SLICE_BEGIN, event.TYPE_SLICE_END
        self._instant_type, self._counter_type = event.TYPE_INSTANT, event.TYPE_COUNTER
        first = self._packet()
        first.sequence_flags = self._pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        for clock in (_BOOTTIME, _REALTIME):
            first.clock_snapshot.clocks.add(clock_id=clock, timestamp=origin_ns)

    def process(self, name: str) -> int:
        number, descriptor = self._descriptor(name)
        descriptor.process.pid = number
        descriptor.process.process_name = name
        descriptor.child_ordering = self._pb.TrackDescriptor.EXPLICIT
        return number

    def track(self, process: int, name: str) -> int:
        number, descriptor = self._descriptor(name)
        self._below(descriptor, process)
        return number

    def counter(self, process: int, name: str, unit: str) -> int:
        number, descriptor = self._descriptor(name)
        self._below(descriptor, process)
        if unit == "bytes":
            descriptor.counter.unit = self._pb.CounterDescriptor.UNIT_SIZE_BYTES
        else:
            descriptor.counter.unit_name = unit
        return number

    def begin(self, track: int, of: Slice) -> None:
        event = self._event(track, of.start_ns, self._begin_type, of.name, of.args)
        if of.flow_out:
            event.flow_ids.append(of.flow_out)
        if of.flow_in:
            event.terminating_flow_ids.append(of.flow_in)

    def end(self, track: int, time_ns: int) -> None:
        self._packet_of(track, time_ns, self._end_type)

    def instant(self, track: int, time_ns: int, name: str, args: Mapping[str, int | float | str] = NOTHING) -> None:
        self._event(track, time_ns, self._instant_type, name, args)

    def value(self, counter: int, time_ns: int, value: float) -> None:
        self._packet_of(counter, time_ns, self._counter_type).track_event.double_counter_value = value

    def close(self) -> None:
        self._file.write(self._trace.SerializeToString())
        self._trace = self._pb.Trace()  # Clearing one would keep all the memory that it ever had.
        self._held = 0

    def _packet(self) -> Any:
        if self._held == _PIECE:
            self.close()
        self._held += 1
        packet = self._trace.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet

    def _packet_of(self, track: int, time_ns: int, kind: int) -> Any:
        packet = self._packet()
        packet.timestamp = time_ns
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet

    def _event(self, track: int, time_ns: int, kind: int, name: str, args: Mapping[str, int | float | str]) -> Any:
        packet = self._packet_of(track, time_ns, kind)
        packet.sequence_flags = 2  # SEQ_NEEDS_INCREMENTAL_STATE: the names before it.
        event = packet.track_event
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names) + 1
            packet.interned_data.event_names.add(iid=number, name=name)
        event.name_iid = number
        for key, value in args.items():
            known = self._arg_names.get(key)
            if known is None:
                known = self._arg_names[key] = len(self._arg_names) + 1
                packet.interned_data.debug_annotation_names.add(iid=known, name=key)
            note = event.debug_annotations.add(name_iid=known)
            setattr(note, _NAME_FIELDS[type(value).__name__], value)
        return event

    def _descriptor(self, name: str) -> tuple[int, Any]:
        self._tracks += 1
        descriptor = self._packet().track_descriptor
        descriptor.uuid = self._tracks
        descriptor.name = name
        return self._tracks, descriptor

    def _below(self, descriptor: Any, process: int) -> None:
        descriptor.parent_uuid = process
        self._ranks[process] = descriptor.sibling_order_rank = self._ranks.get(process, 0) + 1


Writer = ChromeWriter | PerfettoWriter
"""Writes a timeline as a stream. Times are in ns, mostly Unix time; flows have numbers from 1. Tracks lie below their
process in the order in which they were added, and a counter's value holds until the next."""
