"""The data of a summary of communication."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deep500_timing_torch.comm._log import Unfinished
    from deep500_timing_torch.comm._straggler import Lateness, Skew


@dataclass(frozen=True, slots=True)
class OpTimes:
    """One operation at one message size, in groups of one size. Times are in seconds, None where they are unknown."""

    op: str
    message_bytes: float | None
    """Size as nccl-tests counts it; None where there is none, or none that is known."""
    group_size: int
    """Ranks of the group."""
    count: int
    """Operations with a known time."""
    total_s: float
    """Sum of their times."""
    mean_s: float | None
    """Mean without the shortest and the longest tenth."""
    p50_s: float | None
    p95_s: float | None
    algbw_gb_per_s: float | None
    """``message_bytes / mean_s``, in 1e9 bytes per second."""
    busbw_gb_per_s: float | None
    """The same times the factor of the operation, to be held against the speed of the links."""
    issue_s: float | None
    """Mean time in the calls of asynchronous operations; on a device, in the calls of all."""
    exposed_s: float | None
    """Sum of the times spent waiting for asynchronous operations."""
    overlap: float | None
    """Share of the asynchronous operations' time that no caller waited for, 0 to 1."""
    upper_bound: bool
    """Some of these are known only to have ended before their wait did: times are upper bounds, bandwidths lower
    ones."""
    size_is_mean: bool
    """Messages of different sizes, within a power of two, of which ``message_bytes`` is the mean."""
    device: str
    """``"GPU"`` for times between events on a device, ``"CPU"`` for times on the host's clock."""
    pending: int
    """Operations that have not ended, or were not read since."""
    failed: int
    """Operations that raised."""
    untimed: int
    """Operations without a known time, as in a coalescing block."""
    captured: int = 0
    """Operations that were captured into a CUDA graph, and have not run when they were called."""


@dataclass(slots=True)
class SummaryData:
    """This rank's operations, and a comparison with the other ranks."""

    ops: list[OpTimes]
    """This rank's operations."""
    rank: int
    world_size: int
    unseen: dict[str, int] = field(default_factory=dict)
    """For each process group, by its name, how many operations it issued by code that is not timed."""
    unfinished: list[Unfinished] = field(default_factory=list)
    """Operations that were issued and have not finished, the oldest first."""
    device_times: str | None = None
    """How operations on a device were timed, None if there were none."""
    hints: list[str] = field(default_factory=list)
    """Reasons why nothing was recorded, or not everything, with the remedy."""
    stragglers: list[Skew] | None = None
    """The comparison across ranks, None if it was not requested or failed."""
    lateness: list[Lateness] = field(default_factory=list)
    """For each group, the straggler, if there is one."""
    ahead_ranks: dict[int, int] = field(default_factory=dict)
    """Ranks that have asked for so many more comparisons than the others since the one before."""
    missing_ranks: list[int] = field(default_factory=list)
    """Ranks that did not report within the deadline: dead, stuck, or they did not call it."""
    unmatched: int = 0
    """Operations that some rank of their group did not report."""
    mismatched: int = 0
    """Operations that are not the same one on every rank."""
    fault: str | None = None
    """The error of the exchange, None if there was none."""

    @property
    def late_rank(self) -> int | None:
        """The rank that is late by more than chance and jitter explain; the costliest, if groups differ; else None."""
        late = [found for found in self.lateness if found.late_rank is not None]
        return max(late, key=lambda found: found.cost_s * found.count).late_rank if late else None

    def find(self, op: str, message_bytes: float | None = None) -> OpTimes | None:
        """The times of an operation, at the message size if one is given; the first if there are several."""
        for times in self.ops:
            if times.op == op and (message_bytes is None or times.message_bytes == message_bytes):
                return times
        return None

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {**asdict(self), "late_rank": self.late_rank}
