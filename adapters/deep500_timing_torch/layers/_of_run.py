"""The layers of a model in a run: a table describes them, and their times are regions of the run.

The table is written twice: as timing begins, so that the run of a killed process has it, and as timing ends, with the
operations and memory that are known by then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing import TimeStats
from deep500_timing.adapters import QUANTILES
from deep500_timing_torch.layers._call import PURPOSES
from deep500_timing_torch.layers._memory import LayerMemory
from deep500_timing_torch.layers._times import LayerTimes, ModelTimes, add_times, region_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from deep500_timing.runs import Run, RunLog

    Rows = Callable[[str], list[dict[str, Any]]]

TABLE = "layers"
"""The table of a run that has a row for each layer."""
_COLUMNS = {
    "model": "name",
    "layer": "name",
    "kind": "name",
    "position": "int",
    "parent": "int",
    "depth": "int",
    "shared": "int",
    "parameters": "int",
    "flops": "float",
    "kept_bytes": "float",
    "peak_bytes": "float",
    "unreturned_bytes": "float",
    "peak_flops_per_s": "float",
    "version": "int",
}
_NEWEST = 200_000
"""Intervals that the time of a layer's own is measured by; its share in them holds for all."""
_NONE = float("nan")


def write_layers(
    log: RunLog, found: Sequence[LayerTimes], *, version: int, peak_flops_per_s: float | None = None
) -> None:
    log.declare(TABLE, **_COLUMNS)
    log.add(
        TABLE,
        *(
            (
                found[0].path,
                layer.path,
                layer.kind,
                position,
                -1 if layer.parent is None else layer.parent,
                layer.depth,
                int(layer.shared),
                layer.parameters,
                _number(layer.flops),
                _number(None if layer.memory is None else layer.memory.kept_bytes),
                _number(None if layer.memory is None else layer.memory.peak_within_bytes),
                _number(None if layer.memory is None else layer.memory.unreturned_bytes),
                _number(peak_flops_per_s),
                version,
            )
            for position, layer in enumerate(found)
        ),
    )


def read_layers(run: Run, *, rank: int | None = None, model: str | None = None) -> ModelTimes | None:
    """The layers of a model that a run holds, with their times; None if it holds none.

    Args:
        run: An open run, read by DuckDB.
        rank: Of this rank; None for the lowest that has layers.
        model: Of the model of this name; None for the one that was timed first.
    """
    return layers_of_rows(lambda query: run.sql(query).rows(), run.tables, rank=rank, model=model)


def models_of_rows(rows: Rows) -> list[tuple[int, str]]:
    """The models whose layers a run holds, each with the lowest rank that has it, in the order of their ranks."""
    found = rows(f"select min(rank) as rank, model from {TABLE} group by model order by 1, 2")
    return [(int(row["rank"]), str(row["model"])) for row in found]


def layers_of_rows(
    rows: Rows, tables: Mapping[str, object], *, rank: int | None = None, model: str | None = None
) -> ModelTimes | None:
    """The same, by a function that answers DuckDB's SQL over the run's tables."""
    if TABLE not in tables:
        return None
    known = [one for one in models_of_rows(rows) if model is None or one[1] == model]
    if not known:
        return None
    name = known[0][1]
    place = known[0][0] if rank is None else int(rank)
    of = f"from {TABLE} where rank = {place} and model = {_literal(name)}"
    written = rows(
        f"select * {of} and session = (select max(session) {of}) "
        "qualify row_number() over (partition by position order by version desc) = 1 order by position"
    )
    if not written:
        return None
    session = int(written[0]["session"])
    layers = [_layer_of(row) for row in written]
    regions = [region_of(position, layers) for position in range(len(layers))]
    names = ", ".join(_literal(f"{region} {purpose}") for region in regions for purpose in PURPOSES)
    intervals = f"from intervals where rank = {place} and session = {session} and region in ({names})"
    stats = {
        (str(row["region"]), str(row["device"])): _stats_of(row)
        for row in rows(_STATISTICS.format(of=intervals, shares=list(QUANTILES.values())))
    }
    on_device = any(device == "GPU" for _, device in stats)
    newest = _by_region(
        rows(
            f"select region, start_ns, start_ns + dur_ns as end_ns {intervals} "
            f"and device = '{'GPU' if on_device else 'CPU'}' order by start_ns desc limit {_NEWEST}"
        )
    )
    timed = add_times(layers, stats, lambda region, _: newest.get(region, np.empty((0, 2), np.int64)))
    return ModelTimes(tuple(timed), peak_flops_per_s=_known(written[0]["peak_flops_per_s"]))


_STATISTICS = """
select region, device, count(*) as n, sum(dur_ns) / 1e9 as total, min(dur_ns) / 1e9 as low, max(dur_ns) / 1e9 as high,
    coalesce(stddev_samp(dur_ns), 0) / 1e9 as stdev, quantile_cont(dur_ns, {shares}) as quantiles
{of} group by region, device
"""


def _stats_of(row: Mapping[str, Any]) -> TimeStats:
    quantiles: Any = {name: float(value) / 1e9 for name, value in zip(QUANTILES, row["quantiles"], strict=True)}
    count, total = int(row["n"]), float(row["total"])
    return TimeStats(
        min=float(row["low"]),
        mean=total / count,
        max=float(row["high"]),
        stdev=float(row["stdev"]),
        count=count,
        total=total,
        median_ci=None,
        **quantiles,
    )


def _layer_of(row: Mapping[str, Any]) -> LayerTimes:
    kept, peak, unreturned = (_known(row[name]) for name in ("kept_bytes", "peak_bytes", "unreturned_bytes"))
    read = None
    if kept is not None or peak is not None or unreturned is not None:
        read = LayerMemory(0, None, None, None, kept, None if peak is None else round(peak), unreturned)
    flops = _known(row["flops"])
    return LayerTimes(
        str(row["layer"]),
        str(row["kind"]),
        int(row["depth"]),
        None if row["parent"] < 0 else int(row["parent"]),
        shared=bool(row["shared"]),
        parameters=int(row["parameters"]),
        flops=None if flops is None else round(flops),
        memory=read,
    )


def _by_region(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[np.int64]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        found.setdefault(str(row["region"]), []).append((int(row["start_ns"]), int(row["end_ns"])))
    return {region: np.array(pairs[::-1], dtype=np.int64) for region, pairs in found.items()}


def _number(value: float | None) -> float:
    return _NONE if value is None else float(value)


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
