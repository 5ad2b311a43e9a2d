"""Memory at one moment and at the ends of a region, as plain data.

The fields are declared here and nowhere else: columns, metrics and notes of the reports are made from ``MAXIMA`` and
``SHOWN``. A further amount needs its field here, ``max_`` of it in :class:`RegionMemory` if its largest value is to be
kept, and a reader that reads it.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections import deque
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory at one moment; None where it cannot be known. ``shown_as`` is the title of an amount in a table."""

    host_rss_bytes: int | None = field(default=None, metadata={"shown_as": "resident"})
    """The process's resident set."""
    host_used_percent: float | None = None
    """How much of the machine's memory all processes use together."""
    swap_used_percent: float | None = None
    """How much of the machine's swap is in use."""
    device: str | None = None
    """The device that the following are of, such as ``"cuda:0"``."""
    device_allocated_bytes: int | None = field(default=None, metadata={"shown_as": "allocated on {device}"})
    """What tensors occupy."""
    device_peak_allocated_bytes: int | None = None
    """The most that tensors have occupied since the program last reset the framework's counter."""
    device_reserved_bytes: int | None = field(default=None, metadata={"shown_as": "reserved on {device}"})
    """Memory of the framework's allocator, free blocks in its cache included."""
    device_peak_reserved_bytes: int | None = None
    """The most that it has held since the program last reset the framework's counter."""
    device_total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RegionMemory:
    """Memory at the ends of one region: at the last one, and the largest over all."""

    samples: int
    last: MemoryUsage
    max_host_rss_bytes: int | None = None
    """The largest resident set of the process at any of them."""
    max_device_allocated_bytes: int | None = None
    """The most that tensors occupied at any of them; between them it may have been more, see the device's peak."""
    max_device_reserved_bytes: int | None = None
    """The most that the allocator held at any of them."""

    def then(self, usage: MemoryUsage) -> RegionMemory:
        """With one more end."""
        largest = {}
        for name in MAXIMA:
            both = getattr(self, name), getattr(usage, name.removeprefix("max_"))
            largest[name] = max((value for value in both if value is not None), default=None)
        return RegionMemory(self.samples + 1, usage, **largest)


class MemorySamples:
    """The memory at the ends of one region, from any number of threads, signal handlers and finalizers.

    A sample is put down in one step; a thread that finds no other adding up does so, and none waits.
    """

    __slots__ = ("_adding", "_new", "_total")

    def __init__(self) -> None:
        self._total: RegionMemory | None = None
        self._new: deque[MemoryUsage] = deque()
        self._adding = allocate_lock()

    def add(self, usage: MemoryUsage) -> None:
        self._new.append(usage)
        self.total()

    def total(self) -> RegionMemory | None:
        if self._adding.acquire(False):
            try:
                while self._new:
                    usage = self._new.popleft()
                    self._total = (RegionMemory(0, usage) if self._total is None else self._total).then(usage)
            finally:
                self._adding.release()
        return self._total


MAXIMA = tuple(field.name for field in fields(RegionMemory) if field.name.startswith("max_"))
"""The fields of :class:`RegionMemory` that hold the largest of an amount, in bytes."""
SHOWN = {field.name: field.metadata["shown_as"] for field in fields(MemoryUsage) if "shown_as" in field.metadata}
"""The fields of :class:`MemoryUsage` that a table shows, with their titles."""
