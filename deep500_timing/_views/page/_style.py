"""The look of all charts. Colours of text and lines come from the page, which has a light and a dark form."""

from __future__ import annotations

from typing import Any

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
    """A chart with the page's look.

    Args:
        spec: Vega-Lite.
        width: In pixels, for a picture; None: as wide as there is room.
    """
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
