"""PyTorch's functions that record and read events: those of ``torch.cuda`` for CUDA, the generic ones for the rest.

The generic ``torch.Event`` has three faults on CUDA (``c10/cuda/impl/CUDAGuardImpl.h``, PyTorch 2.6 to 2.13): when it
fails it leaves another device current, when it comes back from another device it starts device 0, and it looks its
stream up twice. ``torch.cuda.Event`` has none of them, and its record releases the GIL in the releases that can.
"""

from __future__ import annotations

import time
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch

from deep500_timing.devices import captures, warn_once

if TYPE_CHECKING:
    from collections.abc import Callable

    Functions = dict[str, Callable[..., Any]]

# `torch.accelerator` spends four times as long in Python as its functions below do in C.
_get_stream: Callable[[int], torch.Stream] | None = getattr(torch._C, "_accelerator_getStream", None)
_get_index: Callable[[], int] | None = getattr(torch._C, "_accelerator_getDeviceIndex", None)

WAIT_S = 10.0
"""Time limit for events that may never complete."""


def functions_of_cuda(kind: str, index: int | None) -> Functions:
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


def functions_of_others(kind: str, index: int | None) -> Functions:
    """The functions that time any other accelerator of PyTorch, by generic events."""
    stream = _stream_function(index)
    found: Functions = {"stream": stream, "is_capturing": _capture_function(kind, index, stream)}
    if index is not None:
        # Recording for another device makes that device current, and leaves it so when it fails.
        found["record_handle"] = partial(_staying, torch.Event.record)
    # A failed comparison leaves the start's device current; the pool restores the previous one.
    found["device_now"] = torch.accelerator.current_device_index if _get_index is None else _get_index
    if kind == "mps":
        warn_once(
            "Timing on Apple's GPU: reading a time stops the whole device, so times are read only when you ask for "
            "them, and are some microseconds off.",
            key="mps",
        )
        found["wait"] = _wait_at_most
    return found


def _staying(function: Callable[[Any, Any], Any], event: Any, other: Any) -> Any:
    # Call it, and restore the current device when it fails.
    before = torch.accelerator.current_device_index() if _get_index is None else _get_index()
    try:
        return function(event, other)
    except BaseException:
        torch.accelerator.set_device_index(before)
        raise


def _wait_at_most(event: torch.Event) -> None:
    deadline = time.monotonic() + WAIT_S
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the device has not reached an event within {WAIT_S:g} s")
        time.sleep(0.0005)


def _stream_function(index: int | None) -> Callable[[], torch.Stream]:
    """Return the cheapest function for the current stream, of the current device if ``index`` is None."""
    if _get_stream is None or _get_index is None:
        return partial(torch.accelerator.current_stream, index)
    if index is not None:
        return partial(_get_stream, index)
    get_stream, get_index = _get_stream, _get_index
    # Most backends take -1 for the current device, which saves a call.
    try:
        if get_stream(-1) == get_stream(get_index()):
            return partial(get_stream, -1)
    except Exception:
        pass
    return lambda: get_stream(get_index())


def _capture_function(kind: str, index: int | None, stream: Callable[[], Any]) -> Callable[[], bool]:
    """Return a function that tells whether the stream of ``stream()`` is captured."""
    current: Callable[[], bool] | None = getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)
    if index is None and current is not None:
        return current
    try:
        stream().is_capturing()
    except Exception:
        # PyTorch before 2.12, or a backend without graphs. watch_captures sees captures that Python begins.
        return bool
    return lambda: stream().is_capturing()


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
