"""``deep500-timing compare`` and ``ab``: is B slower than A? And ``history``: which of the last runs made it slower?"""

from __future__ import annotations

import math
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from deep500_timing._command._output import PROGRAM, RUNS, as_json_option, busy, print_json, require_comparison, say
from deep500_timing._launch import folder_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing.compare import Comparison, Floor

NOT_COMPARABLE = 1
"""Exit status: the runs lack what a comparison requires."""
GATE_FAILED = 3
"""Exit status: done, and the answer is no."""
_SEEN_PAIRS = (3, 5, 10)


def _share(_ctx: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """``3%`` or ``0.03`` as a share."""
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 < share < 10:
        raise click.BadParameter(f"{text!r} is no share such as 3% or 0.03.")
    return share


def _output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that `compare` and `ab` have in common."""
    options = (
        click.option("--fail-on", callback=_share, metavar="3%", help="Exit with 3 if B is slower by that or more."),
        click.option("--floor", "floor_path", metavar="FILE", help="The file of noise floors of `ab --same`."),
        click.option("--page", metavar="FILE.html", help="Write a page with the runs in order of time."),
        click.option("--github", is_flag=True, help="Append a summary to the GitHub job ($GITHUB_STEP_SUMMARY)."),
        as_json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("sides", nargs=-1, metavar="A [B]...", type=PROGRAM)
@click.option("--against", metavar="FOLDER", help="Compare with a baseline, in place of A.")
@click.option("--update-baseline", is_flag=True, help="Add B to the baseline of --against, unless the gate fails.")
@click.option("--history", multiple=True, metavar="RUNS", help="Runs of A from other sessions; may be repeated.")
@_output_options
def compare(
    sides: tuple[str, ...], against: str | None, update_baseline: bool, history: tuple[str, ...], **options: Any
) -> int:
    """Say whether runs are slower than others.

    It says whether B is slower than A, by how much, and in which region. A side is a run's folder, a folder of runs, or
    a quoted pattern. One folder that `ab` has written holds both sides. More than two sides of different world sizes
    are compared as a scaling experiment.

    Exit status: 1 a run cannot be read, or the runs are not comparable; 3 the gate of --fail-on failed.
    """
    from deep500_timing.compare._compare import compare, find_floor
    from deep500_timing.compare._runs import read_side, write_baseline

    if update_baseline and not against:
        raise click.UsageError("--update-baseline requires --against FOLDER, the baseline.")
    with busy("Reading the runs"):
        read = [read_side(side) for side in sides]
        if not read:
            raise click.UsageError("Name the runs to judge." if against else "Name two sides: A and B.")
        if against:
            b = [run for side in read for run in side]
            if update_baseline and not (os.path.isdir(against) and os.listdir(against)):
                click.echo(f"The baseline begins: {write_baseline(against, b)}")
                return 0
            read = [read_side(against), b]
        elif len(read) == 1:
            read = [[run for run in read[0] if run.side == side] for side in ("A", "B")]
            if not all(read):
                raise click.UsageError("Name two sides, A and B, or one folder that `ab` has written.")
        else:
            sizes = [{run.world_size for run in side} for side in read]
            if len(read) > 2 or (all(len(size) == 1 for size in sizes) and sizes[0] != sizes[1]):
                return _scaling(read, options)
        floor = find_floor(read[0][0], options["floor_path"])
        found = compare(read[0], read[1], history=[read_side(one) for one in history] or None, floor=floor)
    code = _report(found, floor, options)
    if update_baseline and against and code != GATE_FAILED:
        click.echo(f"Added to the baseline: {write_baseline(against, read[1])}", err=True)
    return code


def _report(found: Comparison, floor: Floor | None, options: dict[str, Any]) -> int:
    from deep500_timing._views.table import width_for
    from deep500_timing.compare._text import draw, gate, markdown

    judged = None if options["fail_on"] is None else gate(found, options["fail_on"], floor)
    if options["as_json"]:
        print_json(asdict(found) | {"slower": found.slower, "gate": judged})
    else:
        say(draw(found, width=width_for(sys.stdout)) + ("" if judged is None else f"\n\n{judged.text}"))
    if options["github"]:
        path = os.environ.get("GITHUB_STEP_SUMMARY")
        if not path:
            raise click.UsageError("--github requires the variable GITHUB_STEP_SUMMARY, which GitHub sets.")
        with open(path, "a", encoding="utf-8") as file:
            file.write(markdown(found, judged.text if judged else ""))
    if options["page"]:
        from deep500_timing.compare._page import write_page

        write_page(found, options["page"])
    if found.method == "not comparable":
        return NOT_COMPARABLE
    return GATE_FAILED if judged is not None and judged.failed else 0


def _scaling(read: list[list[Any]], options: dict[str, Any]) -> int:
    from deep500_timing.compare._series import draw_scaling, scaling

    if options["fail_on"] is not None:
        raise click.UsageError("--fail-on judges two sides of one world size.")
    found = scaling(read)
    if options["as_json"]:
        print_json({"sizes": found})
    else:
        say(draw_scaling(found))
    return 0


@click.command()
@click.argument("words", nargs=-1, metavar="-- A-COMMAND [--- B-COMMAND]", type=PROGRAM)
@click.option("-n", "pairs", type=click.IntRange(3), default=5, show_default=True, help="The most pairs of runs.")
@click.option("--same", is_flag=True, help="Run A against itself and store the machine's noise floor.")
@click.option("--rev", multiple=True, help="A git revision for A; a second one for B (default: the working tree).")
@click.option("--with", "packages", multiple=True, metavar="PKG==V", help="A package for A; a second one for B.")
@click.option("--steps", type=click.IntRange(21), help="End each program after so many steps.")
@click.option("--run", "folder", metavar="FOLDER", help="Where the runs go (default: runs/ab-TIME).")
@_output_options
def ab(
    words: tuple[str, ...],
    pairs: int,
    same: bool,
    rev: tuple[str, ...],
    packages: tuple[str, ...],
    steps: int | None,
    folder: str | None,
    **options: Any,
) -> int:
    """Run two commands in turn and say whether one is slower.

    The order is A B B A A B ... It ends when the answer is known, after 3 pairs at the earliest, or after -n pairs.
    Both sides share the changes of the machine, so they cancel.

    Exit status: 1 a command failed; 3 the gate of --fail-on failed.
    """
    from deep500_timing.compare import _ab
    from deep500_timing.compare._compare import floor_of, store_floor

    if len(rev) > 2 or len(packages) > 2 or (same and (rev or packages)):
        raise click.UsageError("--rev and --with name A, and then B; --same takes neither.")
    try:
        commands = _ab.split_commands(words)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not same and not rev and not packages and commands[0] == commands[1]:
        raise click.UsageError("Both sides are the same command: use --same, --rev or --with, or name B after ---.")
    require_comparison("Comparing runs")
    folder = folder_of(folder, "ab")
    if os.path.isdir(folder) and os.listdir(folder):
        raise click.UsageError(f"The folder {folder} holds runs already. Name another by --run.")
    os.makedirs(folder, exist_ok=True)
    try:
        with ExitStack() as stack:
            variants = []
            for place, side in enumerate("AB"):
                cwd: str | None = None
                environment: dict[str, str] = {}
                if place < len(rev):
                    tree = os.path.join(folder, f"tree-{side}")
                    cwd, environment = stack.enter_context(_ab.revision(rev[place], tree))
                if place < len(packages):
                    target = os.path.join(folder, f"environment-{side}")
                    environment = _ab.environment_with(packages[place], target, environment)
                variants.append(_ab.Variant(commands[place], cwd, environment, steps))
            found, floor, done = _ab.run_pairs(
                variants[0],
                variants[1],
                folder,
                pairs=pairs,
                stop_early=not same,
                floor_path=options["floor_path"],
                on_run=lambda done, of, text: click.echo(f"{done} of {of} runs {text}".rstrip(), err=True),
            )
    except _ab.CommandFailedError as error:
        raise click.ClickException(str(error)) from None
    if not same:
        return _report(found, floor, options)
    measured = floor_of(done)
    path = store_floor(measured, options["floor_path"])
    code = _report(found, measured, options)
    if not options["as_json"]:
        click.echo(f"\n{_sees(measured)}\nStored in {path}.")
    return code


def _sees(floor: Any) -> str:
    from deep500_timing.compare._statistics import smallest_effect
    from deep500_timing.compare._text import percent

    spread = floor.spread
    effects = [
        f"{pairs} pairs {percent(math.expm1(smallest_effect(spread, pairs, spread.df)), sign=False)}"
        for pairs in _SEEN_PAIRS
    ]
    noise = percent(math.sqrt(spread.variance / 2), sign=False)
    said = f"Noise floor: runs differ by {noise}. This machine finds in 95 % of experiments: {', '.join(effects)}."
    if floor.waited is None:
        return said
    waited = percent(floor.waited, sign=False)
    return f"{said} The training thread waited for a processor for up to {waited} of the time."


@click.command()
@click.argument("folder", default=RUNS, type=click.Path(file_okay=False))
@click.option("--region", default="", metavar="PATH", help="Look at this region instead of the step.")
@as_json_option
def history(folder: str, region: str, as_json: bool) -> None:
    """Say which of the last runs made it slower.

    It looks at the time of a step of each run in FOLDER, which is runs/ if not given. Runs that cannot be compared,
    such as those of a few steps, are left out and counted.
    """
    from deep500_timing.compare._runs import NotComparableError, read_side
    from deep500_timing.compare._series import draw_history, history

    runs, left_out = [], 0
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"The history {folder!r}: there is no such folder. Name one that holds runs.")
    with busy("Reading the runs"):
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            try:
                runs += read_side(path) if os.path.isdir(path) or name.endswith(".json") else []
            except (NotComparableError, FileNotFoundError):
                left_out += 1
        levels, unit = history(runs, path=region)
    if not as_json:
        say(draw_history(levels, unit, left_out))
        return
    found = [
        {"first_run": one.first.name, "last_run": one.last.name, "points": one.points}
        | {"unit": unit, "seconds": one.seconds, "change": one.change, "p": one.p, "region": one.region}
        for one in levels
    ]
    print_json({"levels": found})
