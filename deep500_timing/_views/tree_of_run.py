"""The tree of regions out of a run."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from deep500_timing._base.require import require
from deep500_timing._summary.nesting import split_path
from deep500_timing._views.tree import BUCKETS, Node, OnDevice, Tree, rest_of

if TYPE_CHECKING:
    from deep500_timing.runs import Run

_COUNTERS = ("failed", "discarded", "captured", "dropped")


def tree_of_run(run: Run, *, rank: int | None = None, session: int | None = None, buckets: int = BUCKETS) -> Tree:
    """Read the tree of a run.

    Args:
        run: The run.
        rank: Of this rank only; of all together if None.
        session: Of this start of the run only.
        buckets: Into how many stretches of equal length to divide the run for the trends; 0 leaves them out.
    """
    rows = run.regions(rank=rank, session=session).rows()
    span_ns = _span(run, rank, session)
    trends = _trends(run, rank, session, span_ns, buckets) if span_ns is not None and buckets else {}
    firsts = _firsts(run, rank, session)
    counters = _counters(run, rank, session)
    on_host = [row for row in rows if row["device"] == "CPU"]
    on_device = {row["path"]: row for row in rows if row["device"] != "CPU"}
    children: dict[str | None, list[dict[str, Any]]] = defaultdict(list)
    for row in on_host:
        children[row["parent"]].append(row)
    of_name: dict[str, str] = {}
    for row in sorted(on_host, key=lambda row: row["total_ns"] or 0):
        of_name[row["region"]] = row["path"]

    def node(row: dict[str, Any]) -> Node:
        path, total_s = tuple(split_path(row["path"])), _seconds(row["total_ns"])
        inside = tuple(node(child) for child in children[row["path"]])
        rest_s = _seconds(row["rest_ns"])
        counted = counters.get((row["region"], "CPU"), {}) if of_name[row["region"]] == row["path"] else {}
        return Node(
            row["region"],
            path,
            total_s=total_s,
            rest_s=rest_s,
            share=row["share"],
            count=row["count"],
            min_s=_seconds(row["min_ns"]),
            median_s=_seconds(row["median_ns"]),
            p95_s=_seconds(row["p95_ns"]),
            p99_s=_seconds(row["p99_ns"]),
            max_s=_seconds(row["max_ns"]),
            trend=trends.get(row["path"], ()),
            gpu=_on_device(on_device.get(row["path"])),
            first_s=firsts.get(row["path"]),
            failed=counted.get("failed", 0),
            overlap_s=_seconds(row["overlap_ns"]) or 0.0,
            children=inside + rest_of(total_s, rest_s, path),
        )

    roots = tuple(node(row) for row in children[None])
    span_s = None if span_ns is None else (span_ns[0] / 1e9, span_ns[1] / 1e9)
    return Tree(roots, rank=rank, span_s=span_s, counters=counters)


def _on_device(row: dict[str, Any] | None) -> OnDevice | None:
    if row is None or not row["count"]:
        return None
    times = (row[name] / 1e9 for name in ("median_ns", "p95_ns"))
    return OnDevice(row["total_ns"] / 1e9, row["share"], row["count"], *times)


def _span(run: Run, rank: int | None, session: int | None) -> tuple[int, int] | None:
    nw = require("narwhals", extra="runs", caller="Reading a run")
    frame = run.intervals(rank=rank, session=session).frame
    ends = frame.select(
        nw.col("unix_ns").min().alias("first"),
        (nw.col("unix_ns") + nw.col("dur_ns")).max().alias("last"),
    )
    row = ends.collect("pyarrow").to_native().to_pylist()[0]
    return None if row["first"] is None else (row["first"], row["last"])


def _trends(
    run: Run, rank: int | None, session: int | None, span_ns: tuple[int, int], buckets: int
) -> dict[str, tuple[float | None, ...]]:
    nw = require("narwhals", extra="runs", caller="Reading a run")
    width = max(-(-(span_ns[1] - span_ns[0] + 1) // buckets), 1)
    frame = run.intervals(rank=rank, session=session).frame.filter(nw.col("device") == "CPU")
    grouped = (
        frame.filter(~nw.col("unix_ns").is_null())
        .with_columns(bucket=(nw.col("unix_ns") - span_ns[0]) // width)
        .group_by("path", "bucket")
        .agg(nw.col("dur_ns").sum().cast(nw.Int64).alias("total"), nw.len().cast(nw.Int64).alias("n"))
    )
    found: dict[str, list[float | None]] = {}
    for row in grouped.collect("pyarrow").to_native().to_pylist():
        means = found.setdefault(row["path"], [None] * buckets)
        means[int(row["bucket"])] = row["total"] / row["n"] / 1e9
    return {path: tuple(means) for path, means in found.items()}


def _firsts(run: Run, rank: int | None, session: int | None) -> dict[str, float]:
    # Two passes, of which the second finds a handful of rows: a sort or a join would move everything.
    nw = require("narwhals", extra="runs", caller="Reading a run")
    frame = run.intervals(rank=rank, session=session).frame.filter(nw.col("device") == "CPU")
    starts = frame.group_by("path").agg(nw.col("unix_ns").min()).collect("pyarrow").to_native().to_pylist()
    first_of = {row["path"]: row["unix_ns"] for row in starts if row["unix_ns"] is not None}
    if not first_of:
        return {}
    among = frame.filter(nw.col("unix_ns").is_in(sorted(set(first_of.values())))).select("path", "unix_ns", "dur_ns")
    found: dict[str, float] = {}
    for row in among.collect("pyarrow").to_native().to_pylist():
        if first_of.get(row["path"]) == row["unix_ns"]:
            found[row["path"]] = max(found.get(row["path"], 0.0), row["dur_ns"] / 1e9)
    return found


def _counters(run: Run, rank: int | None, session: int | None) -> dict[tuple[str, str], dict[str, int]]:
    # Each flush says how many there are so far, of each region, thread and device.
    latest: dict[tuple[Any, ...], dict[str, int]] = {}
    for row in run.table("counters").rows():
        if (rank is None or row["rank"] == rank) and (session is None or row["session"] == session):
            key = row["rank"], row["session"], row["region"], row["thread"], row["device"]
            known = latest.setdefault(key, dict.fromkeys(_COUNTERS, 0))
            for name in _COUNTERS:
                known[name] = max(known[name], row[name] or 0)
    found: dict[tuple[str, str], dict[str, int]] = {}
    for (_, _, region, _, device), counts in latest.items():
        total = found.setdefault((region, device), {})
        for name, count in counts.items():
            if count:
                total[name] = total.get(name, 0) + count
    return {key: counts for key, counts in found.items() if counts}


def _seconds(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9
