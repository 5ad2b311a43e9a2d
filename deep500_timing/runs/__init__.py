"""Runs: the logs that the processes of a training write, and their reader.

``Timer(run="folder")`` or ``DEEP500_TIMING_RUN=folder`` makes a timer log every interval. :class:`RunLog` is that log,
``timer.run``; it takes steps, samples, collectives, events, milestones and tables of your own as well. Code without a
timer finds the log by ``runs.current()``; ``runs.logs`` is empty where there is none. ``runs.feeders.append(callable)``
registers a call that hands over queued rows when a flush is due. None of these waits.

``Run.open(folder)`` reads the logs as tables, each a :class:`Relation`: ``run.intervals()``, ``run.regions()``,
``run.steps()``, ``run.why(81220)``, ``run.table("samples")``, ``run.sql("select ...")``. ``docs/runs.md`` lists the
columns, ``docs/run-format.md`` has the format of the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._base.lazy import homes_in as _homes_in
from deep500_timing._base.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from deep500_timing.runs._current import current, feeders, logs
    from deep500_timing.runs._log import RunLog, attach
    from deep500_timing.runs._run import Relation, Run
    from deep500_timing.runs._tables import NewerSchemaError
    from deep500_timing.runs._why import Cause, Why

__all__ = ["Cause", "NewerSchemaError", "Relation", "Run", "RunLog", "Why", "attach", "current", "feeders", "logs"]

# A timer that writes needs no reader, and a reader no writer.
_HOMES = {
    "_current": "current feeders logs",
    "_log": "RunLog attach",
    "_run": "Relation Run",
    "_tables": "NewerSchemaError",
    "_why": "Cause Why",
}
__getattr__, __dir__ = _lazy_names(__name__, __all__, _homes_in(__name__, _HOMES))
