"""``deep500-timing show``: where the time of a run went."""

from __future__ import annotations

import sys

from deep500_timing._command._app import click


@click.command()
@click.argument("folder", type=click.Path())
@click.option("--rank", type=int, help="Show the times of this rank (default: the lowest).")
@click.option("--session", type=int, help="Session number (default: all).")
@click.option("--off", multiple=True, metavar="RULE", help="Leave out the findings of this rule; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def command(folder: str, rank: int | None, session: int | None, off: tuple[str, ...], as_json: bool) -> None:
    """Show where the time of a run went: what stands out, and the tree of its regions.

    FOLDER is what Timer(run=FOLDER) or DEEP500_TIMING_RUN=FOLDER has written.
    """
    from deep500_timing._command._output import busy, print_sheet
    from deep500_timing._views.findings._find import RULES
    from deep500_timing._views.of_run import sheet_of_run
    from deep500_timing._views.table import draw
    from deep500_timing._views.terminal import put, width_for
    from deep500_timing.runs import Run

    unknown = sorted({*off} - RULES.keys())
    if unknown:
        raise click.BadParameter(f"There is no rule {unknown[0]!r}; there are {', '.join(RULES)}.", param_hint="--off")
    with busy("Reading the run"), Run.open(folder) as run:
        sheet = sheet_of_run(run, rank=rank, session=session, off=off)
        if as_json:
            print_sheet(run, sheet)
    if not as_json:
        put(sys.stdout, draw(sheet, width=width_for(sys.stdout)))
