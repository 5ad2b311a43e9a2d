"""What a summary of communication is: plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    """Operations whose time is known."""
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
    """Share of the asynchronous operations' time that nobody waited for, 0 to 1."""
    upper_bound: bool
    """The backend does not tell when some of these were done, only that it was before the end of the wait: times are
    upper bounds, bandwidths lower ones."""
    size_is_mean: bool
    """Messages of different sizes, within a power of two, of which ``message_bytes`` is the mean."""
    device: str
    """``"GPU"`` for times between events on a device, ``"CPU"`` for times on the host's clock."""
    pending: int
    """Asynchronous operations that are on their way, or that nobody has waited for."""
    failed: int
    """Operations that raised."""
    untimed: int
    """Operations that took place elsewhere, as in a coalescing block, or whose device time cannot be had."""


@dataclass(slots=True)
class SummaryData:
    """This rank's operations, and what else is to be known of them."""

    ops: list[OpTimes]
    """This rank's operations."""
    rank: int
    world_size: int
    unseen: dict[str, int] = field(default_factory=dict)
    """For each process group, by its name, how many operations it issued by code that is not timed."""
    dropped: int = 0
    """Times that were lost because the kernel's buffer was full."""
    hints: list[str] = field(default_factory=list)
    """What explains that nothing was recorded, or not everything, with the remedy."""
    stragglers: list[Skew] | None = None
    """The comparison across ranks, None if it was not asked for or could not be had."""
    lateness: list[Lateness] = field(default_factory=list)
    """For each group, who is late in it, if anybody is."""
    ahead_ranks: dict[int, int] = field(default_factory=dict)
    """Ranks that have asked for so many more comparisons than the others since the one before."""
    missing_ranks: list[int] = field(default_factory=list)
    """Ranks that did not report within the deadline: dead, stuck, or not asked for a summary. Empty where nobody
    could be asked."""
    unmatched: int = 0
    """Operations that some rank of their group did not report."""
    mismatched: int = 0
    """Operations that are not the same one on every rank."""
    fault: str | None = None
    """What went wrong with the exchange, if anything did."""

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
