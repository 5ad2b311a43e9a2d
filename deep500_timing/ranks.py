"""The ranks of a job: the late ones and the cause, and one clock for all hosts.

::

    from deep500_timing.ranks import find_stragglers
    from deep500_timing.runs import Run

    with Run.open("runs/train") as run:    # written by all ranks into one folder, which may be another machine's copy
        print(find_stragglers(run))
"""

from __future__ import annotations

from deep500_timing._distributed.clocks import (
    ClockExchange,
    ClockFit,
    Clocks,
    UncalibratedError,
    clocks_of,
    keep_clocks,
)
from deep500_timing._distributed.stragglers import find_stragglers
from deep500_timing._distributed.transport import StoreTransport, Transport, find_transport
from deep500_timing._distributed.verdict import Stragglers, WhatIf

__all__ = [
    "ClockExchange",
    "ClockFit",
    "Clocks",
    "StoreTransport",
    "Stragglers",
    "Transport",
    "UncalibratedError",
    "WhatIf",
    "clocks_of",
    "find_stragglers",
    "find_transport",
    "keep_clocks",
]
