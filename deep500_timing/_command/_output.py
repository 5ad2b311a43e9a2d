"""Output of subcommands: JSON and progress messages."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deep500_timing._command._app import click
from deep500_timing._summary.text import fit_encoding, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deep500_timing._views.table import Sheet
    from deep500_timing.runs import Run

_PATIENCE_S = 1.0


def print_json(data: Any) -> None:
    """Print plain data as JSON, in ASCII: nothing in a name can steer a terminal."""
    click.echo(json.dumps(data, indent=2, default=_plain))


def say(what: object) -> None:
    """Print a text. On a terminal, sentences longer than a line are broken between words; rows of a table are not."""
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
        return
    for path in paths:
        click.echo(path)


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def print_sheet(run: Run, sheet: Sheet) -> None:
    from deep500_timing._views.about import about_run

    print_json(
        {"run": about_run(run), "rank": sheet.tree.rank, "findings": sheet.findings, "verdict": sheet.verdict}
        | {"regions": list(sheet.tree.roots), "notes": [sentence for _, sentence in sheet.notes]}
    )


@contextmanager
def busy(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a message on the terminal after one second, and remove it at the end.

    What it gives may be called with the done and the total number of parts; they are shown then.
    """
    stream: Any = sys.stderr
    # A dumb terminal would show each state of the message behind the one before.
    if stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda done, of: None
        return
    began = time.monotonic()
    lock = threading.Lock()
    shown = over = False

    def show(state: str) -> None:
        nonlocal shown
        with lock:
            if not over:
                shown = True
                stream.write(f"\r\x1b[K{what} {state}")
                stream.flush()

    def on_progress(done: int, of: int) -> None:
        if time.monotonic() - began > _PATIENCE_S:
            show(f"{done} of {of}")

    timer = threading.Timer(_PATIENCE_S, show, ("…",))
    timer.daemon = True
    timer.start()
    try:
        yield on_progress
    finally:
        timer.cancel()
        with lock:
            over = True
            if shown:
                stream.write("\r\x1b[K")
                stream.flush()
