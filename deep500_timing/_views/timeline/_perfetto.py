"""Perfetto's TrackEvent: protobuf, written in pieces, with names interned. By Perfetto's own classes.

The format: https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

from deep500_timing._base.require import require
from deep500_timing._views.timeline._tracks import NOTHING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deep500_timing._views.timeline._tracks import Slice

_SEQUENCE = 1
_PIECE = 4096
"""Packets that are held before they are written; pieces of a trace that follow each other are a trace."""
_REALTIME, _BOOTTIME = 1, 6
"""Clocks of Perfetto's ClockSnapshot."""
_NAME_FIELDS = {"int": "int_value", "float": "double_value", "str": "string_value"}


class PerfettoWriter:
    """Writes TrackEvents."""

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
        """See :class:`Writer`."""
        number, descriptor = self._descriptor(name)
        descriptor.process.pid = number
        descriptor.process.process_name = name
        descriptor.child_ordering = self._pb.TrackDescriptor.EXPLICIT
        return number

    def track(self, process: int, name: str) -> int:
        """See :class:`Writer`."""
        number, descriptor = self._descriptor(name)
        self._below(descriptor, process)
        return number

    def counter(self, process: int, name: str, unit: str) -> int:
        """See :class:`Writer`."""
        number, descriptor = self._descriptor(name)
        self._below(descriptor, process)
        if unit == "bytes":
            descriptor.counter.unit = self._pb.CounterDescriptor.UNIT_SIZE_BYTES
        else:
            descriptor.counter.unit_name = unit
        return number

    def begin(self, track: int, of: Slice) -> None:
        """See :class:`Writer`."""
        event = self._event(track, of.start_ns, self._begin_type, of.name, of.args)
        if of.flow_out:
            event.flow_ids.append(of.flow_out)
        if of.flow_in:
            event.terminating_flow_ids.append(of.flow_in)

    def end(self, track: int, time_ns: int) -> None:
        """See :class:`Writer`."""
        self._packet_of(track, time_ns, self._end_type)

    def instant(self, track: int, time_ns: int, name: str, args: Mapping[str, int | float | str] = NOTHING) -> None:
        """See :class:`Writer`."""
        self._event(track, time_ns, self._instant_type, name, args)

    def value(self, counter: int, time_ns: int, value: float) -> None:
        """See :class:`Writer`."""
        self._packet_of(counter, time_ns, self._counter_type).track_event.double_counter_value = value

    def close(self) -> None:
        """See :class:`Writer`."""
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
