"""Takes the times of one rank's actions, into a timer's regions and as actions of a batch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deep500_timing._ground.warn import warn_once
from deep500_timing_torch.pipeline._actions import Action, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing import Timer

__all__ = ["TABLE", "Batch", "Recorder"]

TABLE = "pipeline"
"""The table of a run that has a row for each action."""
_COLUMNS = {
    "start_ns": "time",
    "dur_ns": "int",
    "what": "name",
    "kind": "name",
    "stage": "int",
    "microbatch": "int",
    "pipe_rank": "int",
    "replica": "int",
    "batch": "int",
    "schedule": "name",
    "warm_up": "int",
}
REGIONS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward input",
    Kind.BACKWARD_WEIGHT: "backward weight",
}
"""What a stage's regions are called: ``stage 0 forward``. Others are ``pipeline load`` and so on."""

Event = tuple[Kind, int, int, int, int, int]
"""Kind, stage, micro-batch, start, end, and which of its region's intervals on the device it is; -1 without one."""
Note = tuple[Kind | None, int, int, int, int, int]
"""An event, or a loss if the kind is None."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank did in one batch.

    Attributes:
        number: Counted from 0 by the rank; ranks count alike.
        warm_up: Whether shapes were exchanged in it, which is not training.
        rank: Which one, in the pipeline.
        peak_bytes: The most memory of the device that tensors had in the batch; None without a device.
        events: What it was noted down as.
    """

    number: int
    warm_up: bool
    rank: int
    peak_bytes: int | None
    events: tuple[Event, ...]

    @property
    def actions(self) -> tuple[Action, ...]:
        """In the order in which they ended, on the host's clock."""
        return tuple(Action(self.rank, stage, mb, kind, start, end) for kind, stage, mb, start, end, _ in self.events)


class Recorder:
    """One rank's times.

    Args:
        timer: Whose regions the times go to.
        schedule: The schedule's name, None for one of the user's own.
        rank: This rank in the pipeline.
        replica: Which replica of the pipeline it belongs to.
        keep: How many batches to keep as actions.
        gpu: Whether regions are timed on the device as well.
        evaluation: Whether these are forward passes without training, which have regions of their own.
    """

    def __init__(
        self,
        timer: Timer,
        schedule: str | None,
        rank: int,
        *,
        replica: int = 0,
        keep: int = 64,
        gpu: bool = False,
        evaluation: bool = False,
    ) -> None:
        self.timer = timer
        self.schedule = schedule
        self.rank = rank
        self.replica = replica
        self.gpu = gpu
        self.evaluation = evaluation
        self.faults = 0
        self.batches: deque[Batch] = deque(maxlen=keep)
        self.begun = 0
        self._now_ns = timer.now_ns
        self.noted: list[Note] = []
        """What hooks have noted down in the batch under way and :meth:`settle` makes regions and events of. An append
        is all that stands between two actions; the rest is done once for a batch, when its code is warm."""
        self._events: list[Event] = []
        self._warm_up = False
        self._open = False
        self._names: dict[tuple[Kind, int], str] = {}
        self._labels: dict[tuple[Kind, int], str] = {}
        self._on_device: dict[str, int] = {}

    def region_of(self, kind: Kind, stage: int) -> str:
        """The region of a kind of action on a stage."""
        name = self._names.get((kind, stage))
        if name is None:
            what = "evaluation " if self.evaluation else ""
            name = f"stage {stage} {what}{REGIONS[kind]}" if kind in REGIONS else f"pipeline {what}{kind.value}"
            self._names[kind, stage] = name
        return name

    def now_ns(self) -> int:
        """The timer's clock; -1, and a warning, if it fails. What has such a time is not kept."""
        try:
            return self._now_ns()
        except Exception as error:
            self.fault("reading the clock", error)
            return -1

    def put(self, kind: Kind, stage: int, microbatch: int, start_ns: int, end_ns: int) -> None:
        """Keep an action; outside of a batch its region alone. A failure costs a warning."""
        if start_ns < 0 or end_ns < 0:
            return
        try:
            self.timer.record(self.region_of(kind, stage), start_ns, end_ns)
            if self._open:
                self._events.append((kind, stage, microbatch, start_ns, end_ns, -1))
        except Exception as error:
            self.fault(f"a {kind.value}", error)

    def settle(self) -> None:
        """Record the regions of what was noted down since the last time, below the region that is open now."""
        record, names, events = self.timer.record, self._names, self._events
        for kind, stage, microbatch, start_ns, end_ns, ordinal in self.noted:
            if start_ns < 0 or end_ns < 0:
                continue
            try:
                if kind is None:
                    record("pipeline loss", start_ns, end_ns)
                    self._extend_forward(stage, microbatch, end_ns)
                    continue
                if ordinal < 0:
                    record(names.get((kind, stage)) or self.region_of(kind, stage), start_ns, end_ns)
                events.append((kind, stage, microbatch, start_ns, end_ns, ordinal))
            except Exception as error:
                self.fault("an action", error)
        self.noted.clear()

    def run_on_device(self, kind: Kind, stage: int, microbatch: int, work: Any) -> Any:
        """Do work that is timed on the device as well."""
        name = self.region_of(kind, stage)
        start_ns = self.now_ns()
        with self.timer.region(name, gpu=True):
            result = work()
        ordinal = self._on_device[name] = self._on_device.get(name, -1) + 1
        self.noted.append((kind, stage, microbatch, start_ns, self.now_ns(), ordinal))
        return result

    def _extend_forward(self, stage: int, microbatch: int, end_ns: int) -> None:
        # The forward pass that ended last reaches to the end of its loss.
        for place in range(len(self._events) - 1, -1, -1):
            kind, its_stage, its_microbatch, start_ns, _, ordinal = self._events[place]
            if (kind, its_stage, its_microbatch) == (Kind.FORWARD, stage, microbatch):
                self._events[place] = (kind, stage, microbatch, start_ns, end_ns, ordinal)
                return

    def begin(self) -> None:
        """A batch begins."""
        self._events = []
        self.noted.clear()
        self._warm_up = False
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether a batch is under way."""
        return self._open

    def mark_warm_up(self) -> None:
        """Shapes are exchanged in this batch."""
        self._warm_up = True

    def drop(self) -> None:
        """The batch has failed: nothing of it is kept but its regions."""
        self._events, self._open = [], False
        self.begun += 1

    def commit(self) -> None:
        """The batch is over. A failure costs a warning."""
        self.settle()
        events, self._events, self._open = self._events, [], False
        number = self.begun
        self.begun += 1
        try:
            # Actions are made of them when they are asked for: the training thread is the one that is here.
            self.batches.append(Batch(number, self._warm_up, self.rank, self._peak_bytes(), tuple(events)))
            log = self.timer.run
            if log is not None:
                log.declare(TABLE, **_COLUMNS)
                log.add(TABLE, *self._rows(number, events))
        except Exception as error:
            self.fault("a batch", error)

    def actions_of(self, batch: Batch) -> list[Action]:
        """What was done in a batch, with the device's times where there are some. Waits for those on their way."""
        ordinals = [event[-1] for event in batch.events]
        if max(ordinals, default=-1) < 0:
            return list(batch.actions)
        times: dict[str, Any] = {}
        found = []
        for action, ordinal in zip(batch.actions, ordinals, strict=True):
            if ordinal >= 0:
                name = self.region_of(action.kind, action.stage)
                if name not in times:
                    times[name] = self.timer.intervals(name, gpu=True)
                # Of a timer that keeps the last alone, or has lost some, nothing tells which is which.
                if len(times[name]) == self._on_device[name] + 1:
                    start_ns, end_ns = (int(one) for one in times[name][ordinal])
                    action = replace(action, start_ns=start_ns, end_ns=end_ns)
            found.append(action)
        return found

    def fault(self, doing: str, error: Exception) -> None:
        """Timing has failed; training goes on."""
        self.faults += 1
        warn_once(
            f"Timing the pipeline: {doing} failed; training goes on, its time is missing: "
            f"{type(error).__name__}: {error}",
            about=f"pipeline {doing}",
        )

    def _rows(self, number: int, events: Sequence[Event]) -> list[tuple[Any, ...]]:
        schedule, warm_up = "evaluation" if self.evaluation else self.schedule or "", int(self._warm_up)
        return [
            (
                start,
                end - start,
                self._label(kind, mb),
                kind.value,
                stage,
                mb,
                self.rank,
                self.replica,
                number,
                schedule,
                warm_up,
            )
            for kind, stage, mb, start, end, _ in events
        ]

    def _label(self, kind: Kind, microbatch: int) -> str:
        # By which a timeline names its slices.
        label = self._labels.get((kind, microbatch))
        if label is None:
            label = REGIONS.get(kind, kind.value) + (f" {microbatch}" if microbatch >= 0 else "")
            self._labels[kind, microbatch] = label
        return label

    def _peak_bytes(self) -> int | None:
        if not self.gpu:
            return None
        import torch

        if not torch.cuda.is_available():
            return None
        peak = int(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return peak
