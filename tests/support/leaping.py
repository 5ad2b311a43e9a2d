"""A clock of rank 0 that leaps over the wait for ranks that never report."""

from __future__ import annotations

import time
import types
from typing import Any

from deep500_timing._distributed import connection, exchange
from deep500_timing.ranks import StoreTransport


def leap_when_all_are_there(awaited: set[int], deadline_s: float) -> None:
    """Let rank 0, in this process, stop gathering reports once the ranks awaited have confirmed theirs.

    So a deadline can be longer than any load delays a rank, and costs no time.

    Args:
        awaited: These ranks are removed once they are there. More may be added for a further round.
        deadline_s: That of a round.
    """
    take, leapt_s = StoreTransport.take, 0.0

    def watched(*args: Any) -> dict[int, bytes]:
        nonlocal leapt_s
        found = take(*args)
        confirmed = {rank for rank, raw in found.items() if "confirms" in exchange.unframe(raw)[0]}
        if confirmed & awaited:
            awaited.difference_update(confirmed)
            leapt_s += 0 if awaited else exchange._GATHER_SHARE * deadline_s
        return found

    StoreTransport.take = watched  # type: ignore[method-assign, assignment]
    clock = types.SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + leapt_s)
    exchange.time = connection.time = clock  # type: ignore[attr-defined, assignment]
