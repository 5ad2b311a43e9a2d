"""CUDA events through CuPy, as the clock of a device, and the wait that orders them with TensorFlow's kernels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import deep500_timing as _core
from deep500_timing import DeviceUnavailableError, TimingError
from deep500_timing.adapters import missing_package, require
from deep500_timing.devices import lazy_device
from deep500_timing.timer import call_directly

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from os import PathLike
    from typing import Any

    from deep500_timing import Clock, DeviceClock
    from deep500_timing.devices import LazyDevice
    from deep500_timing.runs import RunLog


_clocks: list[DeviceClock] = []


@call_directly
class CPUGPUTimer(_core.CPUGPUTimer):
    """Times regions on the host and, with ``gpu=True``, on the GPU that TensorFlow uses.

    ``gpu=True`` asks for a synchronization: TensorFlow exposes no stream, so before each start and end with
    ``gpu=True`` the calling thread waits until TensorFlow's GPUs are idle, and CuPy's events are recorded after that.
    The times are true, but the host no longer runs ahead of the GPU across that boundary. Without a GPU,
    or without CuPy, CPU times are still taken, and the first ``gpu=True`` names the missing part in one warning.

    Args:
        device: None for a GPU if there is one; ``"cuda"`` to insist on it.
        device_clock: A clock to use in place of CuPy's events.
        run, clock, enabled, keep_last, skip_first: As for :class:`deep500_timing.Timer`.

    Raises:
        DeviceUnavailableError: ``device`` is ``"cuda"`` and there is no GPU, no driver or no CuPy.
        ValueError: ``device`` is something else.
        ImportError: ``device`` is ``"cuda"`` and CuPy is installed and broken.
    """

    __slots__ = ()

    def __init__(
        self,
        *,
        device: str | None = None,
        device_clock: DeviceClock | LazyDevice | None = None,
        run: RunLog | str | PathLike[str] | None = None,
        clock: Clock | None = None,
        enabled: bool = True,
        keep_last: int | None = None,
        skip_first: int = 0,
    ) -> None:
        if device not in (None, "cuda", "gpu"):
            raise ValueError(f"CPUGPUTimer(device={device!r}): pass 'cuda', or None to use a GPU if there is one.")
        if device_clock is None and device is not None:
            found = find_clock()
            if isinstance(found, str):
                raise _core.DeviceUnavailableError(f"CPUGPUTimer(device='cuda') has no GPU to time. {found}")
            device_clock = found
        if device_clock is None:
            # Two waits for TensorFlow are a cost that only `gpu=True` asks for.
            device_clock = lazy_device(_search, for_named_timers=False)
        super().__init__(
            device_clock, run=run, clock=clock, enabled=enabled, keep_last=keep_last, skip_first=skip_first
        )


def _search() -> DeviceClock | str:
    try:
        found = find_clock()
    except ImportError as error:
        # The run has begun, so a broken CuPy costs the GPU times only; device="cuda" raises the error at the start.
        found = f"CuPy is installed and broken: {error}"
    return f"No GPU times, CPU times go on. {found}" if isinstance(found, str) else found


def find_clock() -> DeviceClock | str:
    """The GPU's clock, or why there is none. Looking imports CuPy and starts CUDA."""
    # One clock for all timers of the process: its events are pooled.
    if not _clocks:
        reason = CupyEventClock.why_unavailable()
        if reason is not None:
            return reason
        _clocks.append(CupyEventClock())
    return _clocks[0]


NO_DRIVER_OR_TOO_OLD = 35  # cudaErrorInsufficientDriver; an absent driver gives it too.
NO_DEVICE = 100  # cudaErrorNoDevice
_ABSENT = {
    NO_DRIVER_OR_TOO_OLD: "CuPy is installed, and the NVIDIA driver is absent or too old for it. Install or update the "
    "driver, or install the CuPy of its CUDA, such as cupy-cuda12x. Start a container with the GPU passed through.",
    NO_DEVICE: "CuPy and the NVIDIA driver are there and no GPU is visible. See nvidia-smi, and whether "
    "CUDA_VISIBLE_DEVICES hides it.",
}


class CupyEventClock:
    """Marks the device's time with CuPy's events, each after TensorFlow has finished its work.

    TensorFlow does not expose its streams, so before each event the clock waits, on the host, until TensorFlow's local
    GPUs are idle: 8 µs where they are, twice for each region with ``gpu=True``. Time whole batches with it, not layers.
    Where TensorFlow is not imported, nothing waits, and the events order CuPy's own work.

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
        try:
            import cupy
        except ImportError as error:
            if error.name != "cupy":
                raise
            return f"{missing_package('cupy', extra='cupy', caller='Timing a GPU')}."
        try:
            status = None if int(cupy.cuda.runtime.getDeviceCount()) else NO_DEVICE
        except Exception as error:
            status = getattr(error, "status", None)
            if status not in _ABSENT:
                return f"CUDA does not start: {error}. See whether nvidia-smi lists the GPU."
        return None if status is None else _ABSENT[status]

    def stream(self) -> Hashable:
        current = self._cuda.get_current_stream()
        key = (self._cuda.runtime.getDevice(), current.ptr)
        if key not in self._streams:
            self._streams[key] = current
        return key

    def is_capturing(self) -> bool:
        return bool(self._cuda.get_current_stream().is_capturing())

    def new_event(self, stream: Hashable) -> Any:
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
        return bool(event.done)

    def wait(self, event: Any) -> None:
        event.synchronize()

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Nanoseconds between two events; CUDA gives a float32 of milliseconds."""
        milliseconds: float = self._cuda.get_elapsed_time(start, end)
        return round(milliseconds * 1e6)

    def __reduce__(self) -> Any:
        """Copy and pickle its arguments, not its streams."""
        return type(self), (self._synchronize,)


def synchronize_tensorflow() -> None:
    """Wait until TensorFlow's local GPUs are idle; returns at once if TensorFlow is not imported.

    ``tf.test.experimental.sync_devices`` raises under strategies of several workers, the raw operation does not.
    """
    tf: Any = sys.modules.get("tensorflow")
    if tf is None or not hasattr(tf, "raw_ops"):
        return
    if not tf.executing_eagerly():
        raise TimingError(
            "Timing a region on the GPU inside a tf.function: it runs when the graph is traced, not when it executes. "
            "Time the call of the function from outside, or wrap the step with timed_step."
        )
    gpus = tf.config.list_logical_devices("GPU")  # Asking makes TensorFlow claim them.
    if not gpus:
        raise DeviceUnavailableError(
            "CuPy finds a GPU and TensorFlow does not, so TensorFlow's work runs on the CPU and has no GPU times. "
            "Install TensorFlow with its GPU libraries: pip install 'tensorflow[and-cuda]'."
        )
    for gpu in gpus:
        with tf.device(gpu.name):
            tf.raw_ops.SyncDevice()
