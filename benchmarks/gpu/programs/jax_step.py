"""A jitted JAX step, its loss read every ten."""

import json
import os
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp

width = 4096 if jax.default_backend() == "gpu" else 128
keys = jax.random.split(jax.random.key(0), 4)
weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
state = [jnp.zeros_like(weight) for weight in weights]


@jax.jit
def train_step(weights, state, x):
    def loss_of(weights):
        y = x
        for w in weights:
            y = jax.nn.gelu(y @ w)
        return jnp.mean(y**2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    state = [0.9 * moment + gradient for moment, gradient in zip(state, gradients, strict=True)]
    return [weight - 1e-4 * moment for weight, moment in zip(weights, state, strict=True)], state, loss


x = jax.random.normal(keys[0], (1024, width))
began = 0.0
for number in range(101):
    weights, state, loss = train_step(weights, state, x)
    if number == 1:
        loss.block_until_ready()
        began = time.perf_counter()
    if number % 10 == 0:
        float(loss)
print(json.dumps({"steps": 101, "step_ms": (time.perf_counter() - began) * 10}))
