"""Where the time of a small U-Net goes that finds made discs in noise: a network with paths around its middle.

Run it with::

    python examples/keras_unet.py
"""

from __future__ import annotations

import argparse

import keras
import numpy as np

import deep500_timing_tensorflow as timer

SIZE = 64


def made_discs(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy pictures of a disc, and masks of where it is."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    centre = random.integers(16, SIZE - 16, (count, 2, 1, 1))
    radius = random.integers(6, 14, (count, 1, 1))
    masks = ((rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2 < radius**2).astype("float32")[..., None]
    return masks + random.normal(0, 0.5, masks.shape).astype("float32"), masks


def make_model() -> keras.Model:
    """Two steps down, two up, each joined to the earlier features of its size."""
    layers = keras.layers

    def convolve(pictures, channels):
        for _ in range(2):
            pictures = layers.Conv2D(channels, 3, padding="same", activation="relu")(pictures)
        return pictures

    pictures = keras.Input((SIZE, SIZE, 1))
    at_full = convolve(pictures, 8)
    at_half = convolve(layers.MaxPooling2D()(at_full), 16)
    middle = convolve(layers.MaxPooling2D()(at_half), 32)
    back_at_half = layers.Conv2DTranspose(16, 2, strides=2)(middle)
    back_at_half = convolve(layers.Concatenate()([back_at_half, at_half]), 16)
    back_at_full = layers.Conv2DTranspose(8, 2, strides=2)(back_at_half)
    back_at_full = convolve(layers.Concatenate()([back_at_full, at_full]), 8)
    model = keras.Model(pictures, layers.Conv2D(1, 1)(back_at_full))
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def main() -> None:
    """Train, print where the time went and how fast it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="train on few pictures")
    arguments = parser.parse_args()

    pictures, masks = made_discs(64 if arguments.quick else 512)
    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr, phases=True)
    history = make_model().fit(
        pictures,
        masks,
        batch_size=16,
        epochs=arguments.epochs,
        validation_split=0.125,
        callbacks=[callback],
        verbose=0,
    )
    print(f"loss {history.history['loss'][-1]:.3f}")
    tmr.print_all_time_stats()
    newest = callback.throughput
    if newest is not None and newest.samples_per_s is not None:
        print(f"newest epoch, steady state: {newest.samples_per_s:.0f} samples/s")


if __name__ == "__main__":
    main()
