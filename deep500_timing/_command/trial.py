"""``deep500-timing try`` and ``bisect``: which remedy makes a step shorter, and which commit made it longer?"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import click

from deep500_timing._command._output import PROGRAM, as_json_option, print_json, require_comparison, say
from deep500_timing._command.compare import GATE_FAILED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing.compare._try import Trial, Tried


@contextmanager
def _folder_for(what: str, command: tuple[str, ...]) -> Iterator[str]:
    """A folder for the runs of a command, removed at the end; it stays if the program fails: its output is in it."""
    from deep500_timing.compare._ab import CommandFailedError

    if not command:
        raise click.UsageError(f"Name the program: deep500-timing {what} -- python train.py")
    require_comparison(f"deep500-timing {what}")
    folder = tempfile.mkdtemp(prefix="deep500-timing-")
    with ExitStack() as after:
        after.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield folder
        except CommandFailedError as error:
            after.pop_all()
            raise click.ClickException(str(error)) from None


@click.command("try")
@click.argument("command", nargs=-1, metavar="-- COMMAND", type=PROGRAM)
@click.option("--steps", type=click.IntRange(20), help="The steps of each run (default: enough, at most 200).")
@click.option("-n", "pairs", type=click.IntRange(3), default=5, show_default=True, help="The most pairs of runs.")
@click.option("--also-changing", is_flag=True, help="Try also what changes results, such as jit_compile.")
@as_json_option
def try_(command: tuple[str, ...], steps: int | None, pairs: int, also_changing: bool, as_json: bool) -> int:
    """Try the remedies of a program's findings.

    The program runs once for its findings. Each remedy that can be set from outside is then tested by runs in turn,
    with it and without. Nothing in your files is changed, and no run is kept.

    Exit status: 1 the program failed or made too few steps; 3 no remedy helps.
    """
    from deep500_timing.compare._try import try_all

    on_run = partial(click.echo, err=True)
    with _folder_for("try", command) as folder:
        found = try_all(command, folder, steps=steps, pairs=pairs, also_changing=also_changing, on_run=on_run)
    if as_json:
        print_json(asdict(found) | {"helps": found.helps})
    else:
        say(_text_of(found))
    return 0 if found.helps else GATE_FAILED


def _text_of(found: Trial) -> str:
    none = "No remedy is shown to help." if found.tried else "Nothing that was found can be mended from outside."
    lines = [*([] if found.helps else [none]), *map(_line_of, found.tried), "Nothing was changed."]
    if found.finding:
        lines.append(f"The first finding of the program as it is: {found.finding}")
    if found.left_out:
        names = ", ".join(one.text for one in found.left_out)
        lines.append(f"Not tried, as it changes results: {names}. Try it by --also-changing.")
    return "\n".join(lines)


def _line_of(tried: Tried) -> str:
    from deep500_timing.compare._text import percent

    remedy = tried.remedy
    if tried.change is None or tried.interval is None:
        return f"{remedy.text}: {tried.failed or 'not known.'}"
    if not tried.helps:
        low, high = tried.interval
        verdict = "a step is longer" if tried.hinders else "no difference shown"
        more = "" if tried.hinders or low < 0 < high else f" More may show one: -n {2 * tried.pairs}."
        return f"{remedy.text}: {verdict} (90 %: {percent(low)} to {percent(high)}), {tried.pairs} pairs.{more}"
    put = "call it after the first step" if remedy.call == remedy.text else f"put it into {remedy.call}"
    where = f"; {put}" + (f": {'; '.join(tried.places)}" if tried.places else "")
    changes = f". It changes this: {remedy.changes}" if remedy.changes else ""
    most, least = (-100 * end for end in tried.interval)
    shorter = f"a step is {-100 * tried.change:.0f} % shorter (90 %: {least:.0f} to {most:.0f})"
    return f"{remedy.text}: {shorter}, {tried.pairs} pairs{where}{changes}."


@click.command()
@click.argument("command", nargs=-1, metavar="-- COMMAND", type=PROGRAM)
@click.option("--good", required=True, metavar="REV", help="The one with the faster step.")
@click.option("--bad", default="HEAD", show_default=True, metavar="REV", help="A later one, with the slower step.")
@click.option("--steps", type=click.IntRange(30), default=100, show_default=True, help="The steps of each run.")
@click.option("-n", "pairs", type=click.IntRange(3), default=5, show_default=True, help="The most pairs of each.")
@as_json_option
def bisect(command: tuple[str, ...], good: str, bad: str, steps: int, pairs: int, as_json: bool) -> int:
    """Find the commit or the package version that made a step slower.

    REV is a commit of git, or PACKAGE==VERSION for both ends. It tests whether the two differ at all, and then walks
    between them by pairs of runs, each in a worktree of git, or with the version in an environment of its own. A commit
    or version that cannot be run is skipped.

    Exit status: 1 an end cannot be run; 3 the ends show no difference.
    """
    from deep500_timing.compare import _bisect

    with _folder_for(f"bisect --good {good}", command) as folder:
        points = (_bisect.versions if "==" in good else _bisect.commits)(good, bad)
        found = _bisect.bisect(command, points, folder, pairs=pairs, steps=steps, on_run=partial(click.echo, err=True))
    if as_json:
        print_json(found)
    elif found.change is None:
        say(f"No difference shown between {good} and {bad}: the later one is not slower.")
    else:
        name = _bisect.named
        said = f"{name(found.first_slow)} made a step slower: {100 * found.change:+.1f} % from {good} to {bad}."
        if found.between:
            names = ", ".join(map(name, found.between))
            said += f" It may also be one of these, which could not be run: {names}."
        option = "--with" if "==" in good else "--rev"
        ends = f"{option} {name(found.last_fast)} {option} {name(found.first_slow)}"
        say(f"{said}\nWhich region: deep500-timing ab {ends} --steps {steps} -- {shlex.join(command)}")
    return GATE_FAILED if found.change is None else 0
