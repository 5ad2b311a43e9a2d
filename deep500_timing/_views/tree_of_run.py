"""The tree of a run's regions with trends and counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._base.sql import where
from deep500_timing._summary.tree import BUCKETS
from deep500_timing.runs._regions import region_rows, tree_of_rows

if TYPE_CHECKING:
    from deep500_timing._summary.tree import Tree
    from deep500_timing.runs import Run

_COUNTERS = ("failed", "discarded", "captured", "dropped")


def tree_of_run(run: Run, *, rank: int | None = None, session: int | None = None, buckets: int = BUCKETS) -> Tree:
    condition = (where(rank=rank, session=session) or " where true") + " and device = 'CPU'"
    span = run.sql(f"select min(unix_ns) as first, max(unix_ns + dur_ns) as last from intervals{condition}").rows()[0]
    first, last = span["first"], span["last"]
    more: dict[str, dict[str, Any]] = {}
    if first is not None:
        more = {path: {"first_s": first_s} for path, first_s in _firsts(run, condition).items()}
        width = max(-(-(last - first + 1) // max(buckets, 1)), 1)
        for path, trend in _trends(run, condition, first, width, buckets).items():
            more.setdefault(path, {})["trend"] = trend
    for path, spread in _over_ranks(run, session).items():
        more.setdefault(path, {})["over_ranks_s"] = spread
    return tree_of_rows(
        region_rows(run, rank=rank, session=session),
        more,
        counters=_counters(run, rank, session),
        rank=rank,
        span_s=None if first is None else (first / 1e9, last / 1e9),
    )


def _trends(run: Run, condition: str, first: int, width: int, buckets: int) -> dict[str, tuple[float | None, ...]]:
    if not buckets:
        return {}
    found: dict[str, list[float | None]] = {}
    rows = run.sql(
        f"select path, cast(floor((unix_ns - {first}) / {width}) as bigint) as bucket, "
        f"cast(sum(dur_ns) as bigint) as total, count(*) as n from intervals{condition} and unix_ns is not null "
        "group by path, bucket"
    ).rows()
    for row in rows:
        found.setdefault(row["path"], [None] * buckets)[row["bucket"]] = row["total"] / row["n"] / 1e9
    return {path: tuple(means) for path, means in found.items()}


def _firsts(run: Run, condition: str) -> dict[str, float]:
    rows = run.sql(
        f"with begun as (select path, min(unix_ns) as unix_ns from intervals{condition} group by path) "
        "select i.path as path, max(i.dur_ns) as dur_ns from intervals i join begun b "
        f"on i.path = b.path and i.unix_ns = b.unix_ns{condition} group by i.path"
    ).rows()
    return {row["path"]: row["dur_ns"] / 1e9 for row in rows}


def _over_ranks(run: Run, session: int | None) -> dict[str, tuple[float, float, float]]:
    condition = where(session=session) or " where true"
    rows = run.sql(
        "with totals as (select path, rank, cast(sum(dur_ns) as bigint) as total from intervals"
        f"{condition} and device = 'CPU' group by path, rank) "
        "select path, min(total) as low, median(total) as middle, max(total) as high, count(*) as ranks "
        "from totals group by path"
    ).rows()
    several = [row for row in rows if row["ranks"] > 1]
    return {row["path"]: (row["low"] / 1e9, float(row["middle"]) / 1e9, row["high"] / 1e9) for row in several}


def _counters(run: Run, rank: int | None, session: int | None) -> dict[tuple[str, str], dict[str, int]]:
    # Each flush writes the counts so far of a region, thread and device.
    latest = ", ".join(f"max({name}) as {name}" for name in _COUNTERS)
    sums = ", ".join(f"cast(sum({name}) as bigint) as {name}" for name in _COUNTERS)
    rows = run.sql(
        f"select region, device, {sums} from (select rank, session, region, thread, device, {latest} "
        f"from counters{where(rank=rank, session=session)} group by rank, session, region, thread, device) "
        "group by region, device"
    ).rows()
    found = {(row["region"], row["device"]): {name: row[name] for name in _COUNTERS if row[name]} for row in rows}
    return {key: counts for key, counts in found.items() if counts}
