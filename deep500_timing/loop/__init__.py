"""From events of a training loop to regions, for any framework: an adapter sees the events and tells them here.

::

    from deep500_timing.loop import FORWARD, IO, Loops

    loops = Loops(timer)
    loop = loops.here()          # of the calling thread
    state = loop.begin(IO)
    batch = next(iterator)
    loop.end(state)

``docs/run-command.md`` defines the regions.
"""

from __future__ import annotations

from pathlib import Path as _Path

from deep500_timing._recording.recorder import COMPILED as _COMPILED

if not _COMPILED:
    from deep500_timing._base.plain import load_plain as _load_plain

    _load_plain(__name__, _Path(__file__).parent, ("_loop",))

from deep500_timing.loop._events import (
    BACKWARD,
    BATCH,
    BETWEEN,
    COPY,
    EPOCH,
    EPOCH_START,
    FORWARD,
    GRAD,
    INSIDE,
    IO,
    NAMES,
    NO_GRAD,
    STEP,
    VALIDATION,
)
from deep500_timing.loop._limit import limit
from deep500_timing.loop._loop import Loop
from deep500_timing.loop._loops import Loops

__all__ = [
    "BACKWARD",
    "BATCH",
    "BETWEEN",
    "COPY",
    "EPOCH",
    "EPOCH_START",
    "FORWARD",
    "GRAD",
    "INSIDE",
    "IO",
    "NAMES",
    "NO_GRAD",
    "STEP",
    "VALIDATION",
    "Loop",
    "Loops",
    "limit",
]
