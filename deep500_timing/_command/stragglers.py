"""``deep500-timing stragglers``: which rank the others wait for, and why."""

from __future__ import annotations

from deep500_timing._command._app import click


@click.command()
@click.argument("folder", type=click.Path())
@click.option("--session", type=int, help="Session number (default: the latest common to all ranks).")
@click.option("--scores", is_flag=True, help="Scores as NVIDIA's resiliency extension names them, as plain data.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def command(folder: str, session: int | None, scores: bool, as_json: bool) -> None:
    """Name the rank or machine that the others wait for, and the cause."""
    from deep500_timing._command._output import busy, print_json, say
    from deep500_timing._distributed.stragglers import find_stragglers
    from deep500_timing.runs import Run

    with busy("Reading the run"), Run.open(folder) as run:
        found = find_stragglers(run, session=session)
    if scores:
        print_json(found.nvrx_scores())
    elif as_json:
        print_json(found)
    else:
        say(found)
