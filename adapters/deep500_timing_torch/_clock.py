"""The events of PyTorch's accelerator as a device clock.

Tested with ``torch.Event`` and ``torch.Stream`` of PyTorch 2.13 on a simulated pair of devices, and rehearsed with
PyTorch 2.11's own CUDA code over a simulated driver. ``make test-gpu`` runs the same tests on a real GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deep500_timing import DeviceUnavailableError
from deep500_timing_torch._events import functions_of_cuda, functions_of_others, watch_captures

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


def accelerator() -> str | None:
    """The type of the accelerator that PyTorch can use, such as ``"cuda"``, or None.

    May start the device's driver; children that are forked later cannot use it then.
    """
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def is_started(kind: str) -> bool:
    """Whether PyTorch has started a type of device in this process. Starts nothing."""
    module: Any = getattr(torch, kind, None)
    is_initialized: Callable[[], bool] | None = getattr(module, "is_initialized", None)
    return is_initialized is not None and is_initialized()


def started_accelerator() -> str | None:
    """The type of the accelerator that PyTorch has started in this process, or None. Starts nothing."""
    for kind in (torch._C._get_privateuse1_backend_name(), "cuda", "xpu", "mtia"):
        if is_started(kind):
            return str(kind)
    return "mps" if torch.backends.mps.is_available() else None  # a fork does not break its driver


def check_name(asked: str) -> None:
    """Refuse a device name that is wrong, without starting a driver."""
    device = _named(asked)
    if is_started(device.type):
        _resolve(device)
    elif not _is_built_for(device.type):
        raise _unavailable(f"the device {asked!r}", f"it is not built for {device.type!r}")


def _is_built_for(kind: str) -> bool:
    backends: Any = torch.backends
    if kind == "cuda":  # ROCm as well
        return bool(backends.cuda.is_built())
    if kind == "mps":
        return bool(backends.mps.is_built())
    # Other backends register a module when they are loaded.
    return getattr(torch, kind, None) is not None


class CudaEventClock:
    """Times on an accelerator by timing events in its streams: CUDA, ROCm, and any other of PyTorch.

    The clock of a device type (``"cuda"``) records on the current stream of the current device, so regions follow
    ``torch.cuda.device`` and ``torch.cuda.stream`` blocks. The clock of one device (``"cuda:1"``) records on that
    device's current stream. A process has one clock per name: constructing, copying and unpickling return it.
    Constructing it starts no device.

    CUDA counts in steps of about 0.5 µs and returns a float32 of milliseconds: exact to 0.06 µs at 1 s, 1 µs at 8 s and
    62 µs at 10 minutes. The methods take a stream as :meth:`stream` returns it, or a ``torch.Stream``.

    Attributes:
        name: ``"cuda"`` or ``"cuda:1"``.
        stalls: Whether reading a time stops the device. Then times are read only when the user asks for them.

    Args:
        device: A device type, one device, or None for the accelerator of this machine.

    Raises:
        DeviceUnavailableError: There is no such device.
    """

    # The functions that a region calls are attributes, not methods: PyTorch's own C functions.
    __slots__ = (
        "__weakref__",
        "_index",
        "_new_event",
        "_type",
        "back_to",
        "device_now",
        "device_of",
        "elapsed_ms",
        "handle_of",
        "is_capturing",
        "is_done",
        "name",
        "record_handle",
        "stalls",
        "stream",
        "wait",
    )

    stream: Callable[[], Hashable]
    """The current stream. On CUDA its three numbers, which are cheaper to compare than a ``torch.Stream``."""
    is_capturing: Callable[[], bool]
    """Whether the current stream is captured into a graph."""
    record_handle: Callable[[Any, Any], None]
    """Queue an event in what :attr:`handle_of` returned; cheaper than :meth:`record`."""
    is_done: Callable[[Any], bool]
    wait: Callable[[Any], None]
    elapsed_ms: Callable[[Any, Any], float]
    """The time in milliseconds between two events that are done, as the device returns it."""
    handle_of: Callable[[Any], torch.Stream]
    """The ``torch.Stream`` of a stream."""
    device_of: Callable[[Any], int]
    """The number of a stream's device."""
    _new_event: Callable[..., Any]

    def __new__(cls, device: torch.device | str | None = None) -> CudaEventClock:
        """Return the clock of that device."""
        found = _resolve(device)
        clock = _clocks.get(str(found))
        if clock is None:
            clock = super().__new__(cls)
            clock._set_up(found)
            clock = _clocks.setdefault(clock.name, clock)
        return clock

    def _set_up(self, device: torch.device) -> None:
        # `__init__` would run again at each construction.
        self.name = str(device)
        self._type: str = device.type
        self._index: int | None = device.index
        self.stalls = device.type == "mps"
        self._bind(
            stream=self._first_stream,
            is_capturing=bool,  # bool() is False
            record_handle=torch.Event.record,
            is_done=torch.Event.query,
            wait=torch.Event.synchronize,
            handle_of=lambda stream: stream,
            device_of=lambda stream: int(stream.device_index),
            device_now=lambda: None,  # CUDA events do not change the current device.
            back_to=torch.accelerator.set_device_index,
            _new_event=torch.Event,
            elapsed_ms=torch.Event.elapsed_time,
        )

    def _bind(self, **functions: Callable[..., object]) -> None:
        for name, function in functions.items():
            setattr(self, name, function)

    def _first_stream(self) -> Hashable:
        # The first use on the training thread. Starting the device earlier would break workers that are forked first.
        bind = functions_of_cuda if self._type == "cuda" else functions_of_others
        self._bind(**bind(self._type, self._index))
        watch_captures(torch.get_device_module(self._type))
        return self.stream()

    @staticmethod
    def why_unavailable() -> str | None:
        """Why there is no accelerator to time, or None if there is one. May start its driver."""
        return _why_no(accelerator())

    def new_event(self, stream: Any) -> Any:
        return self._new_event(self.handle_of(stream).device, enable_timing=True)

    def record(self, event: Any, stream: Any) -> None:
        self.record_handle(event, self.handle_of(stream))

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Return the time in nanoseconds between two events that are done; negative if ``end`` came first."""
        return int(self.elapsed_ms(start, end) * 1e6 + 0.5)

    def __repr__(self) -> str:
        return f"CudaEventClock({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by reference."""
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
        "the accelerator of this machine (CPU times only without one), or check the driver and install a PyTorch "
        "that is built for the device: https://pytorch.org/get-started."
    )


def _why_no(kind: str | None) -> str | None:
    empty = "so GPU times will be empty and get_time(key, gpu=True) is []. CPU times go on."
    if kind is None:
        return (
            f"PyTorch {torch.__version__} sees no accelerator, {empty} Leave gpu=True out, or run where there is a GPU."
        )
    if kind == "mps":
        return (
            "PyTorch cannot read a time on Apple's GPUs without stopping the whole device, and reads when a thread of "
            f"the host was told of it, {empty} To have them all the same, name the device: CPUGPUTimer('mps')."
        )
    return None


def _resolve(device: torch.device | str | None) -> torch.device:
    asked = "an accelerator" if device is None else f"the device {str(device)!r}"
    found = None if device is None else _named(device)
    there = accelerator()
    if there is None:
        raise _unavailable(asked, "it sees no accelerator here")
    if found is None:
        reason = _why_no(there)
        if reason is not None:
            raise DeviceUnavailableError(f"Timing on {asked}: {reason}")
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
