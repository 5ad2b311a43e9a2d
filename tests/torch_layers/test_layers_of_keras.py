"""The layers of a Keras model on its PyTorch backend have their times, as those of any other module."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("keras")

PROGRAM = """
import json
import keras
import numpy as np
from deep500_timing_torch import CPUGPUTimer
from deep500_timing_torch.layers import LayerTimer

inner = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4), keras.layers.ReLU()], name="inner")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="first"), inner], name="outer")
model.compile("sgd", "mse")
data, labels = np.ones((32, 8), "float32"), np.ones((32, 4), "float32")
timer = CPUGPUTimer("cpu")
with LayerTimer(model, timer, gpu=False) as layers:
    model.fit(data, labels, batch_size=8, epochs=2, verbose=0)
    model.evaluate(data, labels, batch_size=16, verbose=0)
left = [name for layer in layers.layers for name in vars(layer.module) if name == "_compiled_call_impl"]
counts = {region.name: region.stats.count for region in timer.snapshot()}
print(json.dumps([[layer.path for layer in layers.layers], counts, layers.faults, left]))
"""


def test_layers_of_a_fit_are_timed_step_by_step():
    """Each layer of a nested model has its passes of each step; what Keras calls for the shapes alone is no step."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    paths, counts, faults, left = json.loads(done.stdout.splitlines()[-1])
    assert (0, []) == (faults, left)
    assert {"Sequential", "first", "inner", "inner.re_lu"} <= set(paths)
    for layer in ("Sequential", "first"):
        assert (8, 8, 2) == tuple(counts[f"{layer} {what}"] for what in ("forward", "backward", "evaluation forward"))
