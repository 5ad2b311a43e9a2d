"""``deep500-timing top``: a running training."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from deep500_timing._command._app import click

if TYPE_CHECKING:
    from deep500_timing._views.table import Line

_SHARE = 0.2
"""The share of the time that reading may take: a run that is slow to read is read less often."""


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
    from deep500_timing._command._output import print_sheet
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
