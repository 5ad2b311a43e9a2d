"""Kinds of model and fit on TensorFlow: without the callback, with it, with phases; run by ``test_keras_graphs.py``.

They are tried on Keras 3 and on tf_keras, in a process each.

The last batch of most is smaller than the others, which is where a step may be traced again.
"""

from __future__ import annotations

import functools
import warnings

import numpy as np
import on_tensorflow
import pytest
import tensorflow as tf
from clocks import Moments, ThreadClock, assert_adds_up, keras
from on_tensorflow import counts, failed

import deep500_timing_tensorflow as timer

layers, KERAS_3 = keras.layers, keras.__name__ == "keras"
ROWS, BATCH = 21, 8
random = np.random.default_rng(0)
X, Y = random.random((ROWS, 4), dtype="float32"), random.random((ROWS, 1), dtype="float32")
SERIES, WORDS = random.random((ROWS, 6, 4), dtype="float32"), random.integers(0, 20, (ROWS, 6))


class Subclassed(keras.Model):
    """A model that is written as a class."""

    def __init__(self):
        """Two layers."""
        super().__init__()
        self.hidden, self.out = layers.Dense(8, activation="relu"), layers.Dense(1)

    def call(self, x):
        """The prediction."""
        return self.out(self.hidden(x))


class Ragged(keras.Model):
    """A model of sequences of unequal length."""

    def __init__(self):
        """An embedding and a layer."""
        super().__init__()
        self.embedding, self.out = layers.Embedding(20, 4), layers.Dense(1)

    def call(self, x):
        """The prediction."""
        dense = x.to_tensor() if isinstance(x, tf.RaggedTensor) else x
        return self.out(tf.reduce_mean(self.embedding(dense), axis=1))


class Persistent(keras.Model):
    """A step with a persistent tape and unconnected gradients."""

    def train_step(self, data):
        """Train on one batch."""
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        del tape
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


def stepping(like):
    """A class of models with the step of one of Keras 3."""
    return type(like.__name__, (keras.Model,), {"train_step": like.train_step})


class Batches(keras.utils.PyDataset if KERAS_3 else keras.utils.Sequence):
    """The data batch by batch, made by two threads."""

    def __len__(self):
        """How many batches."""
        return 3

    def __getitem__(self, index):
        """One of them."""
        return X[index * BATCH : (index + 1) * BATCH], Y[index * BATCH : (index + 1) * BATCH]


def dense(model_class=keras.Model):
    """Two layers, by the functional interface."""
    inputs = keras.Input((4,))
    return model_class(inputs, layers.Dense(1)(layers.Dense(8, activation="relu")(inputs)))


def recurrent():
    """A recurrent layer; on tf_keras two functions, of which TensorFlow chooses one."""
    inputs = keras.Input((6, 4))
    return keras.Model(inputs, layers.Dense(1)(layers.LSTM(4)(inputs)))


def embedding():
    """Rows of a table, with sparse gradients."""
    inputs = keras.Input((6,), dtype="int32")
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(layers.Embedding(20, 5)(inputs))))


def noisy():
    """Dropout and batch normalization: random state and statistics of a batch."""
    inputs = keras.Input((4,))
    return keras.Model(
        inputs, layers.Dense(1)(layers.Dropout(0.3)(layers.BatchNormalization()(layers.Dense(8)(inputs))))
    )


def several():
    """Two inputs and two outputs."""
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    joined = layers.Concatenate()([a, b])
    return keras.Model(
        {"a": a, "b": b}, {"one": layers.Dense(1, name="one")(joined), "two": layers.Dense(2, name="two")(joined)}
    )


@functools.cache
def dataset():
    """The data as TensorFlow's."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def generator():
    """Batches without end, as a Python generator."""
    while True:
        yield X[:BATCH], Y[:BATCH]


def arrays():
    """The data as arrays."""
    return {"x": X, "y": Y, "batch_size": BATCH}


def tensors(x=X, y=Y):
    """The data as TensorFlow's, for those kinds that are not about data: of arrays Keras makes a graph for each fit."""
    return {"x": dataset() if x is X and y is Y else tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)}


def ragged():
    """Sequences of unequal length."""
    return tensors(tf.ragged.constant([[1, 2], [3], [4, 5, 6]] * 7))


# The model, its compilation and its data; by SGD, which is traced in a fraction of Adam's time.
KINDS = {
    "arrays": (dense, {"optimizer": lambda: "adam"}, arrays),
    "validation every second epoch": (
        dense,
        {},
        lambda: {**tensors(), "validation_data": dataset(), "validation_freq": 2},
    ),
    "sample weights": (dense, {}, lambda: {**arrays(), "sample_weight": np.full(ROWS, 0.5, "float32")}),
    "class weights": (dense, {}, lambda: {**arrays(), "y": (Y > 0.5).astype(int), "class_weight": {0: 1.0, 1: 3.0}}),
    "generator": (dense, {}, lambda: {"x": generator(), "steps_per_epoch": 3}),
    "endless dataset": (dense, {}, lambda: {"x": dataset().repeat().prefetch(2), "steps_per_epoch": 3}),
    "PyDataset with workers": (dense, {}, lambda: {"x": Batches(workers=2)} if KERAS_3 else {"x": Batches()}),
    "eager": (dense, {"run_eagerly": True}, tensors),
    "two steps per execution": (dense, {"steps_per_execution": 2}, tensors),
    "two of an endless dataset": (
        dense,
        {"steps_per_execution": 2},
        lambda: {"x": dataset().repeat(), "steps_per_epoch": 4},
    ),
    "subclassed": (Subclassed, {}, tensors),
    "recurrent": (recurrent, {}, lambda: tensors(SERIES)),
    "embedding": (embedding, {"optimizer": lambda: "adam"}, lambda: tensors(WORDS)),
    "dropout and normalization": (noisy, {}, tensors),
    "several inputs and outputs": (
        several,
        {"loss": {"one": "mse", "two": "mae"}},
        lambda: tensors({"a": X, "b": X}, {"one": Y, "two": np.concatenate([Y, Y], 1)}),
    ),
    "ragged": (Ragged, {}, ragged),
    "accumulation": (dense, {"optimizer": lambda: keras.optimizers.SGD(gradient_accumulation_steps=2)}, tensors),
    "loss scaling": (
        dense,
        {"optimizer": lambda: keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**127)},
        tensors,
    ),
    "gradient penalty": (lambda: dense(stepping(on_tensorflow.GradientPenalty)), {}, tensors),
    "persistent tape": (lambda: dense(Persistent), {}, tensors),
    "two targets": (lambda: dense(stepping(on_tensorflow.TwoTargets)), {}, tensors),
    "own step without Keras": (lambda: dense(stepping(on_tensorflow.OwnEverything)), {}, tensors),
    "XLA": (dense, {"jit_compile": True}, tensors),
    "averaged weights": (
        dense,
        {"optimizer": lambda: keras.optimizers.SGD(use_ema=True, clipnorm=0.1, momentum=0.9)},
        tensors,
    ),
}
if not KERAS_3:
    del KINDS["accumulation"]  # Keras 2 has none.
WITHOUT_PHASES = {"gradient penalty", "XLA"}
# Kinds of model, of which a callback without phases sees nothing: it sees the data and the calls of the train function.
OF_MODELS = [*KINDS][[*KINDS].index("subclassed") :]
OF_MODELS.remove("XLA")


@pytest.fixture
def tapes(monkeypatch):
    """How many tapes were opened while a function was traced: one a trace, or two."""
    opened = [0]
    original = tf.GradientTape.__init__

    def init(tape, *args, **kwargs):
        opened[0] += tf.inside_function()
        original(tape, *args, **kwargs)

    monkeypatch.setattr(tf.GradientTape, "__init__", init)
    return opened


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind, tapes):
    """Weights, history, traces, the next fit's too, are those without the callback, and an epoch adds up."""
    # That IO or phases are left out is said elsewhere.
    warnings.simplefilter("ignore", timer.TimingWarning)
    build, compiling, fitting = KINDS[kind]
    found = []
    for mode in (None, {"phases": True}) if kind in OF_MODELS or not KERAS_3 else (None, {}, {"phases": True}):
        keras.utils.set_random_seed(3)
        model = build()
        optimizer = compiling.get("optimizer", lambda: "sgd")()
        model.compile(**{"loss": "mse", **compiling, "optimizer": optimizer})
        # Stamps in a graph are of the system's clock, and are left out next to another.
        clock = ThreadClock()
        tmr = timer.Timer(clock=None if mode else clock)
        first, last = Moments(clock), Moments(clock)
        callbacks = [] if mode is None else [first, timer.TimerCallback(tmr, **mode), last]
        keras.utils.set_random_seed(5)
        tapes[0] = 0
        made = model.fit(**fitting(), epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        traced, weights = tapes[0], model.get_weights()
        model.fit(**fitting(), epochs=1, shuffle=False, verbose=0)
        found.append((traced, tapes[0], made.history))
        if mode is None:
            expected = weights
            continue
        callback = callbacks[1]
        for without, with_callback in zip(expected, weights, strict=True):
            np.testing.assert_array_equal(without, with_callback)
        regions = counts(tmr)
        batches = 8 if "steps_per_epoch" in fitting() and "two" in kind else 6
        assert batches == callback.batches
        if not mode:
            assert_adds_up(tmr, first, last, batches, "tensorflow")
        if "phases" in mode and kind not in WITHOUT_PHASES:
            assert batches == regions["FORWARD"] == regions["BACKWARD"]
        assert not failed(tmr)
    assert (found[0][0] > 0) == (not compiling.get("run_eagerly", False))
    for with_callback in found[1:]:
        np.testing.assert_equal(found[0], with_callback)
