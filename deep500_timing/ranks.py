"""What the ranks of a job say together: a report of all of them, and who is late, and why.

::

    from deep500_timing.ranks import gather

    report = gather(tmr.snapshot())        # every rank calls it; rank 0 has the report, the others None
    if report is not None:
        print(report.get("BATCH").over_ranks["median"].max_rank, report.missing)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._ground.lazy import lazy_names

if TYPE_CHECKING:
    from deep500_timing._across.clocks import ClockExchange, ClockFit, UncalibratedError
    from deep500_timing._across.clocks_of_run import Clocks, clocks_of, keep_clocks
    from deep500_timing._across.contract import check_transport
    from deep500_timing._across.gather import Gatherer, find_transport, gather
    from deep500_timing._across.gathered import Gathered, GatheredRegion, OverRanks
    from deep500_timing._across.live import LiveReport
    from deep500_timing._across.mpi import MpiTransport
    from deep500_timing._across.stragglers import find_stragglers
    from deep500_timing._across.transport import AloneTransport, FolderTransport, StoreTransport, Transport
    from deep500_timing._across.verdict import Stragglers, WhatIf

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

# What needs numpy is imported when it is asked for.
_LAZY = {
    "AloneTransport": "deep500_timing._across.transport",
    "ClockExchange": "deep500_timing._across.clocks",
    "ClockFit": "deep500_timing._across.clocks",
    "Clocks": "deep500_timing._across.clocks_of_run",
    "FolderTransport": "deep500_timing._across.transport",
    "Gathered": "deep500_timing._across.gathered",
    "GatheredRegion": "deep500_timing._across.gathered",
    "Gatherer": "deep500_timing._across.gather",
    "LiveReport": "deep500_timing._across.live",
    "MpiTransport": "deep500_timing._across.mpi",
    "OverRanks": "deep500_timing._across.gathered",
    "StoreTransport": "deep500_timing._across.transport",
    "Stragglers": "deep500_timing._across.verdict",
    "Transport": "deep500_timing._across.transport",
    "UncalibratedError": "deep500_timing._across.clocks",
    "WhatIf": "deep500_timing._across.verdict",
    "check_transport": "deep500_timing._across.contract",
    "clocks_of": "deep500_timing._across.clocks_of_run",
    "find_stragglers": "deep500_timing._across.stragglers",
    "find_transport": "deep500_timing._across.gather",
    "gather": "deep500_timing._across.gather",
    "keep_clocks": "deep500_timing._across.clocks_of_run",
}

__getattr__, __dir__ = lazy_names(__name__, __all__, _LAZY)
