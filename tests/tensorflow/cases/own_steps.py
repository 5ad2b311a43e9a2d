"""Models with their own steps, on each backend, that count how often they are traced."""

from __future__ import annotations

import weakref

import keras


class OwnLoss(keras.Sequential):
    """Counts the calls of its loss: once a batch where it runs as Python, once a trace where it is compiled."""

    calls = 0

    def compute_loss(self, *args, **kwargs):
        """The loss of Keras."""
        self.calls_of[self] = self.calls_of.get(self, 0) + 1
        return super().compute_loss(*args, **kwargs)

    # Not on the model, where Keras tracks attributes, nor by its id, which is used again.
    calls_of = weakref.WeakKeyDictionary()  # noqa: RUF012 -- of the class, on purpose


class OwnStep(keras.Sequential):
    """A step without ``compute_loss``, as in keras.io's guides."""

    def train_step(self, *args):
        """Train on one batch."""
        OwnLoss.calls_of[self] = OwnLoss.calls_of.get(self, 0) + 1
        return {"tensorflow": _on_tensorflow, "torch": _on_torch, "jax": _on_jax}[keras.backend.backend()](self, *args)


def traced(model):
    """How often the step of a model ran as Python."""
    return OwnLoss.calls_of.get(model, 0)


def _on_tensorflow(model, data):
    import tensorflow as tf

    x, y = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    model.optimizer.apply_gradients(
        zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights, strict=True)
    )
    return {"loss": loss}


def _on_torch(model, data):
    import torch

    x, y = data
    model.zero_grad()
    loss = ((model(x, training=True) - y) ** 2).mean()
    loss.backward()
    with torch.no_grad():
        model.optimizer.apply([weight.value.grad for weight in model.trainable_weights], model.trainable_weights)
    return {"loss": loss}


def _on_jax(model, state, data):
    import jax

    x, y = data
    trainable, others, optimizer, metrics = state

    def loss_of(trainable):
        predicted, changed = model.stateless_call(trainable, others, x, training=True)
        return keras.ops.mean((predicted - y) ** 2), changed

    (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
    trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    return {"loss": loss}, (trainable, others, optimizer, metrics)
