"""For any tree of modules, times and counts are those of a model of it."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
import clocked_work  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from deep500_timing.testing import ManualClock  # noqa: E402
from deep500_timing_torch import CPUGPUTimer  # noqa: E402
from deep500_timing_torch.layers import LayerTimer  # noqa: E402

CHECKPOINTS = ("checkpoint", "reentrant checkpoint")


class Leaf(nn.Module):
    """Keeps its factors for its backward pass, then takes its time."""

    def __init__(self, clock, forward_ms, backward_ms, in_place):
        super().__init__()
        self.clock, self.ms, self.in_place = clock, (forward_ms, backward_ms), in_place
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, value):
        """Take the time, perhaps change the result in place."""
        value = clocked_work.Work.apply(value * self.weight, self.clock, *self.ms)
        return value.mul_(1) if self.in_place else value


class Raises(nn.Module):
    """Raises, and is caught by the node around it."""

    def forward(self, value):
        """Raise."""
        raise ArithmeticError


class Node(nn.Module):
    """Calls its inner modules one behind the other, side by side, or in an activation checkpoint."""

    def __init__(self, how, inner):
        super().__init__()
        self.how = how
        self.inner = nn.ModuleList(inner)

    def forward(self, value):
        """Call them."""
        if self.how == "beside":
            results = [self._call(module, value) for module in self.inner]
            return torch.stack(results).sum(0)
        if self.how in CHECKPOINTS:
            return checkpoint(self._row, value, use_reentrant=self.how == "reentrant checkpoint")
        return self._row(value)

    def _row(self, value):
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
        st.sampled_from(["row", "beside", *CHECKPOINTS]),
        st.lists(st.one_of(inner, st.integers(0, 3)), min_size=1, max_size=3),
    ),
    max_leaves=8,
)


def build(tree, clock, made, *, checkpointed=False):
    """The modules of a tree; a number stands for a leaf that was made before, shared. Checkpoints do not nest."""
    kind, content = tree
    if kind == "leaf":
        made.append(Leaf(clock, *content))
        return made[-1]
    if kind == "raises":
        return Raises()
    if checkpointed and kind in CHECKPOINTS:
        kind = "row"
    inner = []
    for one in content:
        if isinstance(one, int):
            inner.append(made[one % len(made)] if made else nn.Identity())
        else:
            inner.append(build(one, clock, made, checkpointed=checkpointed or kind in CHECKPOINTS))
    return Node(kind, inner)


def calls_of(module):
    """The leaves in the order in which a module calls them."""
    return [one for one in _called(module) if isinstance(one, Leaf)]


def recomputed_by(module):
    """The times in ms of each leaf that is computed again in a module's backward pass.

    A reentrant checkpoint repeats all; another stops when the last leaf has its tensors, before that takes its time.
    """
    times = defaultdict(list)
    for node in _called(module):
        if isinstance(node, Node) and node.how in CHECKPOINTS:
            calls = calls_of(node)
            for place, leaf in enumerate(calls, 1):
                stops = node.how == "checkpoint" and place == len(calls)
                times[leaf].append(0 if stops else leaf.ms[0])
    return times


@settings(max_examples=50, deadline=None)
@given(tree=trees, steps=st.integers(1, 2))
@example(tree=("reentrant checkpoint", [("leaf", (1, 2, True)), 0, ("beside", [("leaf", (3, 4, False)), 1])]), steps=2)
@example(tree=("row", [("leaf", (1, 2, False)), ("checkpoint", [0, ("leaf", (3, 4, True)), 0])]), steps=2)
def test_times_and_counts_are_those_of_the_tree(tree, steps):
    """Each leaf has its own time for each of its calls, computed again or not, and the parts of a node adds up."""
    clock = ManualClock()
    model = Node("row", [build(tree, clock, [])])
    timer = CPUGPUTimer("cpu", clock=clock)
    layers = LayerTimer(model, timer)
    with layers:
        for _ in range(steps):
            model(torch.ones(2, requires_grad=True) * 2).sum().backward()
    calls = Counter(calls_of(model))
    again = recomputed_by(model)
    result = layers.times()
    by_module = {layer.module: layer for layer in layers.layers}
    for leaf, count in calls.items():
        path, name = by_module[leaf].path, by_module[leaf].region
        forward_s, backward_s = (milliseconds / 1e3 for milliseconds in leaf.ms)
        assert pytest.approx([forward_s] * (count * steps)) == timer.get_time(f"{name} forward")
        assert pytest.approx([backward_s * count * steps]) == [result.get(path).self_s["backward"]]
        backward = timer.get_time(f"{name} backward")
        # A checkpoint's recomputation lies in the backward pass that needs it.
        assert count * steps == len(backward)
        assert leaf in again or pytest.approx([backward_s] * (count * steps)) == backward
        recomputed = timer.get_time(f"{name} recomputed forward")
        assert pytest.approx(sorted(again[leaf] * steps)) == sorted(1e3 * seconds for seconds in recomputed)
    repeated_ms = sum(map(sum, again.values()))
    for place, purpose in enumerate(("forward", "backward")):
        whole = sum(leaf.ms[place] * count for leaf, count in calls.items()) + place * repeated_ms
        total = result.model.total_s(purpose)
        assert pytest.approx(whole * steps / 1e3) == (0.0 if total is None else total)
        purposes = (purpose, "recomputed forward") if place else (purpose,)
        own = (layer.self_s.get(one, 0.0) for layer in result.layers for one in purposes)
        assert pytest.approx(whole * steps / 1e3) == sum(own)
    assert (0, 0) == (layers.faults, layers.untimed)
    raised = sum(region.failed for region in timer.snapshot())
    assert sum(isinstance(module, Raises) for module in _called(model)) * steps == raised


def _called(module):
    yield module
    if isinstance(module, Node):
        for inner in module.inner:
            yield from _called(inner)
