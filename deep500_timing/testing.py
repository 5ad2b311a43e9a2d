"""Test doubles for programs that use the timers, and for adapters: clocks that move only when told to.

For the tests of a device clock or an exporter of your own there are suites to inherit, :class:`DeviceClockContract` and
:class:`ExporterContract`.

::

    clock = ManualClock()
    tmr = Timer(clock=clock)
    with tmr.region("load"):
        clock.advance(0.5)
    assert tmr.get_time("load") == [0.5]
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from deep500_timing.devices._contract import DeviceClockContract, DeviceRig
from deep500_timing.exporters import Exporter
from deep500_timing.timer import Timer

if TYPE_CHECKING:
    from deep500_timing._summary.snapshot import Snapshot

__all__ = [
    "DeviceClockContract",
    "DeviceRig",
    "ExporterContract",
    "InMemoryExporter",
    "ManualClock",
    "ManualDeviceClock",
    "ManualEvent",
]


class ManualClock:
    """A host clock that stands still until it is moved."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        """Start at ``now_ns`` nanoseconds."""
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """The time in nanoseconds."""
        return self._now_ns

    def advance(self, seconds: float) -> None:
        """Move on by ``seconds``."""
        self.advance_ns(round(seconds * 1e9))

    def advance_ns(self, nanoseconds: int) -> None:
        """Move on by ``nanoseconds``."""
        self._now_ns += nanoseconds


class ManualEvent:
    """An event of a :class:`ManualDeviceClock`."""

    __slots__ = ("recorded_ns", "stream")

    def __init__(self) -> None:
        """Not recorded yet."""
        self.recorded_ns: int | None = None
        self.stream: object = None


class ManualDeviceClock:
    """A device with streams that take work of known length, and with a time that tests advance.

    ``calls`` counts its calls: ``record``, ``is_done``, ``wait``, ``elapsed_ns``, ``new_event``,
    ``stream``, ``is_capturing``.
    """

    def __init__(self, name: str = "manual") -> None:
        """An idle device at time 0 with one stream, ``"stream 0"``."""
        self.name = name
        self.calls: Counter[str] = Counter()
        self.capturing = False
        self.now_ns = 0
        self._tails: dict[object, int] = {}
        self._current: dict[int, object] = {}
        self._faults: dict[str, Exception] = {}

    # --- for tests ---------------------------------------------------------------------------------------

    def launch(self, seconds: float) -> None:
        """Queue work of that length in the current stream."""
        stream = self._stream_now()
        self._tails[stream] = max(self._tails.get(stream, 0), self.now_ns) + round(seconds * 1e9)

    def advance(self, seconds: float) -> None:
        """Let the device work for that time."""
        self.now_ns += round(seconds * 1e9)

    def finish(self) -> None:
        """Let the device work until everything queued is done."""
        self.now_ns = max([self.now_ns, *self._tails.values()])

    def use_stream(self, stream: object) -> None:
        """Make ``stream`` the calling thread's current stream."""
        self._current[threading.get_ident()] = stream

    def fail(self, method: str, error: Exception | None) -> None:
        """Make ``method`` raise ``error`` from now on; None lets it work again."""
        if error is None:
            self._faults.pop(method, None)
        else:
            self._faults[method] = error

    # --- for timers --------------------------------------------------------------------------------------

    def stream(self) -> object:
        """The calling thread's current stream."""
        self._called("stream")
        return self._stream_now()

    def is_capturing(self) -> bool:
        """Whether a test said so."""
        self._called("is_capturing")
        return self.capturing

    def new_event(self, stream: object) -> ManualEvent:
        """A new event."""
        self._called("new_event")
        return ManualEvent()

    def record(self, event: ManualEvent, stream: object) -> None:
        """Queue the event behind the stream's work."""
        self._called("record")
        event.recorded_ns = max(self._tails.get(stream, 0), self.now_ns)
        event.stream = stream

    def is_done(self, event: ManualEvent) -> bool:
        """Whether the device's time has reached the event."""
        self._called("is_done")
        if self.capturing:
            raise RuntimeError("an event was queried while a stream was being captured")
        return event.recorded_ns is None or event.recorded_ns <= self.now_ns

    def wait(self, event: ManualEvent) -> None:
        """Let the device work until it reaches the event."""
        self._called("wait")
        self.now_ns = max(self.now_ns, event.recorded_ns or 0)

    def elapsed_ns(self, start: ManualEvent, end: ManualEvent) -> int:
        """Nanoseconds between two events that are done."""
        self._called("elapsed_ns")
        if (
            start.recorded_ns is None
            or end.recorded_ns is None
            or max(start.recorded_ns, end.recorded_ns) > self.now_ns
        ):
            raise RuntimeError("elapsed time of an event that is not done")
        return end.recorded_ns - start.recorded_ns

    def _stream_now(self) -> object:
        return self._current.get(threading.get_ident(), "stream 0")

    def _called(self, method: str) -> None:
        self.calls[method] += 1
        if method in self._faults:
            raise self._faults[method]


class InMemoryExporter:
    """Keeps the snapshots that it is given, with their steps."""

    def __init__(self) -> None:
        """Start empty."""
        self.exported: list[tuple[Snapshot, int | None]] = []
        self.flushes = 0
        self.closed = False

    def export(self, snapshot: Snapshot, *, step: int | None = None) -> None:
        """Keep the snapshot."""
        self.exported.append((snapshot, step))

    def flush(self) -> None:
        """Count the call."""
        self.flushes += 1

    def close(self) -> None:
        """Note the call."""
        self.closed = True


class ExporterContract:
    """What every :class:`~deep500_timing.exporters.Exporter` must do, as tests.

    Under pytest, a class of tests inherits it and has a fixture ``exporter`` that returns a new one.
    """

    def test_is_an_exporter(self, exporter: Exporter) -> None:
        """It has every method."""
        assert isinstance(exporter, Exporter)

    def test_takes_what_a_timer_has(self, exporter: Exporter) -> None:
        """With a step or without: no region, one with times, and one that only runs, which has none."""
        tmr = Timer(clock=ManualClock())
        exporter.export(tmr.snapshot(places=True), step=None)
        with tmr.region("load"):
            pass
        tmr.start("running")
        exporter.export(tmr.snapshot(places=True), step=3)
        exporter.flush()

    def test_is_closed_twice(self, exporter: Exporter) -> None:
        """As its timer and the end of the program may both do."""
        exporter.close()
        exporter.close()
