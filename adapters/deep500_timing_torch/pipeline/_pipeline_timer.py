"""The timed face of a schedule of ``torch.distributed.pipelining``."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from deep500_timing.adapters import DEADLINE_S, Exchange, take_anchor
from deep500_timing_torch._timer import CPUGPUTimer
from deep500_timing_torch.pipeline._actions import Action, Kind, PipelineError
from deep500_timing_torch.pipeline._bubble import Bubble, account, together
from deep500_timing_torch.pipeline._hooks import stages_of, time_schedule
from deep500_timing_torch.pipeline._recorder import Batch, Recorder
from deep500_timing_torch.pipeline._schedules import name_of_schedule

if TYPE_CHECKING:
    from deep500_timing import Timer


def instrument_schedule(
    schedule: Any, timer: Timer | None = None, *, gpu: bool | None = None, keep: int = 64
) -> PipelineTimer:
    """Time a schedule of your own from now on, without a change to it or to your loop.

    ::

        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
        times = instrument_schedule(schedule)
        for batch in loader:
            schedule.step(...)
        print(times.bubble())        # on every rank
        times.detach()

    Args:
        schedule: Any of ``torch.distributed.pipelining``.
        timer: Where the times go; a new :class:`deep500_timing_torch.CPUGPUTimer` if None.
        gpu: Whether to time on the device as well; None for yes if the stages are on one.
        keep: How many batches to keep action by action; regions and the run have all.

    Raises:
        TypeError: It is no such schedule.
    """
    return PipelineTimer(schedule, timer, gpu=gpu, keep=keep).attach()


class TimedPipeline:
    """The batches of a timed pipeline: this rank's, those of all ranks, and the account of the bubble."""

    recorder: Recorder
    _exchange: Exchange
    """Of all ranks of the job."""

    def _group(self) -> Any:
        # The process group of this pipeline.
        raise NotImplementedError

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The batches of this rank, the newest last."""
        return tuple(self.recorder.batches)

    def gather(self, *, deadline_s: float = DEADLINE_S) -> list[list[Action]]:
        """The actions of every rank of the pipeline, for each batch that all have kept and that was no warm-up.

        Every rank of the job calls it. Times are on one clock: the host's if all ranks are on one host, else Unix time.

        Args:
            deadline_s: How long to wait for the others, in seconds.

        Raises:
            PipelineError: Ranks of this pipeline did not answer in time.
        """
        anchor = take_anchor(self.recorder.timer.now_ns)
        report = {
            "host": _boot_id() or socket.gethostname(),
            "offset_ns": anchor.unix_ns - anchor.host_ns,
            "batches": [
                (batch.number, batch.warm_up, [astuple(one) for one in self.recorder.actions_of(batch)])
                for batch in self.recorder.batches
            ],
        }
        members = dist.get_process_group_ranks(self._group() or dist.group.WORLD)
        answers = self._exchange.round(report, deadline_s)
        missing = [rank for rank in members if rank not in answers.result]
        if missing:
            unread = "; ".join(
                f"rank {rank} sent what cannot be read: {why}" for rank, why in answers.unreadable.items()
            )
            raise PipelineError(
                f"Gathering the times of a pipeline: ranks {missing} did not answer within {deadline_s:g} s. Every "
                f"rank has to call this; {answers.fault or unread or 'they may be dead or busy'}."
            )
        return _on_one_clock([answers.result[rank] for rank in members])

    def bubble(self, *, deadline_s: float = DEADLINE_S) -> Bubble:
        """Account for the time of the batches on all ranks of the pipeline, without warm-up. Every rank calls it.

        Raises:
            PipelineError: Ranks did not answer in time, or every batch was warm-up.
        """
        return bubble_of(self.gather(deadline_s=deadline_s), self.recorder.schedule)


class AttachedPipeline(TimedPipeline):
    """A pipeline of other code, timed from :meth:`attach` (or the ``with`` block's begin) to :meth:`detach`."""

    _undo: Callable[[], object] | None = None

    def _time(self) -> Callable[[], object]:
        # Replaces what is timed, and returns what puts it back.
        raise NotImplementedError

    @property
    def attached(self) -> bool:
        return self._undo is not None

    def attach(self) -> Self:
        """Begin to time.

        Raises:
            RuntimeError: It is attached already.
        """
        if self.attached:
            raise RuntimeError(f"Attaching a {type(self).__name__}: it is attached already. Call detach() first.")
        self._undo = self._time()
        return self

    def detach(self) -> None:
        """Restore what is timed; the times stay."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Self:
        return self if self.attached else self.attach()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.detach()


class PipelineTimer(AttachedPipeline):
    """Times a schedule from :meth:`attach` (or the ``with`` block's begin) to :meth:`detach`.

    ``docs/pipeline.md`` names its regions. If the timer writes a run, each action is a row of its table ``pipeline``.
    See :func:`instrument_schedule` for the arguments.
    """

    def __init__(self, schedule: Any, timer: Timer | None = None, *, gpu: bool | None = None, keep: int = 64) -> None:
        stages = stages_of(schedule)
        self.schedule = schedule
        self.timer: Any = CPUGPUTimer() if timer is None else timer
        device = getattr(stages[0].device, "type", "cpu")
        self.recorder = Recorder(
            self.timer,
            name_of_schedule(schedule),
            stages[0].group_rank,
            keep=keep,
            gpu=device not in ("cpu", "meta") if gpu is None else gpu,
        )
        self._exchange = exchange_of("pipeline")

    def _time(self) -> Callable[[], object]:
        return time_schedule(self.schedule, self.recorder)

    @property
    def faults(self) -> int:
        """Measurements that failed and are missing; training continued."""
        return self.recorder.faults

    def _group(self) -> Any:
        return stages_of(self.schedule)[0].group

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        return f"<PipelineTimer of {type(self.schedule).__name__}: {self.recorder.begun} batches, {state}>"


def bubble_of(batches: Sequence[Sequence[Action]], schedule: str | None) -> Bubble:
    """One account of gathered batches.

    Those of another number of micro-batches than the last one are left out.
    """
    if not batches:
        raise PipelineError(
            "Accounting for a pipeline: no batch is complete yet but for the warm-up, in which shapes are exchanged. "
            "Train another batch."
        )
    accounts = [account(batch, schedule) for batch in batches]
    last = accounts[-1]
    return together([one for one in accounts if one.microbatches == last.microbatches])


def exchange_of(name: str) -> Exchange:
    """The exchange of what the ranks of a job know of a pipeline; the same name on every rank."""
    return Exchange(name, _checked, dict, _by_rank)


def _checked(report: dict[str, Any]) -> dict[str, Any]:
    # A rank's report as it is; it raises what it likes if it is none.
    numbers = [report["offset_ns"]]
    for number, warm_up, actions in report["batches"]:
        numbers += number, warm_up
        for rank, stage, microbatch, kind, start_ns, end_ns in actions:
            numbers += rank, stage, microbatch, Kind(kind) is None, start_ns, end_ns
    if not (isinstance(report["host"], str) and all(isinstance(one, int) for one in numbers)):
        raise TypeError("a host is a text, and what tells of an action are numbers")
    return report


def _by_rank(reports: dict[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {int(rank): _checked(report) for rank, report in reports.items()}


def _on_one_clock(reports: Sequence[dict[str, Any]]) -> list[list[Action]]:
    # The batches that every rank has kept and none exchanged shapes in.
    same_clock = len({report["host"] for report in reports}) == 1
    by_rank = [{number: batch for number, *batch in report["batches"]} for report in reports]
    numbers = sorted(set.intersection(*map(set, by_rank))) if by_rank else []
    found = []
    for number in numbers:
        if any(batches[number][0] for batches in by_rank):
            continue
        actions = []
        for report, batches in zip(reports, by_rank, strict=True):
            offset_ns = 0 if same_clock else report["offset_ns"]
            actions += [
                Action(rank, stage, microbatch, Kind(kind), start + offset_ns, end + offset_ns)
                for rank, stage, microbatch, kind, start, end in batches[number][1]
            ]
        found.append(actions)
    return found


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
