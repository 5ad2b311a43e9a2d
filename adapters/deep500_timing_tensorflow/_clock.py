"""CUDA events through CuPy, as the clock of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import require
from deep500_timing_tensorflow._availability import why_no_gpu_times
from deep500_timing_tensorflow._sync import synchronize_tensorflow

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["CupyEventClock"]


class CupyEventClock:
    """Marks the device's time with CuPy's events, each after TensorFlow has finished what it was given.

    TensorFlow launches its kernels on streams of its own that it hands to nobody and that do not wait for any other
    stream, so an event alone says nothing about its kernels. Before each event the clock therefore waits, on the host,
    until TensorFlow's local GPUs are idle. That is the cost of a true time: two waits for each region with
    ``gpu=True``, 8 µs each where the device is idle and otherwise until its work is done. Time whole batches with it,
    not layers. Where TensorFlow is not imported, nothing waits, and the events order CuPy's own work.

    Args:
        synchronize: Called before each event, until it returns the event is not recorded; waits for TensorFlow if
            None. It raises if it cannot order the event, which leaves the region without a device time.

    Raises:
        MissingPackageError: CuPy is not installed.
        ImportError: It is installed and broken.
    """

    name = "cuda"

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._cuda: Any = require("cupy", extra="cupy", caller="CupyEventClock").cuda
        self._synchronize = synchronize
        self._streams: dict[Hashable, Any] = {}

    @staticmethod
    def why_unavailable() -> str | None:
        """Why there is no GPU to time through CuPy, None if there is one.

        Raises:
            ImportError: CuPy is installed and broken.
        """
        return why_no_gpu_times()

    def stream(self) -> Hashable:
        """CuPy's current device and its current stream."""
        current = self._cuda.get_current_stream()
        key = (self._cuda.runtime.getDevice(), current.ptr)
        if key not in self._streams:
            self._streams[key] = current
        return key

    def is_capturing(self) -> bool:
        """Whether CuPy's current stream is being captured."""
        return bool(self._cuda.get_current_stream().is_capturing())

    def new_event(self, stream: Hashable) -> Any:
        """A timing event of the current device."""
        return self._cuda.Event()

    def record(self, event: Any, stream: Hashable) -> None:
        """Wait until TensorFlow's GPUs are idle, then record the event.

        Raises:
            DeviceUnavailableError: TensorFlow is there and sees no GPU.
            TimingError: It is called while TensorFlow traces a graph, where nothing can be waited for.
        """
        (self._synchronize or synchronize_tensorflow)()
        event.record(self._streams[stream])

    def is_done(self, event: Any) -> bool:
        """Whether the device has reached the event."""
        return bool(event.done)

    def wait(self, event: Any) -> None:
        """Block until the device has reached the event."""
        event.synchronize()

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Nanoseconds between two events; CUDA gives a float32 of milliseconds."""
        milliseconds: float = self._cuda.get_elapsed_time(start, end)
        return round(milliseconds * 1e6)

    def __reduce__(self) -> Any:
        """Copy and pickle as what it is for, not with its events' context."""
        return type(self), (self._synchronize,)
