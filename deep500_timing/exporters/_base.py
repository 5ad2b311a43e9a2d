"""The contract of a destination, and what keeps its faults away from the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from deep500_timing._ground.warn import warn_once
from deep500_timing.exceptions import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deep500_timing._summary.snapshot import Snapshot


@runtime_checkable
class Exporter(Protocol):
    """Where snapshots go. Anything with these three methods will do."""

    def export(self, snapshot: Snapshot, *, step: int | None = None) -> None:
        """Take one snapshot, of training step ``step`` if that is known."""
        ...

    def flush(self) -> None:
        """Hand on whatever is held back."""
        ...

    def close(self) -> None:
        """Let go of files and connections. May be called twice."""
        ...


class BaseExporter(ABC):
    """An exporter whose faults are reported once and never reach the training loop, unless it is strict.

    A subclass writes ``_export``, and the other methods with an underscore as it needs them. If it needs an optional
    package, the class attribute ``package`` names it.
    """

    package: str | None = None
    """Import name of the package that the exporter needs, if it needs one."""

    def __init__(self, *, strict: bool = False) -> None:
        """Set what happens to faults.

        Args:
            strict: Raise ``ExportError`` instead of warning once.
        """
        self._strict = strict

    def _open(self) -> None:  # noqa: B027 (most exporters open nothing)
        """Make ready for an export. What this raises is bad input, and reaches the caller as it is."""

    @abstractmethod
    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        """Write one snapshot; may raise anything."""

    def _flush(self) -> None:  # noqa: B027 (most exporters hold nothing)
        """Write what is held back; may raise anything."""

    def _close(self) -> None:  # noqa: B027
        """Let go of files and connections; may raise anything."""

    def _where(self) -> str:
        """The destination, if one exporter of this class differs from another in it; faults are told once for each."""
        return ""

    def export(self, snapshot: Snapshot, *, step: int | None = None) -> None:
        """Take one snapshot.

        Raises:
            ExportError: It failed and the exporter is strict.
        """
        self._open()
        try:
            self._export(snapshot, step)
        except Exception as error:
            self._failed("exporting", error)

    def flush(self) -> None:
        """Hand on whatever is held back.

        Raises:
            ExportError: It failed and the exporter is strict.
        """
        try:
            self._flush()
        except Exception as error:
            self._failed("flushing", error)

    def close(self) -> None:
        """Let go of files and connections.

        Raises:
            ExportError: It failed and the exporter is strict.
        """
        try:
            self._close()
        except Exception as error:
            self._failed("closing", error)

    def _failed(self, doing: str, error: Exception) -> None:
        message = _describe(self, doing, error)
        if self._strict:
            raise ExportError(message) from error
        # Not the error's text, which may hold an address or a time that differs each time.
        kind = (type(error).__qualname__, getattr(error, "errno", None))
        warn_once(
            f"{message}. The run goes on without this report. Said once.",
            about=f"{type(self).__qualname__} {self._where()} {doing} {kind}",
        )


def export_to(snapshot: Snapshot, exporters: Iterable[Exporter], *, step: int | None) -> None:
    """Hand a snapshot to each exporter. One that raises, unless it was asked to be strict, costs a warning only.

    Raises:
        ExportError: A strict exporter failed; the others have had the snapshot.
        OSError: A file cannot be made, for the reason that the system gives; the others have had the snapshot.
    """
    raised: list[Exception] = []
    for exporter in exporters:
        try:
            exporter.export(snapshot, step=step)
        except Exception as error:
            # What a BaseExporter lets out is for the caller; other exporters have not thought about it.
            if isinstance(error, ExportError) or isinstance(exporter, BaseExporter):
                raised.append(error)
            else:
                warn_once(
                    f"{_describe(exporter, 'exporting', error)}. The run goes on without this report. Said once.",
                    about=f"{type(exporter)} {type(error)}",
                )
    if raised:
        raise raised[0]


def _describe(exporter: object, doing: str, error: Exception) -> str:
    # An ExportError was written for the user; other errors need their type to be understood.
    reason = str(error) if isinstance(error, ExportError) else f"{type(error).__name__}: {error}"
    return f"{doing.capitalize()} times with {type(exporter).__name__} failed: {reason}".rstrip(".")
