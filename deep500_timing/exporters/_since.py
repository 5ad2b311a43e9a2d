"""The last snapshot that each exporter got of each timer, so that its next report covers the time since."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from deep500_timing._base.fork import after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from deep500_timing._summary.snapshot import Snapshot


class Source(Protocol):
    """A timer."""

    def snapshot(self, *, places: bool = False) -> Snapshot:
        """Its times at this moment, with what lies in what if that is asked for."""
        ...


_reported: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Snapshot]] = WeakKeyDictionary()
_kept: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()
# Reentrant: a signal handler may export during an export.
_lock = threading.RLock()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


after_fork(_after_fork_in_child)


def take(source: Source, exporters: Sequence[object]) -> list[tuple[Snapshot, Callable[[], None]]]:
    """Take one snapshot of a timer and compute each exporter's part.

    Returns:
        For each exporter its part, and a function that puts the part back for the next report.
    """
    with _lock:
        nested = any(getattr(exporter, "shows_places", False) for exporter in exporters)
        now = source.snapshot(places=True) if nested else source.snapshot()
        return [_part(source, exporter, now) for exporter in exporters]


def _part(source: Source, exporter: object, now: Snapshot) -> tuple[Snapshot, Callable[[], None]]:
    if getattr(exporter, "whole_run", False):
        return now, _nothing
    try:
        of_exporter = _reported.setdefault(exporter, WeakKeyDictionary())
    except TypeError:
        return now, _nothing  # Not hashable or weakly referenceable: it gets the whole run each time.
    before = of_exporter.get(source)
    of_exporter[source] = now

    def take_back() -> None:
        with _lock:
            if of_exporter.get(source) is not now:
                return  # Another thread has reported since.
            if before is None:
                del of_exporter[source]
            else:
                of_exporter[source] = before

    return now.since(before), take_back


def _nothing() -> None:
    pass


def kept_exporter(source: Source, kind: Callable[..., Any], prefix: str, settings: dict[str, Any]) -> Any:
    """The exporter that a timer's own method reports by, the same for the same settings."""
    stats = settings.get("stats")
    key = (
        kind,
        str(prefix).strip("/"),
        *sorted({**settings, "stats": tuple(stats) if isinstance(stats, list) else stats}.items()),
    )
    try:
        with _lock:
            of_source = _kept.setdefault(source, {})
            if key not in of_source:
                of_source[key] = kind(prefix, **settings)
            return of_source[key]
    except (TypeError, AttributeError):
        return kind(prefix, **settings)  # Wrong settings say so themselves, and odd ones are not remembered.
