"""Time a training loop as MaxText writes it: sharded state that is donated, evaluation, checkpoints, late metrics.

The batch is split over all devices. Metrics are read one step late, so that reading them does not stop the dispatch.

Run it with::

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_sharded_loop.py --steps 120
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import deep500_timing_jax as timer

VOCABULARY, WIDTH, LENGTH = 256, 64, 32


def make_state(random):
    shapes = {"embed": (VOCABULARY, WIDTH), "hidden": (WIDTH, 4 * WIDTH), "out": (4 * WIDTH, VOCABULARY)}
    params = {name: 0.02 * jax.random.normal(random, shape) for name, shape in shapes.items()}
    return {"step": jnp.zeros((), jnp.int32), "params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}


def loss_of(params, tokens):
    hidden = jax.nn.gelu(params["embed"][tokens[:, :-1]] @ params["hidden"])
    scores = jax.nn.log_softmax(hidden @ params["out"])
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()


def train_step(state, tokens):
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], tokens)
    momentum = jax.tree.map(lambda old, new: 0.9 * old + new, state["momentum"], gradients)
    params = jax.tree.map(lambda weight, change: weight - 0.1 * change, state["params"], momentum)
    return {"step": state["step"] + 1, "params": params, "momentum": momentum}, {"loss": loss}


def batches(steps, sharding, seed):
    random = np.random.default_rng(seed)
    for _ in range(steps):
        yield jax.device_put(random.integers(0, VOCABULARY, (16, LENGTH + 1)), sharding)


def main() -> None:
    """Train a small model on random tokens and print where the time went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps

    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    state = jax.device_put(make_state(jax.random.key(0)), everywhere)

    tmr = timer.CPUGPUTimer()
    jitted = partial(jax.jit, in_shardings=(everywhere, split))
    # The state is donated, so the timer waits for the loss.
    step = timer.timed_step(jitted(train_step, donate_argnums=0), tmr, output=lambda result: result[1]["loss"])
    evaluate = jitted(lambda state, tokens: loss_of(state["params"], tokens))
    previous, losses = None, []
    with timer.Compilations(tmr) as compilations:
        for number, tokens in enumerate(tmr.steps(batches(steps, split, seed=1))):
            state, metrics = step(state, tokens)
            if previous is not None:
                with tmr.region("logging"):
                    losses.append(float(previous["loss"]))
            previous = metrics
            if number % 50 == 49:
                with tmr.region("VALIDATION"):
                    held_out = [float(evaluate(state, tokens)) for tokens in batches(4, split, seed=2)]
                with tmr.region("CHECKPOINT"):
                    np.savez("state.npz", **jax.device_get(state["params"]))
                print(f"step {number + 1}: loss {losses[-1]:.3f}, held out {sum(held_out) / len(held_out):.3f}")
                step.restart()  # what came between is no part of the next 10 steps

    tmr.print_all_time_stats()
    tens = sorted(tmr.get_time("10 steps", gpu=True))
    if tens:
        print(f"a step takes {tens[len(tens) // 2] / 10 * 1e6:.0f} us, by the median of {len(tens)} times 10 steps")
    print(f"on {len(jax.devices())} devices; compiled: {dict(compilations.counts)}")


if __name__ == "__main__":
    main()
