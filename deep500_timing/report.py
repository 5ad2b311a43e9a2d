"""A run to look at: one HTML page, a timeline, plots. And how to add a section to the page.

::

    from deep500_timing.report import write_report, write_timeline
    from deep500_timing.runs import Run

    with Run.open("runs/digits") as run:
        write_report(run, "digits.html")
        write_timeline(run, "timeline.json", steps=(100, 110))

The commands ``deep500-timing report``, ``timeline`` and ``plot`` do the same. ``docs/report.md`` has the rest.
"""

from __future__ import annotations

from deep500_timing._views.page._page import write_plots, write_report
from deep500_timing._views.page._section import Content, Context, Figure, Panel, Section
from deep500_timing._views.timeline import write_timeline

__all__ = ["Content", "Context", "Figure", "Panel", "Section", "write_plots", "write_report", "write_timeline"]
