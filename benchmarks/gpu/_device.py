"""Requirements of the sections: PyTorch, CuPy, a GPU."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class UnavailableError(Exception):
    """A requirement of a section is missing; the text names it."""


def need_torch() -> Any:
    """PyTorch with a CUDA device.

    Raises:
        UnavailableError: There is none.
    """
    try:
        import torch
    except ImportError as error:
        raise UnavailableError(f"needs PyTorch: {error}") from error
    if not torch.cuda.is_available():
        raise UnavailableError(f"needs a CUDA device, and PyTorch {torch.__version__} finds none")
    return torch


def need_cupy() -> Any:
    """CuPy with a device.

    Raises:
        UnavailableError: There is none.
    """
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:
        raise UnavailableError(f"needs CuPy and a CUDA device: {str(error).splitlines()[0]}") from error
    if not count:
        raise UnavailableError("needs a CUDA device, and CuPy finds none")
    return cupy


def spinner(torch: Any) -> Callable[[float], None]:
    """A function that keeps the current stream busy for a number of seconds, to within some percent."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 100_000_000
    for _ in range(3):  # the first is slow: the kernel is loaded, the clock speeds up
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    per_second = cycles / start.elapsed_time(end) * 1e3
    return lambda seconds: torch.cuda._sleep(max(round(seconds * per_second), 1))


SMALL = "DEEP500_TIMING_GPU_SMALL"


def sized(normal: int, small: int) -> int:
    """A size, or the one for a rehearsal without a GPU."""
    return small if os.environ.get(SMALL) else normal


def kineto(torch: Any) -> contextlib.AbstractContextManager[Any]:
    """PyTorch's profiler of host and device; None in a rehearsal, which has no CUPTI."""
    if os.environ.get(SMALL):
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[Any] = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    )
    return found
