"""``deep500-timing why``: the cause of a slow step."""

from __future__ import annotations

from dataclasses import asdict

from deep500_timing._command._app import click


@click.command()
@click.argument("folder", type=click.Path())
@click.argument("step", type=int, required=False)
@click.option("--session", type=int, help="Session number (default: the latest that has the step).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def command(folder: str, step: int | None, session: int | None, as_json: bool) -> None:
    """Say why STEP took longer than its neighbours, the time since the step before it included.

    Without STEP it is the slowest step after the first.
    """
    from deep500_timing._command._output import busy, print_json, say
    from deep500_timing.runs import Run

    with busy("Reading the run"), Run.open(folder) as run:
        answer = run.why(step, session=session)
    if as_json:
        print_json(asdict(answer))
    else:
        say(answer)
