"""The tree of a run's regions, and the table of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from deep500_timing._base.names import CPU, GPU
from deep500_timing._base.sql import arrow_of, where
from deep500_timing._summary.nesting import path_text, split_path
from deep500_timing._summary.stats import QUANTILES
from deep500_timing._summary.tree import BUCKETS, Node, OnDevice, Tree, build_tree
from deep500_timing.runs._format import typed
from deep500_timing.runs._tables import schema_of

COLUMNS = typed(
    "int32: rank",
    "text: path parent region",
    "int32: depth",
    "text: device",
    "int64: count total_ns",
    "float64: share",
    "int64: rest_ns overlap_ns min_ns",
    "float64: mean_ns median_ns p95_ns p99_ns",
    "int64: max_ns",
)
_COUNTERS = ("failed", "discarded", "captured", "dropped")
_QUANTILES = {f"{name}_ns": share for name, share in QUANTILES.items() if f"{name}_ns" in COLUMNS}

_ROWS = """
with bins as (
    select {keys}, bin, count(*) as count, cast(sum(dur_ns) as bigint) as total_ns,
        min(dur_ns) as min_ns, max(dur_ns) as max_ns, cast(sum(overlap_ns) as bigint) as overlap_ns
    from intervals{where} group by {keys}, bin),
reached as (
    select *,
        sum(count) over (partition by {keys} order by bin) as upto,
        sum(count) over (partition by {keys}) as whole,
        case when bin < 128 then cast(bin as double)
            else (bin - 64 * (floor(bin / 64) - 1)) * power(2, floor(bin / 64) - 1)
                + (power(2, floor(bin / 64) - 1) - 1) / 2 end as middle
    from bins)
select {keys}, cast(sum(count) as bigint) as count, cast(sum(total_ns) as bigint) as total_ns,
    min(min_ns) as min_ns, max(max_ns) as max_ns, cast(sum(overlap_ns) as bigint) as overlap_ns, {quantiles}
from reached group by {keys}"""


def region_rows(
    run: Any, *, rank: int | None = None, session: int | None = None, by_rank: bool = False
) -> list[dict[str, Any]]:
    """Sums and quantiles for each path and device, computed by the engine from histograms.

    A quantile is linear between the two order statistics around it, which are middles of bins.
    """
    below = {name: f"floor(cast({share} as double) * (whole - 1))" for name, share in _QUANTILES.items()}
    statistics = [
        f"min(case when upto >= least({below[name]} + {number}, whole) then middle end) as {name}_{number}"
        for name in _QUANTILES
        for number in (1, 2)
    ]
    query = _ROWS.format(
        keys="path, device, rank" if by_rank else "path, device",
        where=where(rank=rank, session=session),
        quantiles=", ".join(statistics),
    )
    rows: list[dict[str, Any]] = run.sql(query).rows()
    for row in rows:
        for name, share in _QUANTILES.items():
            low, high = row.pop(f"{name}_1"), row.pop(f"{name}_2")
            position = share * (row["count"] - 1)
            value = low + (position - int(position)) * (high - low)
            row[name] = min(max(value, row["min_ns"]), row["max_ns"])
    return rows


def tree_of_rows(rows: Iterable[dict[str, Any]], more: dict[str, dict[str, Any]], **facts: Any) -> Tree:
    """The tree of :func:`region_rows` of one rank, or of all ranks together."""
    nodes: dict[str, Node] = {}
    for row in sorted(rows, key=lambda row: (row["device"], row["path"])):
        text, seconds = row["path"], {name[:-3]: row[name] / 1e9 for name in row if name.endswith("_ns")}
        path = tuple(split_path(text))
        if row["device"] == CPU:
            overlap_s = seconds.pop("overlap")
            times = {f"{name}_s": value for name, value in seconds.items()}
            nodes[text] = Node(path[-1], path, count=row["count"], overlap_s=overlap_s, **times, **more.get(text, {}))
        else:
            gpu = OnDevice(seconds["total"], row["count"], seconds["median"], seconds["p95"])
            nodes[text] = replace(nodes.get(text) or Node(path[-1], path), gpu=gpu)
    return build_tree(nodes.values(), **facts)


def tree_of_run(run: Any, *, rank: int | None = None, session: int | None = None, buckets: int = BUCKETS) -> Tree:
    """The tree of one rank, or of all ranks together.

    Args:
        run: The run.
        rank: Which rank; all of them if None.
        session: Which start of the ranks; all of them if None.
        buckets: Into how many parts of the run its trends are divided; 0 for no trends.
    """
    condition = (where(rank=rank, session=session) or " where true") + f" and device = '{CPU}'"
    more: dict[str, dict[str, Any]] = defaultdict(dict)
    spans = run.sql(
        "with spans as (select path as its, min(unix_ns) as first, max(unix_ns + dur_ns) as last "
        f"from intervals{condition} group by path) select path, max(dur_ns) as dur_ns, min(first) as first, "
        f"max(last) as last from intervals join spans on path = its and unix_ns = first{condition} group by path"
    ).rows()
    for row in spans:
        more[row["path"]]["first_s"] = row["dur_ns"] / 1e9
    span = (min(row["first"] for row in spans), max(row["last"] for row in spans)) if spans else None
    for row in run.sql(
        "with totals as (select path, rank, cast(sum(dur_ns) as bigint) as total from intervals"
        f"{where(session=session) or ' where true'} and device = '{CPU}' group by path, rank) "
        "select path, min(total) as low, median(total) as middle, max(total) as high from totals "
        "group by path having count(*) > 1"
    ).rows():
        more[row["path"]]["over_ranks_s"] = row["low"] / 1e9, float(row["middle"]) / 1e9, row["high"] / 1e9
    if span is not None and buckets:
        for path, trend in _trends(run, condition, *span, buckets).items():
            more[path]["trend"] = tuple(trend)
    return tree_of_rows(
        region_rows(run, rank=rank, session=session),
        more,
        counters=_counters(run, rank, session),
        rank=rank,
        span_s=None if span is None else (span[0] / 1e9, span[1] / 1e9),
    )


def _trends(run: Any, condition: str, first: int, last: int, buckets: int) -> dict[str, list[float | None]]:
    width = -(-(last - first + 1) // buckets)
    found: dict[str, list[float | None]] = defaultdict(lambda: [None] * buckets)
    for row in run.sql(
        f"select path, cast(floor((unix_ns - {first}) / {width}) as bigint) as bucket, "
        f"cast(sum(dur_ns) as bigint) as total, count(*) as n from intervals{condition} and unix_ns is not null "
        "group by path, bucket"
    ).rows():
        found[row["path"]][row["bucket"]] = row["total"] / row["n"] / 1e9
    return found


def _counters(run: Any, rank: int | None, session: int | None) -> dict[tuple[str, str], dict[str, int]]:
    # Each flush writes the counts so far of a region, thread and device.
    latest = ", ".join(f"max({name}) as {name}" for name in _COUNTERS)
    sums = ", ".join(f"cast(sum({name}) as bigint) as {name}" for name in _COUNTERS)
    rows = run.sql(
        f"select region, device, {sums} from (select rank, session, region, thread, device, {latest} "
        f"from counters{where(rank=rank, session=session)} group by rank, session, region, thread, device) "
        "group by region, device order by region, device"
    ).rows()
    found = {(row["region"], row["device"]): {name: row[name] for name in _COUNTERS if row[name]} for row in rows}
    return {key: counts for key, counts in found.items() if counts}


def regions_table(run: Any, rank: int | None, session: int | None, by_rank: bool) -> Any:
    """The regions as a ``pyarrow.Table``, depth first, siblings by falling total, CPU before GPU."""
    import pyarrow as pa

    of_rank: dict[int | None, list[dict[str, Any]]] = defaultdict(list)
    for row in region_rows(run, rank=rank, session=session, by_rank=by_rank):
        of_rank[row.get("rank")].append(row)
    schema = schema_of(COLUMNS if by_rank else {name: kind for name, kind in COLUMNS.items() if name != "rank"})
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    for number in sorted(of_rank, key=lambda number: -1 if number is None else number):
        for line in _lines(of_rank[number]):
            for name in schema.names:
                columns[name].append(number if name == "rank" else line.get(name))
    return pa.table([arrow_of(columns[column.name], column.type) for column in schema], names=schema.names)


def _lines(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    known = {(row["path"], row["device"]): row for row in rows}
    for node in tree_of_rows(rows, {}).walk():
        if node.is_rest:
            continue
        path = path_text(node.path)
        line: dict[str, Any] = {"path": path, "parent": path_text(node.parent) or None, "region": node.name}
        line |= {"depth": len(node.path) - 1, "device": CPU, "count": 0}
        on_host = {"share": node.share, "rest_ns": None if node.rest_s is None else round(node.rest_s * 1e9)}
        on_device = {"share": None if node.gpu is None else node.gpu.share}
        found = [(device, known[path, device]) for device in (CPU, GPU) if (path, device) in known]
        if not found:
            yield line
        for device, row in found:
            own = on_host if device == CPU else on_device
            yield line | row | own | {"mean_ns": row["total_ns"] / row["count"]}
