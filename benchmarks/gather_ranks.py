"""What a report of thousands of ranks costs: `python -m benchmarks.gather_ranks --ranks 10000`.

Snapshots are made up: 30 regions from 20 µs to 20 ms, log-normal times, ranks 1 % apart, every fifth region with a slow
mode. They travel through a store in memory that does what TCPStore does, without its network. Times are processor
times of this process.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import numpy as np

from deep500_timing._distributed.gathered import merge_snapshots, pack_snapshot
from deep500_timing._distributed.transport import StoreTransport
from deep500_timing._summary.distribution import Distribution
from deep500_timing._summary.snapshot import RegionTimes, Snapshot
from deep500_timing._summary.stats import stats_of

REGIONS = 30
DIFFERENT = 50
"""Snapshots that are made; ranks beyond send copies of them."""


class Store:
    """A store in memory."""

    def __init__(self) -> None:
        """Empty."""
        self.values: dict[str, bytes] = {}
        self.set = self.values.__setitem__
        self.get = self.values.__getitem__

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Several at once."""
        return [self.values[key] for key in keys]

    def append(self, key: str, value: str) -> None:
        """Add to a value."""
        self.values[key] = self.values.get(key, b"") + value.encode()

    def delete_key(self, key: str) -> bool:
        """Remove one."""
        return self.values.pop(key, None) is not None


def snapshot(rank: int, steps: int, spread: float) -> Snapshot:
    """What a rank has recorded."""
    rng = np.random.default_rng(rank)
    regions = []
    for place, base in enumerate(np.geomspace(2e4, 2e7, REGIONS)):
        times = base * np.exp(rng.normal(0, spread, steps) + rng.normal(0, 0.01))
        if place % 5 == 0:
            times[::17] *= 3
        times_ns = times.astype(np.int64)
        found = RegionTimes(f"region_{place:02}", "CPU", stats_of(times_ns), distribution=Distribution.of(times_ns))
        regions.append(found)
    return Snapshot(tuple(regions), 1.7e9, f"host-{rank // 8:04}", 1000 + rank, rank=rank)


def measure(ranks: int, steps: int, spread: float) -> dict[str, Any]:
    """Gather so many ranks."""
    own = [snapshot(rank, steps, spread) for rank in range(min(DIFFERENT, ranks))]
    made = time.process_time()
    messages = [pack_snapshot(one) for one in own]
    pack_s = (time.process_time() - made) / len(own)
    del own
    store = Store()
    for rank in range(ranks):
        # A copy: no two ranks share their bytes.
        StoreTransport(store, rank, ranks).send("t", 0, bytes(bytearray(messages[rank % len(messages)])))
    begun = time.process_time()
    report = merge_snapshots(StoreTransport(store, 0, ranks).take("t", 0, range(ranks)), range(ranks))
    root_s = time.process_time() - begun
    assert len(report.ranks) == ranks, report.missing
    return {
        "bytes": float(np.mean([len(message) for message in messages])),
        "pack_ms": pack_s * 1e3,
        "root_s": root_s,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Measure, and print a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--spread", type=float, default=0.05)
    chosen = parser.parse_args()
    found = measure(chosen.ranks, chosen.steps, chosen.spread)
    print(
        f"{chosen.ranks} ranks x {REGIONS} regions, {chosen.steps} steps, {chosen.spread:.0%} spread: "
        f"{found['bytes']:.0f} B a rank, packed in {found['pack_ms']:.1f} ms; rank 0 {found['root_s']:.2f} s of "
        f"processor time, {found['memory_mb']:.0f} MB in this process"
    )


if __name__ == "__main__":
    main()
