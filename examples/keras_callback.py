"""Time `model.fit` with a callback, on any backend of Keras.

Run it with::

    python examples/keras_callback.py
"""

from __future__ import annotations

import argparse

import keras
from sklearn.datasets import load_digits

import deep500_timing_tensorflow as timer


def main() -> None:
    """Fit a small network on scikit-learn's digits and print where the time went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    digits = load_digits()
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Conv2D(16, 3), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    tmr = timer.CPUGPUTimer()
    model.fit(
        digits.images[..., None] / 16,
        digits.target,
        batch_size=64,
        epochs=arguments.epochs,
        validation_split=0.2,
        verbose=0,
        callbacks=[timer.TimerCallback(tmr)],
    )
    tmr.print_all_time_stats()


if __name__ == "__main__":
    main()
