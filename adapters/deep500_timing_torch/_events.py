"""Which of PyTorch's functions record and read events: those of ``torch.cuda``, and the generic ones for the rest.

For CUDA the generic ``torch.Event`` would do, but for three things (``c10/cuda/impl/CUDAGuardImpl.h``, PyTorch 2.6 to
2.13): it leaves another device current when it fails, it starts device 0 when it comes back from another one, and one
look-up of its stream costs two. ``torch.cuda.Event`` holds a guard that does neither, and its record lets other threads
run in the releases that can.
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
"""How long a device whose events can wait for ever is waited for."""


def functions_of_cuda(kind: str, index: int | None) -> Functions:
    """What times CUDA and ROCm; starts the device.

    A stream is known by the three numbers that ``torch._C._cuda_getCurrentStream`` gives, which takes -1 for the
    current device. Whether it is captured PyTorch tells of the current device's only; a clock of another device relies
    on what :func:`watch_captures` sees, and so costs no more. These functions in C have had their names from PyTorch
    2.6 to 2.13; of a release that lacks one the public function around it is taken, at its price.
    """
    cuda: Any = torch.cuda
    cuda.init()
    get_stream = getattr(torch._C, "_cuda_getCurrentStream", _numbers_of_current_stream)
    is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None) or cuda.is_current_stream_capturing
    event = cuda.Event
    in_c = getattr(torch._C, "_CudaEventBase", event)  # without the Python around it
    return {
        "stream": partial(get_stream, -1 if index is None else index),
        "is_capturing": is_capturing if index is None else bool,
        "record": in_c.record,
        "is_done": in_c.query,
        "wait": in_c.synchronize,
        "handle_of": _cuda_stream,
        "device_of": _second,
        "_new_event": lambda device, enable_timing: event(enable_timing=enable_timing),
        "elapsed_ms": in_c.elapsed_time,
    }


def _numbers_of_current_stream(index: int) -> tuple[int, int, int]:
    stream: Any = torch.cuda.current_stream(None if index < 0 else index)
    return stream.stream_id, stream.device_index, stream.device_type


def _cuda_stream(numbers: tuple[int, int, int]) -> torch.cuda.Stream:
    stream_id, device_index, device_type = numbers
    stream: Any = torch.cuda.Stream
    found: torch.cuda.Stream = stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    return found


def _second(numbers: tuple[int, int, int]) -> int:
    return numbers[1]


def functions_of_others(kind: str, index: int | None) -> Functions:
    """What times any other accelerator that PyTorch has, by its generic events."""
    stream = _stream_function(index)
    found: Functions = {"stream": stream, "is_capturing": _capture_function(kind, index, stream)}
    if index is not None:
        # Recording for a device that is not current makes it so, and comes back only if all went well.
        found["record"] = partial(_staying, torch.Event.record)
    # A comparison that fails leaves the start's device current; the pool comes back from there.
    found["device_now"] = torch.accelerator.current_device_index if _get_index is None else _get_index
    if kind == "mps":
        warn_once(
            "Timing on Apple's GPU: reading a time stops the whole device, so times are read only when you ask for "
            "them, and they are those at which a thread of the host was told, some microseconds off.",
            key="mps",
        )
        found["wait"] = _wait_at_most
    return found


def _staying(function: Callable[[Any, Any], Any], event: Any, other: Any) -> Any:
    # Call it and be on the device of before, whatever happens.
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


def _capture_function(kind: str, index: int | None, stream: Callable[[], Any]) -> Callable[[], bool]:
    """What tells whether the stream that ``stream`` gives is being captured."""
    current: Callable[[], bool] | None = getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)
    if index is None and current is not None:
        return current
    try:
        stream().is_capturing()
    except Exception:
        # PyTorch before 2.12, or a backend without graphs: captures that PyTorch begins are seen as they begin.
        return bool
    return lambda: stream().is_capturing()


def watch_captures(module: Any) -> None:
    """Let the event pools know of each capture into a graph, on whatever thread it begins.

    ``torch.cuda.graph``, ``make_graphed_callables`` and the compiler's graphs all go through these two methods.

    Args:
        module: The device's module; its graph classes are those that have ``capture_begin`` and ``capture_end``.
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
