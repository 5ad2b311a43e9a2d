"""What subcommands share: the run's folder, JSON and progress messages."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from deep500_timing._base import progress
from deep500_timing._base.require import require
from deep500_timing._summary.text import fit_encoding, safe_name, wrap

RUNS = "runs"
"""The folder in which ``deep500-timing run`` makes a folder for each run."""
SCHEMA_VERSION = 1
"""Of the JSON of all commands: it rises when a key goes or changes its meaning."""


def last_run() -> str:
    """The folder of the run in ``runs/`` that was written last.

    Raises:
        click.UsageError: There is none.
    """
    from deep500_timing.runs._run import runs_in

    found = runs_in(RUNS)
    if not found:
        remedy = "Name a run's folder, or write one with: deep500-timing run train.py"
        raise click.UsageError(f"Missing argument 'FOLDER': {RUNS}/ holds no run here. {remedy}")
    click.echo(f"{safe_name(found[0])} (the last run)", err=True)
    return found[0]


def _folder(ctx: click.Context, _argument: click.Parameter, folder: str | None) -> str | None:
    return folder if folder is not None or ctx.resilient_parsing else last_run()


PROGRAM = click.Path(readable=False)
"""Of the words of a program, for a shell that completes them."""
folder_argument = click.argument("folder", required=False, callback=_folder, type=click.Path(file_okay=False))
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")


def print_json(data: Any) -> None:
    """Print plain data as JSON with its schema, in ASCII: nothing in a name can steer a terminal.

    Args:
        data: A dataclass or a dictionary of plain data.
    """
    schema = f"deep500-timing.{click.get_current_context().info_name}/{SCHEMA_VERSION}"
    fields = data if isinstance(data, dict) else asdict(data)
    click.echo(json.dumps({"schema": schema} | fields, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def say(what: object, *, as_json: bool = False) -> None:
    """Print a result as text or as JSON.

    On a terminal, sentences longer than a line are broken between words; rows of a table are not.
    """
    if as_json:
        print_json(what)
        return
    from deep500_timing._views.table import width_for

    text, width = str(what), width_for(sys.stdout)
    if width is not None:
        indents = [(line, len(line) - len(line.lstrip())) for line in text.split("\n")]
        text = "\n".join(
            line if "  " in line.strip() else " " * indent + wrap(line[indent:], width - indent, indent)
            for line, indent in indents
        )
    click.echo(fit_encoding(text, getattr(sys.stdout, "encoding", None)))


def say_written(paths: list[str], *, as_json: bool) -> None:
    """Print the paths of written files, or paths and sizes as JSON."""
    if as_json:
        print_json({"files": [{"path": path, "bytes": os.path.getsize(path)} for path in paths]})
    else:
        click.echo("\n".join(paths))


def require_comparison(caller: str) -> None:
    """See that the packages of a comparison are there before its first run, and not after it."""
    for needed in ("scipy.special", "duckdb"):
        require(needed, extra="compare", caller=caller)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show a message on the terminal, with a bar where the block tells how far it is, and remove it at the end."""
    stream: Any = sys.stderr
    # A dumb terminal would show each state of the message behind the one before.
    if stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return

    def show(state: str) -> None:
        stream.write(f"\r\x1b[K{state}")
        stream.flush()

    def show_share(done: int, of: int) -> None:
        share = done / of if of else 1.0
        room = min(shutil.get_terminal_size().columns - len(what) - 8, 20)
        show(f"{what} [{'#' * int(room * share):-<{room}}] {share:.0%}" if room > 0 else f"{share:.0%}")

    show(f"{what} …")
    before, progress.show = progress.show, show_share
    try:
        yield
    finally:
        progress.show = before
        show("")
