"""Pipelines that were written into a run, read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deep500_timing_torch.pipeline._actions import Action, Kind
from deep500_timing_torch.pipeline._pipeline_timer import bubble_of
from deep500_timing_torch.pipeline._recorder import TABLE
from deep500_timing_torch.pipeline._schedules import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing.runs import Run
    from deep500_timing_torch.pipeline._bubble import Bubble


@dataclass(frozen=True, slots=True)
class RunBatches:
    """Batches of one replica that a run holds.

    Attributes:
        schedule: The schedule's name; None for one of the user's own.
        numbers: Which batches they are.
        batches: The actions of each, on one clock.
    """

    schedule: str | None
    numbers: tuple[int, ...]
    batches: tuple[tuple[Action, ...], ...]

    def bubble(self) -> Bubble:
        """Where their time went.

        Raises:
            PipelineError: There is none.
        """
        return bubble_of(self.batches, self.schedule)


def read_batches(run: Run, *, replica: int = 0, last: int = 16) -> RunBatches:
    """The latest batches of a run that are no warm-up and no evaluation.

    Args:
        run: An open run.
        replica: Of the pipeline.
        last: How many at most.
    """

    def rows(query: str) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for row in run.sql(query).rows()]

    if TABLE not in run.tables:
        return RunBatches(None, (), ())
    return batches_of_rows(rows, replica=replica, last=last)


def batches_of_rows(rows: Callable[[str], list[tuple[Any, ...]]], *, replica: int = 0, last: int = 16) -> RunBatches:
    """The same from a function that answers SQL over the run's tables with rows as tuples."""
    of = (
        f"from {TABLE} where schedule <> 'evaluation' and replica = {int(replica)} "
        f"and session = (select max(session) from {TABLE})"
    )
    world = rows(f"select count(distinct pipe_rank) {of}")
    complete = rows(
        f"select batch {of} group by batch having sum(warm_up) = 0 and count(distinct pipe_rank) = {world[0][0]} "
        f"order by batch desc limit {int(last)}"
    )
    numbers = sorted(row[0] for row in complete)
    if not numbers:
        return RunBatches(None, (), ())
    found: dict[int, list[Action]] = {number: [] for number in numbers}
    schedules = set()
    # Ranks of one host share its monotonic clock, which is truer than what each of them took Unix time to be.
    hosts = rows("select count(distinct host) from logs")[0][0]
    start = "start_ns" if hosts == 1 else "unix_ns"
    for batch, rank, stage, microbatch, kind, start_ns, dur_ns, schedule in rows(
        f"select batch, pipe_rank, stage, microbatch, kind, {start}, dur_ns, schedule {of} and batch >= {numbers[0]} "
        f"order by {start}"
    ):
        if batch in found:
            found[batch].append(Action(rank, stage, microbatch, Kind(kind), start_ns, start_ns + dur_ns))
            schedules.add(schedule)
    name = schedules.pop() if len(schedules) == 1 else ""
    return RunBatches(name if name in NAMES else None, tuple(numbers), tuple(tuple(found[one]) for one in numbers))
