"""No framework: time a training loop written in numpy, on the CPU.

Run it with::

    python examples/numpy_only.py
"""

from __future__ import annotations

import numpy as np

import deep500_timing as timer


def main() -> None:
    """Fit a linear model by stochastic gradient descent."""
    random = np.random.default_rng(0)
    features = random.normal(size=(20_000, 64))
    target = features @ random.normal(size=64) + 0.1 * random.normal(size=20_000)
    weights = np.zeros(64)

    # The first two batches of each region are warm-up: caches, lazy imports.
    tmr = timer.Timer(skip_first=2)
    for _ in range(5):
        with tmr.region(timer.TimeType.EPOCH):
            order = random.permutation(len(target))
            for batch in tmr.steps(np.array_split(order, 100)):
                with tmr.region(timer.TimeType.FORWARD):
                    error = features[batch] @ weights - target[batch]
                with tmr.region(timer.TimeType.BACKWARD):
                    weights -= 0.05 * features[batch].T @ error / len(batch)
    tmr.print_all_time_stats()

    forward = tmr.get_time_stats(timer.TimeType.FORWARD)
    print(f"forward: median {forward.median * 1e6:.1f} µs over {forward.count} batches, {forward.skipped} left out")


if __name__ == "__main__":
    main()
