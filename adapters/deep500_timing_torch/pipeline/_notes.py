"""The numeric notes of a rank's hooks, and their meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing_torch.pipeline._actions import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deep500_timing_torch.pipeline._calls import CallRow

__all__ = ["REGIONS", "Codes", "Event", "events_of"]

REGIONS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward input",
    Kind.BACKWARD_WEIGHT: "backward weight",
}
"""The names in a stage's regions: ``stage 0 forward``. Others are ``pipeline load`` and so on."""

Event = tuple[Kind, int, int, int, int, int]
"""Kind, stage, micro-batch, start, end, and which of its region's intervals on the device it is; -1 without one."""


class Codes:
    """Small numbers for kinds of actions on stages.

    Args:
        evaluation: Whether these are forward passes without training, which have other regions.
    """

    def __init__(self, evaluation: bool = False) -> None:
        self._evaluation = evaluation
        self._known: dict[tuple[Kind | None, int], int] = {}
        self.meanings: list[tuple[Kind | None, int]] = []
        """Kind and stage by code; the kind of a loss is None."""
        self.regions: list[str] = []
        """The region by code."""

    def of(self, kind: Kind | None, stage: int) -> int:
        """The code of a kind of action on a stage, None for the loss."""
        code = self._known.get((kind, stage))
        if code is None:
            if kind is None:
                name = "pipeline loss"
            else:
                what = "evaluation " if self._evaluation else ""
                name = f"stage {stage} {what}{REGIONS[kind]}" if kind in REGIONS else f"pipeline {what}{kind.value}"
            code = self._known[kind, stage] = len(self.meanings)
            self.meanings.append((kind, stage))
            self.regions.append(name)
        return code

    def region_of(self, kind: Kind, stage: int) -> str:
        """The region of a kind of action on a stage."""
        return self.regions[self.of(kind, stage)]


def events_of(notes: Iterable[CallRow], codes: Codes) -> list[Event]:
    """What notes say; those without a time are left out.

    A forward pass reaches to the end of its loss, which follows it.
    """
    found: list[Event] = []
    for code, microbatch, start_ns, end_ns, ordinal in notes:
        if start_ns < 0 or end_ns < 0:
            continue
        kind, stage = codes.meanings[code]
        if kind is not None:
            found.append((kind, stage, microbatch, start_ns, end_ns, ordinal))
            continue
        for place in range(len(found) - 1, -1, -1):
            event = found[place]
            if event[:2] == (Kind.FORWARD, stage):
                found[place] = (*event[:4], end_ns, event[5])
                break
    return found
