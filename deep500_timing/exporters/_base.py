"""The contract of an exporter, its share of the times, and the handling of its faults."""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from deep500_timing._base.fork import after_fork
from deep500_timing._base.warn import warn_once
from deep500_timing.exceptions import ExportError

if TYPE_CHECKING:
    from deep500_timing._summary.snapshot import Snapshot

_PASSWORD = re.compile(r"//[^/@\s]*@")

_reported: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Had]] = WeakKeyDictionary()
"""The part that each exporter has had of each timer."""
_kept: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()
# Reentrant: a signal handler may export during an export.
_lock = threading.RLock()


@after_fork
def _after_fork_in_child() -> None:
    global _lock, _reported
    _lock = threading.RLock()
    _reported = WeakKeyDictionary()  # The child's timers start empty.


class Had:
    """The part that an exporter has had of one timer: its next report covers the time since."""

    snapshot: Snapshot | None = None


class Source(Protocol):
    """A timer."""

    def snapshot(self, *, places: bool = False) -> Snapshot: ...


@runtime_checkable
class Exporter(Protocol):
    """Where snapshots go. Anything with these three methods will do."""

    def export(self, snapshot: Snapshot, *, step: int | None = None) -> None:
        """Take one snapshot, of training step ``step`` if that is known."""
        ...

    def flush(self) -> None:
        """Write buffered reports."""
        ...

    def close(self) -> None:
        """Release files and connections. May be called twice."""
        ...


class BaseExporter(ABC):
    """An exporter that reports a fault once and never raises into the training loop, unless it is strict.

    A subclass writes ``_export``, and the other methods with an underscore as it needs them. If it needs an optional
    package, the class attribute ``package`` names it.
    """

    package: str | None = None
    """Import name of the package that the exporter needs, if it needs one."""

    def __init__(self, *, strict: bool = False, whole_run: bool = False) -> None:
        """Choose how to treat faults, and the content of a report.

        Args:
            strict: Raise ``ExportError`` instead of warning once.
            whole_run: Report the whole run each time, instead of the times since this exporter's last report.
        """
        self._strict = strict
        self.whole_run = whole_run
        self.failures = 0
        """Calls that failed and did not raise."""

    @abstractmethod
    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        """Write one snapshot; may raise anything."""

    def _flush(self) -> None:  # noqa: B027 (most exporters hold nothing)
        """Write buffered data; may raise anything."""

    def _close(self) -> None:
        """Write buffered data, and release files and connections; may raise anything."""
        self._flush()

    def _where(self) -> str:
        """The destination, for messages: a fault is reported once per destination."""
        return ""

    def _queue_up(self, snapshot: Snapshot, had: Had | None, step: int | None) -> bool:
        """Let a report wait for the exporter's own thread; return False if the caller is to hand it out now."""
        return False

    def note_destination(self) -> None:  # noqa: B027
        """Remember the destination of this thread's reports; the next may come from a thread without an active run."""

    def export(self, snapshot: Snapshot, *, step: int | None = None) -> None:
        """Take one snapshot.

        Args:
            snapshot: The times.
            step: The training step that they belong to: an integer, or None if there is none.
        """
        self._guard("exporting", self._export, snapshot, check_step(step))

    def flush(self) -> None:
        """Write buffered reports."""
        self._guard("flushing", self._flush)

    def close(self) -> None:
        """Release files and connections."""
        self._guard("closing", self._close)

    def _guard(self, doing: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            if self._strict:
                raise ExportError(_describe(self, doing, error)) from error
            self.failures += 1
            self._say_once(doing, error)

    def _say_once(self, doing: str, error: Exception) -> None:
        # The error's text may hold an address or a time that differs each time.
        kind = (type(error).__qualname__, getattr(error, "errno", None))
        _warn(self, doing, error, key=f"{type(self).__qualname__} {self._where()} {doing} {kind}")


def check_step(step: Any) -> int | None:
    """A training step as every destination can hold it: an integer of 64 bits with a sign, or None."""
    if step is None:
        return None
    try:
        number = index(step)
    except TypeError:
        number = None
    # numpy's truth values are integers to numpy 1.
    if number is None or type(step).__name__ in ("bool", "bool_"):
        raise TypeError(
            f"Exporting times with step={step!r}: a step is an integer, or None if there is none, not "
            f"{type(step).__name__}. Give the number of the batch or epoch, such as step=int(step)."
        )
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"Exporting times with step={step!r}: a step must fit 64 bits. Count steps from 0.")
    return number


def check_exporter(exporter: object) -> None:
    """See that something is an exporter."""
    if isinstance(exporter, type):
        remedy = f"it is a class; make one of it: {exporter.__name__}(...)"
    elif callable(getattr(exporter, "export", None)):
        return
    elif isinstance(exporter, str):
        remedy = f"it is a name; make an exporter: deep500_timing.exporters.get({exporter!r})(...)"
    elif isinstance(exporter, list | tuple | set | frozenset):
        remedy = "it is a collection; pass each exporter as an argument: export(*exporters)"
    else:
        remedy = "it has no method export; give an exporter, such as deep500_timing.exporters.TerminalExporter()"
    raise TypeError(f"Exporting times to {exporter!r:.200}: {remedy}.")


def report(source: Source, exporters: Iterable[Exporter], *, step: int | None) -> None:
    """Give each exporter the times since its last report. An exporter that raises costs a warning, unless it is strict.

    An exporter's first report holds the whole run, and so does each report if its ``whole_run`` is true. The next
    report includes times that the exporter failed to take.

    Raises:
        TypeError: One of them is no exporter, or the step no integer; none has had the times.
        ValueError: The step does not fit 64 bits; none has had the times.
        ExportError: A strict exporter failed; the others have had the times.
        OSError: A file cannot be made, for the reason that the system gives; the others have had the times.
    """
    several, step = list(exporters), check_step(step)
    for exporter in several:
        check_exporter(exporter)
    nested = any(getattr(exporter, "shows_places", False) for exporter in several)
    shares: list[tuple[Exporter, Snapshot, Callable[[], None]]] = []
    with _lock:  # Each exporter's reports are in the order of their snapshots.
        now = source.snapshot(places=True) if nested else source.snapshot()
        for exporter in several:
            had = _had(source, exporter)
            if not (isinstance(exporter, BaseExporter) and exporter._queue_up(now, had, step)):
                shares.append((exporter, *_share(had, now)))
    raised: list[Exception] = []
    for exporter, snapshot, take_back in shares:
        failures = getattr(exporter, "failures", 0)
        failed = True
        try:
            exporter.export(snapshot, step=step)
            failed = getattr(exporter, "failures", 0) != failures
        except Exception as error:
            # A BaseExporter raises for the caller on purpose; an error of another exporter is a fault.
            if isinstance(error, ExportError) or isinstance(exporter, BaseExporter):
                raised.append(error)
            else:
                _warn(exporter, "exporting", error, key=f"{type(exporter)} {type(error)}")
        finally:
            if failed:
                take_back()
    if raised:
        raise raised[0]


def _had(source: Source, exporter: object) -> Had | None:
    """What the exporter has had of the source; None if it gets the whole run each time."""
    if getattr(exporter, "whole_run", False):
        return None
    try:
        return _reported.setdefault(exporter, WeakKeyDictionary()).setdefault(source, Had())
    except TypeError:
        return None  # Not hashable or weakly referenceable.


def _share(had: Had | None, now: Snapshot) -> tuple[Snapshot, Callable[[], None]]:
    """The part of a snapshot that an exporter has not had, and a function that puts it back for the next report."""
    if had is None:
        return now, lambda: None
    before, had.snapshot = had.snapshot, now

    def take_back() -> None:
        with _lock:
            if had.snapshot is now:  # Otherwise another thread has reported since.
                had.snapshot = before

    return now.since(before), take_back


def kept_exporter(source: Source, kind: Callable[..., Any], prefix: str, settings: dict[str, Any]) -> Any:
    """The exporter that a timer's own method reports by, the same for the same settings."""
    stats = settings.get("stats")
    plain = {**settings, "stats": tuple(stats) if isinstance(stats, list) else stats}
    key = (kind, str(prefix).strip("/"), *sorted(plain.items()))
    try:
        with _lock:
            of_source = _kept.setdefault(source, {})
            if key not in of_source:
                of_source[key] = kind(prefix, **settings)
            return of_source[key]
    except (TypeError, AttributeError):
        return kind(prefix, **settings)  # Wrong settings say so themselves, and odd ones are not remembered.


def _warn(exporter: object, doing: str, error: Exception, *, key: str) -> None:
    warn_once(f"{_describe(exporter, doing, error)}. The run goes on without this report. Said once.", key=key)


def _describe(exporter: object, doing: str, error: Exception) -> str:
    # An ExportError was written for the user; other errors need their type to be understood.
    reason = str(error) if isinstance(error, ExportError) else f"{type(error).__name__}: {error}"
    return without_passwords(f"{doing.capitalize()} times with {type(exporter).__name__} failed: {reason}".rstrip("."))


def without_passwords(text: Any) -> str:
    """The text without user names and passwords in addresses."""
    return _PASSWORD.sub("//", str(text))
