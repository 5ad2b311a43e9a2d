"""Arguments that several subcommands take, and the bar that they show."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deep500_timing._command._app import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BAR_AFTER_S = 1.0


def steps_of(text: str | None) -> tuple[int, int] | None:
    """``"5"`` or ``"5:9"`` as the first step and the last.

    Raises:
        click.BadParameter: It is neither.
    """
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


def numbers_of(text: str | None, option: str) -> list[int] | None:
    """``"0,3"`` or ``"0-7"`` or both as numbers, rising.

    Raises:
        click.BadParameter: It is neither.
    """
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        try:
            found.update(range(int(first), int(last or first) + 1))
        except ValueError:
            raise click.BadParameter(f"{text!r} is no list of numbers such as 0,3 or 0-7.", param_hint=option) from None
    return sorted(found)


def default_path(folder: str, ending: str) -> str:
    """The path of a run with another ending, for output files; for ``.`` it uses the folder's name."""
    path = folder.rstrip("/\\") or folder
    if os.path.basename(path) in (os.curdir, os.pardir):
        path = os.path.abspath(path)
    return path + ending


@contextmanager
def progress_of(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on terminals, after one second. Call it with the done and the total number."""
    began = time.monotonic()
    bars: list[Any] = []
    # A dumb terminal would show each state of the bar behind the one before.
    draws = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def on_progress(done: int, of: int) -> None:
        if not bars and draws and time.monotonic() - began > _BAR_AFTER_S:
            bars.append(click.progressbar(length=of, label=what, file=sys.stderr, width=0))
            bars[0].__enter__()
        if bars:
            bars[0].update(done - bars[0].pos)

    try:
        yield on_progress
    finally:
        for bar in bars:
            bar.__exit__(None, None, None)
