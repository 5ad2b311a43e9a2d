"""``deep500-timing stragglers``: which rank the others wait for, and why."""

from __future__ import annotations

from deep500_timing._command._app import click


@click.command()
@click.argument("folder")
@click.option("--session", type=int, help="Of this start of the run; the last that all ranks have if not given.")
@click.option("--scores", is_flag=True, help="Scores as NVIDIA's resiliency extension names them.")
def command(folder: str, session: int | None, scores: bool) -> None:
    """Say which rank the others wait for, and why: a rank, a machine, or nobody."""
    import json

    from deep500_timing._across.stragglers import find_stragglers
    from deep500_timing.runs import Run

    with Run.open(folder) as run:
        found = find_stragglers(run, session=session)
    click.echo(json.dumps(found.nvrx_scores(), indent=2) if scores else str(found))
