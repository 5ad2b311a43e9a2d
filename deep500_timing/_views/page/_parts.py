"""Parts of several charts, in Vega-Lite."""

from __future__ import annotations

from typing import Any

from deep500_timing._summary.text import SIZE_UNITS

TIME_LABELS = r"replace(format(datum.value, '~s'), /([a-zµ]?)$/, '\u00a0$1s')"
"""Seconds with their prefix: 20 ms, 500 µs."""
BYTE_LABELS = (
    "".join(
        f"datum.value >= {scale} ? format(datum.value / {scale}, '.4~r') + ' {unit}' : " for scale, unit in SIZE_UNITS
    )
    + "datum.value + ' B'"
)
"""Bytes with their unit."""
WHOLE_LABELS = "datum.value == floor(datum.value) ? format(datum.value, '{}') : ''"
"""Whole numbers: Vega sets ticks between them on short axes in spite of ``tickMinStep``."""
ZOOM = {
    "name": "zoom",
    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.ctrlKey || event.metaKey]"},
    "bind": "scales",
}
"""Drag to move, Ctrl and the wheel to zoom: the wheel alone goes on scrolling the page."""


def colour_by_datum() -> dict[str, Any]:
    """Take colours from the data: names stay data, and colours cannot run out."""
    return {"field": "colour", "type": "nominal", "scale": None, "legend": None}


def fitting(start: str, end: str) -> dict[str, Any]:
    """A text that is at most as long as its bar, at any width and zoom."""
    width = f"(scale('x', datum.{end}) - scale('x', datum.{start}))"
    return {"limit": {"expr": f"max({width} - 6, 1)"}, "opacity": {"expr": f"{width} < 26 ? 0 : 1"}}


def tooltip(**titles: str) -> list[dict[str, Any]]:
    """The tooltip of a mark: fields of the data by their titles."""
    return [{"field": field, "title": title, "type": "nominal"} for field, title in titles.items()]


def time_axis(title: str | None) -> dict[str, Any]:
    """An axis of seconds."""
    return {"title": title, "labelExpr": TIME_LABELS, "tickCount": 6}


def step_axis() -> dict[str, Any]:
    """An axis of steps."""
    labels = {"labelExpr": WHOLE_LABELS.format("d"), "labelOverlap": True, "labelSeparation": 6}
    return {"title": "step", "grid": False, "tickMinStep": 1, **labels}


def data(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows, inside the chart."""
    return {"values": rows}


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Rounded to significant digits, which saves bytes."""
    return None if value is None else float(f"{value:.{digits}g}")
