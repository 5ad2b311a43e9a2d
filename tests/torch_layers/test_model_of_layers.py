"""Whatever tree of modules there is, times and counts are those of a model of it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
import clocked_work  # noqa: E402
from torch import nn  # noqa: E402

from deep500_timing.testing import ManualClock  # noqa: E402
from deep500_timing_torch import CPUGPUTimer  # noqa: E402
from deep500_timing_torch.layers import LayerTimer  # noqa: E402


class Leaf(nn.Module):
    """Takes its time."""

    def __init__(self, clock, forward_ms, backward_ms, in_place):
        super().__init__()
        self.clock, self.ms, self.in_place = clock, (forward_ms, backward_ms), in_place

    def forward(self, value):
        """Take the time, perhaps change the result in place."""
        value = clocked_work.Work.apply(value, self.clock, *self.ms)
        return value.mul_(1) if self.in_place else value


class Raises(nn.Module):
    """Raises, and is caught by the node around it."""

    def forward(self, value):
        """Raise."""
        raise ArithmeticError


class Node(nn.Module):
    """Calls its inner modules one behind the other, or side by side."""

    def __init__(self, how, inner):
        super().__init__()
        self.how = how
        self.inner = nn.ModuleList(inner)

    def forward(self, value):
        """Call them."""
        if self.how == "beside":
            results = [self._call(module, value) for module in self.inner]
            return torch.stack(results).sum(0)
        for module in self.inner:
            value = self._call(module, value)
        return value

    def _call(self, module, value):
        if isinstance(module, Raises):
            try:
                return module(value)
            except ArithmeticError:
                return value * 1
        return module(value)


times = st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans())
leaves = st.one_of(st.tuples(st.just("leaf"), times), st.tuples(st.just("raises"), st.none()))
trees = st.recursive(
    leaves,
    lambda inner: st.tuples(
        st.sampled_from(["row", "beside"]), st.lists(st.one_of(inner, st.integers(0, 3)), min_size=1, max_size=3)
    ),
    max_leaves=8,
)


def build(tree, clock, made):
    """The modules of a tree; a number stands for a leaf that was made before, shared."""
    kind, content = tree
    if kind == "leaf":
        made.append(Leaf(clock, *content))
        return made[-1]
    if kind == "raises":
        return Raises()
    inner = []
    for one in content:
        if isinstance(one, int):
            inner.append(made[one % len(made)] if made else nn.Identity())
        else:
            inner.append(build(one, clock, made))
    return Node(kind, inner)


def expect(module, calls):
    """Count the calls of each leaf as the tree makes them."""
    if isinstance(module, Leaf):
        calls[module] += 1
    elif isinstance(module, Node):
        for inner in module.inner:
            expect(inner, calls)


@settings(max_examples=60)
@given(tree=trees, steps=st.integers(1, 2))
def test_times_and_counts_are_those_of_the_tree(tree, steps):
    """Each leaf has its own time for each of its calls, forward and backward, and what is within a node adds up."""
    clock = ManualClock()
    model = Node("row", [build(tree, clock, [])])
    timer = CPUGPUTimer("cpu", clock=clock)
    layers = LayerTimer(model, timer)
    with layers:
        for _ in range(steps):
            model(torch.ones(2, requires_grad=True) * 2).sum().backward()
    calls: Counter = Counter()
    expect(model, calls)
    by_module = {layer.module: layer.path for layer in layers.layers}
    for leaf, count in calls.items():
        for purpose, milliseconds in zip(("forward", "backward"), leaf.ms, strict=True):
            expected = [milliseconds / 1e3] * (count * steps)
            assert pytest.approx(expected) == timer.get_time(f"{by_module[leaf]} {purpose}")
    result = layers.times()
    for place, purpose in enumerate(("forward", "backward")):
        whole = sum(leaf.ms[place] * count for leaf, count in calls.items()) * steps / 1e3
        total = result.model.total_s(purpose)
        assert pytest.approx(whole) == (0.0 if total is None else total)
        assert pytest.approx(whole) == sum(layer.self_s.get(purpose, 0.0) for layer in result.layers)
    assert (0, 0) == (layers.faults, layers.untimed)
    raised = sum(region.failed for region in timer.snapshot())
    assert sum(isinstance(module, Raises) for module in _called(model)) * steps == raised


def _called(module):
    yield module
    if isinstance(module, Node):
        for inner in module.inner:
            yield from _called(inner)
