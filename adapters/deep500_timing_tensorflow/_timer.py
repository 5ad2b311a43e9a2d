"""The timer of this adapter: the core's, with CuPy's events as the device's clock where there is a GPU."""

from __future__ import annotations

from weakref import ref

import deep500_timing as _core
from deep500_timing._ground.warn import warn_once
from deep500_timing.devices._null import NoLedger
from deep500_timing.devices._pool import DeviceLedger, ledger_of
from deep500_timing.timer import call_directly

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from deep500_timing import DeviceClock

_clocks: list[DeviceClock] = []


@call_directly
class CPUGPUTimer(_core.CPUGPUTimer):
    """Times regions on the host and, with ``gpu=True``, on the GPU that TensorFlow uses.

    ``gpu=True`` asks for a synchronization: TensorFlow exposes no stream, so before each start and end with
    ``gpu=True`` the calling thread waits until TensorFlow's GPUs are idle, and CuPy's events are recorded after that.
    The times are true; the cost is that the host no longer runs ahead of the GPU across that boundary. Without a GPU,
    or without CuPy, CPU times are taken all the same and the first ``gpu=True`` says in one warning what is missing.

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

    def __init__(self, *, device: str | None = None, device_clock: DeviceClock | None = None, **settings: Any) -> None:
        """See the class."""
        if device not in (None, "cuda", "gpu"):
            raise ValueError(f"CPUGPUTimer(device={device!r}): pass 'cuda', or None to use a GPU if there is one.")
        if device_clock is None and device is not None:
            device_clock = _find_clock(insist=True)
        super().__init__(device_clock=device_clock, **settings)
        if device_clock is None:
            self._device: Any = _DeviceOnFirstUse(self)

    def _settings(self) -> dict[str, Any]:
        if isinstance(self._device, _DeviceOnFirstUse):
            return _core.Timer._settings(self)
        return super()._settings()


class _DeviceOnFirstUse(NoLedger):
    """Stands in for the device's events until ``gpu=True`` is first used, and looks for a GPU then.

    Looking imports CuPy, and what is missing concerns only those who want GPU times.
    """

    __slots__ = ("_timer",)

    def __init__(self, timer: CPUGPUTimer) -> None:
        self._timer = ref(timer)

    def _found(self) -> DeviceLedger | None:
        try:
            clock = _find_clock(insist=False)
        except ImportError as error:
            # The run has begun: what is broken costs the GPU times. To have it as an error, ask for device="cuda".
            warn_once(f"No GPU times, CPU times go on. CuPy is installed and broken: {error}")
            clock = None
        ledger = None if clock is None else ledger_of(clock)
        timer = self._timer()
        if timer is not None:
            timer._device = ledger
        return ledger

    @property
    def clock(self) -> DeviceClock | None:
        """The GPU's clock, or None if there is no GPU to time."""
        found = self._found()
        return None if found is None else found.clock

    def begin(self, region: Any) -> None:
        """Begin on the GPU, if there is one."""
        found = self._found()
        if found is not None:
            found.begin(region)


def _find_clock(*, insist: bool) -> DeviceClock | None:
    # One clock for all timers of the process: its events are pooled.
    if _clocks:
        return _clocks[0]
    from deep500_timing_tensorflow._availability import why_no_gpu_times

    reason = why_no_gpu_times()
    if reason is None:
        from deep500_timing_tensorflow._clock import CupyEventClock

        _clocks.append(CupyEventClock())
        return _clocks[0]
    if insist:
        raise _core.DeviceUnavailableError(f"CPUGPUTimer(device='cuda') has no GPU to time. {reason}")
    warn_once(f"No GPU times, CPU times go on. {reason}", about=f"no gpu times {reason}")
    return None
