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
    from deep500_timing._across.contract import check_transport
    from deep500_timing._across.gather import Gatherer, find_transport, gather
    from deep500_timing._across.gathered import Gathered, GatheredRegion, OverRanks
    from deep500_timing._across.late import Stragglers, WhatIf
    from deep500_timing._across.live import LiveReport
    from deep500_timing._across.mpi import MpiTransport
    from deep500_timing._across.stragglers import find_stragglers
    from deep500_timing._across.transport import AloneTransport, FolderTransport, StoreTransport, Transport

__all__ = [
    "AloneTransport",
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
    "WhatIf",
    "check_transport",
    "find_stragglers",
    "find_transport",
    "gather",
]

# What needs numpy is imported when it is asked for.
_LAZY = {
    "AloneTransport": "deep500_timing._across.transport",
    "FolderTransport": "deep500_timing._across.transport",
    "Gathered": "deep500_timing._across.gathered",
    "GatheredRegion": "deep500_timing._across.gathered",
    "Gatherer": "deep500_timing._across.gather",
    "LiveReport": "deep500_timing._across.live",
    "MpiTransport": "deep500_timing._across.mpi",
    "OverRanks": "deep500_timing._across.gathered",
    "StoreTransport": "deep500_timing._across.transport",
    "Stragglers": "deep500_timing._across.late",
    "Transport": "deep500_timing._across.transport",
    "WhatIf": "deep500_timing._across.late",
    "check_transport": "deep500_timing._across.contract",
    "find_stragglers": "deep500_timing._across.stragglers",
    "find_transport": "deep500_timing._across.gather",
    "gather": "deep500_timing._across.gather",
}

__getattr__, __dir__ = lazy_names(__name__, __all__, _LAZY)
