"""Where the time of a small convolutional network goes, on made pictures of the size of MNIST's digits.

Run it with::

    python examples/keras_convnet.py
    KERAS_BACKEND=torch python examples/keras_convnet.py
"""

from __future__ import annotations

import argparse

import keras
import numpy as np

import deep500_timing_tensorflow as timer


def made_pictures(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of 28 by 28 with a bright bar, and which of ten places it is at."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, count)
    pictures = random.random((count, 28, 28, 1), dtype="float32") / 2
    for place in range(10):
        pictures[labels == place, :, 2 * place + 4 : 2 * place + 7] += 0.5
    return pictures, labels


def make_model() -> keras.Model:
    """Two rounds of convolution and pooling, then ten classes."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def main() -> None:
    """Train, print where the time went and how fast it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="train on few pictures")
    arguments = parser.parse_args()

    pictures, labels = made_pictures(640 if arguments.quick else 6400)
    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr, phases=True)
    history = make_model().fit(
        pictures,
        labels,
        batch_size=128,
        epochs=arguments.epochs,
        validation_split=0.1,
        callbacks=[callback],
        verbose=0,
    )
    print(f"accuracy {history.history['accuracy'][-1]:.3f}")
    tmr.print_all_time_stats()
    newest = callback.throughput
    if newest is not None and newest.samples_per_s is not None:
        print(f"newest epoch, steady state: {newest.samples_per_s:.0f} samples/s")


if __name__ == "__main__":
    main()
