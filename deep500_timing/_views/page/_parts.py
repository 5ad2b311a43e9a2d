"""Parts of several charts, in Vega-Lite, and their look. Colours of text and lines come from the page."""

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
WHOLE_LABELS = "datum.value == floor(datum.value) ? format(datum.value, '{}') : ''"
"""Whole numbers: Vega sets ticks between them on short axes in spite of ``tickMinStep``."""
ZOOM = {
    "name": "zoom",
    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.ctrlKey || event.metaKey]"},
    "bind": "scales",
}
"""Drag to move, Ctrl and the wheel to zoom: the wheel alone goes on scrolling the page."""


COLOUR: dict[str, Any] = {"field": "colour", "type": "nominal", "scale": None, "legend": None}
"""Take colours from the data: names stay data, and colours cannot run out."""
INK = COLOUR | {"field": "ink"}
"""The same of texts on a colour."""


def quantity(field: str, **more: Any) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", **more}


def fitting(start: str, end: str) -> dict[str, Any]:
    """A text at the left of its bar that is at most as long as it, at any width and zoom."""
    width = f"(scale('x', datum.{end}) - scale('x', datum.{start}))"
    limits = {"limit": {"expr": f"max({width} - 6, 1)"}, "opacity": {"expr": f"{width} < 26 ? 0 : 1"}}
    return {"type": "text", "align": "left", "dx": 4, "baseline": "middle", "fontSize": 12} | limits


def bars(rows: list[dict[str, Any]], name: str, x: dict[str, Any], **titles: str) -> dict[str, Any]:
    y = {"field": name, "type": "nominal", "sort": None, "axis": {"title": None, "labelLimit": 240}}
    encoding = {"y": y, "x": x, "color": COLOUR, "tooltip": tooltip(**titles)}
    return {"height": max(22 * len(rows), 40), "data": data(rows), "mark": {"type": "bar"}, "encoding": encoding}


def tooltip(**titles: str) -> list[dict[str, Any]]:
    """The tooltip of a mark: fields of the data by their titles."""
    return [{"field": field, "title": title, "type": "nominal"} for field, title in titles.items()]


def time_axis(title: str | None) -> dict[str, Any]:
    return {"title": title, "labelExpr": TIME_LABELS, "tickCount": 6}


def by_step() -> dict[str, Any]:
    """The channels of bars over steps, from the field ``step`` to ``end``."""
    labels = {"labelExpr": WHOLE_LABELS.format("d"), "labelOverlap": True, "labelSeparation": 6}
    axis = {"title": "step", "grid": False, "tickMinStep": 1, **labels}
    scale = {"nice": False, "zero": False}
    return {"x": quantity("step", bin={"binned": True}, scale=scale, axis=axis), "x2": {"field": "end"}}


def data(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"values": rows}


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Rounded to significant digits, which saves bytes."""
    return None if value is None else float(f"{value:.{digits}g}")


FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', sans-serif"
_CONFIG: dict[str, Any] = {
    "aria": False,  # The page has a caption and a table for each chart.
    "background": None,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "domain": False, "ticks": False},
    "axisX": {"labelPadding": 4},
    "legend": {"labelFontSize": 11},
    "bar": {"stroke": None},
}


def styled(spec: dict[str, Any], width: int | None = None) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "config": _CONFIG,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "width": "container",
    }
    whole |= spec
    if width is not None and whole["width"] == "container":
        whole["width"] = width
        whole["config"] = _CONFIG | {"background": "white"}
    return whole
