"""Communication by operation and size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._summary.text import format_bytes, format_time
from deep500_timing._views.page._colours import Colours
from deep500_timing._views.page._context import shown
from deep500_timing._views.page._parts import BYTE_LABELS, colour_by_datum, data, rounded, time_axis, tooltip
from deep500_timing._views.page._section import Content, Figure, Panel

if TYPE_CHECKING:
    from deep500_timing._views.page._context import Context

_MOST = 200


class Communication:
    """Collectives."""

    name, title, place = "communication", "Communication", 90
    missing = "No collective was recorded."

    def build(self, context: Context) -> Content | None:
        """See :class:`Section`."""
        rows = context.rows(
            'select op, "group", case when bytes < 0 then null else bytes end as size, count(*) as n, '
            "sum(dur_ns)::double as total, median(dur_ns) as middle, min(dur_ns) as low, max(dur_ns) as high "
            f"from collectives group by all order by total desc, op, 2, 3 limit {_MOST}"
        )
        if not rows:
            return None
        totals: dict[str, float] = {}
        for row in rows:
            totals[row["op"] or ""] = totals.get(row["op"] or "", 0.0) + row["total"]
        colours = Colours(totals)
        figures = [_totals(totals, colours)]
        sized = [row for row in rows if row["size"] and row["middle"]]
        if len({row["size"] for row in sized}) > 1:
            figures.append(_rates(sized, colours))
        return Content(
            tuple(figures),
            tables=(
                (
                    "By operation, group and size",
                    (
                        "operation",
                        "group",
                        "size",
                        "count",
                        "total",
                        "shortest",
                        "median",
                        "longest",
                        "size over median",
                    ),
                    [_row(row) for row in rows],
                ),
            ),
        )


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    times = (row["low"], row["middle"], row["high"])
    rate = f"{format_bytes(row['size'] / row['middle'] * 1e9)}/s" if row["size"] and row["middle"] else None
    return (
        shown(row["op"] or ""),
        shown(row["group"] or ""),
        format_bytes(row["size"]),
        row["n"],
        format_time(row["total"] / 1e9),
        *(format_time(value / 1e9) for value in times),
        rate,
    )


def _totals(totals: dict[str, float], colours: Colours) -> Figure:
    rows = [
        {"op": shown(op), "s": rounded(total / 1e9), "time": format_time(total / 1e9), "colour": colours.of(op)}
        for op, total in sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    ]
    spec = {
        "height": 26 * len(rows),
        "data": data(rows),
        "mark": {"type": "bar"},
        "encoding": {
            "y": {"field": "op", "type": "nominal", "sort": None, "axis": {"title": None, "labelLimit": 200}},
            "x": {"field": "s", "type": "quantitative", "axis": time_axis(None)},
            "color": colour_by_datum(),
            "tooltip": tooltip(op="operation", time="total"),
        },
    }
    return Figure(
        "Time by operation, all ranks together",
        f"{rows[0]['op']} takes most: {rows[0]['time']}.",
        (Panel(spec),),
        ("operation", "total"),
        [(row["op"], row["time"]) for row in rows],
        note="A rank's time in a collective includes its wait for the others.",
    )


def _rates(sized: list[dict[str, Any]], colours: Colours) -> Figure:
    rows = [
        {"op": shown(row["op"] or ""), "size": row["size"], "rate": rounded(row["size"] / row["middle"] * 1e9)}
        | {"said": f"{format_bytes(row['size'] / row['middle'] * 1e9)}/s", "bytes": format_bytes(row["size"])}
        | {"colour": colours.of(row["op"] or ""), "n": row["n"]}
        for row in sized
    ]
    spec = {
        "height": 220,
        "data": data(rows),
        "mark": {"type": "point", "filled": True, "size": 70, "opacity": 0.8},
        "encoding": {
            "x": {
                "field": "size",
                "type": "quantitative",
                "scale": {"type": "log", "base": 2},
                "axis": {"title": "size of a message", "labelExpr": BYTE_LABELS, "tickCount": 6, "labelOverlap": True},
            },
            "y": {
                "field": "rate",
                "type": "quantitative",
                "scale": {"type": "log", "base": 2},
                "axis": {
                    "title": "size over median time, /s",
                    "labelExpr": BYTE_LABELS,
                    "tickCount": 6,
                    "labelOverlap": "greedy",
                },
            },
            "color": colour_by_datum(),
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
