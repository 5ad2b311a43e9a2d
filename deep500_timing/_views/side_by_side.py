"""Several runs in one folder, side by side: what each is, and what its steps spend most on."""

from __future__ import annotations

from dataclasses import dataclass

from deep500_timing._base.names import BACKWARD, BATCH
from deep500_timing._summary.text import format_time, lines_of, safe_name
from deep500_timing._views.about import about_run
from deep500_timing._views.findings._finding import percent
from deep500_timing._views.reports import ranges, report_of_run
from deep500_timing.runs import Run

MOST = 20
"""Runs that are listed."""
_NAMED = 2
_TRAINS = (BACKWARD, "optimizer")


@dataclass(frozen=True)
class Beside:
    """One of several runs."""

    folder: str
    program: str
    ranks: tuple[int, ...]
    steps: int
    trains: bool
    """Whether a backward pass or an optimizer was timed: the engines of an RL job have neither."""
    began_unix_s: float | None
    wall_s: float | None
    step_s: float | None
    """The median of its steps."""
    most: dict[str, float]
    """Shares of the steps, of the regions that take most of them."""
    finding: str
    """What stands out of its regions; may be empty."""
    state: str


def read_beside(folders: list[str]) -> list[Beside]:
    """What the runs in these folders are, the one that began first before the others."""
    found = []
    for folder in folders[:MOST]:
        with Run.open(folder) as run:
            about, report = about_run(run), report_of_run(run, whole=True)
        steps = max(report.tree.named(BATCH), key=lambda node: node.total_s or 0.0, default=None)
        inside = () if steps is None else steps.children
        shares = {node.name: node.share or 0.0 for node in sorted(inside, key=lambda node: -(node.share or 0.0))}
        said = [finding.text for finding in report.findings if finding.region]
        found.append(
            Beside(
                folder,
                about.program,
                about.ranks,
                about.steps,
                any(node.name in _TRAINS for node in report.tree.walk()),
                about.first_unix_s,
                about.wall_s,
                None if steps is None else steps.median_s,
                dict([*shares.items()][:_NAMED]),
                said[0] if said else "",
                about.state,
            )
        )
    return sorted(found, key=lambda one: one.began_unix_s or 0.0)


def text_of(found: list[Beside]) -> str:
    """As a table, with what stands out of each."""
    began = min((one.began_unix_s for one in found if one.began_unix_s is not None), default=0.0)
    rows = [("run", "program", "most of its steps", "ranks", "steps", "a step", "from", "took", "")]
    for one in found:
        most = ", ".join(f"{safe_name(name)} {percent(share)}" for name, share in one.most.items())
        rows.append(
            (
                safe_name(one.folder),
                safe_name(one.program) + ("" if one.trains else ", does not train"),
                most,
                ranges(one.ranks),
                str(one.steps),
                *(format_time(time_s) for time_s in (one.step_s, (one.began_unix_s or began) - began, one.wall_s)),
                one.state,
            )
        )
    said = [f"{safe_name(one.folder)}: {one.finding}" for one in found if one.finding]
    heading = f"{len(found)} runs side by side; `deep500-timing show` with one of their folders shows it."
    return "\n".join([heading, "", *lines_of(rows, left=3), "", *said])
