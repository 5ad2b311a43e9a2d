"""The timer of PyTorch programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from deep500_timing import CPUGPUTimer as _CoreTimer
from deep500_timing import DeviceUnavailableError
from deep500_timing._ground.warn import warn_once
from deep500_timing.devices._null import NoLedger
from deep500_timing.timer import call_directly
from deep500_timing_torch._clock import CudaEventClock, accelerator

if TYPE_CHECKING:
    from deep500_timing import DeviceClock


@call_directly
class CPUGPUTimer(_CoreTimer):
    """Times regions on the CPU and, where ``gpu=True`` asks for it, on the accelerator.

    A region is timed on the stream that is current where it starts, from the work queued there before it to the work
    queued when it ends. Where there is no accelerator everything works, and there are no GPU times: the first
    ``gpu=True`` says so in one warning, and ``get_time(key, gpu=True)`` is empty.

    In a function that ``torch.compile`` compiles, a region records nothing and breaks no graph: time the call of the
    compiled function from outside. While a CUDA graph is captured, a region's GPU time is not taken, and is counted
    as captured.

    Args:
        device: None for the accelerator that is there, if one is. A type (``"cuda"``) where it must be there. One
            device (``"cuda:1"``) to time on its current stream whichever device is current, as a script needs that
            moves its tensors there and leaves device 0 current. ``"cpu"`` for CPU times only.
        device_clock: A device clock of your own, instead.
        **settings: As for :class:`deep500_timing.Timer`: ``clock``, ``enabled``, ``keep_last``, ``skip_first``.

    Raises:
        DeviceUnavailableError: The device that was named is not there.
        ValueError: ``keep_last`` or ``skip_first`` is negative.
    """

    __slots__ = ("_asked",)

    def __init__(
        self, device: torch.device | str | None = None, *, device_clock: DeviceClock | None = None, **settings: Any
    ) -> None:
        """See the class."""
        self._asked = None if device is None else str(device)
        if device_clock is None:
            device_clock = _clock_for(device)
        super().__init__(device_clock=device_clock, **settings)
        if device_clock is None:
            self._device: Any = _NoDevice(self)

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        clock = settings.pop("device_clock", None)
        if clock is None or isinstance(clock, CudaEventClock):
            # What was asked for, not what was found: a checkpoint may be loaded on another machine.
            settings["device"] = self._asked
        else:
            settings["device_clock"] = clock
        return settings

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the settings, as :class:`deep500_timing.Timer` does."""
        return _rebuild, (type(self), self._settings())


def _clock_for(device: torch.device | str | None) -> CudaEventClock | None:
    if device is None:
        return None if accelerator() is None else CudaEventClock()
    if str(device).partition(":")[0] == "cpu":
        return None
    return CudaEventClock(device)


def _rebuild(kind: type[CPUGPUTimer], settings: dict[str, Any]) -> CPUGPUTimer:
    try:
        return kind(**settings)
    except DeviceUnavailableError as error:
        # Whoever loads a checkpoint wants what is in it, not the device that it was written on.
        warn_once(f"Loading a timer: GPU times will be empty, CPU times go on. {error}")
        return kind(**{**settings, "device": "cpu"})


class _NoDevice(NoLedger):
    """Stands in for the device's events until ``gpu=True`` is first used, and then says that there are none."""

    __slots__ = ("_timer",)

    clock = None

    def __init__(self, timer: CPUGPUTimer) -> None:
        self._timer = ref(timer)

    def begin(self, region: object) -> None:
        timer = self._timer()
        if timer is not None:
            timer._device = None  # From here on `gpu=True` costs nothing.
            why = f"PyTorch {torch.__version__} sees no accelerator"
            if timer._asked is not None:
                why = "this timer was made for the CPU"
            warn_once(
                f"Timing a region with gpu=True: {why}, so GPU times will be empty and get_time(key, gpu=True) is []. "
                "CPU times go on. Leave gpu=True out, or run where there is a GPU.",
                about="no accelerator",
            )
