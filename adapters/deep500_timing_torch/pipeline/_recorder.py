"""Takes the times of one rank's actions, into a timer's regions and as actions of a batch."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing import Timer
from deep500_timing.adapters import warn_once
from deep500_timing_torch.pipeline._actions import Action, Kind
from deep500_timing_torch.pipeline._calls import REGIONS, CallLog, CallRow, Codes, Event, events_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

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


class Batch(NamedTuple):
    """What one rank did in one batch.

    Attributes:
        number: Counted from 0 by the rank; ranks count alike.
        warm_up: Whether shapes were exchanged in it, which is not training.
        rank: Which one, in the pipeline.
        peak_bytes: PyTorch's peak of allocated device memory, read after the batch and never reset; None without a
            device.
        notes: The notes in the order of their ends.
        codes: What their codes stand for.
    """

    number: int
    warm_up: bool
    rank: int
    peak_bytes: int | None
    notes: tuple[CallRow, ...]
    codes: Codes

    @property
    def events(self) -> list[Event]:
        return events_of(self.notes, self.codes)

    @property
    def actions(self) -> tuple[Action, ...]:
        """In the order in which they ended, on the host's clock."""
        return tuple(Action(self.rank, stage, mb, kind, start, end) for kind, stage, mb, start, end, _ in self.events)


class Recorder:
    """One rank's times."""

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
        self.now_ns = self._clock_of(timer)
        """The timer's clock; -1 and a warning if it fails. Actions with such a time are dropped."""
        self.calls = CallLog(self.now_ns)
        """What hooks have noted down in the batch under way and :meth:`settle` makes regions and events of. Nothing
        else stands between two actions; the rest is done once for a batch, when its code is warm."""
        self.codes = Codes(evaluation)
        self._notes: list[CallRow] = []
        self._warm_up = False
        self._open = False
        self._labels: dict[tuple[Kind, int], str] = {}
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
            code = self.codes.of(kind, stage)
            self.timer.record(self.codes.regions[code], start_ns, end_ns)
            if self._open:
                self._notes.append((code, microbatch, start_ns, end_ns, -1))
        except Exception as error:
            self.fault(f"a {kind.value}", error)

    def settle(self, skipped: Collection[int] = ()) -> None:
        """Record the regions of the new notes, below the region that is open now."""
        codes = self.codes
        rows = self.calls.take()
        if skipped:
            rows = [row for row in rows if row[0] not in skipped]
        record, regions = self.timer.record, codes.regions
        for code, _, start_ns, end_ns, ordinal in rows:
            try:
                if ordinal < 0 and start_ns >= 0 and end_ns >= 0:
                    record(regions[code], start_ns, end_ns)
            except Exception as error:
                self.fault("an action", error)
        self._notes += rows

    def run_on_device(self, code: int, microbatch: int, work: Any) -> Any:
        name = self.codes.regions[code]
        start_ns = self.now_ns()
        with self.timer.region(name, gpu=True):
            result = work()
        ordinal = self._on_device[name] = self._on_device.get(name, -1) + 1
        self.calls.note(code, microbatch, start_ns, self.now_ns(), ordinal)
        return result

    def begin(self) -> None:
        self._notes = []
        self.calls.take()
        self._warm_up = False
        self._open = True

    @property
    def is_open(self) -> bool:
        return self._open

    def mark_warm_up(self) -> None:
        """Shapes are exchanged in this batch."""
        self._warm_up = True

    def drop(self) -> None:
        """The batch has failed: nothing of it is kept but its regions."""
        self._notes, self._open = [], False
        self.begun += 1

    def commit(self) -> None:
        """The batch is over. A failure costs a warning."""
        self.settle()
        notes, self._notes, self._open = self._notes, [], False
        number = self.begun
        self.begun += 1
        try:
            # Actions are made of them when they are asked for: the training thread is the one that is here.
            batch = Batch(number, self._warm_up, self.rank, self._peak_bytes(), tuple(notes), self.codes)
            self.batches.append(batch)
            log = self.timer.run
            if log is not None:
                log.declare(TABLE, **_COLUMNS)
                log.add(TABLE, *self._rows(number, batch.events))
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
                name = self.codes.region_of(action.kind, action.stage)
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
        return int(torch.cuda.max_memory_allocated())
