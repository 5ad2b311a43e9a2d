"""The page: its sections, built one by one; the file without external resources; the charts as pictures."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import resources
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from deep500_timing._base import plugins, progress
from deep500_timing._base.files import whole_file
from deep500_timing._base.regular import is_private, read_bounded
from deep500_timing._base.require import require
from deep500_timing._base.settings import cache_folder
from deep500_timing._base.warn import warn_once
from deep500_timing._summary.text import UNKNOWN
from deep500_timing._views.about import title_of
from deep500_timing._views.findings import verdict
from deep500_timing._views.findings._finding import percent
from deep500_timing._views.page._charts import COLOUR, layer, quantity, save_picture, styled
from deep500_timing._views.page._job import goodput, machine, not_measured, samples, workers
from deep500_timing._views.page._lengths import over, spread
from deep500_timing._views.page._ranks import communication, ranks_over_run, stragglers
from deep500_timing._views.page._section import GROUP, TABLE_GROUP, Content, Context, Figure, Section
from deep500_timing._views.page._step import typical, where

if TYPE_CHECKING:
    from deep500_timing.runs import Run

_CALLER = "Writing a report"
_MOST_ROWS = 400
"""Rows of a table that are shown."""
_WIDTH, _SMALL = 900, 270
"""Of a picture with one chart, and of each of several in one."""
_COLUMNS = 5
"""Of a picture's legend."""


class _BuiltIn(NamedTuple):
    name: str
    title: str
    place: int
    missing: str
    build: Callable[[Context], Content | None]


_NO_STEP, _ONE_RANK = "No step was timed as BATCH.", "There is one rank."
_BUILT_IN = (
    _BuiltIn("tree", "Where a step goes", 30, "No region was timed.", where),
    _BuiltIn("goodput", "Goodput: where the wall clock of the job went", 35, "", goodput),
    _BuiltIn("over-the-run", "Over the run", 40, _NO_STEP, over),
    _BuiltIn("machine", "The processors: who had them", 45, "", machine),
    _BuiltIn("steps", "A typical step and the slowest", 50, _NO_STEP, typical),
    _BuiltIn("distributions", "How long each region takes", 60, "No region has 10 intervals.", spread),
    _BuiltIn("workers", "Workers of the data loader", 63, "", workers),
    _BuiltIn("stragglers", "Who is late, and why", 65, _ONE_RANK, stragglers),
    _BuiltIn("ranks", "Ranks", 70, "The ranks meet in no step.", ranks_over_run),
    _BuiltIn("memory", "Memory, throughput, devices", 80, "No memory, throughput or device was sampled.", samples),
    _BuiltIn("communication", "Communication", 90, "No collective was recorded.", communication),
    _BuiltIn("not-measured", "Missing data and environment", 110, "", not_measured),
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*\Z")


@dataclass(frozen=True)
class Built:
    name: str
    title: str
    content: Content


def build(run: Run, more: Iterable[Section] = ()) -> tuple[Context, list[Built]]:
    """Build the sections in the order of their places."""
    context = Context(run)
    sections = sorted(_sections(run, more), key=lambda section: (section.place, section.name))
    built = []
    for done, section in enumerate(sections):
        progress.show(done, len(sections))
        try:
            content = section.build(context)
        except Exception as error:
            # A section that fails costs itself, not the page.
            said = f"{type(error).__name__}: {error}"
            warn_once(f"The section {section.name!r} of the report failed: {said}. It is left out.")
            context.missing.append((section.title, f"It failed: {said}"))
            continue
        if content is None:
            context.missing += [(section.title, section.missing)] if section.missing else []
        else:
            built.append(Built(section.name, section.title, content))
    progress.show(len(sections), len(sections))
    return context, built


def _sections(run: Run, more: Iterable[Section]) -> list[Section]:
    found: dict[str, Any] = {section.name: section for section in _BUILT_IN}
    registered = [*plugins.loadable(GROUP), *plugins.loadable(TABLE_GROUP, only=run.tables)]
    for section in [*(section for _, section in registered), *more]:
        try:
            made: Any = section() if isinstance(section, type) else section
            name, _, _, _ = str(made.name), str(made.title), int(made.place), made.build
        except Exception as error:
            warn_once(f"{section!r} is not a section of a report: {type(error).__name__}: {error}. It is left out.")
            continue
        if not _NAME.match(name) or name in found:
            why = "there is one of that name" if name in found else "a name has letters, digits and hyphens"
            warn_once(f"The section {name!r} of the report is left out: {why}.")
            continue
        found[name] = made
    return list(found.values())


def write_report(run: Run, path: str | PathLike[str], *, sections: Iterable[Section] = ()) -> None:
    """Write a run as one HTML file without external resources.

    Args:
        run: The run, opened with DuckDB.
        path: The file; it is written whole or not at all.
        sections: Sections besides the built-in ones and those of entry points (``docs/report.md``).

    Raises:
        OSError: The file cannot be written.
        MissingPackageError: A package of the extra ``report`` is not installed.
    """
    with whole_file(os.fspath(path)) as file:
        context, built = build(run, sections)
        anchors = {section.name: section.name for section in built}
        anchors["devices"] = anchors.get("memory", "")  # One section has both.
        page = render_page(
            context.about.name,
            built,
            head=title_of(context.about, with_date=True)[1:],
            findings=[replace(found, anchor=anchors.get(found.anchor, "")) for found in context.findings],
            summary=context.summary,
            verdict=None if context.findings else verdict(context.evidence).text,
        )
        file.write(page.encode("utf-8", "backslashreplace"))


_MOST_JAVASCRIPT = 1 << 24


def _javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed. To bundle them takes 1.3 s, and gives the same for one version."""
    vl_convert = require("vl_convert", extra="report", caller=_CALLER)
    path = ""
    with suppress(OSError, ValueError):
        path = os.path.join(cache_folder(), f"vega-{vl_convert.__version__}.js")
        if is_private(path):  # It runs in the browsers of those who open the page.
            return read_bounded(path, _MOST_JAVASCRIPT).decode()
    bundle: str = vl_convert.javascript_bundle()
    with suppress(OSError):  # A home that cannot be written to costs time, no page.
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with whole_file(path) as kept:
            kept.write(bundle.encode())
    return bundle


def render_page(
    name: str,
    built: Sequence[Built],
    *,
    head: Sequence[str],
    findings: Sequence[Any] = (),
    summary: Sequence[tuple[str, str]] = (),
    verdict: str | None = None,
) -> str:
    jinja2 = require("jinja2", extra="report", caller=_CALLER)
    library = _javascript().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    script = _resource("page.js")
    charts: list[dict[str, Any]] = []

    def place_charts(figure: Figure) -> list[int]:
        first = len(charts)
        charts.extend(styled(panel.spec) for panel in figure.panels)
        return list(range(first, len(charts)))

    def charts_as_json() -> str:
        data = json.dumps(charts, separators=(",", ":"), allow_nan=False)
        # Only these end a script or begin a comment in it.
        return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

    said = {"name": name, "head": head, "findings": findings, "summary": summary, "verdict": verdict, "sections": built}
    digests = [hashlib.sha256(text.encode()).digest() for text in (library, script)]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    page: str = environment.from_string(_resource("page.html")).render(
        said,
        licences=_resource("javascript-licenses.txt"),
        library=library,
        script=script,
        style=_resource("page.css"),
        hashes=" ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests),
        place_charts=place_charts,
        charts_as_json=charts_as_json,
        most=_MOST_ROWS,
        cell=_cell,
        numeric=_numeric,
        percent=percent,
    )
    return page


def _cell(value: object) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[bool]:
    """Which columns hold numbers, and are aligned right."""
    texts = [[_cell(row[place]) for row in rows] for place in range(1, len(columns))]
    numbers = (all(one in ("", UNKNOWN) or one.lstrip("+-−")[:1].isdigit() for one in column) for column in texts)
    return [False, *numbers]


def _resource(name: str) -> str:
    return (resources.files("deep500_timing._views.page") / name).read_text(encoding="utf-8")


def write_plots(
    run: Run,
    folder: str | PathLike[str],
    *,
    format: Literal["png", "svg"] = "png",  # noqa: A002 (the usual name)
    only: Iterable[str] | None = None,
    sections: Iterable[Section] = (),
) -> list[str]:
    """Write each chart of the page as a file: ``tree-1.png``, ``over-the-run-1.png`` and so on.

    Args:
        run: The run, opened with DuckDB.
        folder: The folder; made if missing.
        format: ``"png"`` or ``"svg"``.
        only: Names of sections; all if None.
        sections: Sections besides the built-in ones and those of entry points.

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
    require("vl_convert", extra="report", caller="Drawing plots")
    _, built = build(run, sections)
    # The page may have a table of numbers that cannot be drawn.
    drawn = {
        section.name: [(number, figure) for number, figure in enumerate(section.content.figures, 1) if figure.panels]
        for section in built
    }
    names = [name for name, figures in drawn.items() if figures]
    wanted = set(names if only is None else only)
    for name in sorted(wanted):
        if name not in names:
            raise LookupError(f"Drawing {name!r}: the run has charts for {', '.join(names) or 'none'}.")
    if names:
        os.makedirs(folder, exist_ok=True)
    paths = []
    for name in (name for name in names if name in wanted):
        for number, figure in drawn[name]:
            paths.append(os.path.join(os.fspath(folder), f"{name}-{number}.{format}"))
            save_picture(_picture(figure), paths[-1], caller="Drawing plots")
    return paths


def _picture(figure: Figure) -> dict[str, Any]:
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
    marks = [
        {"x": place % _COLUMNS + 0.02, "y": place // _COLUMNS + 0.5, "name": name, "colour": colour}
        for place, (name, colour) in enumerate(figure.legend)
    ]
    rows = -(-len(marks) // _COLUMNS)
    x = quantity("x", axis=None, scale={"domain": [0, _COLUMNS], "nice": False})
    y = quantity("y", axis=None, scale={"domain": [0, rows], "reverse": True})
    square = layer({"type": "square", "size": 110, "opacity": 1}, color=COLOUR)
    look = {"align": "left", "baseline": "middle", "dx": 10, "fontSize": 12, "limit": _WIDTH / _COLUMNS - 20}
    parts = [square, layer({"type": "text", **look}, text="name")]
    size = {"width": _WIDTH, "height": 18 * rows}
    return {**size, "data": {"values": marks}, "encoding": {"x": x, "y": y}, "layer": parts}
