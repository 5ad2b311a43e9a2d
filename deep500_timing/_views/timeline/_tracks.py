"""The parts of a timeline in any format: processes, tracks, slices, counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

NOTHING: Mapping[str, int | float | str] = {}


class Slice(NamedTuple):
    """A stretch of time with a name."""

    start_ns: int
    end_ns: int
    name: str
    args: Mapping[str, int | float | str] = NOTHING
    flow_out: int = 0
    """The number of an arrow that begins here; 0 for none."""
    flow_in: int = 0
    """The number of an arrow that ends here."""


class Writer(Protocol):
    """Writes a timeline as a stream. Times are in ns, mostly Unix time; flows have numbers from 1."""

    def process(self, name: str) -> int:
        """Add a group of tracks below the others; returns its number."""
        ...

    def track(self, process: int, name: str) -> int:
        """Add a track below the others of a process; returns its number."""
        ...

    def counter(self, process: int, name: str, unit: str) -> int:
        """Add a track of a value over time; ``unit`` is text such as ``"bytes"`` or ``"%"``, or empty."""
        ...

    def begin(self, track: int, of: Slice) -> None:
        """Begin a slice inside the open slices of its track."""
        ...

    def end(self, track: int, time_ns: int) -> None:
        """End the innermost open slice of a track."""
        ...

    def instant(self, track: int, time_ns: int, name: str, args: Mapping[str, int | float | str] = NOTHING) -> None:
        """Write an event."""
        ...

    def value(self, counter: int, time_ns: int, value: float) -> None:
        """Write a value that holds from this time on."""
        ...

    def close(self) -> None:
        """Write buffered data; the file stays open."""
        ...


class Lanes:
    """A track with lanes for overlapping slices.

    Viewers draw a track as a stack, in which a slice ends before the slices around it. A slice that overlaps goes to
    another lane.
    """

    def __init__(self, writer: Writer, process: int, name: str) -> None:
        self._writer, self._process, self._name = writer, process, name
        self._lanes: list[tuple[int, list[int]]] = []

    def slice(self, of: Slice) -> None:
        """Add a slice. Slices must come by rising start; for equal starts the longest first."""
        for track, open_ends in self._lanes:
            while open_ends and open_ends[-1] <= of.start_ns:
                self._writer.end(track, open_ends.pop())
            if not open_ends or open_ends[-1] >= of.end_ns:
                break
        else:
            track, open_ends = self._writer.track(self._process, self._name), []
            self._lanes.append((track, open_ends))
        open_ends.append(of.end_ns)
        self._writer.begin(track, of)

    def instant(self, time_ns: int, name: str, args: Mapping[str, int | float | str] = NOTHING) -> None:
        """Add an event to the first lane."""
        if not self._lanes:
            self._lanes.append((self._writer.track(self._process, self._name), []))
        self._writer.instant(self._lanes[0][0], time_ns, name, args)

    def close(self) -> None:
        """End all open slices."""
        for track, open_ends in self._lanes:
            while open_ends:
                self._writer.end(track, open_ends.pop())


def unit_of(metric: str) -> str:
    """The unit at the end of a metric's name, as text; empty without one."""
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
"""Longer suffixes first."""
