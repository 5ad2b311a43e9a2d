"""Simulated trainings in which one rank or host is late, or none: the times of a timer with regions and collectives.

A step of about 1 s is IO 5 %, FORWARD 30 %, BACKWARD 50 %, the optimizer 8 %, the rest 7 %. Ranks meet once a step, at
the end of BACKWARD. Each rank differs from the others by 1 % in each region. Eight ranks share a host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from deep500_timing._distributed.late import REST, RankSteps

REGIONS = ("BACKWARD", "FORWARD", "IO", "optimizer", REST)
SHARES = np.array([0.50, 0.30, 0.05, 0.08, 0.07])
NOISES = {
    "ar5": "AR(1) 0.5, 3 %",
    "ar9": "AR(1) 0.9, 3 %",
    "heavy": "Student t2",
    "pareto": "Pareto spikes",
    "periodic": "periodic",
    "host": "shared by a host, AR 0.95",
    "lengths": "variable lengths, 25 %",
    "warm-up": "warm-up of 20 steps",
    "apart": "ranks 3 % apart",
}
LONG = ("ar9", "lengths", "apart", "host")
"""Noises that are given 1 000 steps; the others have 300."""
KINDS = ("none", "late", "evaluation", "host late", "now and then")


class World(NamedTuple):
    """One training and the truth about it."""

    steps: RankSteps
    late: tuple[int, ...]
    """The late ranks."""
    region: str | None
    """Where they lose time."""


def correlated(rng: Any, shape: tuple[int, ...], rho: float) -> Any:
    """AR(1) noise along the first axis, of variance 1."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    fresh = np.float32(np.sqrt(1 - rho * rho))
    for step in range(1, len(noise)):
        noise[step] *= fresh
        noise[step] += np.float32(rho) * noise[step - 1]
    return noise


def own_times(rng: Any, noise: str, ranks: int, steps: int) -> Any:
    """Each rank's own times, of shape (steps, ranks, regions)."""
    shape = (steps, ranks, len(REGIONS))
    apart = (0.03 if noise == "apart" else 0.01) * rng.standard_normal(shape[1:])
    if noise in ("ar5", "apart", "warm-up"):
        logs = 0.03 * correlated(rng, shape, 0.5)
        if noise == "warm-up":
            logs[:20] += np.linspace(1.5, 0, 20)[:, None, None] * (1 + 0.3 * rng.random((1, ranks, 1)))
    elif noise == "ar9":
        logs = 0.03 * correlated(rng, shape, 0.9)
    elif noise == "heavy":
        logs = 0.02 * np.clip(rng.standard_t(2, shape), -40, 40)
    elif noise == "pareto":
        spikes = (rng.random(shape, dtype=np.float32) < 0.03) * np.minimum(rng.pareto(1.5, shape), 3.0)
        logs = 0.02 * rng.standard_normal(shape, dtype=np.float32) + spikes
    elif noise == "periodic":
        moment = np.arange(steps)[:, None, None] + rng.integers(0, 60, (1, ranks, 1))
        period = rng.integers(15, 60, (1, ranks, 1))
        logs = 0.02 * rng.standard_normal(shape, dtype=np.float32) + 0.15 * (moment % period == 0)
        logs += 0.02 * np.sin(2 * np.pi * moment / period)
    elif noise == "host":
        shared = np.repeat(0.03 * correlated(rng, (steps, -(-ranks // 8), 1), 0.95), 8, axis=1)[:, :ranks]
        logs = shared + 0.01 * rng.standard_normal(shape, dtype=np.float32)
    elif noise == "lengths":
        logs = 0.02 * rng.standard_normal(shape, dtype=np.float32)
        logs[:, :, :2] += 0.25 * rng.standard_normal((steps, ranks, 1), dtype=np.float32)
    else:
        raise ValueError(f"own_times({noise!r}): the noises are {', '.join(NOISES)}.")
    return SHARES * np.exp(logs + apart)


def seen(own: Any) -> RankSteps:
    """The view of own times: the waits at the end of BACKWARD, and own times with the waits taken off."""
    backward, forward, io, optimizer, rest = range(5)
    after = own[:, :, optimizer] + own[:, :, rest]
    came = own[:, :, backward] + own[:, :, forward] + own[:, :, io]
    came[1:] += after[:-1]
    ranks = own.shape[1]
    return RankSteps(
        ranks=tuple(range(ranks)),
        hosts=tuple(f"host{rank // 8}" for rank in range(ranks)),
        numbers=tuple(range(len(own))),
        regions=REGIONS,
        lateness=came - came.max(axis=1, keepdims=True),
        own=own,
        step_s=float(np.median(came.max(axis=1))),
        met_at="collective operations",
    )


def world(seed: int, noise: str, ranks: int, delay: float, kind: str = "late", *, steps: int | None = None) -> World:
    """A training.

    Args:
        seed: The same world each time.
        noise: One of :data:`NOISES`.
        ranks: How many.
        delay: How late, as a share of a step.
        kind: ``"none"``, ``"late"`` (one rank, drawn, in one region, drawn), ``"evaluation"`` (rank 0 works alone for
            a whole step, every 50 steps), ``"host late"`` (all ranks of one host), ``"now and then"`` (one rank, in
            one of 50 steps).
        steps: Their number; the noise's own if None.
    """
    rng = np.random.default_rng([seed, ranks, list(NOISES).index(noise), KINDS.index(kind), round(delay * 1000)])
    count = steps or (1000 if noise in LONG else 300)
    own = own_times(rng, noise, ranks, count)
    rank, place = int(rng.integers(ranks)), int(rng.integers(len(REGIONS)))
    late: tuple[int, ...] = ()
    if kind == "late":
        own[:, rank, place] += delay
        late = (rank,)
    elif kind == "evaluation":
        own[49::50, 0, 4] += 1.0
    elif kind == "host late":
        first = rank // 8 * 8
        own[:, first : first + 8, place] += delay
        late = tuple(range(first, min(first + 8, ranks)))
    elif kind == "now and then":
        own[:, rank, place] += delay * (rng.random(count) < 0.02)
        late = (rank,)
    return World(seen(own), late, REGIONS[place] if late else None)


def operations_of(steps: RankSteps) -> RankSteps:
    """The same waits, as operations of which nothing else is known, with a transfer of 2 % of a step."""
    from deep500_timing._distributed.late import steps_of_operations

    return steps_of_operations(steps.ranks, 0.02 * steps.step_s - steps.lateness, met_at="collective operations")
