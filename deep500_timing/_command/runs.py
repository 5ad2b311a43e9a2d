"""The subcommands that read one run, and the arguments that several of them take."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deep500_timing._base.settings import numbers_of
from deep500_timing._command._app import click
from deep500_timing._command._output import busy, print_json, print_sheet, say, say_written

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._views.table import Line
    from deep500_timing.runs import Run

_SHARE = 0.2
"""The share of the time that `top` may read: a run that is slow to read is read less often."""
_NO_PAGES = (".json", ".pdf", ".pftrace", ".png", ".svg")


@contextmanager
def reading(folder: str) -> Iterator[Run]:
    """A run, with a message on the terminal if the command takes long."""
    from deep500_timing.runs import Run

    with busy("Reading the run"), Run.open(folder) as run:
        yield run


def steps_of(text: str | None) -> tuple[int, int] | None:
    """``"5"`` or ``"5:9"`` as the first step and the last."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    try:
        found = int(first), int(last or first)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no step and no FIRST:LAST.", param_hint="--steps") from None
    if found[0] > found[1]:
        raise click.BadParameter(f"{text!r} ends before it begins.", param_hint="--steps")
    return found


def ranks_of(text: str | None) -> list[int] | None:
    """``"0,3"`` or ``"0-7"`` or both as numbers, rising."""
    try:
        return None if text is None else sorted(numbers_of(text))
    except ValueError:
        message = f"{text!r} is no list of numbers such as 0,3 or 0-7."
        raise click.BadParameter(message, param_hint="--ranks") from None


def default_path(folder: str, ending: str) -> str:
    """The path of a run with another ending, for output files; for ``.`` it uses the folder's name."""
    path = folder.rstrip("/\\") or folder
    if os.path.basename(path) in (os.curdir, os.pardir):
        path = os.path.abspath(path)
    return path + ending


@click.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> Any:
    """Time a training program without editing it."""
    from deep500_timing._launch.command import main

    return main(list(arguments))


@click.command()
@click.argument("folder", type=click.Path())
@click.option("--rank", type=int, help="Show the times of this rank (default: the lowest).")
@click.option("--session", type=int, help="Session number (default: all).")
@click.option("--off", multiple=True, metavar="RULE", help="Leave out the findings of this rule; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def show(folder: str, rank: int | None, session: int | None, off: tuple[str, ...], as_json: bool) -> None:
    """Show where the time of a run went: what stands out, and the tree of its regions.

    FOLDER is what Timer(run=FOLDER) or DEEP500_TIMING_RUN=FOLDER has written.
    """
    from deep500_timing._views import table
    from deep500_timing._views.findings import RULES
    from deep500_timing._views.sheets import sheet_of_run

    unknown = sorted({*off} - RULES.keys())
    if unknown:
        raise click.BadParameter(f"There is no rule {unknown[0]!r}; there are {', '.join(RULES)}.", param_hint="--off")
    with reading(folder) as run:
        sheet = sheet_of_run(run, rank=rank, session=session, off=off)
        if as_json:
            print_sheet(run, sheet)
    if not as_json:
        table.show(sys.stdout, sheet)


@click.command()
@click.argument("folder", type=click.Path())
@click.option("--rank", type=int, help="Show the times of this rank (default: the lowest).")
@click.option(
    "--every", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between readings."
)
@click.option("--once", is_flag=True, help="Read once, as without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print plain data instead, once.")
def top(folder: str, rank: int | None, every: float, once: bool, as_json: bool) -> None:
    """Show a run while it is being written, until it ends or Ctrl-C.

    It reads the run's files only, and does not touch the training.
    """
    from deep500_timing._views.about import live_line
    from deep500_timing._views.sheets import sheet_of_run
    from deep500_timing._views.table import Span, draw, is_terminal, put, width_for
    from deep500_timing.runs import Run

    stream = sys.stdout
    live = is_terminal(stream) and os.environ.get("TERM") != "dumb" and not once
    try:
        with Run.open(folder) as run:
            while True:
                began = time.monotonic()
                sheet = sheet_of_run(run, rank=rank)
                if as_json:
                    print_sheet(run, sheet)
                    return
                lines = draw(sheet, width=width_for(stream))
                ended = not sheet.title[-1].startswith("not ended")
                if not ended:
                    lines[1:1] = [[Span(live_line(run, rank))]]
                if live:
                    # Drawn over the old text, which does not flicker, and the rest of the screen is cleared.
                    stream.write("\x1b[H\x1b[J")
                    lines = _fitting(lines)
                    if not ended:
                        said = f"{time.strftime('%H:%M:%S')}, every {every:g} s; Ctrl-C ends"
                        lines = [*lines, [], [Span(said, "dim")]]
                put(stream, lines)
                if not live or ended:
                    return
                time.sleep(max(every, (time.monotonic() - began) / _SHARE))
                run.compact()
    except KeyboardInterrupt:
        return  # The way to leave it.


def _fitting(lines: list[Line]) -> list[Line]:
    from deep500_timing._views.table import Span

    # The end is cut, so that the head stands still.
    try:
        height = os.get_terminal_size(sys.stdout.fileno()).lines
    except (AttributeError, OSError, ValueError):
        height = 24
    room = max(height - 4, 5)
    return lines if len(lines) <= room else [*lines[:room], [Span(f"{len(lines) - room} more lines", "dim")]]


@click.command()
@click.argument("folder", type=click.Path())
@click.argument("step", type=int, required=False)
@click.option("--session", type=int, help="Session number (default: the latest that has the step).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def why(folder: str, step: int | None, session: int | None, as_json: bool) -> None:
    """Say why STEP took longer than its neighbours, the time since the step before it included.

    Without STEP it is the slowest step after the first.
    """
    with reading(folder) as run:
        answer = run.why(step, session=session)
    if as_json:
        print_json(asdict(answer))
    else:
        say(answer)


@click.command()
@click.argument("folder", type=click.Path())
@click.option("--session", type=int, help="Session number (default: the latest common to all ranks).")
@click.option("--scores", is_flag=True, help="Scores as NVIDIA's resiliency extension names them, as plain data.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def stragglers(folder: str, session: int | None, scores: bool, as_json: bool) -> None:
    """Name the rank or machine that the others wait for, and the cause."""
    from deep500_timing._distributed.stragglers import find_stragglers

    with reading(folder) as run:
        found = find_stragglers(run, session=session)
    if scores:
        print_json(found.nvrx_scores())
    elif as_json:
        print_json(found)
    else:
        say(found)


@click.command()
@click.argument("folder", type=click.Path())
@click.option(
    "--bucket", "chosen", multiple=True, metavar="REGION=BUCKET", help="Count a region as evaluation, data, …"
)
@click.option("--mfu", type=click.FloatRange(0, 1), help="MFU of the steps, for MFU × goodput; else from samples.")
@click.option("--ranks", is_flag=True, help="Print the account of each rank as well.")
@click.option("--json", "as_json", is_flag=True, help="Print plain data instead.")
def goodput(folder: str, chosen: tuple[str, ...], mfu: float | None, ranks: bool, as_json: bool) -> None:
    """Show where the wall clock of the job went, restarts included. The parts add up to 100 %."""
    from deep500_timing.runs._goodput import rank_lines

    buckets = {}
    for pair in chosen:
        region, _, bucket = pair.rpartition("=")
        if not region:
            raise click.BadParameter(f"{pair!r} is not REGION=BUCKET.", param_hint="--bucket")
        buckets[region] = bucket
    with reading(folder) as run:
        found = run.goodput(buckets=buckets, mfu=mfu)
    if as_json:
        rates = {"goodput": found.goodput, "ettr": found.ettr, "mfu_goodput": found.mfu_goodput}
        print_json(asdict(found) | rates)
        return
    say("\n".join([str(found), *(["", *rank_lines(found)] if ranks else [])]))


@click.command()
@click.argument("folder")
@click.argument("file", required=False)
@click.option("-o", "--output", metavar="FILE", help="The same as FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print the written files as JSON.")
def report(folder: str, file: str | None, output: str | None, as_json: bool) -> None:
    """Write a run as one HTML page that works offline (default: FOLDER.html)."""
    from deep500_timing.report import write_report
    from deep500_timing.runs import Run

    if file is not None and output is not None:
        raise click.UsageError("The file is named twice: give it as FILE or by -o.")
    path = output or file or default_path(folder, ".html")
    if path.lower().endswith(_NO_PAGES):
        remedy = "deep500-timing plot writes pictures" if path.lower().endswith((".png", ".svg")) else "name it .html"
        raise click.UsageError(f"The report is an HTML page, and {path!r} does not end in .html: {remedy}.")
    with busy("Writing the report") as on_progress, Run.open(folder) as run:
        write_report(run, path, on_progress=on_progress)
    say_written([path], as_json=as_json)


@click.command()
@click.argument("folder")
@click.argument("to", required=False)
@click.option("--format", "kind", type=click.Choice(["png", "svg"]), default="png", show_default=True)
@click.option("--only", multiple=True, metavar="SECTION", help="Draw this section only; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print the written files as JSON.")
def plot(folder: str, to: str | None, kind: str, only: tuple[str, ...], as_json: bool) -> None:
    """Draw the charts of the report as pictures into the folder TO (default: FOLDER-plots)."""
    from deep500_timing._summary.text import fit_encoding
    from deep500_timing.report import write_plots
    from deep500_timing.runs import Run

    target = to or default_path(folder, "-plots")
    with busy("Drawing the charts") as on_progress, Run.open(folder) as run:
        paths = write_plots(run, target, format=kind, only=only or None, on_progress=on_progress)  # type: ignore[arg-type]
    if not paths:
        raise click.ClickException(f"Drawing {fit_encoding(folder, 'ascii')!r}: the run has nothing to draw yet.")
    say_written(paths, as_json=as_json)


@click.command()
@click.argument("folder")
@click.argument("file", required=False)
@click.option("--steps", metavar="FIRST[:LAST]", help="These steps only; without it the whole run.")
@click.option("--ranks", metavar="RANKS", help="These ranks only, such as 0,3 or 0-7.")
@click.option("--profile", multiple=True, metavar="TRACE", help="A trace of torch.profiler to add.")
@click.option("--json", "as_json", is_flag=True, help="Print the written files as plain data.")
def timeline(
    folder: str,
    file: str | None,
    steps: str | None,
    ranks: str | None,
    profile: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write a run as a timeline for https://ui.perfetto.dev: threads, devices, steps, launches, memory.

    FILE is FOLDER.json if not given. It has Chrome's trace format.
    """
    from deep500_timing._views.timeline import write_timeline
    from deep500_timing.runs import Run

    wanted_steps, wanted_ranks = steps_of(steps), ranks_of(ranks)
    path = file or default_path(folder, ".json")
    with busy("Writing the timeline") as on_progress, Run.open(folder) as run:
        write_timeline(run, path, steps=wanted_steps, ranks=wanted_ranks, profiles=profile, on_progress=on_progress)
    say_written([path], as_json=as_json)


@click.command()
@click.argument("folder", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def compact(folder: str, as_json: bool) -> None:
    """Convert a run's logs to Parquet (done automatically on first read).

    The logs stay. Only logs that have grown are read again.
    """
    from deep500_timing._summary.text import format_bytes
    from deep500_timing.runs._compact import find_logs

    with reading(folder) as run:
        logs = [log for found in run.folders for log in find_logs(found)]
        files = sorted({path for paths in run.tables.values() for path in paths})
        rows = run.sql("select count(*) as n from intervals").rows()[0]["n"]
    before, after = sum(log.size for log in logs), sum(os.path.getsize(path) for path in files)
    if as_json:
        print_json({"logs": len(logs), "log_bytes": before, "files": files, "bytes": after, "intervals": rows})
        return
    where = os.path.dirname(files[0]) if files else folder
    click.echo(
        f"{len(logs)} {'log' if len(logs) == 1 else 'logs'} of {format_bytes(before)}, {rows} intervals: "
        f"{len(files)} files of Parquet, {format_bytes(after)}, in {where}"
    )
