"""The tree of regions, as every view shows it: measured nesting, shares, rests, and how it went over the run.

Plain frozen data; times in seconds. What is not known is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

REST = "the rest"
"""The name of what lies in a region and in none of those inside it."""
BUCKETS = 15
"""Into how many stretches of time a run is divided for :attr:`Node.trend`, unless said otherwise."""


_MARKED_OVERLAP = 0.01
"""Of a region's time; less is the moment that two take to change over."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A region's times on a device."""

    total_s: float
    """Their sum."""
    share: float | None
    """Of the parent's total on the device; None without a parent there."""
    count: int
    """Intervals."""
    median_s: float
    """Their median."""
    p95_s: float
    """95th percentile."""


@dataclass(frozen=True, slots=True)
class Node:
    """One place in the tree: a region inside those that enclosed it, or the rest of its parent."""

    name: str
    """The region's name as it was given: text of a stranger, to be made safe where it is shown."""
    path: tuple[str, ...]
    """The names from the outermost region to this one."""
    is_rest: bool = False
    """Whether it is what no region inside the parent covers."""
    total_s: float | None = None
    """The sum of its times; None for a region that has not ended yet."""
    rest_s: float | None = None
    """What of the total lies in none of the regions inside it; None where nothing lies inside or it is not known."""
    share: float | None = None
    """Of the parent's total; None for the outermost."""
    count: int = 0
    """Intervals, 0 for the rest."""
    min_s: float | None = None
    """The shortest."""
    median_s: float | None = None
    """Their median, within 1 %."""
    p95_s: float | None = None
    """95th percentile, within 1 %."""
    p99_s: float | None = None
    """99th percentile, within 1 %."""
    max_s: float | None = None
    """The longest."""
    trend: tuple[float | None, ...] = ()
    """The mean of the intervals that began in each stretch of the run, see :attr:`Tree.span_s`; None where none
    did. Empty where it is not known."""
    gpu: OnDevice | None = None
    """Its times on a device, if there are any."""
    first_s: float | None = None
    """The first interval, which often pays for others; None where it is not known."""
    warm_up: int = 0
    """Intervals that ``skip_first`` left out."""
    warm_up_s: float | None = None
    """Their sum; None where there are none."""
    failed: int = 0
    """Intervals of the region, wherever it lay, that an exception ended: they are in no other number. Shown at the
    place where the region took most time."""
    running: int = 0
    """How many threads have it open."""
    overlap_s: float = 0.0
    """How much of it lies within its siblings before it on the same thread: it is taken from the parent's rest once."""
    children: tuple[Node, ...] = ()
    """What lies inside it, by falling total, the rest last."""

    @property
    def parent(self) -> tuple[str, ...]:
        """The path of what it lies in; empty for the outermost."""
        return self.path[:-1]

    @property
    def overlaps(self) -> bool:
        """Whether it is to be marked as overlapping its siblings."""
        return self.overlap_s > _MARKED_OVERLAP * (self.total_s or 0.0)

    @property
    def mean_s(self) -> float | None:
        """The mean of its intervals."""
        return self.total_s / self.count if self.count and self.total_s is not None else None

    def walk(self) -> Iterator[Node]:
        """This node and all that lies inside it, depth first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def child(self, name: str) -> Node | None:
        """The region of that name that lies directly inside it."""
        return next((node for node in self.children if node.name == name and not node.is_rest), None)


@dataclass(frozen=True, slots=True)
class Tree:
    """The regions of one process, or of all of a run together."""

    roots: tuple[Node, ...]
    """What lies in nothing else, by falling total."""
    rank: int | None = None
    """Whose times these are; None for all ranks together, and where no rank is known."""
    span_s: tuple[float, float] | None = None
    """When the first interval began and the last one ended, in Unix time: what trends divide into equal stretches.
    None where it is not known."""
    is_nested: bool = True
    """Whether it is known what lies in what. If not, every region is a root."""
    kept_only: bool = False
    """Whether places are known of the newest intervals only; numbers are of the whole run all the same."""
    counters: Mapping[tuple[str, str], Mapping[str, int]] = field(default_factory=dict)
    """For region and device what is in no time: failed, discarded, captured and so on; zeros are left out."""

    def walk(self) -> Iterator[Node]:
        """All nodes, depth first, each parent before its children, siblings by falling total, the rest last."""
        for root in self.roots:
            yield from root.walk()

    def at(self, path: tuple[str, ...]) -> Node | None:
        """The region at a place."""
        return next((node for node in self.walk() if node.path == path and not node.is_rest), None)

    def named(self, name: str) -> list[Node]:
        """The places of a region, by falling total."""
        found = [node for node in self.walk() if node.name == name and not node.is_rest]
        return sorted(found, key=lambda node: -(node.total_s or 0.0))

    def parent_of(self, node: Node) -> Node | None:
        """What a node lies in, None for the outermost."""
        return self.at(node.parent) if node.parent else None

    @property
    def has_device_times(self) -> bool:
        """Whether any region has times on a device."""
        return any(node.gpu is not None for node in self.walk())


def rest_of(total_s: float | None, rest_s: float | None, path: tuple[str, ...]) -> tuple[Node, ...]:
    """The node of a rest, for the end of a region's children; none where there is no rest."""
    if rest_s is None or rest_s <= 0 or not total_s:
        return ()
    return (Node(REST, (*path, REST), is_rest=True, total_s=rest_s, share=rest_s / total_s),)
