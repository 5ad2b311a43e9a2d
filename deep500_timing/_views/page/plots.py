"""The charts of the page as pictures."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from deep500_timing._base.files import whole_file
from deep500_timing._base.require import require
from deep500_timing._summary.text import width_of
from deep500_timing._views.page._charts import COLOUR, layer, quantity, styled
from deep500_timing._views.page._page import build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from os import PathLike

    from deep500_timing._views.page._section import Figure, Section
    from deep500_timing.runs import Run

_WIDTH, _SMALL = 900, 270
_SCALE = 2.0
"""Pixels of a PNG for each pixel of the chart."""


def write_plots(
    run: Run,
    folder: str | PathLike[str],
    *,
    format: Literal["png", "svg"] = "png",  # noqa: A002 (the usual name)
    only: Iterable[str] | None = None,
    sections: Iterable[Section] = (),
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[str]:
    """Write each chart of the page as a file: ``tree-1.png``, ``over-the-run-1.png`` and so on.

    Args:
        run: The run, opened with DuckDB.
        folder: The folder; made if missing.
        format: ``"png"`` or ``"svg"``.
        only: Names of sections; all if None.
        sections: Sections besides the built-in ones and those of entry points.
        on_progress: Called with the number of sections done and the number of all.

    Returns:
        The files' paths; none, and no folder, if the run has nothing to draw.

    Raises:
        LookupError: No section has such a name, or the run has nothing for it.
        ValueError: The format is unknown.
        OSError: A file cannot be written.
        MissingPackageError: A package of the extra ``report`` is not installed.
    """
    if format not in ("png", "svg"):
        raise ValueError(f"Drawing plots as {format!r}: use 'png' or 'svg'.")
    convert: Any = require("vl_convert", extra="report", caller="Drawing plots")
    _, built = build(run, sections, on_progress)
    with_charts = [section for section in built if any(figure.panels for figure in section.content.figures)]
    wanted = None if only is None else set(only)
    for name in sorted(wanted or ()):
        if name not in {section.name for section in with_charts}:
            there = ", ".join(section.name for section in with_charts) or "none"
            raise LookupError(f"Drawing {name!r}: the run has charts for {there}.")
    if with_charts:
        os.makedirs(folder, exist_ok=True)
    paths = []
    for section in with_charts:
        if wanted is not None and section.name not in wanted:
            continue
        for number, figure in enumerate(section.content.figures, 1):
            if not figure.panels:  # The page has a table of numbers that cannot be drawn.
                continue
            spec = _spec_of(figure)
            path = os.path.join(os.fspath(folder), f"{section.name}-{number}.{format}")
            drawn: bytes = (
                convert.vegalite_to_png(spec, scale=_SCALE)
                if format == "png"
                else convert.vegalite_to_svg(spec).encode("utf-8")
            )
            with whole_file(path) as file:
                file.write(drawn)
            paths.append(path)
    return paths


def _spec_of(figure: Figure) -> dict[str, Any]:
    title = {"text": figure.title, "anchor": "start", "fontSize": 14}
    if len(figure.panels) == 1 and not figure.legend:
        return {**styled(figure.panels[0].spec, _WIDTH), "title": title}
    whole = styled({}, _SMALL)
    together = {"$schema": whole["$schema"], "config": whole["config"], "title": title}
    if len(figure.panels) == 1:
        return together | {"vconcat": [_legend_of(figure), {**figure.panels[0].spec, "width": _WIDTH}]}
    parts = [{**panel.spec, "width": _SMALL, "title": panel.title} for panel in figure.panels]
    return together | {"columns": 3, "concat": parts}


def _legend_of(figure: Figure) -> dict[str, Any]:
    # The page's legend. Names are data here: in an axis or a legend they would be code.
    marks, at, row = [], 0.0, 0
    for name, colour in figure.legend:
        wide = 36 + 8 * width_of(name)
        if at + wide > _WIDTH and at:
            at, row = 0.0, row + 1
        marks.append({"x": at + 6, "y": row + 0.5, "name": name, "colour": colour})
        at += wide
    x = quantity("x", axis=None, scale={"domain": [0, _WIDTH], "nice": False})
    y = quantity("y", axis=None, scale={"domain": [0, row + 1], "reverse": True})
    square = layer({"type": "square", "size": 110, "opacity": 1}, color=COLOUR)
    look = {"align": "left", "baseline": "middle", "dx": 10, "fontSize": 12, "limit": _WIDTH}
    parts = [square, layer({"type": "text", **look}, text="name")]
    size = {"width": _WIDTH, "height": 18 * (row + 1)}
    return {**size, "data": {"values": marks}, "encoding": {"x": x, "y": y}, "layer": parts}
