"""The actions of a pipeline's ranks: plain frozen data, measured or simulated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from deep500_timing.exceptions import TimingError


class PipelineError(TimingError, RuntimeError):
    """A pipeline is set up wrongly, or one of its ranks has failed; the text names the rank where it is known."""


class Kind(StrEnum):
    """The kind of an action. A message has two: the call that issues it, and the exposed wait for it."""

    FORWARD = "F"
    """The forward pass of a micro-batch; on the last stage its loss as well."""
    BACKWARD = "B"
    """The whole backward pass of a micro-batch."""
    BACKWARD_INPUT = "I"
    """The gradient of the input alone, which a zero-bubble schedule computes first."""
    BACKWARD_WEIGHT = "W"
    LOAD = "load"
    SEND_ACTIVATION = "send activation"
    """Issuing the message; the transfer goes on."""
    SEND_GRADIENT = "send gradient"
    RECEIVE_ACTIVATION = "receive activation"
    RECEIVE_GRADIENT = "receive gradient"
    WAIT_ACTIVATION = "wait for activation"
    """Waiting for a message that is not there yet."""
    WAIT_GRADIENT = "wait for gradient"
    WAIT_SENT = "wait for sends"
    """Waiting until a sent message has left."""
    REDUCE = "reduce"
    STEP = "step"
    SETUP = "setup"
    """Exchanging shapes, before the first batch and after they change."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
"""The actions that a schedule orders, and that are not idle time."""


class Slot(NamedTuple):
    """One place in a schedule: a computation without its time."""

    stage: int
    kind: Kind
    microbatch: int


Order = dict[int, list[Slot]]
"""What each rank computes, in its order."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    Attributes:
        rank: The rank in the pipeline, from 0.
        stage: The stage of the model, from 0; -1 where it belongs to none.
        microbatch: Which micro-batch of the batch, from 0; -1 where it belongs to none.
        kind: The kind of action.
        start_ns: When it began, on a clock that all ranks share.
        end_ns: When it ended.
    """

    rank: int
    stage: int
    microbatch: int
    kind: Kind
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def slot(self) -> Slot:
        return Slot(self.stage, self.kind, self.microbatch)
