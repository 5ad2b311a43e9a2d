"""Simulated trainings in which one rank is late, or none: what a timer with regions and collectives would see.

A step is IO 10 %, FORWARD 30 %, BACKWARD 46 %, COMM 6 %, the rest (the host) 8 %. Ranks meet twice: at the end of
BACKWARD, whose time holds the wait, and in COMM after what each does there by itself. Own times are log-normal about
their share: autocorrelated (AR(1), 0.5) with 3 %, spikes (exponential, half the region's time on average) on 2 % of the
steps, and 1 % between ranks, drawn anew for each rank and region. The late rank takes a fixed time longer in one place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deep500_timing._distributed.late import REST, Steps

STEPS = 200
PLACES = ("IO", "FORWARD", "BACKWARD", "COMM", REST)
SHARES = np.array([0.10, 0.30, 0.46, 0.06, 0.08])
SPREAD, CORRELATION, SPIKES, SPIKE, BETWEEN = 0.03, 0.5, 0.02, 0.5, 0.01


def own_times(rng: Any, ranks: int, steps: int) -> Any:
    """Each rank's own times in steps of about 1 s, of shape (steps, ranks, places)."""
    shape = (steps, ranks, len(PLACES))
    noise = rng.standard_normal(shape, dtype=np.float32)
    for step in range(1, steps):
        noise[step] = CORRELATION * noise[step - 1] + np.sqrt(1 - CORRELATION**2) * noise[step]
    logs = SPREAD * noise + BETWEEN * rng.standard_normal(shape[1:])
    logs += (rng.random(shape, dtype=np.float32) < SPIKES) * rng.exponential(SPIKE, shape)
    return SHARES * np.exp(logs)


def seen(own: Any) -> Steps:
    """What is seen of own times: waits where ranks meet, and regions with the waits inside them taken off."""
    io, forward, backward, comm, rest = range(5)
    # Since they met in COMM: the rest of the step before, IO, FORWARD, BACKWARD.
    before = np.concatenate((np.zeros_like(own[:1, :, rest]), own[:-1, :, rest]))
    first = before + own[:, :, io] + own[:, :, forward] + own[:, :, backward]
    second = own[:, :, comm]
    waits = (first.max(axis=1, keepdims=True) - first, second.max(axis=1, keepdims=True) - second)
    length = float(np.median(first.max(axis=1) + second.max(axis=1)))
    ranks = own.shape[1]
    return Steps(
        ranks=tuple(range(ranks)),
        hosts=tuple(f"host{rank // 8}" for rank in range(ranks)),
        numbers=tuple(range(len(own))),
        regions=PLACES,
        lateness=-(waits[0] + waits[1]),
        own=own,
        step_s=length,
        met_at="BACKWARD and COMM",
    )


def world(seed: int, ranks: int, delay: float, *, steps: int = STEPS) -> tuple[Steps, int, str]:
    """A training, which rank is late by ``delay`` (a share of a step), and where; nobody is if that is 0."""
    rng = np.random.default_rng([seed, ranks, round(delay * 1000)])
    own = own_times(rng, ranks, steps)
    rank, place = int(rng.integers(ranks)), int(rng.integers(len(PLACES)))
    own[:, rank, place] += delay
    return seen(own), rank, PLACES[place]
