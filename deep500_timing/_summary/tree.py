"""The tree of regions: measured nesting, shares, rests, and the trend over the run. Every view reads it.

Plain frozen data; times in seconds. An unknown value is None, never 0.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, fields, replace

from deep500_timing._base.names import COMM, CPU, IO

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from deep500_timing._summary.stats import TimeStats

    Path = tuple[str, ...]

REST = "the rest"
"""The name of the part of a region that no region inside it covers."""
BUCKETS = 15
"""The default number of equal parts into which a run is divided for :attr:`Node.trend`."""
_MARKED_OVERLAP = 0.01
"""Least overlap that is marked, as a share of the region. Two regions that take turns may overlap for a moment."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The times of a region on a device."""

    total_s: float
    count: int
    median_s: float
    p95_s: float
    """95th percentile."""
    share: float | None = None
    """Share of the parent's total on the device; None if the parent has none."""


@dataclass(frozen=True, slots=True)
class Node:
    """A region inside the regions that enclosed it, all threads together; or the rest of its parent."""

    name: str
    """The region's name as the user gave it. Pass it through ``safe_name`` before printing."""
    path: tuple[str, ...]
    """The names from the outermost region to this one."""
    is_rest: bool = False
    """Whether this is the part of the parent that no region covers."""
    total_s: float | None = None
    """The sum of its times; None for a region that has not ended yet."""
    rest_s: float | None = None
    """The part of the total that no region inside it covers; None without regions inside, and if unknown."""
    share: float | None = None
    """Share of the parent's total; None for the outermost, and if unknown."""
    count: int = 0
    """Intervals, 0 for the rest."""
    min_s: float | None = None
    median_s: float | None = None
    """Their median, within 1 %."""
    p95_s: float | None = None
    """95th percentile, within 1 %."""
    p99_s: float | None = None
    """99th percentile, within 1 %."""
    max_s: float | None = None
    trend: tuple[float | None, ...] = ()
    """The mean of the intervals that began in each part of the run, see :attr:`Tree.span_s`; None for a part without
    intervals. Empty if unknown."""
    gpu: OnDevice | None = None
    """Its times on a device, if there are any."""
    first_s: float | None = None
    """The first interval, which often includes one-time costs; None if unknown."""
    warm_up: int = 0
    """Intervals that ``skip_first`` left out."""
    warm_up_s: float | None = None
    """Their sum; None without any, and if unknown."""
    failed: int = 0
    """Intervals of this name, at all paths, that an exception ended. They are in no other number. Shown at the path
    with the largest total."""
    running: int = 0
    """Threads that have it open."""
    overlap_s: float = 0.0
    """The time in which an earlier sibling on the same thread was open as well. The parent's rest counts it once."""
    over_ranks_s: tuple[float, float, float] | None = None
    """The smallest, median and largest total of the run's ranks; None for fewer than two ranks."""
    children: tuple[Node, ...] = ()
    """The regions inside it by falling total, the rest last."""

    @property
    def parent(self) -> tuple[str, ...]:
        """The path of its parent; empty for the outermost."""
        return self.path[:-1]

    @property
    def overlaps(self) -> bool:
        """Whether to mark it as overlapping its siblings."""
        return self.overlap_s > _MARKED_OVERLAP * (self.total_s or 0.0)

    @property
    def divides(self) -> bool:
        """Whether it tells of the work in the region around it: it is no wait, no mere start, nor the interpreter's."""
        is_start = self.name.startswith("jit(") and "FIT" in self.path  # Keras waits for JAX later
        return not (self.is_rest or is_start or self.name in (IO, COMM, "GC", "compile"))

    @property
    def mean_s(self) -> float | None:
        return self.total_s / self.count if self.count and self.total_s is not None else None

    def walk(self) -> Iterator[Node]:
        """This node and its descendants, depth first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True)
class Tree:
    """The regions of one process, or of all processes of a run together."""

    roots: tuple[Node, ...]
    """The outermost regions by falling total."""
    rank: int | None = None
    """The rank; None for all ranks together, and if unknown."""
    span_s: tuple[float, float] | None = None
    """Start of the first and end of the last interval in Unix time: the range that trends divide. None if unknown."""
    is_nested: bool = True
    """Whether the nesting is known. If not, every region is a root."""
    kept_only: bool = False
    """Whether the nesting comes from the newest intervals only. The numbers are of the whole run in any case."""
    counters: Mapping[tuple[str, str], Mapping[str, int]] = field(default_factory=dict)
    """For region and device the counts of intervals without a time: failed, discarded, captured and so on, no zeros."""

    def walk(self) -> Iterator[Node]:
        """All nodes, depth first: parents before children, siblings by falling total, the rest last."""
        for root in self.roots:
            yield from root.walk()

    def at(self, path: tuple[str, ...]) -> Node | None:
        """The region with this path."""
        return next((node for node in self.walk() if node.path == path and not node.is_rest), None)

    def inside(self, path: tuple[str, ...]) -> tuple[Node, ...]:
        """The regions directly inside a place; the roots for the empty path."""
        node = self.at(path) if path else None
        return self.roots if not path else () if node is None else node.children

    def named(self, name: str) -> list[Node]:
        return sorted((node for node in self.walk() if node.name == name and not node.is_rest), key=_order)

    def parent_of(self, node: Node) -> Node | None:
        return self.at(node.parent) if node.parent else None

    @property
    def has_device_times(self) -> bool:
        """Whether any region has times on a device."""
        return any(node.gpu is not None for node in self.walk())


_IN_SECONDS = [item.name for item in fields(Node) if item.name.endswith("_s")]


def node_of(path: Path, stats: TimeStats | None, **more: Any) -> Node:
    """A node without relations, for :func:`build_tree`."""
    if stats is None:
        return Node(path[-1], path, **more)
    # Every statistic that a node has a field for.
    times = {name: getattr(stats, name[:-2]) for name in _IN_SECONDS if hasattr(stats, name[:-2])}
    return Node(path[-1], path, count=stats.count, **times, **more)


def on_device(stats: TimeStats) -> OnDevice:
    return OnDevice(stats.total, stats.count, stats.median, stats.p95)


def build_tree(
    nodes: Iterable[Node],
    *,
    counters: Mapping[tuple[str, str], Mapping[str, int]] | None = None,
    rank: int | None = None,
    span_s: tuple[float, float] | None = None,
    is_nested: bool = True,
    kept_only: bool = False,
) -> Tree:
    """Put nodes into a tree and compute the shares and rests that they do not have."""
    by_path = {node.path: node for node in nodes}
    for path in list(by_path):
        for end in range(1, len(path)):
            by_path.setdefault(path[:end], Node(path[end - 1], path[:end]))
    children: dict[Path, list[Path]] = defaultdict(list)
    largest: dict[str, Node] = {}
    for path, node in by_path.items():
        children[path[:-1]].append(path)
        if node.name not in largest or (node.total_s or 0.0) > (largest[node.name].total_s or 0.0):
            largest[node.name] = node

    def finished(path: Path) -> Node:
        node, above = by_path[path], by_path.get(path[:-1])
        inside = sorted(map(finished, children[path]), key=_order)
        rest_s = node.rest_s
        if inside and node.total_s is not None and rest_s is None:
            rest_s = (_ns(node.total_s) - sum(_ns(child.total_s) - _ns(child.overlap_s) for child in inside)) / 1e9
        share = node.share
        if share is None and above is not None and above.total_s and node.total_s is not None:
            share = node.total_s / above.total_s
        gpu, gpu_above = node.gpu, None if above is None else above.gpu
        if gpu is not None and gpu_above is not None and gpu_above.total_s:
            gpu = replace(gpu, share=gpu.total_s / gpu_above.total_s)
        counted = (counters or {}).get((node.name, CPU), {}) if largest[node.name] is node else {}
        # A step is a nanosecond longer than its only event.
        if rest_s is not None and rest_s > 1e-9 * node.count and node.total_s:
            inside.append(Node(REST, (*path, REST), is_rest=True, total_s=rest_s, share=rest_s / node.total_s))
        # Threads that keep the parent open leave its children with more time than the parent. That is no share.
        return replace(
            node,
            share=share if share is None or share <= 1 else None,
            rest_s=rest_s if not kept_only or rest_s is None or rest_s >= 0 else None,
            gpu=gpu,
            failed=counted.get("failed", 0),
            running=counted.get("running", 0),
            children=tuple(inside),
        )

    roots = sorted(map(finished, children[()]), key=_order)
    # An open region encloses regions that have ended, so its total says nothing about its size.
    roots.sort(key=lambda root: not root.running)
    return Tree(tuple(roots), rank, span_s, is_nested, kept_only, counters or {})


def _ns(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)


def _order(node: Node) -> float:
    total_s = node.total_s if node.count else sum(child.total_s or 0.0 for child in node.children)
    return -(total_s or 0.0)
