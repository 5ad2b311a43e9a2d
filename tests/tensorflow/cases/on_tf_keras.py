"""Cases of tf_keras, Keras 2 on TensorFlow, with the callback of Keras 3 as well; run by ``test_keras_graphs.py``."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import deep500_timing_tensorflow as timer
from deep500_timing_tensorflow import _data


class OwnStep(tf_keras.Model):
    """A train step of the user's own."""

    def train_step(self, data):
        """Train on one batch."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def make_model(model_class=tf_keras.Model, **compiling):
    """A model of two layers, the same each time; by SGD, which is traced in a fraction of Adam's time."""
    tf_keras.utils.set_random_seed(7)
    inputs = tf_keras.Input((4,))
    model = model_class(inputs, tf_keras.layers.Dense(1)(tf_keras.layers.Dense(8, activation="relu")(inputs)))
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiling})
    return model


def counts(tmr):
    """How often each region was timed, and that none is left open."""
    snapshot = tmr.snapshot()
    assert [] == [region.name for region in snapshot if region.running]
    return {region.name: region.stats.count for region in snapshot if region.stats is not None}


@pytest.mark.parametrize("model_class", [tf_keras.Model, OwnStep])
@pytest.mark.parametrize("steps", [1, 2])
def test_fit(data, model_class, steps):
    """Fits, epochs, batches, passes and validations are counted, and the weights are those without the callback."""
    weights = []
    tmr = timer.Timer()
    for callbacks in (
        [],
        [timer.TimerCallback(tmr, io=False)],
        [timer.TimerCallback(tmr, io=True, phases=True, log_prefix="t/")],
    ):
        model = make_model(model_class, optimizer="adam", steps_per_execution=steps)
        made = model.fit(
            *data, batch_size=8, epochs=3, validation_data=data, callbacks=callbacks, verbose=0, shuffle=False
        )
        weights.append(model.get_weights())
        assert not {"train_step", "compute_loss"} & set(vars(model))
    assert 3 == len(made.history["t/EPOCH"])
    found = counts(tmr)
    assert (2, 6, 6) == (found["FIT"], found["EPOCH"], found["VALIDATION"])
    assert 2 * 3 * -(-5 // steps) == found["BATCH"]
    assert 15 == found["FORWARD"] == found["BACKWARD"]
    for with_callback in weights[1:]:
        for expected, actual in zip(weights[0], with_callback, strict=True):
            np.testing.assert_array_equal(expected, actual)


def test_wait_for_data_is_timed(data):
    """tf_keras fetches inside its compiled function, and tf.data tells how long it waited."""
    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr)
    make_model().fit(*data, batch_size=8, epochs=2, callbacks=[callback], verbose=0)
    assert (10, 10) == (counts(tmr)["IO"], callback.batches)
    assert 40 == callback.throughput.epoch_samples


def test_traces_are_those_of_a_fit_without_the_callback(data):
    """A smaller last batch is traced as often with the callback as without it, in its fit and in the next."""
    found = []
    for callbacks in ([], [timer.TimerCallback(timer.Timer())], [timer.TimerCallback(timer.Timer(), phases=True)]):
        model = make_model(OwnStep)
        numbers = []
        for fit_callbacks in (callbacks, []):
            model.fit(
                data[0][:37], data[1][:37], batch_size=8, epochs=2, callbacks=fit_callbacks, verbose=0, shuffle=False
            )
            numbers.append(model.train_tf_function.experimental_get_tracing_count())
        found.append((numbers, [weight.tolist() for weight in model.get_weights()]))
    assert found[0] == found[1] == found[2]


def test_broken_off_fit_and_the_next(data, monkeypatch):
    """A fit that raises has the batches until then, leaves the model as it was, and the next is timed in full."""

    class Raising(tf_keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(_data, "_FIRST_ONES", 1)
    for name in ("READ_AFTER_NS", "READ_EACH_NS", "WAITS_NS"):
        monkeypatch.setattr(_data, name, math.inf)
    tmr = timer.Timer()
    model, callback = make_model(), timer.TimerCallback(tmr, phases=True)
    with pytest.raises(KeyboardInterrupt) as raised:
        model.fit(*data, batch_size=8, callbacks=[callback, Raising()], verbose=0)
    assert 1 == tmr.snapshot().get("FIT").running
    callback.set_model(model)
    assert (1, 0) == (tmr.snapshot().get("FIT").failed, tmr.snapshot().get("FIT").running)
    assert raised.tb is not None  # It keeps the frame of the fit.
    assert (2, 2 * 8) == (callback.throughput.epoch_steps, callback.throughput.epoch_samples)
    model.fit(*data, batch_size=8, callbacks=[callback], verbose=0)
    found = counts(tmr)
    assert (1, 7) == (found["FIT"], found["BATCH"])
    assert 1 == tmr.snapshot().get("FIT").failed
