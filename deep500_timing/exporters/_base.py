"""The contract of a destination, and what keeps its faults away from the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from deep500_timing._warn import warn_once
from deep500_timing.exceptions import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deep500_timing._snapshot import Snapshot


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

    A subclass writes ``_export``, and ``_flush`` and ``_close`` if it holds anything.
    """

    def __init__(self, *, strict: bool = False) -> None:
        """Set what happens to faults.

        Args:
            strict: Raise ``ExportError`` instead of warning once.
        """
        self._strict = strict

    @abstractmethod
    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        """Write one snapshot; may raise anything."""

    def _flush(self) -> None:  # noqa: B027 (most exporters hold nothing)
        """Write what is held back; may raise anything."""

    def _close(self) -> None:  # noqa: B027
        """Let go of files and connections; may raise anything."""

    def export(self, snapshot: Snapshot, *, step: int | None = None) -> None:
        """Take one snapshot.

        Raises:
            ExportError: It failed and the exporter is strict.
        """
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
        warn_once(
            f"{message}. The run goes on; the report is lost. Said once.", about=f"{type(self)} {doing} {error!r}"
        )


def export_to(snapshot: Snapshot, exporters: Iterable[Exporter], *, step: int | None) -> None:
    """Hand a snapshot to each exporter. One that raises, unless it was asked to be strict, costs a warning only.

    Raises:
        ExportError: A strict exporter failed; the others have had the snapshot.
    """
    strict_failures = []
    for exporter in exporters:
        try:
            exporter.export(snapshot, step=step)
        except ExportError as error:
            strict_failures.append(error)
        except Exception as error:
            warn_once(_describe(exporter, "exporting", error), about=f"{type(exporter)} {error!r}")
    if strict_failures:
        raise strict_failures[0]


def _describe(exporter: object, doing: str, error: Exception) -> str:
    return f"{doing.capitalize()} times with {type(exporter).__name__} failed: {type(error).__name__}: {error}"
