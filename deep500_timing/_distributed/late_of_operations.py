"""Who is late in operations of which nothing is known but how long they took each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._distributed.operation_stragglers import LEAST_OPERATIONS, find_late_rank
from deep500_timing._distributed.verdict import Stragglers, WhatIf

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from deep500_timing._distributed.late import Steps


def steps_of_operations(ranks: tuple[int, ...], durations_s: NDArray[np.float64], *, met_at: str) -> Steps:
    """Operations as steps without regions.

    Args:
        ranks: Those that took part in all of them.
        durations_s: Of shape (operations, ranks), in the order of time.
        met_at: Where they meet, in words.
    """
    import numpy as np

    from deep500_timing._distributed.late import Steps

    return Steps(
        ranks=ranks,
        hosts=("",) * len(ranks),
        numbers=tuple(range(len(durations_s))),
        regions=(),
        lateness=-durations_s,
        own=np.zeros((*durations_s.shape, 0)),
        step_s=0.0,
        met_at=met_at,
    )


def judge_operations(operations: Steps) -> Stragglers:
    """Who is late in them; why cannot be told. See ``operation_stragglers.find_late_rank``."""
    import numpy as np

    durations = -operations.lateness
    verdict = find_late_rank(durations * 1e9)
    if len(operations.ranks) < 2:
        return Stragglers("unknown", reason="there is one rank", operations=verdict)
    late = operations.lateness - np.median(operations.lateness, axis=1, keepdims=True)
    typical = np.median(late, axis=0).tolist() if len(late) else [0.0] * len(operations.ranks)
    kind, reason = "rank", ""
    ranks: tuple[int, ...] = ()
    if verdict.rank is not None:
        ranks = (operations.ranks[verdict.rank],)
    elif verdict.enough:
        kind, reason = "nobody", "chance or jitter explains who came last"
    else:
        kind = "unknown"
        reason = (
            f"{verdict.operations} operations count as {verdict.independent_operations:.0f} independent ones, "
            f"{LEAST_OPERATIONS} are the least"
        )
    return Stragglers(
        kind,
        ranks=ranks,
        lateness_s=verdict.lateness_s,
        last_share=verdict.last_share,
        steps=verdict.operations,
        what_if=WhatIf(verdict.cost_s, verdict.waiting_s),
        reason=reason,
        met_at=operations.met_at,
        operations=verdict,
        lateness=dict(zip(operations.ranks, typical, strict=True)),
    )
