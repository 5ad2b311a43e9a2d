"""Goodput: where the wall clock of the whole job went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._summary.text import UNKNOWN, format_time
from deep500_timing._views.page._parts import bars, quantity, rounded
from deep500_timing._views.page._section import Content, Figure, Panel
from deep500_timing.runs._goodput import advice, gain, sentence

if TYPE_CHECKING:
    from deep500_timing._views.page._context import Context

_COLOURS = {
    "productive": "#009e73",
    "communication": "#0072b2",
    "stragglers": "#d55e00",
    "data": "#e69f00",
    "lost": "#cc79a7",
    "unknown": "#7f8a93",
}
_OTHER = "#56b4e9"


def goodput(context: Context) -> Content | None:
    """The account of the wall clock, restarts included; a job that was never restarted lacks nothing."""
    if context.about.sessions < 2:
        return None
    account = context.goodput
    rows, drawn = [], []
    for bucket in account.buckets:
        for part, indent in [(bucket, ""), *((part, "\u2003") for part in bucket.parts if part.seconds)]:
            time = "not measured" if part.seconds is None else format_time(part.seconds)
            share = UNKNOWN if part.share is None else f"{100 * part.share:.2f} %"
            rows.append((indent + part.title, time, share, gain(part)))
            if part is bucket and bucket.seconds:
                colour = _COLOURS.get(bucket.name, _OTHER)
                drawn.append({"part": bucket.title, "share": rounded(bucket.share), "shown": share, "colour": colour})
    x = quantity("share", axis={"title": "of the wall clock", "format": "%"})
    figure = Figure(
        "The wall clock of the job",
        sentence(account),
        (Panel(bars(drawn, "part", x, part="part", shown="share")),),
        ("part", "time", "share", "if halved"),
        rows,
        note="The parts add up to the wall clock. In each step, the slowest rank decides.",
    )
    return Content((figure,), text=(*advice(account), *account.notes))
