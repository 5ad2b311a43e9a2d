"""``deep500-timing show``: where the time of a run went."""

from __future__ import annotations

import sys

from deep500_timing._command._app import click


@click.command()
@click.argument("folder")
@click.option("--rank", type=int, help="Show the times of this rank; the lowest if not given.")
@click.option("--session", type=int, help="Of this start of the run only; all if not given.")
def command(folder: str, rank: int | None, session: int | None) -> None:
    """Show where the time of a run went."""
    from deep500_timing._views.drawing import draw
    from deep500_timing._views.of_run import sheet_of_run
    from deep500_timing._views.terminal import put, width_for
    from deep500_timing.runs import Run

    with Run.open(folder) as run:
        put(sys.stdout, draw(sheet_of_run(run, rank=rank, session=session), width=width_for(sys.stdout)))
