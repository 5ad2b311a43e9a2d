"""Waiting for TensorFlow's GPUs, the only way to order anything with its kernels."""

from __future__ import annotations

import sys
from typing import Any

from deep500_timing import DeviceUnavailableError, TimingError

_gpus: list[str] = []


def local_gpus(tf: Any) -> list[str]:
    """The names of the GPUs that TensorFlow uses in this process; asking makes it claim them."""
    if not _gpus:
        _gpus.extend(device.name for device in tf.config.list_logical_devices("GPU"))
    return _gpus


def synchronize_tensorflow() -> None:
    """Wait until TensorFlow's local GPUs have done what they were given; returns at once if it is not imported.

    ``tf.test.experimental.sync_devices`` raises under strategies of several workers, the raw operation does not.

    Raises:
        DeviceUnavailableError: TensorFlow sees no GPU, so no time on a GPU is a time of its work.
        TimingError: The caller is being traced into a graph, where the wait would become a part of the graph.
    """
    tf: Any = sys.modules.get("tensorflow")
    if tf is None or not hasattr(tf, "raw_ops"):
        return
    if not tf.executing_eagerly():
        raise TimingError(
            "Timing a region on the GPU inside a tf.function: it runs when the graph is traced, not when it executes. "
            "Time the call of the function from outside, or wrap the step with timed_step."
        )
    gpus = local_gpus(tf)
    if not gpus:
        raise DeviceUnavailableError(
            "CuPy finds a GPU and TensorFlow does not, so TensorFlow's work runs on the CPU and has no GPU times. "
            "Install TensorFlow with its GPU libraries: pip install 'tensorflow[and-cuda]'."
        )
    for gpu in gpus:
        with tf.device(gpu):
            tf.raw_ops.SyncDevice()
