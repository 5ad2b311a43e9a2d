"""Parts of several charts, in Vega-Lite, and their colours. Colours of text and lines come from the page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import cycle
from os import PathLike
from typing import Any

from deep500_timing._base.files import whole_file
from deep500_timing._base.names import BACKWARD, BATCH, COMM, EPOCH, FORWARD, IO
from deep500_timing._base.require import require
from deep500_timing._summary.text import SIZE_UNITS

GREY = "#949494"
"""Time in no region, or time that was not measured."""
ACCENT = "#0072b2"
ALARM = "#d55e00"
# The hues of Okabe and Ito, which colour-blind readers can tell apart, at a contrast of 3 : 1 to either paper.
REGION_COLOURS = {
    FORWARD: "#0072b2",
    BACKWARD: "#009e73",
    IO: "#d08400",
    COMM: "#cc79a7",
    "optimizer": "#2f94cf",
    "OPTIMIZER": "#2f94cf",
    "VALIDATION": "#8f7fc9",
    BATCH: "#7f97ad",
    EPOCH: "#76889a",
    "FIT": "#87919b",
}
_OTHERS = ("#d55e00", "#a39300", "#117733", "#aa4466", "#3a9c8c", "#8a6038", "#5f93c8", "#d96d91")


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """The colour of each region in every chart: fixed for those of nearly every run, by order for the others."""
    free = cycle(_OTHERS)
    return {name: REGION_COLOURS.get(name) or next(free) for name in dict.fromkeys(names)}


def luminance_of(colour: str) -> float:
    """A colour's relative luminance, 0 to 1, as the Web's guideline (WCAG 2) defines it."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    return "#000000" if luminance_of(colour) > 0.179 else "#ffffff"


TIME_LABELS = r"replace(format(datum.value, '~s'), /([a-zµ]?)$/, '\u00a0$1s')"
"""Seconds with their prefix: 20 ms, 500 µs."""
BYTE_LABELS = "".join(
    f"datum.value >= {scale} ? format(datum.value / {scale}, '.4~r') + ' {unit}' : " for scale, unit in SIZE_UNITS
)
BYTE_LABELS += "datum.value + ' B'"
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


def coloured(field: str, colours: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Colours by the values of a field, which are the program's own words, with a legend."""
    scale = {"domain": [*colours], "range": [*colours.values()]}
    return {"field": field, "type": "nominal", "title": None, "scale": scale, **more}


def layer(mark: str | dict[str, Any], rows: list[dict[str, Any]] | None = None, **channels: Any) -> dict[str, Any]:
    """A mark with its channels. A channel that is a text is the field of that name; ``rows`` are the layer's data."""
    encoding = {name: {"field": channel} if isinstance(channel, str) else channel for name, channel in channels.items()}
    marked = {"mark": {"type": mark} if isinstance(mark, str) else mark, "encoding": encoding}
    return marked if rows is None else {"data": {"values": rows}, **marked}


def fitting(start: str, end: str) -> dict[str, Any]:
    """A text at the left of its bar that is at most as long as it, at any width and zoom."""
    width = f"(scale('x', datum.{end}) - scale('x', datum.{start}))"
    limits = {"limit": {"expr": f"max({width} - 6, 1)"}, "opacity": {"expr": f"{width} < 26 ? 0 : 1"}}
    return {"type": "text", "align": "left", "dx": 4, "baseline": "middle", "fontSize": 12} | limits


def bars(rows: Iterable[tuple[str, float, str, str]], axis: dict[str, Any], name: str, said: str) -> dict[str, Any]:
    """Bars from left to right. A row has the bar's name, its length, the length in words, and the colour.

    ``name`` and ``said`` are the titles of the names and of the lengths in words.
    """
    values = [
        {"name": named, "length": rounded(length), "said": in_words, "colour": colour}
        for named, length, in_words, colour in rows
    ]
    y = {"field": "name", "type": "nominal", "sort": None, "axis": {"title": None, "labelLimit": 240}}
    tip = tooltip(name=name, said=said)
    bar = layer("bar", values, y=y, x=quantity("length", axis=axis), color=COLOUR, tooltip=tip)
    return {"height": max(22 * len(values), 40), **bar}


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


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Rounded to significant digits, which saves bytes."""
    return None if value is None else float(f"{value:.{digits}g}")


_CONFIG: dict[str, Any] = {
    "aria": False,  # The page has a caption and a table for each chart.
    "background": None,
    "font": "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "domain": False, "ticks": False},
    "axisX": {"labelPadding": 4},
    "legend": {"labelFontSize": 11},
    "bar": {"stroke": None},
}


def styled(spec: dict[str, Any], width: int | None = None) -> dict[str, Any]:
    """A chart for the page, or one of a width for a picture."""
    whole: dict[str, Any] = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "config": _CONFIG if width is None else _CONFIG | {"background": "white"},
        "autosize": {"type": "fit-x", "contains": "padding"},
        "width": width or "container",
    }
    return whole | spec


def save_picture(spec: dict[str, Any], path: str | PathLike[str], *, caller: str) -> None:
    """Write a chart that is :func:`styled` to a file: an SVG if its name says so, else a PNG of twice the size."""
    convert: Any = require("vl_convert", extra="report", caller=caller)
    is_svg = os.fspath(path).endswith(".svg")
    drawn: bytes = convert.vegalite_to_svg(spec).encode() if is_svg else convert.vegalite_to_png(spec, scale=2.0)
    with whole_file(os.fspath(path)) as file:
        file.write(drawn)
