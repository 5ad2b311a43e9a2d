"""Computes the nesting of regions from their starts and ends."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deep500_timing._base.arrays import BoolArray, Int64Array

ENDLESS = (1 << 63) - 1
ROOT = -1
_UNKNOWN = -2
_SMALL = 1 << 22
"""Numbers below it are looked up in an array that has a place for each."""
_ALL = slice(None)
_FEW = 16
"""Threads up to which a pass over all intervals for each costs less than sorting."""
_DEPTHS = 8
"""Depths of nesting that are found by a pass each. Few programs have more, and overlaps look like more."""
_GOING = 1 << 12
"""Intervals that are kept for the next chunk at most: no program nests that deeply."""
_NAME = re.compile(r"(?:^|/)((?:\\.|[^\\/])*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def parents_of(starts: Int64Array, ends: Int64Array) -> tuple[Int64Array, BoolArray]:
    """The parent of each interval of one thread.

    Args:
        starts: Shape ``(n,)``, rising; for equal starts the longest interval first.
        ends: Shape ``(n,)``.

    Returns:
        The index of the parent, :data:`ROOT` for none; and whether an interval overlaps an earlier one that does not
        enclose it.
    """
    count = len(starts)
    # The first candidate is the interval before; the next is the candidate's own candidate. An interval that a
    # candidate passed over encloses no later one, so the steps double.
    parents = np.arange(-1, count - 1, dtype=np.int64)
    # An interval that begins when all before it have ended has no parent; among the others, one that begins when all
    # others before it have ended has the last of the former as its first candidate; and so on, a pass for each depth.
    rows, above = np.arange(count, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for _ in range(_DEPTHS):
        if not len(rows):
            break
        is_first = np.append(True, starts[rows[1:]] >= np.maximum.accumulate(ends[rows])[:-1])
        first, rows = rows[is_first], rows[~is_first]
        newest = np.full(count, ROOT, dtype=np.int64)
        newest[above] = above
        parents[first] = np.maximum.accumulate(newest)[first]
        above = first
    overlaps = np.zeros(count, dtype=np.bool_)
    above = np.append(ends, ENDLESS)  # the last one is that of ROOT
    active: Any = _ALL
    while True:
        candidates = parents[active]
        last = above[candidates]
        # An interval that begins at the end of another follows it, so an empty interval encloses nothing.
        encloses = (last >= ends[active]) & (last > starts[active])
        if encloses.all():
            return parents, overlaps
        active, passed = np.arange(count, dtype=np.int64)[active][~encloses], candidates[~encloses]
        overlaps[active] |= ends[passed] > starts[active]
        parents[active] = parents[passed]


def covered_by_siblings(starts: Int64Array, ends: Int64Array, parents: Int64Array, overlaps: BoolArray) -> Int64Array:
    """The part of each interval in ns that earlier siblings cover.

    The remaining parts add up to the length of the siblings' union.
    """
    covered = np.zeros(len(starts), dtype=np.int64)
    if not overlaps.any():
        return covered
    rows = np.flatnonzero(np.isin(parents, parents[overlaps]))
    rows = rows[np.argsort(parents[rows], kind="stable")]
    is_first = np.append(True, parents[rows][1:] != parents[rows][:-1])
    family = np.cumsum(is_first) - 1
    begun = starts[rows][is_first][family]
    finite = np.where(ends[rows] == ENDLESS, starts[rows], ends[rows])
    # Shift the families behind each other, so that one running maximum serves all.
    lengths = np.maximum.reduceat(finite, np.flatnonzero(is_first)) - starts[rows][is_first] + 1
    shift = (np.cumsum(lengths) - lengths)[family] - begun
    latest = np.maximum.accumulate(finite + shift)
    before = np.append(0, latest[:-1])
    covered[rows] = np.maximum(np.minimum(before, finite + shift) - (starts[rows] + shift), 0)
    covered[rows[is_first]] = 0
    return covered


def order_for_nesting(starts: Int64Array, ends: Int64Array, regions: Int64Array) -> Int64Array:
    """The order by start; for equal starts the longest first, then the smaller number of the region."""
    order = np.argsort(starts, kind="stable")  # Fast where they are sorted, as in a log.
    is_next_equal = np.diff(starts[order]) == 0
    tied = np.flatnonzero(np.append(is_next_equal, False) | np.append(False, is_next_equal))
    rows = order[tied]
    order[tied] = rows[np.lexsort((regions[rows], -ends[rows], starts[rows]))]
    return order


def place_of(starts: Int64Array, known: Int64Array) -> Int64Array:
    """For each start, the index of the same one among the ``known``; -1 if it is not there. Of equal ones, the last."""
    if not len(known):
        return np.full(len(starts), -1, dtype=np.int64)
    order = np.argsort(known, kind="stable")
    at = order[np.maximum(np.searchsorted(known, starts, side="right", sorter=order) - 1, 0)]
    return np.where(known[at] == starts, at, -1)


class Nested(NamedTuple):
    """The positions of intervals in the tree."""

    paths: Int64Array
    overlaps: BoolArray
    covered: Int64Array
    """The part in ns that earlier siblings cover."""
    parents: Int64Array
    """The index of the parent among the intervals on the host; :data:`ROOT` for none."""

    @classmethod
    def empty(cls, count: int) -> Nested:
        root, zero = np.full(count, ROOT, dtype=np.int64), np.zeros(count, dtype=np.int64)
        return cls(root, zero.astype(np.bool_), zero, root.copy())


class Paths:
    """Numbers for paths: each is a region below another path."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.regions: list[int] = []
        self.depths: list[int] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._last: dict[tuple[int, int], int] = {}
        self._before: tuple[Int64Array, ...] = (np.zeros(0, dtype=np.int64),) * 4
        self._going = np.zeros((4, 0), dtype=np.int64)
        """Starts, ends, regions and threads of intervals before that may enclose later ones."""

    def number_of(self, parent: int, region: int) -> int:
        number = self._numbers.get((parent, region))
        if number is None:
            number = self._numbers[parent, region] = len(self.parents)
            self.parents.append(parent)
            self.regions.append(region)
            self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
        return number

    def nest(self, rows: Mapping[str, Any], still_open: Mapping[str, Any]) -> Nested:
        """Find the paths of a log's intervals, chunk after chunk.

        A device interval has the path of its host interval; if that is unknown, the newest path of its region.

        Args:
            rows: Columns of equal length: ``start_ns``, ``dur_ns``, ``region`` and ``thread`` (numbers), ``on_host``
                (false for a device), ``host_start_ns`` (start of the host interval).
            still_open: ``start_ns``, ``region`` and ``thread`` of regions that are open at the end of the chunk.
        """
        count = len(rows["start_ns"])
        begun = [np.concatenate((rows[name], still_open[name])) for name in ("start_ns", "region", "thread")]
        begun.insert(1, np.append(rows["start_ns"] + rows["dur_ns"], np.full(len(begun[0]) - count, ENDLESS)))
        starts, ends, regions, threads = map(np.append, begun, self._going)
        on_host = np.append(rows["on_host"], np.ones(len(starts) - count, dtype=np.bool_))
        if rows["on_host"].any():
            latest = rows["start_ns"][rows["on_host"]].max()
            going = np.flatnonzero(on_host & (ends > latest) & (ends != ENDLESS))[:_GOING]
            self._going = np.stack((starts[going], ends[going], regions[going], threads[going]))
        is_all = bool(on_host.all())
        host: Any = _ALL if is_all else np.flatnonzero(on_host)
        nested = Nested.empty(len(starts))
        of_host = self.nest_on_host(starts[host], ends[host], regions[host], threads[host])
        for column, values in zip(nested, of_host, strict=True):
            column[host] = values
        host = slice(len(begun[0])) if is_all else host[host < len(begun[0])]
        known = tuple(column[host] for column in (threads, regions, starts, nested.paths))
        if not is_all:
            self._place_on_device(rows, np.concatenate((self._before, known), axis=1), nested.paths)
        self._before = known
        for thread, of in _by_value(known[0]):
            newest = np.full(int(known[1][of].max()) + 1, -1, dtype=np.int64)
            newest[known[1][of]] = known[3][of]  # The last of several values is kept.
            for region in np.flatnonzero(newest >= 0).tolist():
                self._last[thread, region] = int(newest[region])
        return Nested(nested.paths[:count], nested.overlaps[:count], nested.covered[:count], nested.parents[:count])

    def nest_on_host(self, starts: Int64Array, ends: Int64Array, regions: Int64Array, threads: Int64Array) -> Nested:
        """Find the paths of intervals on the host; a region that is open ends at :data:`ENDLESS`."""
        nested = Nested.empty(len(starts))
        for _, found in _by_value(threads):
            order = order_for_nesting(starts[found], ends[found], regions[found])
            found = order if found is _ALL else found[order]
            parents, nested.overlaps[found] = parents_of(starts[found], ends[found])
            nested.covered[found] = covered_by_siblings(starts[found], ends[found], parents, nested.overlaps[found])
            nested.paths[found] = self._of_thread(parents, regions[found])
            nested.parents[found] = np.where(parents == ROOT, ROOT, found[parents])
        return nested

    def _place_on_device(self, rows: Mapping[str, Any], known: Int64Array, paths: Int64Array) -> None:
        # `known`: threads, regions, starts and paths of host intervals in this chunk and the one before.
        device = np.flatnonzero(~rows["on_host"])
        for thread, region in set(zip(rows["thread"][device].tolist(), rows["region"][device].tolist(), strict=True)):
            own = device[(rows["thread"][device] == thread) & (rows["region"][device] == region)]
            starts, found = known[2:, (known[0] == thread) & (known[1] == region)]
            newest = self._last.get((thread, region))
            if newest is None:
                newest = int(found[0]) if len(found) else self.number_of(ROOT, region)
            at = place_of(rows["host_start_ns"][own], starts)
            paths[own] = np.where(at < 0, newest, np.append(found, ROOT)[at])

    def _of_thread(self, parents: Int64Array, regions: Int64Array) -> Int64Array:
        """The paths of the intervals of one thread, from :func:`parents_of` and the numbers of their names."""
        # Those that enclose others come first: they are few, and of several depths. Then all others have known parents.
        width = int(regions.max(initial=0)) + 1
        paths = np.full(len(parents) + 1, _UNKNOWN, dtype=np.int64)
        paths[ROOT] = ROOT  # the last one, which has no interval
        is_parent = np.zeros(len(paths), dtype=np.bool_)
        is_parent[parents] = True
        for rest in (np.flatnonzero(is_parent[:-1]), np.flatnonzero(~is_parent[:-1])):
            while len(rest):
                above = paths[parents[rest]]
                known = above != _UNKNOWN
                todo, rest = rest[known], rest[~known]
                keys = (above[known] + 1) * width + regions[todo]
                found = distinct(keys)
                numbers = np.array([self.number_of(key // width - 1, key % width) for key in found], dtype=np.int64)
                if found[-1] < _SMALL:
                    table = np.zeros(found[-1] + 1, dtype=np.int64)
                    table[found] = numbers
                    paths[todo] = table[keys]
                else:
                    paths[todo] = numbers[np.searchsorted(found, keys)]
        return paths[:-1]

    def regions_of(self, number: int) -> list[int]:
        found: list[int] = []
        while number != ROOT:
            found.append(self.regions[number])
            number = self.parents[number]
        return found[::-1]


def distinct(numbers: Int64Array) -> list[int]:
    """The distinct values of an array of small numbers, rising, without sorting."""
    if not len(numbers):
        return []
    if int(numbers.max()) < _SMALL:
        return [int(number) for number in np.flatnonzero(np.bincount(numbers))]
    return [int(number) for number in np.unique(numbers)]


def _by_value(numbers: Int64Array) -> Iterator[tuple[int, Any]]:
    """The places of each distinct value, rising: an array, or :data:`_ALL`, which copies nothing."""
    found = distinct(numbers)
    if len(found) == 1:
        yield found[0], _ALL
        return
    if len(found) <= _FEW:
        yield from ((number, np.flatnonzero(numbers == number)) for number in found)
        return
    order = np.argsort(numbers, kind="stable")
    yield from zip(found, np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1), strict=True)


def path_text(names: Sequence[str]) -> str:
    """The text of a path, from its names, outermost first: the inverse of :func:`split_path`."""
    return "/".join(name.replace("\\", "\\\\").replace("/", "\\/") for name in names)


def split_path(path: str) -> list[str]:
    """The names of a path, outermost first: the inverse of :func:`path_text`."""
    return [_ESCAPED.sub(r"\1", name) for name in _NAME.findall(path)]
