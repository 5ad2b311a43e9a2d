"""Memory of the host and of the device, now and at the end of regions.

::

    from deep500_timing.memory import MemoryTimer

    tmr = MemoryTimer()                      # for a GPU's memory: deep500_timing_torch.memory.MemoryTimer
    with tmr.region("FORWARD"):
        ...
    tmr.snapshot().get("FORWARD").memory     # what the process held at the region's ends

Readers only read: peaks that a framework counts are the user's, and are never reset here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from deep500_timing._base.memory_usage import MemorySamples, MemoryUsage, RegionMemory
from deep500_timing._base.require import require
from deep500_timing._base.warn import warn_once
from deep500_timing._recording.recorder import Recorder, name_of
from deep500_timing._summary.text import UNKNOWN_IN_LOG
from deep500_timing.timer import CPUGPUTimer

if TYPE_CHECKING:
    from deep500_timing._base.names import TimeType

__all__ = ["HostMemory", "MemoryReader", "MemoryTimer", "MemoryUsage", "RegionMemory", "format_usage"]


@runtime_checkable
class MemoryReader(Protocol):
    """Something that reads memory."""

    def read(self) -> MemoryUsage:
        """The memory in use now. It must not wait for the device, and must not reset anything."""
        ...


class HostMemory:
    """Reads the memory of this process and of the machine.

    Raises:
        MissingPackageError: psutil is not installed.
    """

    def __init__(self) -> None:
        self._psutil = require("psutil", extra="memory", caller="deep500_timing.memory.HostMemory")
        self._process = self._psutil.Process()

    def __reduce__(self) -> tuple[type[HostMemory], tuple[()]]:
        """A copy reads the memory of the process that it is in."""
        return HostMemory, ()

    def read(self) -> MemoryUsage:
        """The memory in use now."""
        if self._process.pid != os.getpid():  # this process was forked
            self._process = self._psutil.Process()
        return MemoryUsage(
            host_rss_bytes=int(self._process.memory_info().rss),
            host_used_percent=float(self._psutil.virtual_memory().percent),
            swap_used_percent=float(self._psutil.swap_memory().percent),
        )


def read_or_none(reader: MemoryReader) -> MemoryUsage | None:
    """Return the reader's result, or None with one warning if it fails."""
    try:
        return reader.read()
    except Exception as error:
        warn_once(
            f"Reading memory with {type(reader).__name__} failed; it is left out of the reports: {error}",
            key=f"memory {type(reader)}",
        )
        return None


def format_usage(usage: MemoryUsage | None) -> str:
    """One line in the manner of DeepSpeed's ``memory_usage``: its four numbers of a device, if there is one, and ours.

    "GB" is 1024³ bytes, as in the original. What cannot be known is left out.
    """
    if usage is None:
        return f" | memory: {UNKNOWN_IN_LOG}"
    parts = [
        f"{label}: {value / 1024**3:.4f} GB"
        for label, value in (
            ("mem_allocated", usage.device_allocated_bytes),
            ("max_mem_allocated", usage.device_peak_allocated_bytes),
            ("cache_allocated", usage.device_reserved_bytes),
            ("max_cache_allocated", usage.device_peak_reserved_bytes),
            ("host_rss", usage.host_rss_bytes),
        )
        if value is not None
    ]
    if usage.host_used_percent is not None:
        parts.append(f"host_used: {usage.host_used_percent:.1f} %")
    return "".join(f" | {part}" for part in parts) or f" | memory: {UNKNOWN_IN_LOG}"


# --- at the end of regions --------------------------------------------------------------------------------------------


def sample_region(recorder: Recorder, name: str, reader: MemoryReader) -> None:
    """Read the memory and keep it with the region; a fault costs one warning."""
    usage = read_or_none(reader)
    if usage is not None:
        recorder._memory_at_ends.setdefault(name, MemorySamples()).add(usage)
        run = recorder._run
        if run is not None:
            for metric, value in amounts_of(usage):
                run.sample(f"memory.{metric}", value, region=name)


def amounts_of(usage: MemoryUsage) -> list[tuple[str, float]]:
    """The known numbers of a reading, by field."""
    named = ((field.name, getattr(usage, field.name)) for field in fields(usage))
    return [(name, value) for name, value in named if isinstance(value, (int, float))]


def _read_at_end(timer: Any, name: str) -> None:
    sample_region(timer, name, timer._memory)


class MemoryTimer(CPUGPUTimer):
    """A timer that also reads the memory at the end of its regions, after their time has been taken.

    Reading takes tens of microseconds, which fall to the region around, if there is one.

    Args:
        memory: What reads it; the host's memory if None.
        memory_keys: Read at the ends of these regions; None for all.
        **settings: As for :class:`deep500_timing.CPUGPUTimer`.

    Raises:
        MissingPackageError: ``memory`` is None and psutil is not installed.
        InvalidKeyError: One of ``memory_keys`` is neither a ``TimeType`` nor a non-empty string.
    """

    def __init__(
        self,
        *,
        memory: MemoryReader | None = None,
        memory_keys: Iterable[TimeType | str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._memory = HostMemory() if memory is None else memory
        self._memory_keys = (
            None if memory_keys is None else frozenset(name_of("Reading memory after", key) for key in memory_keys)
        )
        self._call_at_end(_read_at_end, self._memory_keys)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "memory": self._memory, "memory_keys": self._memory_keys}
