"""The ranks of a job: one report of all of them, the late ranks, and the cause.

::

    from deep500_timing.ranks import gather

    report = gather(tmr.snapshot())        # every rank calls it; rank 0 has the report, the others None
    if report is not None:
        print(report.get("BATCH").over_ranks["median"].max_rank, report.missing)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._base.lazy import lazy_names

if TYPE_CHECKING:
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
    from deep500_timing._distributed.mpi import MpiTransport
    from deep500_timing._distributed.stragglers import find_stragglers
    from deep500_timing._distributed.transport import (
        AloneTransport,
        FolderTransport,
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

# What needs numpy is imported when it is asked for.
_HOMES: dict[str, tuple[str, ...]] = {
    "_distributed.clocks": ("ClockExchange", "ClockFit", "Clocks", "UncalibratedError", "clocks_of", "keep_clocks"),
    "_distributed.gather": ("Gatherer", "LiveReport", "find_transport", "gather"),
    "_distributed.gathered": ("Gathered", "GatheredRegion", "OverRanks"),
    "_distributed.mpi": ("MpiTransport",),
    "_distributed.stragglers": ("find_stragglers",),
    "_distributed.transport": ("AloneTransport", "FolderTransport", "StoreTransport", "Transport", "check_transport"),
    "_distributed.verdict": ("Stragglers", "WhatIf"),
}
_LAZY = {name: f"{__package__}.{module}" for module, names in _HOMES.items() for name in names}

__getattr__, __dir__ = lazy_names(__name__, __all__, _LAZY)
