"""Several runs in one folder, side by side: what each is, and what its steps spend most on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._base.names import BACKWARD, BATCH
from deep500_timing._summary.text import format_time, lines_of, safe_name
from deep500_timing._views.about import About, about_run
from deep500_timing._views.findings._finding import percent
from deep500_timing._views.reports import ranges, report_of_run
from deep500_timing.runs import Run

if TYPE_CHECKING:
    from deep500_timing._views.table import TextReport

MOST = 20
"""Runs that are listed."""
_NAMED = 2
_TRAINS = (BACKWARD, "optimizer")
"""The engines of an RL job have neither."""


def read_beside(folders: list[str]) -> list[tuple[About, TextReport]]:
    """The runs in these folders, the one that began first before the others."""
    found = []
    for folder in folders[:MOST]:
        with Run.open(folder) as run:
            found.append((about_run(run), report_of_run(run, whole=True)))
    return sorted(found, key=lambda one: one[0].first_unix_s or 0.0)


def text_of(found: list[tuple[About, TextReport]]) -> str:
    """As a table, with what stands out of the regions of each."""
    began = found[0][0].first_unix_s or 0.0
    said: list[str] = []
    rows: list[tuple[str, ...]] = [
        ("run", "program", "most of its steps", "ranks", "steps", "a step", "from", "took", "")
    ]
    for about, report in found:
        trains = any(node.name in _TRAINS for node in report.tree.walk())
        step = next(iter(report.tree.named(BATCH)), None)
        inside = sorted(() if step is None else step.children, key=lambda node: -(node.share or 0.0))[:_NAMED]
        began_s = (about.first_unix_s or began) - began
        rows.append(
            (
                safe_name(about.folder),
                safe_name(about.program) + ("" if trains else ", does not train"),
                ", ".join(f"{safe_name(node.name)} {percent(node.share or 0.0)}" for node in inside),
                ranges(about.ranks),
                str(about.steps),
                format_time(None if step is None else step.median_s),
                format_time(began_s),
                format_time(about.wall_s),
                about.state,
            )
        )
        said += [f"{safe_name(about.folder)}: {one.text}" for one in report.findings if one.region][:1]
    heading = f"{len(found)} runs side by side; `deep500-timing show` with one of their folders shows it."
    return "\n".join([heading, "", *lines_of(rows, left=3), "", *said])
