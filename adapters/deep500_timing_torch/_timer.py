"""The timer of PyTorch programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, cast

from deep500_timing import Clock, DeviceClock, DeviceUnavailableError, Timer
from deep500_timing import CPUGPUTimer as _CoreTimer
from deep500_timing.devices import LazyDevice, lazy_device, warn_once
from deep500_timing.ranklog import GlobalTimer
from deep500_timing.timer import call_directly
from deep500_timing_torch._clock import CudaEventClock, check_name

if TYPE_CHECKING:
    import torch

    from deep500_timing.runs import RunLog


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
        run, clock, enabled, keep_last, skip_first: As for :class:`deep500_timing.Timer`.

    Nothing is looked for before the first ``gpu=True``, since asking CUDA whether it is there keeps forked children
    from using it.

    Raises:
        DeviceUnavailableError: PyTorch is not built for the named device. Its absence is reported here
            if PyTorch has started the device already, and else by the first ``gpu=True``.
        ValueError: ``keep_last`` or ``skip_first`` is negative.
    """

    __slots__ = ()

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        device_clock: DeviceClock | LazyDevice | None = None,
        run: RunLog | str | PathLike[str] | None = None,
        clock: Clock | None = None,
        enabled: bool = True,
        keep_last: int | None = None,
        skip_first: int = 0,
    ) -> None:
        if device_clock is None:
            device_clock = lazy_device(Search(None if device is None else str(device)))
        super().__init__(
            device_clock, run=run, clock=clock, enabled=enabled, keep_last=keep_last, skip_first=skip_first
        )


@dataclass(frozen=True, slots=True)
class Search:
    """Searches for a timer's device. Errors that need no driver are raised at once."""

    asked: str | None
    is_copy: bool = field(default=False, compare=False)
    """Whether a named device may be missing: a checkpoint may be loaded on another machine."""

    def __post_init__(self) -> None:
        if self.asked is not None and not self.asked.startswith("cpu"):
            check_name(self.asked)

    def __call__(self) -> DeviceClock | str:
        """The device's clock, or why there is none."""
        if self.asked is not None and self.asked.startswith("cpu"):
            return "this timer was made for the CPU, so GPU times will be empty and get_time(key, gpu=True) is []."
        reason = CudaEventClock.why_unavailable() if self.asked is None else None
        if reason is not None:
            return reason
        try:
            return cast("DeviceClock", CudaEventClock(self.asked))  # its functions are attributes
        except DeviceUnavailableError as error:
            if self.asked is not None and not self.is_copy:
                raise
            return str(error)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the request, not the found device."""
        return _search_again, (self.asked,)


def _search_again(asked: str | None) -> Search:
    try:
        return Search(asked, is_copy=True)
    except DeviceUnavailableError as error:
        warn_once(f"Loading a timer: GPU times will be empty, CPU times go on. {error}")
        return Search("cpu")


class TorchGlobalTimer(GlobalTimer):
    """As :class:`deep500_timing.ranklog.GlobalTimer`, timed on the accelerator as well where there is one."""

    def _new_timer(self) -> Timer:
        return CPUGPUTimer()


global_timer = TorchGlobalTimer()
