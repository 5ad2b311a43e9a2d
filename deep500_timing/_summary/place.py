"""A place in the tree of regions of one process, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from deep500_timing._summary.stats import TimeStats


@dataclass(frozen=True, slots=True)
class Place:
    """A region inside those that enclosed it, all threads together. Times are in seconds."""

    path: tuple[str, ...]
    """The names from the outermost region to this one."""
    device: str
    """``"CPU"`` or ``"GPU"``."""
    stats: TimeStats | None
    """Of its times there, without warm-up; None while it has not ended."""
    share: float | None = None
    """Of its parent's total; None for the outermost, and where it is not known."""
    rest_s: float | None = None
    """What of it lies in no region inside it; None where nothing does, and where it is not known."""
    overlap_s: float = 0.0
    """How much of it lies within its siblings before it: it is taken from the parent's rest once."""
    first_s: float | None = None
    """The first interval, be it warm-up or not; None where it is not kept."""
    warm_up: int = 0
    """Intervals that ``skip_first`` left out."""
    warm_up_s: float | None = None
    """Their sum; None where there are none, or they are not kept."""
    trend: tuple[float | None, ...] = ()
    """Means of the intervals that began in each stretch of the run; empty where not all of them are kept."""
    is_estimate: bool = False
    """Whether the region was put here by its newest intervals alone."""
