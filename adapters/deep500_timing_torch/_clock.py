"""The events of PyTorch's accelerator as a device clock: those of ``torch.cuda`` for CUDA, generic ones for the rest.

The generic ``torch.Event`` has three faults on CUDA (``c10/cuda/impl/CUDAGuardImpl.h``, PyTorch 2.6 to 2.13): when it
fails it leaves another device current, when it comes back from another device it starts device 0, and it looks its
stream up twice. ``torch.cuda.Event`` has none of them, and its record releases the GIL in the releases that can.

Tested with ``torch.Event`` and ``torch.Stream`` of PyTorch 2.13 on a simulated pair of devices, and rehearsed with
PyTorch 2.11's own CUDA code over a simulated driver. ``make test-gpu`` runs the same tests on a real GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import partial, wraps
from typing import Any

import torch

from deep500_timing import DeviceUnavailableError
from deep500_timing.devices import captures, warn_once

Functions = dict[str, Callable[..., Any]]

WAIT_S = 10.0
"""Time limit for events that may never complete."""


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
        vars(self).update(
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

    def _first_stream(self) -> Hashable:
        # The first use on the training thread. Starting the device earlier would break workers that are forked first.
        bind = _functions_of_cuda if self._type == "cuda" else _functions_of_others
        vars(self).update(bind(self._type, self._index))
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


def _functions_of_cuda(kind: str, index: int | None) -> Functions:
    """The functions that time CUDA and ROCm. Starts the device.

    A stream is the three numbers that ``torch._C._cuda_getCurrentStream`` returns, which takes -1 for the current
    device. PyTorch tells whether the current device's stream is captured; a capture that C++ begins on another device
    is not seen. The C functions have had these names from PyTorch 2.6 to 2.13. If a release lacks one, the slower
    public function serves.
    """
    cuda: Any = torch.cuda
    cuda.init()
    get_stream = getattr(torch._C, "_cuda_getCurrentStream", _numbers_of_current_stream)
    is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None) or cuda.is_current_stream_capturing
    get_device = getattr(torch._C, "_cuda_getDevice", None) or cuda.current_device
    event = cuda.Event
    in_c = getattr(torch._C, "_CudaEventBase", event)  # without the Python around it
    return {
        "stream": partial(get_stream, -1 if index is None else index),
        # Asking on another device could start that device.
        "is_capturing": is_capturing if index is None else lambda: get_device() == index and is_capturing(),
        "record_handle": in_c.record,
        "is_done": in_c.query,
        "wait": in_c.synchronize,
        "handle_of": _cuda_stream,
        "device_of": _device_in,
        "_new_event": lambda device, enable_timing: event(enable_timing=enable_timing),
        "elapsed_ms": in_c.elapsed_time,
    }


def _numbers_of_current_stream(index: int) -> tuple[int, int, int]:
    stream: Any = torch.cuda.current_stream(None if index < 0 else index)
    return stream.stream_id, stream.device_index, stream.device_type


def _cuda_stream(numbers: tuple[int, int, int] | torch.cuda.Stream) -> torch.cuda.Stream:
    if not isinstance(numbers, tuple):
        return numbers
    stream_id, device_index, device_type = numbers
    stream: Any = torch.cuda.Stream
    found: torch.cuda.Stream = stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    return found


def _device_in(numbers: tuple[int, int, int] | torch.cuda.Stream) -> int:
    return numbers[1] if isinstance(numbers, tuple) else numbers.device_index


def _functions_of_others(kind: str, index: int | None) -> Functions:
    """The functions that time any other accelerator of PyTorch, by generic events."""
    stream = partial(torch.accelerator.current_stream, index)
    # A failed comparison leaves the start's device current; the pool restores the previous one.
    found: Functions = {"device_now": torch.accelerator.current_device_index, "stream": stream}
    current = getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)
    found["is_capturing"] = current if index is None and current is not None else _capture_function(stream)
    if index is not None:
        found["record_handle"] = _record_staying
    if kind == "mps":
        warn_once(
            "Timing on Apple's GPU: reading a time stops the whole device, so times are read only when you ask for "
            "them, and are some microseconds off.",
            key="mps",
        )
        found["wait"] = _wait_at_most
    return found


def _capture_function(stream: Callable[[], Any]) -> Callable[[], bool]:
    try:
        stream().is_capturing()
    except Exception:
        # PyTorch before 2.12, or a backend without graphs. watch_captures sees captures that Python begins.
        return bool
    return lambda: stream().is_capturing()


def _record_staying(event: torch.Event, stream: torch.Stream) -> None:
    # Recording for another device makes that device current, and leaves it so when it fails.
    before = torch.accelerator.current_device_index()
    try:
        event.record(stream)
    except BaseException:
        torch.accelerator.set_device_index(before)
        raise


def _wait_at_most(event: torch.Event) -> None:
    deadline = time.monotonic() + WAIT_S
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the device has not reached an event within {WAIT_S:g} s")
        time.sleep(0.0005)


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


def watch_all_captures() -> None:
    """Watch the captures of every accelerator. Starts no driver."""
    for name in ("accelerator", "cuda", "xpu", "mtia"):
        module = getattr(torch, name, None)
        if module is not None:
            watch_captures(module)


def watch_captures(module: Any) -> None:
    """Report each capture into a graph to the event pools, on any thread, before it begins.

    ``torch.cuda.graph``, ``make_graphed_callables`` and the compiler's graphs all call the two wrapped methods.
    """
    for graph in list(vars(module).values()):
        if isinstance(graph, type) and hasattr(graph, "capture_begin") and hasattr(graph, "capture_end"):
            _watch(graph)


def _watch(graph: Any) -> None:
    begin, end = graph.capture_begin, graph.capture_end
    if getattr(begin, "_deep500_timing", False):
        return

    @wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        captures.begin(self)
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            captures.end(self)
            raise

    @wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            captures.end(self)

    capture_begin._deep500_timing = True  # type: ignore[attr-defined]
    graph.capture_begin, graph.capture_end = capture_begin, capture_end
