"""The page: one file without external resources."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from deep500_timing._base.files import whole_file
from deep500_timing._base.require import require
from deep500_timing._summary.text import UNKNOWN
from deep500_timing._views.about import title_of
from deep500_timing._views.findings import verdict
from deep500_timing._views.findings._finding import percent
from deep500_timing._views.page._build import build
from deep500_timing._views.page._parts import styled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from os import PathLike

    from deep500_timing._views.page._build import Built
    from deep500_timing._views.page._section import Figure, Section
    from deep500_timing.runs import Run

_CALLER = "Writing a report"
_MOST_ROWS = 400
"""Rows of a table that are shown."""


def write_report(
    run: Run,
    path: str | PathLike[str],
    *,
    sections: Iterable[Section] = (),
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Write a run as one HTML file without external resources.

    Args:
        run: The run, opened with DuckDB.
        path: The file; it is written whole or not at all.
        sections: Sections besides the built-in ones and those of entry points (``docs/report.md``).
        on_progress: Called with the number of sections done and the number of all.

    Raises:
        OSError: The file cannot be written.
        MissingPackageError: A package of the extra ``report`` is not installed.
    """
    with whole_file(os.fspath(path)) as file:
        context, built = build(run, sections, on_progress)
        anchors = {section.name: section.name for section in built}
        anchors["devices"] = anchors.get("memory", "")  # One section has both.
        page = render_page(
            context.about.name,
            built,
            head=title_of(context.about, with_date=True)[1:],
            findings=[replace(found, anchor=anchors.get(found.anchor, "")) for found in context.findings],
            summary=context.summary,
            verdict=None if context.findings else verdict(context.evidence),
        )
        file.write(page.encode("utf-8", "backslashreplace"))


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
    library = _library()
    charts: list[dict[str, Any]] = []

    def place_charts(figure: Figure) -> list[int]:
        first = len(charts)
        charts.extend(styled(panel.spec) for panel in figure.panels)
        return list(range(first, len(charts)))

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.globals.update(
        place_charts=place_charts, cell=_cell, numeric=_numeric, most=_MOST_ROWS, percent=percent
    )
    script, style = _resource("page.js"), _resource("page.css")
    template = environment.from_string(_resource("page.html"))
    # Writing the sections collects the charts, so their data follow.
    body = template.module.body(built)
    data = _for_script(json.dumps(charts, ensure_ascii=True, separators=(",", ":"), allow_nan=False))
    page: str = template.render(
        name=name,
        head=head,
        findings=findings,
        summary=summary,
        verdict=verdict,
        sections=built,
        main=body,
        data=_safe(data),
        library=_safe(library),
        script=_safe(script),
        style=_safe(style),
        hashes=" ".join(f"'sha256-{_sha256(text)}'" for text in (library, script)),
    )
    return page


def _cell(value: object) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[bool]:
    """Which columns hold numbers, and are aligned right."""
    return [place > 0 and all(_is_number(row[place]) for row in rows) for place in range(len(columns))]


def _is_number(value: object) -> bool:
    text = str(value)
    return value is None or isinstance(value, (int, float)) or text in ("", UNKNOWN) or text.lstrip("+−")[:1].isdigit()


def _for_script(text: str) -> str:
    # Only these end a script or begin a comment in it.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _safe(text: str) -> Any:
    return require("markupsafe", extra="report", caller=_CALLER).Markup(text)


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _library() -> str:
    # Vega, Vega-Lite and Vega-Embed from vl-convert.
    bundle: str = require("vl_convert", extra="report", caller=_CALLER).javascript_bundle()
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


@cache
def _resource(name: str) -> str:
    return (resources.files("deep500_timing._views.page") / name).read_text(encoding="utf-8")
