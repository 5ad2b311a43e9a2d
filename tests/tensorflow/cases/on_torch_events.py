"""Keras on torch with the torch adapter's timer, on the test accelerator: ``test_keras.py`` runs them.

The device's clock stands still until it is moved, so the times are exact.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import torch

import deep500_timing_tensorflow as timer
import deep500_timing_torch

FORWARD_NS, BACKWARD_NS = 5_000_000, 7_000_000


@pytest.fixture
def dev():
    """The controls of the test accelerator; skips where it cannot be built."""
    path = Path(__file__).parents[2] / "torch_device" / "__init__.py"
    if "torch_device" not in sys.modules:
        spec = importlib.util.spec_from_file_location("torch_device", path)
        sys.modules["torch_device"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    device = sys.modules["torch_device"].load_or_skip()
    device.reset()
    yield device
    device.reset()


def test_passes_are_timed_by_torchs_events_without_waiting(dev, data):
    """FORWARD and BACKWARD are the work that each launched on the device, and nothing synchronizes."""

    class Launches(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            dev.launch(FORWARD_NS)
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            dev.launch(BACKWARD_NS)
            return gradient

    class Layer(keras.layers.Layer):
        def call(self, x):
            return Launches.apply(x)

    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(Layer()(keras.layers.Dense(3)(inputs))))
    model.compile("sgd", "mse")
    dev.advance(10 * FORWARD_NS)  # What Keras launched to learn the layers' shapes.
    dev.reset_counters()
    tmr = deep500_timing_torch.CPUGPUTimer()

    class Device(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            dev.advance(FORWARD_NS + BACKWARD_NS)

    callbacks = [timer.TimerCallback(tmr, gpu=True, phases=True), Device()]
    model.fit(*data, batch_size=8, epochs=3, callbacks=callbacks, verbose=0)
    counters = dev.counters()
    assert 0 == counters.event_synchronizes + counters.stream_synchronizes + counters.device_synchronizes
    np.testing.assert_allclose(tmr.get_time("FORWARD", gpu=True), [FORWARD_NS / 1e9] * 14)
    np.testing.assert_allclose(tmr.get_time("BACKWARD", gpu=True), [BACKWARD_NS / 1e9] * 14)
    assert 15 == len(tmr.get_time("BATCH", gpu=True))


def test_compilations_of_dynamo_are_kept_apart(monkeypatch):
    """Executions in which ``torch.compile`` was at work, the first and any later one, are not in the steady state."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # Inductor takes minutes.
    compiled = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.before = int(torch._dynamo.utils.counters["frames"]["total"])

        def on_train_batch_end(self, batch, logs=None):
            compiled.append(int(torch._dynamo.utils.counters["frames"]["total"]) > self.before)

    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    tmr = timer.Timer()
    x, y = np.ones((37, 4), "float32"), np.ones((37, 1), "float32")
    model.fit(x, y, batch_size=8, epochs=2, callbacks=[timer.TimerCallback(tmr), Looks()], verbose=0)
    assert True in compiled
    assert (sum(compiled), 10) == (len(tmr.get_time("compile")), len(tmr.get_time("BATCH")))
