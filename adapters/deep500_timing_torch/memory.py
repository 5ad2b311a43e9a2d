"""Memory of the accelerator and the host, see :mod:`deep500_timing.memory`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch

from deep500_timing import MissingPackageError, TimeType
from deep500_timing.adapters import warn_once
from deep500_timing.memory import HostMemory, MemoryReader, MemoryUsage
from deep500_timing.memory import MemoryTimer as _CoreMemoryTimer
from deep500_timing_torch._clock import started_accelerator
from deep500_timing_torch._timer import CPUGPUTimer

__all__ = ["MemoryTimer", "TorchMemory"]


class TorchMemory:
    """Reads what PyTorch's allocator holds on one device, and the host's memory where psutil is installed.

    It only reads: ``reset_peak_memory_stats`` is never called, so peaks are those since the program last did.

    Args:
        device: The device; the current one of the accelerator that is there if None. Without an accelerator, and as
            long as PyTorch has not started it, the numbers of the device are None.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)

    @cached_property
    def _host(self) -> HostMemory | None:
        # At the first reading: it looks for psutil.
        try:
            return HostMemory()
        except MissingPackageError as error:
            warn_once(f"Reading memory: the host's is left out. {error}", key="no psutil")
            return None

    def __reduce__(self) -> tuple[type[TorchMemory], tuple[torch.device | None]]:
        """A copy reads the memory of the process that it is in."""
        return TorchMemory, (self._device,)

    def read(self) -> MemoryUsage:
        """The memory in use now. Does not wait for the device."""
        usage = MemoryUsage() if self._host is None else self._host.read()
        device = self._device or _current_device()
        if device is None or device.type == "cpu":
            return usage
        module = torch.get_device_module(device)
        return dataclasses.replace(
            usage,
            device=str(device),
            # MPS counts no cache and has another name for its one number.
            device_allocated_bytes=_ask(module, ("memory_allocated", "current_allocated_memory"), device),
            device_peak_allocated_bytes=_ask(module, ("max_memory_allocated",), device),
            device_reserved_bytes=_ask(module, ("memory_reserved", "driver_allocated_memory"), device),
            device_peak_reserved_bytes=_ask(module, ("max_memory_reserved",), device),
            device_total_bytes=_capacity(module, device),
        )


def _current_device() -> torch.device | None:
    # A device that is not started holds nothing of this process, and a query may start it.
    kind = started_accelerator()
    return None if kind is None else torch.device(kind, torch.accelerator.current_device_index())


def _ask(module: Any, names: tuple[str, ...], device: torch.device) -> int | None:
    for name in names:
        function: Callable[..., int] | None = getattr(module, name, None)
        if function is not None:
            return int(function(device) if device.type != "mps" else function())
    return None


def _capacity(module: Any, device: torch.device) -> int | None:
    # Of the properties that PyTorch keeps: asking the driver how much is free takes it longer, and may wait.
    properties = getattr(module, "get_device_properties", None)
    if properties is None:
        return _ask(module, ("recommended_max_memory",), device)
    total = getattr(properties(device), "total_memory", None)
    return None if total is None else int(total)


class MemoryTimer(_CoreMemoryTimer, CPUGPUTimer):
    """A :class:`deep500_timing_torch.CPUGPUTimer` that also reads the memory at the end of its regions.

    Reading takes tens of microseconds, which fall to the region around, if there is one.

    Args:
        memory: What reads it; host and current device if None.
        memory_keys: Read at the ends of these regions; None for all.
        **settings: As for :class:`deep500_timing_torch.CPUGPUTimer`.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        memory: MemoryReader | None = None,
        memory_keys: Iterable[TimeType | str] | None = None,
        **settings: Any,
    ) -> None:
        memory = TorchMemory(device) if memory is None else memory
        super().__init__(device=device, memory=memory, memory_keys=memory_keys, **settings)
