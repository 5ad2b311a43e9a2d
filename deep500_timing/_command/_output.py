"""Output of subcommands: JSON and progress messages."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from deep500_timing._summary.text import fit_encoding, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


folder_argument = click.argument("folder", type=click.Path())
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")


def print_json(data: Any) -> None:
    """Print plain data as JSON, in ASCII: nothing in a name can steer a terminal."""
    click.echo(json.dumps(data, indent=2, default=_plain))


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


@contextmanager
def busy(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a message on the terminal, and remove it at the end.

    What it gives may be called with the done and the total number of parts; they are shown then.
    """
    stream: Any = sys.stderr
    # A dumb terminal would show each state of the message behind the one before.
    if stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda done, of: None
        return

    def show(state: str) -> None:
        stream.write(f"\r\x1b[K{state}")
        stream.flush()

    show(f"{what} …")
    try:
        yield lambda done, of: show(f"{what} {done} of {of}")
    finally:
        show("")
