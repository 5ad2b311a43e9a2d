"""The device module ``torch.testdev``: what torch asks of an accelerator's module, and controls for tests.

Import it through `load` of this package, which builds the extension and registers the backend. All times are
integer nanoseconds of the virtual clock.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import _build

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import Literal

    Fault = Literal["record", "query", "elapsed", "synchronize", "stream_lookup"]

_ext: ModuleType = _build.load_extension()
_available = True
_probes = 0
_probed_by = 0

DEVICE_COUNT: int = _ext.DEVICE_COUNT
Event = torch.Event
Stream = torch.Stream


class Counters(NamedTuple):
    """Calls that reached the device since the last reset, the ones that raised included.

    Attributes:
        records: ``event.record()`` and ``stream.record_event()``; `Stream.wait_stream` makes one too.
        queries: Event queries. ``elapsed_time`` of torch makes one or two itself before it asks the
            device, so `own_queries` is what the code under test asked for.
        elapsed_calls: ``elapsed_time`` of two events that are done.
        event_synchronizes: ``event.synchronize()`` of a recorded event.
        stream_synchronizes: ``stream.synchronize()``.
        device_synchronizes: ``torch.accelerator.synchronize()``.
        events_created: Events of the device; torch makes one at the first ``record()``, not in
            ``torch.Event()``.
        events_destroyed: Those of `events_created` that are gone.
        events_alive: Those of the events created since `reset` that exist (`reset_counters` leaves it alone).
        stream_lookups: Reads of the current stream: ``current_stream()``, ``record()`` without a stream, and
            some by torch itself (in ``torch.compile``, for one).
        device_lookups: Reads of the current device, by callers as by torch itself.
        stream_queries: ``stream.query()``.
        streams_created: ``torch.Stream()``.
        blocks: ``event.wait()``, ``stream.wait_event()``, ``stream.wait_stream()``.
        launches: `launch`, outside of a capture.
        records_while_capturing: Records on a stream that is capturing.
        queries_while_capturing: Event queries while any stream is capturing: they would break the capture.
        synchronizes_while_capturing: Synchronizes of any kind while any stream is capturing.
        launches_while_capturing: `launch` on a stream that is capturing.
        set_devices: Times that a device was made current, by torch itself too.
        foreign_events_destroyed: Events destroyed in another process than the one that recorded them.
        full_queue_waits: Records and launches that found their stream full, see `set_queue_limit`.
        faults: Injected faults that were raised.
    """

    records: int
    queries: int
    elapsed_calls: int
    event_synchronizes: int
    stream_synchronizes: int
    device_synchronizes: int
    events_created: int
    events_destroyed: int
    events_alive: int
    stream_lookups: int
    device_lookups: int
    stream_queries: int
    streams_created: int
    blocks: int
    launches: int
    records_while_capturing: int
    queries_while_capturing: int
    synchronizes_while_capturing: int
    launches_while_capturing: int
    set_devices: int
    foreign_events_destroyed: int
    full_queue_waits: int
    faults: int

    @property
    def synchronizes(self) -> int:
        """Synchronizes of every kind: the number that has to stay 0."""
        return self.event_synchronizes + self.stream_synchronizes + self.device_synchronizes

    @property
    def own_queries(self) -> int:
        """Queries less the two that torch made for each ``elapsed_time`` that reached the device."""
        return self.queries - 2 * self.elapsed_calls


def launch(duration_ns: int, stream: torch.Stream | None = None) -> tuple[int, int]:
    """Queue `duration_ns` of work on `stream` (by default the current one); return its start and end.

    It starts at the end of the stream's queue, or now. While the stream is capturing the work goes
    into the graph: the timeline stays as it is and the two times are equal.

    Raises:
        ValueError: `duration_ns` is negative.
    """
    started_ended: tuple[int, int] = _ext.launch(duration_ns, *_stream_key(stream))
    return started_ended


def advance(ns: int) -> int:
    """Move the clock on by `ns` and return its new reading.

    Raises:
        ValueError: `ns` is negative.
    """
    return int(_ext.advance(ns))


def drain() -> int:
    """Move the clock on to the end of all queued work, which counts as no synchronize; return its reading."""
    return int(_ext.drain())


def now_ns() -> int:
    """Read the clock. A host clock that reads it too shares one timeline with the device."""
    return int(_ext.now_ns())


def tail_ns(stream: torch.Stream | None = None) -> int:
    """Return when the work queued on `stream` (by default the current one) ends; it may lie in the past."""
    return int(_ext.tail_ns(*_stream_key(stream)))


def counters() -> Counters:
    """Return a copy of the counters; looking is not counted."""
    return Counters(**_ext.counters())


def reset_counters() -> None:
    """Set the counters to 0, `events_alive` excepted."""
    _ext.reset_counters()


def reset() -> None:
    """Go back to the state after loading.

    That is time 0, idle streams, device 0 and the default streams current in every thread, counters 0, no
    capture, no faults, available. Events recorded before are done from then on, and have no elapsed time with
    events recorded after; they no longer count as alive. Streams stay valid.
    """
    global _available, _probes, _probed_by
    _ext.reset()
    _available = True
    _probes = _probed_by = 0


def set_capturing(on: bool, stream: torch.Stream | None = None) -> None:
    """Begin or end a graph capture: of `stream`, or of every stream when there is none.

    An event recorded on a capturing stream can never be read: ``query()``, ``synchronize()`` and
    ``elapsed_time()`` raise, until it is recorded again outside of a capture.
    """
    _ext.set_capturing(on, None if stream is None else _stream_key(stream))


is_current_stream_capturing = _ext.is_current_stream_capturing
"""Tell whether the current stream is capturing, as ``torch.cuda`` and ``Stream.is_capturing()`` do; a function in C."""

MODES = ("global", "thread_local", "relaxed")


class TestGraph:
    """A capture that dies of what kills CUDA's: queries and waits of other threads, as its mode has it."""

    __test__ = False

    def capture_begin(self, stream: torch.Stream | None = None, capture_error_mode: str = "global") -> None:
        """Capture `stream` (by default the current one), owned by the calling thread.

        Mode "global": a query or a wait on any thread ends the capture and raises there (900). "thread_local": those
        of this thread do. "relaxed": none.

        Raises:
            RuntimeError: It is the default stream, or another capture is under way.
        """
        _ext.begin_capture(*_stream_key(stream), MODES.index(capture_error_mode))

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            RuntimeError: Something has ended it before (901).
        """
        _ext.end_capture()


def exchange_capture_mode(mode: str) -> str:
    """Set the calling thread's own mode, as ``cudaThreadExchangeStreamCaptureMode`` does, and return the former."""
    return MODES[_ext.exchange_capture_mode(MODES.index(mode))]


def contexts() -> list[int]:
    """The devices that have a context: the ones that were ever made current since the last reset."""
    return [index for index, made in enumerate(_ext.contexts()) if made]


def set_streams_tell_captures(on: bool) -> None:
    """False plays PyTorch before 2.12, with a ``Stream`` without ``is_capturing``."""
    _ext.set_streams_tell_captures(on)


def fail_next(kind: Fault, n: int = 1) -> None:
    """Let the next `n` calls of a kind raise a RuntimeError; 0 takes it back.

    A faulty ``query`` also ends ``elapsed_time``, which queries first. ``synchronize`` means all three kinds.

    Raises:
        ValueError: `kind` is unknown or `n` is negative.
    """
    _ext.fail_next(kind, n)


def set_float32_elapsed(on: bool) -> None:
    """Whether ``elapsed_time`` counts half microseconds in a float32 of milliseconds, as CUDA's does; it does at first.

    False gives the exact time.
    """
    _ext.set_float32_elapsed(on)


def set_queue_limit(limit: int) -> None:
    """Let a stream hold that many works and records that are not done; 0, as from the start, any number.

    One more call waits for the first of them: the clock moves on to its end. CUDA holds about 1 000.
    """
    _ext.set_queue_limit(limit)


def set_available(on: bool) -> None:
    """Play a machine with the backend but without a device: none is available, and their number is 0."""
    global _available
    _available = on


# --- what torch asks of the module of a device


def is_available() -> bool:
    """Answer ``torch.accelerator.is_available()``. Starts the driver, as CUDA's does: see `probes`."""
    _start_driver()
    return _available


def probes() -> int:
    """How often the driver was asked since the last reset; children that are forked later cannot use the device."""
    return _probes


def _start_driver() -> None:
    global _probes, _probed_by
    _probes += 1
    _probed_by = _probed_by or os.getpid()


def is_initialized() -> bool:
    """Whether the device was used since the last reset."""
    return any(_ext.contexts())


def device_count() -> int:
    """Answer ``torch.accelerator.device_count()``. Starts the driver."""
    _start_driver()
    return DEVICE_COUNT if _available else 0


def current_device() -> int:
    """Return the index of this thread's current device; not counted."""
    return int(_ext.current_device())


def set_device(device: int) -> None:
    """Set this thread's current device."""
    torch.accelerator.set_device_index(device)


def current_stream(device: int | None = None) -> torch.Stream:
    """Return this thread's current stream on `device`; counted as a lookup."""
    return torch.accelerator.current_stream(device)


def synchronize(device: int | None = None) -> None:
    """Wait for all work of `device`; counted as a synchronize."""
    torch.accelerator.synchronize(device)


def manual_seed_all(seed: int) -> None:
    """``torch.manual_seed`` calls it; the device has no random numbers."""


def _is_in_bad_fork() -> bool:
    return _probed_by not in (0, os.getpid())


@contextlib.contextmanager
def device(index: int) -> Iterator[None]:
    """A block in which another device is current."""
    before = current_device()
    torch.accelerator.set_device_index(index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def get_amp_supported_dtype() -> list[Any]:
    """No tensors, so no types for autocast."""
    return []


def _stream_key(stream: torch.Stream | None) -> tuple[int, int]:
    if stream is None:
        device = _ext.current_device()
        return device, _ext.current_stream_id(device)
    return stream.device_index, stream.stream_id
