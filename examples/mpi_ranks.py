"""One report of all ranks under MPI, without a framework.

Each rank fits a linear model to its part of the data, and sums the gradients with the others; the last rank takes
longer for them. Run it with::

    mpirun -n 2 python examples/mpi_ranks.py

It needs ``pip install 'deep500-timing[mpi]'`` and an MPI, such as Debian's ``openmpi-bin``.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

import deep500_timing as timer
from deep500_timing.ranks import MpiTransport, gather

SLOW_S = 0.01


def main() -> None:
    """Fit, and say how the ranks did."""
    transport = MpiTransport()  # made by all ranks together, as it has a communicator of its own
    rank, world_size = transport.rank, transport.world_size
    random = np.random.default_rng(rank)
    features = random.normal(size=(2_000, 64))
    target = features @ np.arange(64)
    weights = np.zeros(64)

    tmr = timer.Timer(skip_first=2)
    for _ in range(40):
        with tmr.region(timer.TimeType.BATCH):
            with tmr.region(timer.TimeType.IO):
                batch = random.integers(0, len(target), 256)
            with tmr.region(timer.TimeType.FORWARD):
                error = features[batch] @ weights - target[batch]
            with tmr.region(timer.TimeType.BACKWARD):
                if rank == world_size - 1:
                    time.sleep(SLOW_S)
                gradient = features[batch].T @ error / len(batch)
            with tmr.region(timer.TimeType.COMM):
                MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, gradient)
            weights -= 0.02 * gradient / world_size

    report = gather(tmr.snapshot(), transport=transport)  # rank 0 waits for the others, at most 10 s; they go on
    if report is not None:
        for region in (timer.TimeType.BACKWARD, timer.TimeType.COMM):
            of = report.get(region)
            low, high = of.over_ranks["median"].min, of.over_ranks["median"].max
            print(f"{of.name} of {len(report.ranks)} ranks: median {of.stats.median * 1e3:.2f} ms, ", end="")
            print(f"by rank {low * 1e3:.2f} to {high * 1e3:.2f} ms, longest on rank {of.over_ranks['median'].max_rank}")
        print(f"missing: {', '.join(map(str, report.missing)) or 'none'}")
    MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    main()
