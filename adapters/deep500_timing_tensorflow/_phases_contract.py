"""What times the passes inside an execution, and what it tells whom: for graphs and for torch alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deep500_timing import TimeType


class Stamps(NamedTuple):
    """When a batch passed the anchors, in seconds since 1970; NaN for one that it did not pass."""

    number: int
    """The execution that it was trained in."""
    data_s: float
    """The batch is there."""
    loss_s: float
    """The loss is there."""
    gradients_s: float
    """The gradients are there."""
    end_s: float
    """The step is done."""


class StampTaker(Protocol):
    """What stamps are handed to."""

    def take(self, stamps: Iterable[Stamps]) -> None:
        """Stamps that a graph has taken, in order."""
        ...


class PhasesListener(Protocol):
    """A fit whose passes are timed."""

    @property
    def matcher(self) -> StampTaker:
        """What takes the stamps of a graph."""
        ...

    def is_running(self) -> bool:
        """Whether the calling thread is inside the fit."""
        ...

    def pass_begins(self, key: TimeType) -> None:
        """On torch, a pass begins."""
        ...

    def pass_ends(self, key: TimeType) -> None:
        """It came to its end."""
        ...

    def pass_is_not_told(self, key: TimeType) -> None:
        """Where it ends cannot be told."""
        ...


class Phases(Protocol):
    """What times the passes inside an execution."""

    def join(self, listener: PhasesListener) -> None:
        """A fit begins."""
        ...

    def leave(self, listener: PhasesListener) -> None:
        """It came to its end, or was broken off."""
        ...

    def prepare_step(self, number: int) -> None:
        """An execution of that number is next."""
        ...

    def step_begins(self, listener: PhasesListener) -> None:
        """The execution."""
        ...

    def step_ends(self, listener: PhasesListener) -> None:
        """It came to its end, or never was."""
        ...

    def drain(self) -> int:
        """Hand over the stamps that were taken.

        Returns:
            How many were lost.
        """
        ...

    @property
    def has_stamps(self) -> bool:
        """Whether the passes come as stamps, and not as regions of the timer."""
        ...
