"""Samples: memory, throughput, utilization, clocks, power, temperature, and the program's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._base.sql import literal
from deep500_timing._summary.text import UNKNOWN, format_bytes
from deep500_timing._views.page._colours import ACCENT
from deep500_timing._views.page._context import shown
from deep500_timing._views.page._parts import BYTE_LABELS, data, quantity, rounded, tooltip
from deep500_timing._views.page._section import Content, Figure, Panel

if TYPE_CHECKING:
    from deep500_timing._views.page._context import Context

_POINTS = 150
_FINITE = "value is not null and isfinite(value)"
_MOST = 9
_TIMES = (("h", "hours", 3600), ("min", "minutes", 60), ("s", "seconds", 1))
"""Units of the time axis; the first of which three fit is taken."""
_FAMILIES = (
    ("Memory", ("_bytes",)),
    ("Throughput and MFU", ("throughput.", "mfu", "flops")),
    ("Device and machine", ("gpu", "system.", "process.")),
)


def samples(context: Context) -> Content | None:
    metrics = context.rows(
        f"select metric, count(*) filter ({_FINITE}) as n, count(*) filter (not ({_FINITE})) as unreal, "
        f"min(value) filter ({_FINITE}) as low, avg(value) filter ({_FINITE}) as mean, "
        f"max(value) filter ({_FINITE}) as high, min(unix_ns) as first, max(unix_ns) as last "
        "from samples group by metric order by metric"
    )
    if not metrics:
        return None
    families: dict[str, list[dict[str, Any]]] = {}
    for row in metrics:
        families.setdefault(_family(row["metric"] or ""), []).append(row)
    order = [name for name, _ in _FAMILIES] + ["Other samples"]
    return Content(tuple(_figure(context, name, families[name]) for name in order if name in families))


def _family(metric: str) -> str:
    for name, marks in _FAMILIES:
        if any(metric.endswith(mark) if mark.startswith("_") else metric.startswith(mark) for mark in marks):
            return name
    return "Other samples"


def _figure(context: Context, name: str, metrics: list[dict[str, Any]]) -> Figure:
    begin = min((row["first"] for row in metrics if row["first"] is not None), default=0)
    # A capacity is constant: the table is enough.
    lines = [row for row in metrics if row["n"]]
    drawn = [row for row in lines if not (row["metric"] or "").endswith("_total_bytes")][:_MOST]
    span_s = (max((row["last"] for row in metrics if row["last"] is not None), default=0) - begin) / 1e9
    time = next((unit for unit in _TIMES if span_s >= 3 * unit[2]), _TIMES[-1])
    panels = tuple(Panel(_spec(context, row, begin, time), shown(row["metric"] or "")) for row in drawn)
    said = "; ".join(f"{shown(row['metric'] or '')} {_value(row, 'low')} to {_value(row, 'high')}" for row in drawn)
    heads = ["metric", "samples", "lowest", "mean", "highest"]
    note = "The line is the mean of all ranks, the band from the lowest to the highest."
    if len(metrics) > len(drawn):
        note += f" {len(drawn)} of {len(metrics)} are drawn; all are in the table."
    has_unreal = any(row["unreal"] for row in metrics)
    if has_unreal:
        heads.append("NaN or infinite")
        named = ", ".join(f"{row['unreal']} of {shown(row['metric'] or '')}" for row in metrics if row["unreal"])
        note += f" NaN or infinite, and not drawn: {named}."
    rows = [_row(row, has_unreal) for row in metrics]
    return Figure(name, f"{said}." if said else "No value is finite.", panels, tuple(heads), rows, note=note)


def _row(row: dict[str, Any], has_unreal: bool) -> tuple[object, ...]:
    metric = row["metric"] or ""
    values = (_value(row, what) for what in ("low", "mean", "high"))
    return shown(metric), row["n"], *values, *([row["unreal"]] if has_unreal else [])


def _value(row: dict[str, Any], what: str) -> str:
    value = row[what]
    if value is None:
        return UNKNOWN
    return format_bytes(value) if (row["metric"] or "").endswith("_bytes") else f"{value:.4g}"


def _spec(context: Context, metric: dict[str, Any], begin: int, time: tuple[str, str, int]) -> dict[str, Any]:
    abbreviation, plural, length_s = time
    width = max(((metric["last"] or 0) - (metric["first"] or 0)) // _POINTS + 1, 1)
    rows = context.rows(
        f"select (coalesce(unix_ns, time_ns) - {begin}) // {width} as part, avg(value) as mean, min(value) as low, "
        f"max(value) as high from samples where metric = {literal(metric['metric'] or '')} and {_FINITE} "
        "group by 1 order by 1"
    )
    in_bytes = (metric["metric"] or "").endswith("_bytes")
    values = [
        {"t": rounded(row["part"] * width / (length_s * 1e9), 5)}
        | {name: rounded(row[name], 6) for name in ("mean", "low", "high")}
        | {"said": format_bytes(row["mean"]) if in_bytes else f"{row['mean']:.4g}"}
        for row in rows
    ]
    axis: dict[str, Any] = {"title": None, "grid": False, "tickCount": 4, "labelOverlap": True}
    axis["labelExpr"] = f"datum.value + ' {abbreviation}'"
    y_axis = {"title": None, "tickCount": 4, **({"labelExpr": BYTE_LABELS} if in_bytes else {"format": "~s"})}
    x, scale = quantity("t", scale={"nice": False, "zero": False}, axis=axis), {"zero": False}
    band = {"x": x, "y": quantity("low", scale=scale, axis=y_axis), "y2": {"field": "high"}}
    line = {"x": x, "y": quantity("mean", scale=scale, axis=y_axis), "tooltip": tooltip(t=plural, said="mean")}
    return {
        "height": 120,
        "data": data(values),
        "layer": [
            {"mark": {"type": "area", "opacity": 0.25, "color": ACCENT}, "encoding": band},
            {"mark": {"type": "line", "color": ACCENT, "point": len(values) < 30}, "encoding": line},
        ],
    }
