"""Public models: training is the same to the bit, a layer's backward pass is its own nodes, and memory is given back.

Models without their package are skipped; ``make test-zoo`` installs them.
"""

from __future__ import annotations

import gc
import importlib.util
import random
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))
from zoo import NEEDS, ZOO, import_torchvision  # noqa: E402

from deep500_timing.testing import ManualClock  # noqa: E402
from deep500_timing_torch import CPUGPUTimer  # noqa: E402
from deep500_timing_torch.layers import LayerTimer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]
NODE_S = 1e-3
"""The time that each autograd node takes on the clock."""
FREED = ["resnet18", "densenet", "swin_timm", "bert", "gpt2", "llama_checkpointed", "t5", "whisper"]
FREED += ["unet2d_diffusers", "sd_unet_diffusers"]
"""Ten models from four packages."""


def made(name):
    """A model in training, its step, and the same random state each time."""
    if NEEDS[name] is not None and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    if NEEDS[name] is not None and importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 -- public models draw from it
    model, step = ZOO[name]()
    model.train()
    torch.manual_seed(1)
    return model, step


def trained(name, *, timed):
    """Everything that two steps leave: losses, gradients, state, random state."""
    model, step = made(name)
    layers = LayerTimer(model).attach() if timed else None
    losses, optimizer = [], None
    for _ in range(2):
        loss = step(model)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    if layers is not None:
        layers.detach()
        times = layers.times()
        assert (0, 0) == (times.faults, times.untimed)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*losses, *gradients, *model.state_dict().values(), torch.get_rng_state()]


class Nodes:
    """Moves a clock by each autograd node that has run, and knows the numbers that each module's calls gave."""

    def __init__(self, model, clock):
        self.clock, self.ran = clock, []
        self.ranges = {}
        for name, module in model.named_modules(remove_duplicate=False):
            if module not in self.ranges:
                self.ranges[module] = calls = []
                module.register_forward_pre_hook(self._begins(calls), with_kwargs=True, prepend=True)
                module.register_forward_hook(self._ends(calls), with_kwargs=True, always_call=True)
            del name

    def _begins(self, calls):
        def hook(*_):
            calls.append([torch.autograd._get_sequence_nr(), None])

        return hook

    def _ends(self, calls):
        def hook(*_):
            open_call = next(call for call in reversed(calls) if call[1] is None)
            open_call[1] = torch.autograd._get_sequence_nr()

        return hook

    def watch(self, loss):
        """Hook every node of a graph."""
        seen, todo = set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node).__name__ != "AccumulateGrad":
                node.register_hook(self._has_run(node._sequence_nr()))
            todo += [following for following, _ in node.next_functions]

    def _has_run(self, number):
        def hook(*_):
            self.clock.advance(NODE_S)
            self.ran.append(number)

        return hook

    def of(self, module):
        """The nodes that the calls of a module made and that have run."""
        total, end = 0, -1
        for began, ended in sorted((began, ended) for began, ended in self.ranges[module] if ended is not None):
            first, end = max(began, end), max(ended, end)
            total += sum(first <= number < end for number in self.ran)
        return total


@pytest.mark.parametrize("name", ZOO)
def test_training_is_the_same_to_the_bit(name):
    """Losses, gradients, weights, statistics and the random state are those of the model without the timer."""
    for without, timed in zip(trained(name, timed=False), trained(name, timed=True), strict=True):
        torch.testing.assert_close(timed, without, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ZOO)
def test_each_layer_has_the_nodes_that_it_made(name):
    """On a clock that moves by one tick a node, each layer's backward time is the number of its nodes."""
    model, step = made(name)
    if "lazy" in name:
        step(model)
    clock = ManualClock()
    nodes = Nodes(model, clock)
    with LayerTimer(model, CPUGPUTimer("cpu", clock=clock)) as layers:
        loss = step(model)
        nodes.watch(loss)
        loss.backward()
    times = layers.times()
    assert (0, 0) == (times.faults, times.untimed)
    measured = {
        layer.path: round((found.total_s("backward") or 0.0) / NODE_S)
        for layer, found in zip(layers.layers, times.layers, strict=True)
    }
    expected = {layer.path: nodes.of(layer.module) for layer in layers.layers}
    assert {path: (count, expected[path]) for path, count in measured.items() if count != expected[path]} == {}


def tensor_bytes():
    """The memory of all tensors that Python can reach, each storage once."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("name", FREED)
def test_memory_after_detach_is_what_it_was(name):
    """A detached model keeps no tensor more than before; dropped, each of its modules and its timer are freed."""
    for _ in range(2):  # The first time, packages fill their caches.
        without = tensor_bytes()
        model, step = made(name)
        before = tensor_bytes()
        assert before > without
        layers = LayerTimer(model).attach()
        for _ in range(2):
            step(model).backward()
        layers.detach()
        assert layers.times().layers[0].total_s("backward") > 0
        model.zero_grad(set_to_none=True)
        after = tensor_bytes()
        alive = [weakref.ref(one) for one in (layers, layers.timer, *model.modules())]
        del model, step, layers
        left = tensor_bytes()
    assert (before, without) == (after, left)
    assert [] == [one() for one in alive if one() is not None]
