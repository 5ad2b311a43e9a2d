"""Time a training loop in plain JAX: data, dispatch, the true time of ten steps, and compilation.

Run it with::

    python examples/jax_loop.py --epochs 2
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import deep500_timing_jax as timer


def loss_of(params, images, labels):
    hidden = jax.nn.relu(images @ params["first"])
    scores = jax.nn.log_softmax(hidden @ params["second"])
    return -scores[jnp.arange(len(labels)), labels].mean()


def train_step(params, images, labels):
    loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, gradients), loss


def batches(images, labels, size):
    for first in range(0, len(images), size):
        yield images[first : first + size], labels[first : first + size]


def main() -> None:
    """Train a small network on random images and print where the time went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    epochs = parser.parse_args().epochs

    random = np.random.default_rng(0)
    images, labels = random.normal(size=(6_450, 64)).astype(np.float32), random.integers(0, 10, 6_450)
    params = {
        "first": 0.1 * jax.random.normal(jax.random.key(0), (64, 256)),
        "second": 0.1 * jax.random.normal(jax.random.key(1), (256, 10)),
    }

    tmr = timer.CPUGPUTimer()
    step = timer.timed_step(jax.jit(train_step), tmr, output=lambda result: result[1])
    with timer.Compilations(tmr) as compilations:
        for _ in range(epochs):
            with tmr.region(timer.TimeType.EPOCH):
                # The last batch is smaller, so the step is compiled twice.
                for inputs, targets in tmr.steps(batches(images, labels, 128)):
                    params, loss = step(params, inputs, targets)
    print(f"loss {float(loss):.3f}")
    tmr.print_all_time_stats()
    tens = tmr.get_time("10 steps", gpu=True)
    print(f"a step takes {sorted(tens)[len(tens) // 2] / 10 * 1e6:.0f} us, by the median of {len(tens)} times 10 steps")
    print(f"compiled more than once: {compilations.recompiled()}")


if __name__ == "__main__":
    main()
