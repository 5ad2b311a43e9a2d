"""A clock of rank 0 that leaps over the wait for ranks that never report."""

from __future__ import annotations

import time
import types
from typing import Any

from deep500_timing._distributed import connection, exchange


def leap_when_all_are_there(awaited: set[int], deadline_s: float) -> None:
    """Let rank 0, in this process, stop gathering reports once those of the ranks awaited are there.

    So a deadline can be longer than any load delays a rank, and costs no time.

    Args:
        awaited: These ranks are removed once they are there. More may be added for a further round.
        deadline_s: That of a round.
    """
    get_all, leapt_s = exchange.get_all, 0.0

    def watched(*args: Any) -> dict[int, bytes]:
        nonlocal leapt_s
        found = get_all(*args)
        if awaited & found.keys():
            awaited.difference_update(found)
            leapt_s += 0 if awaited else exchange._GATHER_SHARE * deadline_s
        return found

    exchange.get_all = watched  # type: ignore[assignment]
    clock = types.SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + leapt_s)
    exchange.time = connection.time = clock  # type: ignore[attr-defined, assignment]
