"""Takes the times of one rank's actions, into a timer's regions and as actions of a batch.

Between two actions of a rank only a note is taken: their code is cold, and each Python function costs microseconds.
Regions and actions are made of the notes once for a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from typing import Any, NamedTuple

import torch

from deep500_timing import Timer
from deep500_timing.adapters import warn_once
from deep500_timing_torch.pipeline._actions import Action, Kind

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
"""The names in a stage's regions: ``stage 0 forward``. Others are ``pipeline load`` and so on."""

ActionKey = tuple[Kind | None, int]
"""A kind of action and its stage; the kind of a loss is None."""
Note = tuple[ActionKey, int, int, int, int]
"""Place, micro-batch, start and end in ns, and the index among its region's device intervals (-1 without one)."""
Event = tuple[Kind, int, int, int, int, int]
"""The same of an action: kind, stage, micro-batch, start, end, and index."""


class Batch(NamedTuple):
    """What one rank did in one batch.

    Attributes:
        number: Counted from 0 by the rank; ranks count alike.
        warm_up: Whether shapes were exchanged in it, which is not training.
        rank: Which one, in the pipeline.
        peak_bytes: PyTorch's peak of allocated device memory, read after the batch and never reset; None without a
            device.
        notes: The notes in the order of their ends.
    """

    number: int
    warm_up: bool
    rank: int
    peak_bytes: int | None
    notes: tuple[Note, ...]

    @property
    def events(self) -> list[Event]:
        return events_of(self.notes)

    @property
    def actions(self) -> tuple[Action, ...]:
        """In the order in which they ended, on the host's clock."""
        return tuple(Action(self.rank, stage, mb, kind, start, end) for kind, stage, mb, start, end, _ in self.events)


def events_of(notes: Iterable[Note]) -> list[Event]:
    """What notes say; those without a time are left out.

    A forward pass reaches to the end of its loss, which follows it.
    """
    found: list[Event] = []
    for (kind, stage), microbatch, start_ns, end_ns, ordinal in notes:
        if start_ns < 0 or end_ns < 0:
            continue
        if kind is not None:
            found.append((kind, stage, microbatch, start_ns, end_ns, ordinal))
            continue
        for position in range(len(found) - 1, -1, -1):
            event = found[position]
            if event[:2] == (Kind.FORWARD, stage):
                found[position] = (*event[:4], end_ns, event[5])
                break
    return found


@dataclass(eq=False, repr=False)
class Recorder:
    """One rank's times."""

    timer: Timer
    schedule: str | None
    rank: int
    _: KW_ONLY
    replica: int = 0
    keep: InitVar[int] = 64
    gpu: bool = False
    evaluation: bool = False

    def __post_init__(self, keep: int) -> None:
        self.faults = 0
        self.batches: deque[Batch] = deque(maxlen=keep)
        self.begun = 0
        self.now_ns = self._clock_of(self.timer)
        """The timer's clock; -1 and a warning if it fails. Actions with such a time are dropped."""
        self.active = False
        """Whether hooks take notes: a schedule is running a batch."""
        self.is_open = False
        self._noted: list[Note] = []
        """The notes of hooks that :meth:`settle` has not made regions of yet."""
        self._notes: list[Note] = []
        self.warm_up = False
        """Whether shapes are exchanged in this batch."""
        self._names: dict[ActionKey, str] = {}
        self._on_device: dict[str, int] = {}

    def _clock_of(self, timer: Timer) -> Callable[[], int]:
        read_ns = timer.now_ns
        kind: Any = type(timer)  # A stand-in for a timer may have a clock too.
        if issubclass(kind, Timer) and kind.now_ns is Timer.now_ns and timer.clock is None:
            return read_ns  # The system's clock, which does not fail.

        def now_ns() -> int:
            try:
                return read_ns()
            except Exception as error:
                self.fault("reading the clock", error)
                return -1

        return now_ns

    def put(self, kind: Kind, stage: int, microbatch: int, start_ns: int, end_ns: int) -> None:
        """Keep an action; outside of a batch its region alone. A failure costs a warning."""
        if start_ns < 0 or end_ns < 0:
            return
        try:
            place = kind, stage
            self.timer.record(self._region_of(place), start_ns, end_ns)
            if self.is_open:
                self._notes.append((place, microbatch, start_ns, end_ns, -1))
        except Exception as error:
            self.fault(f"a {kind.value}", error)

    def note(self, place: ActionKey, microbatch: int, start_ns: int, end_ns: int, ordinal: int = -1) -> None:
        self._noted.append((place, microbatch, start_ns, end_ns, ordinal))

    def settle(self, skipped: Collection[ActionKey] = ()) -> None:
        """Record the regions of the new notes, below the region that is open now."""
        self.active = False
        notes, self._noted = self._noted, []
        notes = [note for note in notes if note[0] not in skipped]
        for place, _, start_ns, end_ns, ordinal in notes:
            try:
                if ordinal < 0 and start_ns >= 0 and end_ns >= 0:
                    self.timer.record(self._region_of(place), start_ns, end_ns)
            except Exception as error:
                self.fault("an action", error)
        self._notes += notes

    def run_on_device(self, place: ActionKey, microbatch: int, work: Any) -> Any:
        name = self._region_of(place)
        start_ns = self.now_ns()
        with self.timer.region(name, gpu=True):
            result = work()
        ordinal = self._on_device[name] = self._on_device.get(name, -1) + 1
        self.note(place, microbatch, start_ns, self.now_ns(), ordinal)
        return result

    def _region_of(self, place: ActionKey) -> str:
        name = self._names.get(place)
        if name is None:
            kind, stage = place
            what = "evaluation " if self.evaluation else ""
            if kind is None:
                name = "pipeline loss"
            else:
                name = f"stage {stage} {what}{REGIONS[kind]}" if kind in REGIONS else f"pipeline {what}{kind.value}"
            self._names[place] = name
        return name

    @contextmanager
    def batch(self) -> Iterator[None]:
        """A batch, which is kept when it ends; of one that fails only the regions are."""
        self._notes, self._noted = [], []
        self.warm_up, self.is_open = False, True
        ended = False
        try:
            yield
            ended = True
        finally:
            self.settle()
            notes, self._notes, self.is_open = tuple(self._notes), [], False
            self.begun += 1
            if ended:
                self._keep(self.begun - 1, notes)

    def _keep(self, number: int, notes: tuple[Note, ...]) -> None:
        try:
            # Actions are made of them when they are asked for: the training thread is the one that is here.
            on_cuda = self.gpu and torch.cuda.is_available()
            peak_bytes = torch.cuda.max_memory_allocated() if on_cuda else None
            batch = Batch(number, self.warm_up, self.rank, peak_bytes, notes)
            self.batches.append(batch)
            log = self.timer.run
            if log is not None:
                log.declare(TABLE, **_COLUMNS)
                log.add(TABLE, *self._rows(batch))
        except Exception as error:
            self.fault("a batch", error)

    def actions_of(self, batch: Batch) -> list[Action]:
        """The actions of a batch, with device times where there are any. Waits for times on their way."""
        ordinals = [event[-1] for event in batch.events]
        if max(ordinals, default=-1) < 0:
            return list(batch.actions)
        times: dict[str, Any] = {}
        found = []
        for action, ordinal in zip(batch.actions, ordinals, strict=True):
            if ordinal >= 0:
                name = self._region_of((action.kind, action.stage))
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
            key=f"pipeline {doing}",
        )

    def _rows(self, batch: Batch) -> list[tuple[Any, ...]]:
        schedule, warm_up = "evaluation" if self.evaluation else self.schedule or "", int(batch.warm_up)
        whose = self.rank, self.replica, batch.number
        rows = []
        for kind, stage, mb, start, end, _ in batch.events:
            label = REGIONS.get(kind, kind.value) + (f" {mb}" if mb >= 0 else "")  # A timeline names its slices by it.
            rows.append((start, end - start, label, kind.value, stage, mb, *whose, schedule, warm_up))
        return rows
