"""Where the time of a small transformer goes that classifies made sentences, and its times in a CSV file by epoch.

The sentences come from a generator, so the wait for data is real; ``log_prefix`` puts each epoch's means next to the
loss, where Keras's own CSVLogger finds them.

Run it with::

    python examples/keras_transformer.py --csv times.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import keras
import numpy as np

import deep500_timing_tensorflow as timer

WORDS, LENGTH, WIDTH, HEADS = 2000, 64, 32, 2


class Positions(keras.layers.Layer):
    """Adds to each word a vector that is learnt for its place."""

    def build(self, shape):
        """Make the vectors."""
        self.places = self.add_weight(shape=(shape[1], shape[2]), initializer="random_normal")

    def call(self, words):
        """Add them."""
        return words + self.places


def make_model() -> keras.Model:
    """One block of attention and a feed-forward layer, each with its residual, then one score."""
    layers = keras.layers
    sentence = keras.Input((LENGTH,), dtype="int32")
    words = Positions()(layers.Embedding(WORDS, WIDTH)(sentence))
    attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(words, words)
    words = layers.LayerNormalization()(words + layers.Dropout(0.1)(attended))
    deeper = layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, activation="relu")(words))
    words = layers.LayerNormalization()(words + layers.Dropout(0.1)(deeper))
    score = layers.Dense(1)(layers.GlobalAveragePooling1D()(words))
    model = keras.Model(sentence, score)
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def made_sentences(batch_size: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of sentences without end; the label says whether low words outnumber high ones by far."""
    random = np.random.default_rng(seed)
    while True:
        labels = random.integers(0, 2, (batch_size, 1))
        share = np.where(labels, 0.6, 0.4)
        low = random.random((batch_size, LENGTH)) < share
        words = np.where(low, random.integers(0, WORDS // 2, low.shape), random.integers(WORDS // 2, WORDS, low.shape))
        yield words.astype("int32"), labels.astype("float32")


def main() -> None:
    """Train, print where the time went and how fast it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="train on few sentences")
    parser.add_argument("--csv", help="where to write losses and times by epoch")
    arguments = parser.parse_args()

    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr, phases=True, log_prefix="time/")
    callbacks = [callback, keras.callbacks.CSVLogger(arguments.csv)] if arguments.csv else [callback]
    history = make_model().fit(
        made_sentences(32, seed=0),
        steps_per_epoch=10 if arguments.quick else 100,
        epochs=arguments.epochs,
        validation_data=made_sentences(32, seed=1),
        validation_steps=5,
        callbacks=callbacks,
        verbose=0,
    )
    print(f"accuracy {history.history['accuracy'][-1]:.3f}")
    means = history.history.get("time/BATCH", [])
    print("mean of BATCH by epoch:", ", ".join(f"{1e3 * seconds:.2f} ms" for seconds in means))
    tmr.print_all_time_stats()
    newest = callback.throughput
    if newest is not None and newest.samples_per_s is not None:
        print(f"newest epoch, steady state: {newest.samples_per_s:.0f} samples/s")


if __name__ == "__main__":
    main()
