"""The table of regions: a tree, with what is left over at each of its nodes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.require import require
from deep500_timing._summary.histogram import bin_bounds
from deep500_timing._summary.nesting import path_text, split_path
from deep500_timing.runs._tables import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator

COLUMNS = {
    "rank": "int32",
    "path": "text",
    "parent": "text",
    "region": "text",
    "depth": "int32",
    "device": "text",
    "count": "int64",
    "total_ns": "int64",
    "share": "float64",
    "rest_ns": "int64",
    "overlap_ns": "int64",
    "min_ns": "int64",
    "mean_ns": "float64",
    "median_ns": "float64",
    "p95_ns": "float64",
    "p99_ns": "float64",
    "max_ns": "int64",
}


@dataclass
class _Node:
    count: int = 0
    total_ns: int = 0
    overlap_ns: int = 0
    min_ns: int = 0
    max_ns: int = 0
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, bin_: int, count: int, total: int, low: int, high: int, overlap: int) -> None:
        self.min_ns = low if not self.count else min(self.min_ns, low)
        self.max_ns = high if not self.count else max(self.max_ns, high)
        self.count += count
        self.total_ns += total
        self.overlap_ns += overlap
        self.bins[bin_] = self.bins.get(bin_, 0) + count


def regions_of(frame: Any, windows: Any, rank: int | None, session: int | None, by_rank: bool) -> Any:
    """Summarize intervals by their place in the tree.

    Args:
        frame: Intervals, as a lazy frame of Narwhals.
        windows: Histograms of intervals that are not kept, likewise; None if there are none.
        rank: Of which rank the windows are wanted.
        session: Of which session.
        by_rank: Keep ranks apart.

    Returns:
        A ``pyarrow.Table``, depth first, siblings by falling total, CPU before GPU.
    """
    pa = require("pyarrow", extra="runs", caller="Reading a run")
    nodes: dict[int | None, dict[tuple[str, str], _Node]] = defaultdict(lambda: defaultdict(_Node))
    for row in _grouped(frame, by_rank):
        found = nodes[row["rank"] if by_rank else None]
        node = found[row["path"], row["device"]]
        node.add(row["bin"], row["n"], row["total"], row["low"], row["high"], row["overlap"])
    if windows is not None:
        for row in _of_windows(windows, rank, session):
            found = nodes[row["rank"] if by_rank else None]
            node = found[row["path"], row["device"]]
            node.add(row["bin"], row["count"], row["total_ns"], row["min_ns"], row["max_ns"], 0)
    rows = [
        row for of_rank in sorted(nodes, key=lambda r: -1 if r is None else r) for row in _tree(nodes[of_rank], of_rank)
    ]
    schema = schema_of(COLUMNS if by_rank else {name: kind for name, kind in COLUMNS.items() if name != "rank"})
    return pa.Table.from_pylist([{name: row[name] for name in schema.names} for row in rows], schema=schema)


def _grouped(frame: Any, by_rank: bool) -> list[dict[str, Any]]:
    nw = require("narwhals", extra="runs", caller="Reading a run")
    keys = ["path", "device", "bin", *(["rank"] if by_rank else [])]
    duration = nw.col("dur_ns")
    grouped = frame.group_by(*keys).agg(
        nw.len().cast(nw.Int64).alias("n"),
        duration.sum().cast(nw.Int64).alias("total"),
        duration.min().alias("low"),
        duration.max().alias("high"),
        nw.col("overlap_ns").sum().cast(nw.Int64).alias("overlap"),
    )
    rows: list[dict[str, Any]] = grouped.collect("pyarrow").to_native().to_pylist()
    return rows


def _of_windows(windows: Any, rank: int | None, session: int | None) -> list[dict[str, Any]]:
    rows = windows.collect("pyarrow").to_native().to_pylist()
    return [
        row for row in rows if (rank is None or row["rank"] == rank) and (session is None or row["session"] == session)
    ]


def _tree(nodes: dict[tuple[str, str], _Node], rank: int | None) -> Iterator[dict[str, Any]]:
    devices = sorted({device for _, device in nodes}, key=lambda name: (name != "CPU", name))
    children: dict[str, list[str]] = defaultdict(list)
    known: set[str] = set()
    for path in sorted({path for path, _ in nodes}):
        # A region that has not ended yet has no interval, and what is in it has a place all the same.
        names = split_path(path)
        for depth in range(len(names)):
            part = path_text(names[: depth + 1])
            if part not in known:
                known.add(part)
                children[path_text(names[:depth])].append(part)

    def total(path: str) -> int:
        own = nodes.get((path, devices[0]))
        if own is not None and own.count:
            return own.total_ns
        return sum(total(child) for child in children[path])

    def walk(parent: str, depth: int) -> Iterator[dict[str, Any]]:
        for path in sorted(children[parent], key=lambda child: (-total(child), child)):
            present = [device for device in devices if (path, device) in nodes] or [devices[0]]
            for device in present:
                yield _row(nodes, children, path, parent, depth, device, rank)
            yield from walk(path, depth + 1)

    yield from walk("", 0)


def _row(
    nodes: dict[tuple[str, str], _Node],
    children: dict[str, list[str]],
    path: str,
    parent: str,
    depth: int,
    device: str,
    rank: int | None,
) -> dict[str, Any]:
    node = nodes.get((path, device), _Node())
    above = nodes.get((parent, device))
    inside = [nodes[child, device] for child in children[path] if (child, device) in nodes]
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {"rank": rank, "path": path, "parent": parent or None, "region": split_path(path)[-1]}
    row |= {"depth": depth, "device": device, "count": node.count}
    if not node.count:
        return row
    rest = node.total_ns - sum(child.total_ns - child.overlap_ns for child in inside)
    quantiles = [quantile(node.bins, q) for q in (0.5, 0.95, 0.99)]
    clamped = [min(max(value, node.min_ns), node.max_ns) for value in quantiles]
    row |= {
        "total_ns": node.total_ns,
        "share": node.total_ns / above.total_ns if above is not None and above.total_ns else None,
        "rest_ns": rest if inside and device == "CPU" else None,
        "overlap_ns": node.overlap_ns,
        "min_ns": node.min_ns,
        "mean_ns": node.total_ns / node.count,
        "median_ns": clamped[0],
        "p95_ns": clamped[1],
        "p99_ns": clamped[2],
        "max_ns": node.max_ns,
    }
    return row


def quantile(bins: dict[int, int], q: float) -> float:
    """The ``q``-quantile in ns of a histogram by bins, linear between order statistics, within 1 %."""
    numbers = sorted(bins)
    reached = np.cumsum([bins[number] for number in numbers])
    position = q * (int(reached[-1]) - 1)
    low = int(position)

    def statistic(rank: int) -> float:
        first, width = bin_bounds(numbers[int(np.searchsorted(reached, rank))])
        return first + (width - 1) / 2

    first = statistic(low + 1)
    return first if position == low else first + (position - low) * (statistic(low + 2) - first)
