"""``deep500-timing why``: what made a step slow."""

from __future__ import annotations

from deep500_timing._command._app import click


@click.command()
@click.argument("folder")
@click.argument("step", type=int)
@click.option("--session", type=int, help="Of this start of the run; the last that has the step if not given.")
def command(folder: str, step: int, session: int | None) -> None:
    """Say why a step took as long as it did, beside its neighbours."""
    from deep500_timing.runs import Run

    with Run.open(folder) as run:
        click.echo(str(run.why(step, session=session)))
