"""``deep500-timing ab``: runs two commands in turn and compares them."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from typing import Any

from deep500_timing._base.require import require
from deep500_timing._command._app import click
from deep500_timing._command.compare import output_options, show

_SEEN_PAIRS = (3, 5, 10)


@click.command()
@click.argument("words", nargs=-1, metavar="-- A-COMMAND [--- B-COMMAND]", type=click.UNPROCESSED)
@click.option("-n", "pairs", type=click.IntRange(3), default=5, show_default=True, help="The most pairs of runs.")
@click.option("--same", is_flag=True, help="Run A against itself and store the machine's noise floor.")
@click.option("--rev", multiple=True, help="A git revision for A; a second one for B (default: the working tree).")
@click.option("--with", "packages", multiple=True, metavar="PKG==V", help="A package for A; a second one for B.")
@click.option("--run", "folder", metavar="FOLDER", help="Where the runs go (default: runs/ab-TIME).")
@output_options
def ab(
    words: tuple[str, ...],
    pairs: int,
    same: bool,
    rev: tuple[str, ...],
    packages: tuple[str, ...],
    folder: str | None,
    **options: Any,
) -> int:
    """Run A and B in turn (A B B A A B ...) and say whether B is slower.

    It ends when the answer is known, after 3 pairs at the earliest, or after -n pairs. Both sides share
    the changes of the machine, so they cancel.

    Exit codes: 1 a command or the gate failed; 2 the arguments are wrong.
    """
    from deep500_timing.compare._ab import (
        CommandFailedError,
        Variant,
        environment_with,
        revision,
        run_pairs,
        split_commands,
    )
    from deep500_timing.compare._compare import floor_of, store_floor

    if len(rev) > 2 or len(packages) > 2 or (same and (rev or packages)):
        raise click.UsageError("--rev and --with name A, and then B; --same takes neither.")
    try:
        commands = split_commands(words)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not same and not rev and not packages and commands[0] == commands[1]:
        raise click.UsageError("Both sides are the same command: use --same, --rev or --with, or name B after ---.")
    for needed in ("scipy.special", "duckdb"):  # now, not when the first pairs have been run
        require(needed, extra="compare", caller="Comparing runs")
    folder = os.path.abspath(folder or os.path.join("runs", f"ab-{time.strftime('%Y%m%d-%H%M%S')}"))
    if os.path.isdir(folder) and os.listdir(folder):
        raise click.UsageError(f"The folder {folder} holds runs already. Name another by --run.")
    os.makedirs(folder, exist_ok=True)
    with ExitStack() as stack:
        variants = []
        try:
            for place, side in enumerate("AB"):
                cwd: str | None = None
                environment: dict[str, str] = {}
                if place < len(rev):
                    cwd, environment = stack.enter_context(revision(rev[place], os.path.join(folder, f"tree-{side}")))
                if place < len(packages):
                    added = environment_with(packages[place], os.path.join(folder, f"environment-{side}"))
                    paths = [added["PYTHONPATH"], environment.get("PYTHONPATH", "")]
                    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
                variants.append(Variant(commands[place], cwd, environment))
            found, floor, done = run_pairs(
                variants[0],
                variants[1],
                folder,
                pairs=pairs,
                stop_early=not same,
                floor_path=options["floor_path"],
                on_run=_say,
            )
        except CommandFailedError as error:
            click.echo(f"Error: {error}", err=True)
            return 1
    click.echo("", err=True)
    if not same:
        return show(found, floor, **options)
    measured = floor_of(done)
    path = store_floor(measured, options["floor_path"])
    code = show(found, measured, **options)
    if not options["as_json"]:
        click.echo(f"\n{_sees(measured)}\nStored in {path}.")
    return code


def _say(done: int, of: int, text: str) -> None:
    # One line that is overwritten on a terminal; a line for each run in a log.
    bar = "#" * (20 * done // of)
    line = f"{done} of {of} runs [{bar:<20}] {text}"
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    click.echo(f"\r{line:<78}" if is_terminal else line.rstrip(), err=True, nl=not is_terminal)


def _sees(floor: Any) -> str:
    import math

    from deep500_timing.compare._statistics import smallest_effect
    from deep500_timing.compare._text import percent

    spread = floor.spread
    if spread is None:
        return "The runs have no steps: there is no noise floor of the step."
    effects = [
        f"{pairs} pairs {percent(math.expm1(smallest_effect(spread, pairs, floor=spread)), sign=False)}"
        for pairs in _SEEN_PAIRS
    ]
    noise = percent(math.sqrt(spread.variance / 2), sign=False)
    return f"Noise floor: runs differ by {noise}. This machine finds in 95 % of experiments: {', '.join(effects)}."
