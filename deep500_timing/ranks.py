"""The ranks of a job: one report of all of them, the late ranks, and the cause.

::

    from deep500_timing.ranks import gather

    report = gather(tmr.snapshot())        # every rank calls it; rank 0 has the report, the others None
    if report is not None:
        print(report.get("BATCH").over_ranks["median"].max_rank, report.missing)
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
from deep500_timing._distributed.gather import Gatherer, LiveReport, find_transport, gather
from deep500_timing._distributed.gathered import Gathered, GatheredRegion, OverRanks
from deep500_timing._distributed.stragglers import find_stragglers
from deep500_timing._distributed.transport import (
    AloneTransport,
    FolderTransport,
    MpiTransport,
    StoreTransport,
    Transport,
    check_transport,
)
from deep500_timing._distributed.verdict import Stragglers, WhatIf

__all__ = [
    "AloneTransport",
    "ClockExchange",
    "ClockFit",
    "Clocks",
    "FolderTransport",
    "Gathered",
    "GatheredRegion",
    "Gatherer",
    "LiveReport",
    "MpiTransport",
    "OverRanks",
    "StoreTransport",
    "Stragglers",
    "Transport",
    "UncalibratedError",
    "WhatIf",
    "check_transport",
    "clocks_of",
    "find_stragglers",
    "find_transport",
    "gather",
    "keep_clocks",
]
