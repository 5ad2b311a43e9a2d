"""A run in a row of numbers: its speed, and the shares of training, waiting and communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deep500_timing._base.names import BATCH, IO
from deep500_timing._views.findings._account import account_of
from deep500_timing._views.findings._evidence import percent
from deep500_timing._views.findings._ranks import communication_of

if TYPE_CHECKING:
    from deep500_timing._views.findings._evidence import Evidence, Steps

_SAMPLES = "throughput.samples_per_s"
_PAUSE = 4.0
"""Times the median from which on the time between two steps is a pause, and no part of the speed."""


def summary_of(evidence: Evidence) -> list[tuple[str, str]]:
    """Names and values; unknown values are left out."""
    found = []
    if evidence.steady is not None and (speed := steps_per_s(evidence.steady)) is not None:
        found.append(("steps a second, in the steady state", f"{speed:.3g}"))
    rates = [values for (_, metric, _), (_, values) in evidence.samples.items() if metric == _SAMPLES]
    if rates:
        found.append(("samples a second, all ranks", f"{sum(float(np.median(values)) for values in rates):.4g}"))
    account, step = account_of(evidence), evidence.step_node
    if account.whole_s and account.training_s:
        found.append(("of the run is training", percent(account.training_s / account.whole_s)))
    if step is not None and step.total_s:
        waits = [node for node in evidence.tree.named(IO) if BATCH in node.path[:-1] or node.parent == step.parent]
        if waits and account.training_s:
            waiting = sum(node.total_s or 0.0 for node in waits) / account.training_s
            found.append(("of training waits for data", percent(min(waiting, 1.0))))
        communication = communication_of(evidence)
        if communication is not None:
            share = communication.exposed_s / step.total_s
            found.append((f"of {BATCH} communicates", percent(share * communication.transfer_share)))
            if communication.is_compared:
                found.append((f"of {BATCH} waits for other ranks", percent(share * (1 - communication.transfer_share))))
    return found


def steps_per_s(steps: Steps) -> float | None:
    """The speed without pauses such as validations; None of fewer than two steps."""
    between = np.diff(steps.starts_s)
    between = between[(between > 0) & (np.diff(steps.sessions) == 0)]
    if not len(between):
        return None
    return float(1 / between[between <= _PAUSE * np.median(between)].mean())
