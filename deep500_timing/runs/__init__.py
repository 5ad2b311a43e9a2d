"""Runs: the logs that the processes of a training write, and their reader.

**Writing.** ``Timer(run="folder")`` or ``DEEP500_TIMING_RUN=folder`` makes a timer log every interval; ``RunLog``
is the log itself, with its settings. ``timer.run`` is the log, or None, and takes other records as well::

    log = RunLog(folder, timer)                      # or Timer(run=log), for settings of your own
    timer.step(n)                                    # step n begins here
    log.sample("memory.rss_bytes", value, region="FORWARD")
    log.collective("all_reduce", start_ns, end_ns, group="data", sequence=7, nbytes=4096)
    log.event("retry", "the file server was away")
    log.mark("checkpoint_saved", step=n, dur_s=2.5)  # goodput reads it
    log.declare("layers", start_ns="time", dur_ns="int", layer="name")    # a table of an extension
    log.add("layers", (start_ns, dur_ns, "conv1"))

Code without a timer finds the process's log by ``runs.current()``. ``runs.feeders.append(callable)`` registers a call
that hands over queued rows when a flush is due; ``runs.logs`` is empty where there is no log. None of these waits: they
queue, and the log's thread writes. The reader adds ``unix_ns`` to columns of type ``time`` named ``time_ns`` or
``start_ns``; ``step`` of the smallest int64 is none.

**Reading.** ``Run.open(folder)`` compacts the logs to Parquet and gives tables, each a :class:`Relation` with
``.df()``, ``.arrow()``, ``.rows()``::

    run.intervals(rank=None, session=None, steps=(first, last))
    run.regions(rank=None, session=None, by_rank=False)      # the tree, with shares and rests
    run.steps(rank=None, session=None)
    run.why(81220)                                           # an answer as data; str() gives the sentences
    run.table("samples"), run.sql("select ...")              # every table, those of later capabilities among them

The columns are in ``docs/runs.md``, the format of the files in ``docs/run-format.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._base.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from deep500_timing.runs._current import current, feeders, logs
    from deep500_timing.runs._engine import Relation
    from deep500_timing.runs._log import RunLog, attach
    from deep500_timing.runs._read import NewerSchemaError
    from deep500_timing.runs._run import Run
    from deep500_timing.runs._why import Cause, Why

__all__ = ["Cause", "NewerSchemaError", "Relation", "Run", "RunLog", "Why", "attach", "current", "feeders", "logs"]

# A timer that writes needs no reader, and a reader no writer.
__getattr__, __dir__ = _lazy_names(
    __name__,
    __all__,
    {
        "Cause": "deep500_timing.runs._why",
        "NewerSchemaError": "deep500_timing.runs._read",
        "Relation": "deep500_timing.runs._engine",
        "Run": "deep500_timing.runs._run",
        "RunLog": "deep500_timing.runs._log",
        "Why": "deep500_timing.runs._why",
        "attach": "deep500_timing.runs._log",
        "current": "deep500_timing.runs._current",
        "feeders": "deep500_timing.runs._current",
        "logs": "deep500_timing.runs._current",
    },
)
