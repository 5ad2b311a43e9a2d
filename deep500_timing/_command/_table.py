"""The subcommands: name, purpose and module. A new one is a row here and a module."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A subcommand."""

    module: str
    """The module with its ``command``."""
    summary: str
    """Its help in the list of commands."""


COMMANDS: dict[str, Entry] = {
    "run": Entry("run", "Time a training program without editing it."),
    "show": Entry("show", "Show where the time of a run went."),
    "top": Entry("top", "Show a run while it is being written."),
    "why": Entry("why", "Say why a step was slow."),
    "compare": Entry("compare", "Say whether runs are slower than others, and in which region."),
    "ab": Entry("ab", "Run two commands in turn and say whether one is slower."),
    "history": Entry("history", "Say which of the last runs made it slower."),
    "report": Entry("report", "Write a run as one HTML page that works offline."),
    "stragglers": Entry("stragglers", "Say which rank the others wait for, and why."),
    "goodput": Entry("goodput", "Account for the wall clock of the job, restarts included."),
    "timeline": Entry("timeline", "Write a run as a timeline, for Perfetto or Chrome."),
    "plot": Entry("plot", "Draw the charts of the report as pictures."),
    "compact": Entry("compact", "Convert a run's logs to Parquet."),
    "doctor": Entry("doctor", "List installed and missing packages."),
    "bench": Entry("bench", "Measure the cost of timing on this machine."),
}
"""In the order in which they are listed."""
