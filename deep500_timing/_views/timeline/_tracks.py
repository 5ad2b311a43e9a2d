"""What a timeline is made of, whatever the file's format: processes, their tracks, and what lies on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

NOTHING: Mapping[str, int | float | str] = {}
NO_FLOW = 0


class Writer(Protocol):
    """Writes a timeline down as it comes. Times are in ns, mostly of Unix time; flows have numbers from 1."""

    def process(self, name: str) -> int:
        """A new group of tracks, below those that are there; returns its number."""
        ...

    def track(self, process: int, name: str) -> int:
        """A new track of a process, below those that are there; returns its number."""
        ...

    def counter(self, process: int, name: str, unit: str) -> int:
        """A new track of a value over time; ``unit`` is ``"bytes"``, ``"%"`` or whatever else, or empty."""
        ...

    def begin(
        self,
        track: int,
        start_ns: int,
        end_ns: int,
        name: str,
        args: Mapping[str, int | float | str] = NOTHING,
        flow_out: int = NO_FLOW,
        flow_in: int = NO_FLOW,
    ) -> None:
        """A slice begins, inside those that have begun on its track and not ended."""
        ...

    def end(self, track: int, time_ns: int) -> None:
        """The slice that began last on a track, of those that have not ended, ends."""
        ...

    def instant(self, track: int, time_ns: int, name: str, args: Mapping[str, int | float | str] = NOTHING) -> None:
        """Something happened."""
        ...

    def value(self, counter: int, time_ns: int, value: float) -> None:
        """A value from here on."""
        ...

    def close(self) -> None:
        """Write what is left; the file stays open."""
        ...


class Lanes:
    """A track on which things may overlap: what does not lie in what has begun goes to a lane of its own.

    Viewers draw a track as a stack, in which a slice ends before those around it do.

    Args:
        writer: Where the slices go.
        process: Whose track it is.
        name: Of the track; its lanes share it, and viewers that can put them together do.
    """

    def __init__(self, writer: Writer, process: int, name: str) -> None:
        self._writer, self._process, self._name = writer, process, name
        self._lanes: list[tuple[int, list[int]]] = []

    def slice(
        self,
        start_ns: int,
        end_ns: int,
        name: str,
        args: Mapping[str, int | float | str] = NOTHING,
        flow_out: int = NO_FLOW,
        flow_in: int = NO_FLOW,
    ) -> None:
        """Put a slice down. They come by rising start; of those that begin together the longest comes first."""
        for track, open_ends in self._lanes:
            while open_ends and open_ends[-1] <= start_ns:
                self._writer.end(track, open_ends.pop())
            if not open_ends or open_ends[-1] >= end_ns:
                break
        else:
            track, open_ends = self._writer.track(self._process, self._name), []
            self._lanes.append((track, open_ends))
        open_ends.append(end_ns)
        self._writer.begin(track, start_ns, end_ns, name, args, flow_out, flow_in)

    def instant(self, time_ns: int, name: str, args: Mapping[str, int | float | str] = NOTHING) -> None:
        """Put a moment down, on the first lane."""
        if not self._lanes:
            self._lanes.append((self._writer.track(self._process, self._name), []))
        self._writer.instant(self._lanes[0][0], time_ns, name, args)

    def close(self) -> None:
        """End what has not ended."""
        for track, open_ends in self._lanes:
            while open_ends:
                self._writer.end(track, open_ends.pop())


def unit_of(metric: str) -> str:
    """The unit that a metric's name ends in, as a reader writes it; empty if it names none."""
    for suffix, unit in _UNITS.items():
        if metric.endswith(suffix):
            return unit
    return ""


_UNITS = {
    "_bytes_per_s": "bytes/s",
    "_per_s": "1/s",
    "_bytes": "bytes",
    "_percent": "%",
    "_mhz": "MHz",
    "_w": "W",
    "_c": "°C",
}
"""The longest of two that fit comes first."""
