"""The layers of a Keras model on its PyTorch backend have their times, as those of any other module."""

from __future__ import annotations

import importlib.util
import json

import pytest
import suite_ranks

pytestmark = pytest.mark.slow

pytest.importorskip("torch")
# Not imported here: that would take the suite's process seconds, on another backend.
if importlib.util.find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

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


def test_layers_of_a_fit_are_timed_step_by_step(forks, tmp_path):
    """Each layer of a nested model has its passes of each step; what Keras calls for the shapes alone is no step."""
    output = tmp_path / "output"
    status = forks.start(["-c", PROGRAM], suite_ranks.environment(KERAS_BACKEND="torch"), output).wait(300)
    assert 0 == status, output.read_text()
    paths, counts, faults, left = json.loads(output.read_text().splitlines()[-1])
    assert (0, []) == (faults, left)
    assert {"Sequential", "first", "inner", "inner.re_lu"} <= set(paths)
    for layer in ("Sequential", "Sequential.first"):
        assert (8, 8, 2) == tuple(counts[f"{layer} {what}"] for what in ("forward", "backward", "evaluation forward"))
