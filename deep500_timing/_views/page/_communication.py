"""Communication by operation and size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._summary.text import format_bytes, format_time
from deep500_timing._views.page._colours import Colours
from deep500_timing._views.page._context import shown
from deep500_timing._views.page._parts import BYTE_LABELS, COLOUR, bars, data, quantity, rounded, time_axis, tooltip
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
        row["rate"] = row["size"] / row["middle"] * 1e9 if row["size"] and row["middle"] else None
        row["said"] = None if row["rate"] is None else f"{format_bytes(row['rate'])}/s"
    colours = Colours(totals)
    figures = [_totals(totals, colours)]
    sized = [row for row in rows if row["rate"]]
    if len({row["size"] for row in sized}) > 1:
        figures.append(_rates(sized, colours))
    table = [
        (
            *(shown(row["op"]), shown(row["group"] or ""), format_bytes(row["size"]), row["n"]),
            *(format_time(row[what] / 1e9) for what in ("total", "low", "middle", "high")),
            row["said"],
        )
        for row in rows
    ]
    return Content(tuple(figures), tables=(("By operation, group and size", _HEADS, table),))


def _totals(totals: dict[str, float], colours: Colours) -> Figure:
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


def _rates(sized: list[dict[str, Any]], colours: Colours) -> Figure:
    rows = [
        {"op": shown(row["op"]), "size": row["size"], "rate": rounded(row["rate"]), "said": row["said"], "n": row["n"]}
        | {"bytes": format_bytes(row["size"]), "colour": colours.of(row["op"])}
        for row in sized
    ]
    scale = {"type": "log", "base": 2}
    axis = {"labelExpr": BYTE_LABELS, "tickCount": 6}
    spec = {
        "height": 220,
        "data": data(rows),
        "mark": {"type": "point", "filled": True, "size": 70, "opacity": 0.8},
        "encoding": {
            "x": quantity("size", scale=scale, axis=axis | {"title": "size of a message", "labelOverlap": True}),
            "y": quantity(
                "rate", scale=scale, axis=axis | {"title": "size over median time, /s", "labelOverlap": "greedy"}
            ),
            "color": COLOUR,
            "tooltip": tooltip(op="operation", bytes="size", said="rate", n="messages"),
        },
    }
    best = max(rows, key=lambda row: row["rate"])
    return Figure(
        "Rate against size",
        f"The best rate is {best['said']}, of {best['op']} with {best['bytes']}.",
        (Panel(spec),),
        ("operation", "size", "messages", "rate"),
        [(row["op"], row["bytes"], row["n"], row["said"]) for row in rows],
        legend=tuple(dict.fromkeys((row["op"], row["colour"]) for row in rows)),
    )
