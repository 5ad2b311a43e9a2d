"""The timer of this adapter: the core's, with CuPy's events as the device's clock where there is a GPU."""

from __future__ import annotations

import deep500_timing as _core
from deep500_timing.devices import clocks, lazy_device
from deep500_timing.timer import call_directly

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from deep500_timing import DeviceClock
    from deep500_timing.devices import LazyDevice

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
        **settings: As for :class:`deep500_timing.Timer`.

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
        **settings: Any,
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
        super().__init__(device_clock=device_clock, **settings)


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
        clock = _clock_class()
        reason: str | None = clock.why_unavailable()
        if reason is not None:
            return reason
        _clocks.append(clock())
    return _clocks[0]


def _clock_class() -> Any:
    try:
        return clocks.get("cupy")
    except LookupError:  # in a source tree that is not installed nothing is registered
        from deep500_timing_tensorflow._clock import CupyEventClock

        return CupyEventClock
