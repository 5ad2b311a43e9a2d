"""What a rank's hooks note down between two actions, and what is made of it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing_torch.pipeline._actions import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["ISSUED", "REGIONS", "WAITED", "Codes", "Event", "Label", "Note", "events_of"]

REGIONS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward input",
    Kind.BACKWARD_WEIGHT: "backward weight",
}
"""What a stage's regions are called: ``stage 0 forward``. Others are ``pipeline load`` and so on."""

Event = tuple[Kind, int, int, int, int, int]
"""Kind, stage, micro-batch, start, end, and which of its region's intervals on the device it is; -1 without one."""
Label = tuple[int, int, int]
"""What a message is: the codes of its issue and of the wait for it, and the micro-batch."""
Note = tuple[int, Any, Any, int, int]
"""An event with the code of its kind and stage for those. Of messages: :data:`ISSUED`, their labels, start, end; or
:data:`WAITED`, their labels, and the times between which each was waited for."""
ISSUED = -1
WAITED = -2


class Codes:
    """Small numbers for kinds of actions on stages.

    Args:
        evaluation: Whether these are forward passes without training, which have regions of their own.
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

    def message_by_message(self, notes: Iterable[Note]) -> Iterator[Note]:
        """The notes, with one for each message in the place of those of several."""
        for note in notes:
            what, labels, start_ns, end_ns, _ = note
            if what >= 0:
                yield note
            elif what == ISSUED:
                last: Label | None = None
                for label in labels:
                    if label is not last:  # Several tensors of one message come one after the other.
                        yield label[0], label[2], start_ns, end_ns, -1
                    last = label
            else:
                times_ns = start_ns
                if len(times_ns) != len(labels) + 1:
                    labels = [self._first_received(labels)]
                start_ns = times_ns[0]
                for (_, code, microbatch), end_ns in zip(labels, times_ns[1:], strict=True):
                    yield code, microbatch, start_ns, end_ns, -1
                    start_ns = end_ns

    def _first_received(self, labels: Sequence[Label]) -> Label:
        # Messages that were put together by the backend have one handle: what is waited for is what comes in.
        received = (label for label in labels if self.meanings[label[1]][0] is not Kind.WAIT_SENT)
        return next(received, labels[0] if labels else (-1, self.of(Kind.WAIT_SENT, -1), -1))


def events_of(notes: Iterable[Note], codes: Codes) -> list[Event]:
    """What notes of single actions say; those without a time are left out.

    A forward pass reaches to the end of its loss.
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
            if event[:3] == (Kind.FORWARD, stage, microbatch):
                found[place] = (*event[:4], end_ns, event[5])
                break
    return found
