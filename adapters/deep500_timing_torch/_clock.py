"""Events of whatever accelerator PyTorch has, as a device clock.

What has been confirmed, and what has not. All of it runs in the tests against real ``torch.Event`` and ``torch.Stream``
objects of PyTorch 2.13, on a simulated pair of devices. No real GPU has run it yet (``make test-gpu`` does, where there
is one): that CUDA takes -1 for the current device, that generic events are as cheap there as those of ``torch.cuda``,
and that nothing here disturbs a capture is known from PyTorch's source alone, as is all that older releases do.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deep500_timing import DeviceUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

# `torch.accelerator` spends four times as long in Python as its functions below do in C.
_get_stream: Callable[[int], torch.Stream] | None = getattr(torch._C, "_accelerator_getStream", None)
_get_index: Callable[[], int] | None = getattr(torch._C, "_accelerator_getDeviceIndex", None)


def accelerator() -> str | None:
    """The type of the accelerator that PyTorch can use here, such as ``"cuda"``, or None if there is none.

    Asking may start the device's driver, which keeps children that are forked later from using it.
    """
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def is_started(kind: str) -> bool:
    """Whether PyTorch has started a type of device in this process; asking starts nothing."""
    module: Any = getattr(torch, kind, None)
    is_initialized: Callable[[], bool] | None = getattr(module, "is_initialized", None)
    return is_initialized is not None and is_initialized()


def check_name(asked: str) -> None:
    """Refuse a device that was named, as far as it can be told without starting a driver.

    Raises:
        DeviceUnavailableError: PyTorch knows no such device or is not built for it; or it is started and not there.
    """
    device = _named(asked)
    if is_started(device.type):
        _resolve(device)
    elif not _is_built_for(device.type):
        raise _unavailable(f"the device {asked!r}", f"it is not built for {device.type!r}")


def _is_built_for(kind: str) -> bool:
    if kind == "cuda":  # ROCm as well
        return bool(torch._C._has_cuda)
    if kind == "mps":
        return bool(torch.backends.mps.is_built())
    # Other backends register a module when they are loaded, or are compiled in and find out when they are used.
    return getattr(torch, kind, None) is not None


class CudaEventClock:
    """Times on an accelerator, by timing events in its streams: CUDA, ROCm, and any other that PyTorch has.

    A clock of no particular device (``"cuda"``) records on the current stream of the device that is current at each
    call, so regions follow ``torch.cuda.device`` and ``torch.cuda.stream`` blocks. A clock of one device
    (``"cuda:1"``) records on the current stream of that device, whichever is current. There is one clock for each in
    a process: constructing, copying and unpickling give that one. Constructing it starts no device.

    Resolution. CUDA counts about half a microsecond at a time, and hands out a float32 of milliseconds, which is
    exact to 0.06 µs at 1 s, 1 µs at 8 s and 62 µs at 10 minutes. Regions shorter than some microseconds on the device
    tell their order of magnitude at best.

    Attributes:
        name: ``"cuda"`` or ``"cuda:1"``.

    Args:
        device: A device type, one device, or None for the accelerator that is there.

    Raises:
        DeviceUnavailableError: There is no such device.
    """

    # What a region calls are attributes, not methods: PyTorch's own C functions, with nothing in between.
    __slots__ = ("__weakref__", "_index", "_type", "is_capturing", "is_done", "name", "record", "stream", "wait")

    def __new__(cls, device: torch.device | str | None = None) -> CudaEventClock:
        """The clock of that device."""
        found = _resolve(device)
        clock = _clocks.get(str(found))
        if clock is None:
            clock = super().__new__(cls)
            clock._set_up(found)
            clock = _clocks.setdefault(clock.name, clock)
        return clock

    def _set_up(self, device: torch.device) -> None:
        # Not in `__init__`, which would run again each time that the clock is asked for.
        self.name = str(device)
        self._type: str = device.type
        self._index: int | None = device.index
        self._bind(
            stream=self._first_stream,
            is_capturing=bool,  # which is False when it is called without an argument
            record=torch.Event.record,
            is_done=torch.Event.query,
            wait=torch.Event.synchronize,
        )

    def _bind(self, **functions: Callable[..., object]) -> None:
        for name, function in functions.items():
            setattr(self, name, function)

    def _first_stream(self) -> torch.Stream:
        # The first call on the training thread: only now may the device be started, which a parent must not do before
        # it forks its workers.
        stream = _stream_function(self._index)
        found = stream()
        self._bind(stream=stream, is_capturing=_capture_function(self._type, self._index, stream))
        return found

    if TYPE_CHECKING:

        def stream(self) -> torch.Stream:
            """The current stream; called on the training thread, as are the next two."""
            ...

        def is_capturing(self) -> bool:
            """Whether that stream is being captured into a graph."""
            ...

        def record(self, event: torch.Event, stream: torch.Stream) -> None:
            """Queue an event in a stream."""
            ...

        def is_done(self, event: torch.Event) -> bool:
            """Whether the device has reached an event; never waits."""
            ...

        def wait(self, event: torch.Event) -> None:
            """Block until it has."""
            ...

    @staticmethod
    def why_unavailable() -> str | None:
        """Why there is no accelerator to time here, None if there is one; asking may start its driver."""
        if accelerator() is not None:
            return None
        return (
            f"PyTorch {torch.__version__} sees no accelerator, so GPU times will be empty and "
            "get_time(key, gpu=True) is []. CPU times go on. Leave gpu=True out, or run where there is a GPU."
        )

    def new_event(self, stream: torch.Stream) -> torch.Event:
        """A new event for ``stream``; the device makes its part of it when it is first recorded."""
        return torch.Event(stream.device, enable_timing=True)

    def elapsed_ns(self, start: torch.Event, end: torch.Event) -> int:
        """The time in nanoseconds between two events that are done; negative if ``end`` came first."""
        return round(start.elapsed_time(end) * 1e6)

    def __repr__(self) -> str:
        """Name the device."""
        return f"CudaEventClock({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by reference: the same device's clock in the process that loads it."""
        return CudaEventClock, (self.name,)


_clocks: dict[str, CudaEventClock] = {}


def _named(asked: torch.device | str) -> torch.device:
    try:
        return torch.device(asked)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceUnavailableError(
            f"Timing on the device {str(asked)!r}: PyTorch knows no such device ({reason})."
        ) from error


def _unavailable(asked: str, reason: str) -> DeviceUnavailableError:
    return DeviceUnavailableError(
        f"Timing on {asked}: this PyTorch ({torch.__version__}) cannot, {reason}. Leave `device` out to time on "
        "whatever is there (CPU times only, where there is nothing), or check the driver and install a PyTorch "
        "that is built for the device: https://pytorch.org/get-started."
    )


def _resolve(device: torch.device | str | None) -> torch.device:
    asked = "an accelerator" if device is None else f"the device {str(device)!r}"
    found = None if device is None else _named(device)
    there = accelerator()
    if there is None:
        raise _unavailable(asked, "it sees no accelerator here")
    if found is None:
        return torch.device(there)
    if found.type != there:
        raise _unavailable(asked, f"the accelerator that it can use is {there!r}")
    count = torch.accelerator.device_count()
    if ":" in str(found) and found.index >= count:
        raise DeviceUnavailableError(
            f"Timing on {asked}: there are {count} of that type here, numbered from 0. Choose one of them, or leave "
            "the number out to time on whichever is current."
        )
    return found


def _stream_function(index: int | None) -> Callable[[], torch.Stream]:
    """What gives the current stream, of the current device if ``index`` is None, at the least cost."""
    if _get_stream is None or _get_index is None:
        return partial(torch.accelerator.current_stream, index)
    if index is not None:
        return partial(_get_stream, index)
    get_stream, get_index = _get_stream, _get_index
    # Most backends take -1 for the current device, which saves a call; see whether this one does.
    try:
        if get_stream(-1) == get_stream(get_index()):
            return partial(get_stream, -1)
    except Exception:
        pass
    return lambda: get_stream(get_index())


def _capture_function(kind: str, index: int | None, stream: Callable[[], torch.Stream]) -> Callable[[], bool]:
    """What tells whether the stream that ``stream`` gives is being captured."""
    device: Any = torch.get_device_module(kind)
    current: Callable[[], bool] | None = getattr(device, "is_current_stream_capturing", None)
    if kind == "cuda":
        current = getattr(torch._C, "_cuda_isCurrentStreamCapturing", current)  # what that one calls
    if index is None and current is not None:
        return current
    try:
        stream().is_capturing()
    except Exception:
        # An older PyTorch, or a backend without graphs.
        return bool if current is None or index is None else partial(_on_device, device, index, current)
    return lambda: stream().is_capturing()


def _on_device(device: Any, index: int, ask: Callable[[], bool]) -> bool:
    with device.device(index):
        return bool(ask())
