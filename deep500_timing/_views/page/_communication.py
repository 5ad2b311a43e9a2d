"""Communication by operation and size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._summary.text import format_bytes, format_time
from deep500_timing._views.page._colours import Colours
from deep500_timing._views.page._context import shown
from deep500_timing._views.page._parts import bars, quantity, rounded, time_axis
from deep500_timing._views.page._section import Content, Figure, Panel

if TYPE_CHECKING:
    from deep500_timing._views.page._context import Context

_MOST = 200
_HEADS = ("operation", "group", "size", "count", "total", "shortest", "median", "longest", "size over median")


def communication(context: Context) -> Content | None:
    rows = context.rows(
        'select op, "group", case when bytes < 0 then null else bytes end as size, count(*) as n, '
        "sum(dur_ns)::double as total, median(dur_ns) as middle, min(dur_ns) as low, max(dur_ns) as high "
        f"from collectives group by all order by total desc, op, 2, 3 limit {_MOST}"
    )
    if not rows:
        return None
    totals: dict[str, float] = {}
    for row in rows:
        row["op"] = row["op"] or ""
        totals[row["op"]] = totals.get(row["op"], 0.0) + row["total"]
        rate = row["size"] / row["middle"] * 1e9 if row["size"] and row["middle"] else None
        row["said"] = None if rate is None else f"{format_bytes(rate)}/s"
    table = [
        (
            *(shown(row["op"]), shown(row["group"] or ""), format_bytes(row["size"]), row["n"]),
            *(format_time(row[what] / 1e9) for what in ("total", "low", "middle", "high")),
            row["said"],
        )
        for row in rows
    ]
    return Content((_totals(totals),), tables=(("By operation, group and size", _HEADS, table),))


def _totals(totals: dict[str, float]) -> Figure:
    colours = Colours(totals)
    rows = [
        {"op": shown(op), "s": rounded(total / 1e9), "time": format_time(total / 1e9), "colour": colours.of(op)}
        for op, total in sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    ]
    return Figure(
        "Time by operation, all ranks together",
        f"{rows[0]['op']} takes most: {rows[0]['time']}.",
        (Panel(bars(rows, "op", quantity("s", axis=time_axis(None)), op="operation", time="total")),),
        ("operation", "total"),
        [(row["op"], row["time"]) for row in rows],
        note="A rank's time in a collective includes its wait for the others.",
    )
