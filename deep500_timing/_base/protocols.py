"""Interfaces that a user may implement: a host clock, a device clock, a text stream.

A *host clock* returns the time at once. A device works through a queue, so a *device clock* records events into a
stream now and reads them later.
"""

from __future__ import annotations

from collections.abc import Hashable
from time import perf_counter_ns
from typing import Any, Protocol, runtime_checkable


class HostClock:
    """The monotonic clock of highest resolution that the system has: that of :func:`time.perf_counter_ns`."""

    @staticmethod
    def now_ns() -> int:
        """The time in nanoseconds since an arbitrary moment."""
        return perf_counter_ns()

    def __repr__(self) -> str:
        return "HostClock()"


@runtime_checkable
class Writable(Protocol):
    """The part of a text stream that a report needs."""

    def write(self, text: str, /) -> object: ...


@runtime_checkable
class Clock(Protocol):
    """A clock on the host."""

    def now_ns(self) -> int:
        """The time in nanoseconds since an arbitrary moment. It never runs backwards."""
        ...


@runtime_checkable
class DeviceClock(Protocol):
    """One kind of device, timed by events in its streams.

    A timer calls ``stream``, ``is_capturing`` and ``record`` on the training thread, so they must be cheap and
    must not wait for the device. Any method may raise: the interval concerned is then counted as failed, with
    one warning, and the run goes on.
    """

    name: str
    """The device type in the framework's own term, such as ``"cuda"``."""

    def stream(self) -> Hashable:
        """The stream that receives the calling thread's work, on the current device.

        Equal streams compare equal and hash alike; streams of different devices differ.
        """
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph, when nothing may be recorded or queried."""
        ...

    def new_event(self, stream: Any) -> Any:
        """A new event that can be recorded into ``stream`` any number of times."""
        ...

    def record(self, event: Any, stream: Any) -> None:
        """Queue ``event`` in ``stream``: it is done when all work queued before it is."""
        ...

    def is_done(self, event: Any) -> bool:
        """Whether the device has reached ``event``. Never waits."""
        ...

    def wait(self, event: Any) -> None:
        """Block the calling thread until the device has reached ``event``."""
        ...

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """The time in nanoseconds between two events that are done."""
        ...
