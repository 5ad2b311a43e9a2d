"""The subcommands that read one run."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from deep500_timing._base.settings import numbers_of
from deep500_timing._command._output import (
    PROGRAM,
    as_json_option,
    busy,
    folder_argument,
    last_run,
    print_json,
    say,
    say_written,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._views.about import About
    from deep500_timing._views.table import TextReport
    from deep500_timing.runs import Run

_SHARE = 0.2
"""The share of the time that `top` may read: a run that is slow to read is read less often."""
_NO_PAGES = (".json", ".pdf", ".png", ".svg")


@contextmanager
def _reading(folder: str, what: str = "Reading the run") -> Iterator[Run]:
    """A run, with a message on the terminal if the command takes long."""
    from deep500_timing.runs import Run

    with busy(what), Run.open(folder) as run:
        yield run


def _steps(_ctx: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """``"5"`` or ``"5:9"`` as the first step and the last."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    try:
        found = int(first), int(last or first)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no step and no FIRST:LAST.") from None
    if found[0] > found[1]:
        raise click.BadParameter(f"{text!r} ends before it begins.")
    return found


def _ranks(_ctx: click.Context, _option: click.Parameter, text: str | None) -> list[int] | None:
    """``"0,3"`` or ``"0-7"`` or both as numbers, rising."""
    try:
        return None if text is None else sorted(numbers_of(text))
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 0,3 or 0-7.") from None


def _default_path(folder: str, ending: str) -> str:
    """The path of a run with another ending, for output files; for ``.`` it uses the folder's name."""
    path = folder.rstrip("/\\") or folder
    if os.path.basename(path) in (os.curdir, os.pardir):
        path = os.path.abspath(path)
    return path + ending


@click.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", nargs=-1, type=PROGRAM)
def run(arguments: tuple[str, ...]) -> Any:
    """Time a training program without editing it."""
    from deep500_timing._launch.command import main

    return main(list(arguments))


@click.command()
@folder_argument
@click.option("--rank", type=int, help="Show the times of this rank (default: the lowest).")
@click.option("--session", type=int, help="Session number (default: all).")
@click.option("--all", "whole", is_flag=True, help="Show each region, and all that is known of each finding.")
@click.option("--off", multiple=True, metavar="RULE", help="Leave out the findings of this rule; may be repeated.")
@as_json_option
def show(folder: str, rank: int | None, session: int | None, whole: bool, off: tuple[str, ...], as_json: bool) -> None:
    """Show where the time of a run went.

    It prints what stands out, and the tree of its regions. FOLDER is what Timer(run=FOLDER) or
    DEEP500_TIMING_RUN=FOLDER has written. Where it holds several runs, they are listed side by side.
    """
    from deep500_timing._views import table
    from deep500_timing._views.findings import RULES
    from deep500_timing._views.reports import read_beside, report_of_run, text_beside
    from deep500_timing.runs._compact import find_logs
    from deep500_timing.runs._run import runs_in

    unknown = sorted({*off} - RULES.keys())
    if unknown:
        raise click.BadParameter(f"There is no rule {unknown[0]!r}; there are {', '.join(RULES)}.", param_hint="--off")
    found = [*runs_in(folder), *([folder] if os.path.isdir(folder) and find_logs(folder) else [])]
    more: dict[str, list[About]] = {}
    if len(found) > 1 and rank is None and session is None:
        with busy("Reading the runs"):
            beside = read_beside(found)
        more["beside"] = [about for about, _ in beside]
        if not as_json:
            say(text_beside(beside) + "\n")
        elif folder not in found:
            print_json(more)
        if folder not in found:
            return
    with _reading(folder) as run:
        report = report_of_run(run, rank=rank, session=session, off=off, whole=whole or as_json)
        data = _as_json(run, report) if as_json else {}
    if as_json:
        print_json(data | more)
    else:
        table.show(sys.stdout, report)


def _as_json(run: Run, report: TextReport) -> dict[str, Any]:
    from deep500_timing._views.about import about_run
    from deep500_timing._views.findings._tries import data_of

    assert report.evidence is not None
    findings = [data_of(one, report.evidence) for one in report.findings]
    found = {"run": about_run(run), "rank": report.tree.rank, "findings": findings, "verdict": report.verdict}
    return found | {"regions": [*report.tree.roots], "notes": [sentence for _, sentence in report.notes]}


@click.command()
@folder_argument
@click.option("--rank", type=int, help="Show the times of this rank (default: the lowest).")
@click.option(
    "--every", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between readings."
)
@click.option("--once", is_flag=True, help="Read once, as without a terminal.")
@as_json_option
def top(folder: str, rank: int | None, every: float, once: bool, as_json: bool) -> None:
    """Show a run while it is being written.

    It draws until the run ends or Ctrl-C; with --json it reads once. It reads the run's files only, and does not touch
    the training.
    """
    from deep500_timing._views.about import live_line
    from deep500_timing._views.reports import report_of_run
    from deep500_timing._views.table import Span, draw, is_terminal, put, width_for
    from deep500_timing.runs import Run

    stream = sys.stdout
    live = is_terminal(stream) and os.environ.get("TERM") != "dumb" and not once
    with suppress(KeyboardInterrupt), Run.open(folder) as run:
        while True:
            began = time.monotonic()
            report = report_of_run(run, rank=rank, whole=as_json)
            if as_json:
                print_json(_as_json(run, report))
                return
            lines = draw(report, width=width_for(stream))
            if not report.ended:
                lines[1:1] = [[Span(live_line(run, rank))]]
            if live:
                # Drawn over the old text, which does not flicker, and the rest of the screen is cleared.
                stream.write("\x1b[H\x1b[J")
            if live and not report.ended:
                # The end of a long table is cut, so that the head stands still.
                room = max(shutil.get_terminal_size().lines - 4, 5)
                if len(lines) > room:
                    lines[room:] = [[Span(f"{len(lines) - room} more lines; --once shows them", "dim")]]
                said = f"{time.strftime('%H:%M:%S')}, every {every:g} s; Ctrl-C ends"
                lines += [[], [Span(said, "dim")]]
            put(stream, lines)
            if not live or report.ended:
                return
            time.sleep(max(every, (time.monotonic() - began) / _SHARE))
            run.compact()


@click.command()
@folder_argument
@click.argument("step", type=int, required=False)
@click.option("--session", type=int, help="Session number (default: the latest that has the step).")
@as_json_option
def why(folder: str, step: int | None, session: int | None, as_json: bool) -> None:
    """Say why a step was slow.

    STEP is compared with its neighbours, the time since the step before it included. Without STEP it is the slowest
    step after the first.
    """
    if step is None and folder.isdecimal() and not os.path.exists(folder):
        folder, step = last_run(), int(folder)
    with _reading(folder) as run:
        found = run.why(step, session=session)
    say(found, as_json=as_json)


@click.command()
@folder_argument
@click.option("--session", type=int, help="Session number (default: the latest common to all ranks).")
@as_json_option
def stragglers(folder: str, session: int | None, as_json: bool) -> None:
    """Say which rank the others wait for, and why."""
    from deep500_timing._distributed.stragglers import find_stragglers
    from deep500_timing._views.findings import evidence_of, why_late

    with _reading(folder) as run:
        found = find_stragglers(run, session=session)
        if found.ranks:
            found = replace(found, busy_host=why_late(evidence_of(run, session=session), found))
    say(found, as_json=as_json)


@click.command()
@folder_argument
@click.option(
    "--bucket", "chosen", multiple=True, metavar="REGION=BUCKET", help="Count a region as evaluation, data, …"
)
@click.option("--mfu", type=click.FloatRange(0, 1), help="MFU of the steps, for MFU × goodput; else from samples.")
@click.option("--ranks", is_flag=True, help="Print the account of each rank as well.")
@as_json_option
def goodput(folder: str, chosen: tuple[str, ...], mfu: float | None, ranks: bool, as_json: bool) -> None:
    """Account for the wall clock of the job, restarts included. The parts add up to 100 %."""
    from deep500_timing.runs._goodput import rank_lines

    buckets = {}
    for pair in chosen:
        region, _, bucket = pair.rpartition("=")
        if not region:
            raise click.BadParameter(f"{pair!r} is not REGION=BUCKET.", param_hint="--bucket")
        buckets[region] = bucket
    with _reading(folder) as run:
        found = run.goodput(buckets=buckets, mfu=mfu)
    if as_json:
        rates = {"goodput": found.goodput, "ettr": found.ettr, "mfu_goodput": found.mfu_goodput}
        print_json(asdict(found) | rates)
        return
    say("\n".join([str(found), *(["", *rank_lines(found)] if ranks else [])]))


@click.command()
@folder_argument
@click.argument("file", required=False)
@click.option("-o", "--output", metavar="FILE", help="The same as FILE.")
@click.option("--open", "opens", is_flag=True, help="Open it in the browser.")
@as_json_option
def report(folder: str, file: str | None, output: str | None, opens: bool, as_json: bool) -> None:
    """Write a run as one HTML page that works offline. FILE is FOLDER.html if not given."""
    from deep500_timing.report import write_report

    if file is not None and output is not None:
        raise click.UsageError("The file is named twice: give it as FILE or by -o.")
    path = output or file or _default_path(folder, ".html")
    if path.lower().endswith(_NO_PAGES):
        remedy = "name it .html. deep500-timing plot writes pictures."
        raise click.UsageError(f"The report is an HTML page, and {path!r} does not end in .html: {remedy}")
    with _reading(folder, "Writing the report") as run:
        write_report(run, path)
    say_written([path], as_json=as_json)
    if opens:
        import webbrowser
        from pathlib import Path

        if not webbrowser.open(Path(path).absolute().as_uri()):
            raise click.ClickException(f"Opening {path!r}: no browser was found. The page is written.")


@click.command()
@folder_argument
@click.argument("to", required=False)
@click.option("--format", "kind", type=click.Choice(["png", "svg"]), default="png", show_default=True)
@click.option("--only", multiple=True, metavar="SECTION", help="Draw this section only; may be repeated.")
@as_json_option
def plot(folder: str, to: str | None, kind: str, only: tuple[str, ...], as_json: bool) -> None:
    """Draw the charts of the report as pictures. The folder TO is FOLDER-plots if not given."""
    from deep500_timing._summary.text import fit_encoding
    from deep500_timing.report import write_plots

    target = to or _default_path(folder, "-plots")
    with _reading(folder, "Drawing the charts") as run:
        paths = write_plots(run, target, format=kind, only=only or None)  # type: ignore[arg-type]
    if not paths:
        raise click.ClickException(f"Drawing {fit_encoding(folder, 'ascii')!r}: the run has nothing to draw yet.")
    say_written(paths, as_json=as_json)


@click.command()
@folder_argument
@click.argument("file", required=False)
@click.option("--steps", metavar="FIRST[:LAST]", callback=_steps, help="These steps only; without it the whole run.")
@click.option("--ranks", metavar="RANKS", callback=_ranks, help="These ranks only, such as 0,3 or 0-7.")
@click.option("--profile", multiple=True, metavar="TRACE", help="A trace of torch.profiler to add.")
@as_json_option
def timeline(
    folder: str,
    file: str | None,
    steps: tuple[int, int] | None,
    ranks: list[int] | None,
    profile: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write a run as a timeline, for Perfetto.

    It has threads, devices, steps, launches and memory, in Chrome's trace format: open it at https://ui.perfetto.dev.
    FILE is FOLDER.json if not given.
    """
    from deep500_timing._views.timeline import write_timeline

    path = file or _default_path(folder, ".json")
    with _reading(folder, "Writing the timeline") as run:
        write_timeline(run, path, steps=steps, ranks=ranks, profiles=profile)
    say_written([path], as_json=as_json)
