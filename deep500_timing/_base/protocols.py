"""What a timer asks of parts that a user may bring: a clock of the host, a clock of a device, a text stream.

A *host clock* answers at once. A *device clock* cannot: work is queued, and so are the marks around it. It therefore
deals in events that are recorded into a stream now and read later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Hashable


@runtime_checkable
class Writable(Protocol):
    """A text stream, as far as a report needs one."""

    def write(self, text: str, /) -> object:
        """Take the text."""
        ...


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
        """The stream that receives what the calling thread issues now, on the current device.

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
