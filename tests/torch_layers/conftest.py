"""Modules with passes of a given length, on a clock that moves only with them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the layers of PyTorch models")
import clocked_work  # noqa: E402
from torch import nn  # noqa: E402

from deep500_timing_torch import CPUGPUTimer  # noqa: E402


class Work(nn.Module):
    """A layer that takes so many milliseconds forward and backward, and has its own parameter."""

    def __init__(self, clock, forward_ms=1, backward_ms=2, *, weight=True):
        super().__init__()
        self.clock, self.forward_ms, self.backward_ms = clock, forward_ms, backward_ms
        if weight:
            self.weight = nn.Parameter(torch.ones(()))

    def forward(self, value):
        """Take the time, and hand the value on."""
        if hasattr(self, "weight"):
            value = value * self.weight
        return clocked_work.Work.apply(value, self.clock, self.forward_ms, self.backward_ms)

    def __deepcopy__(self, memo):
        return Work(self.clock, self.forward_ms, self.backward_ms, weight=hasattr(self, "weight"))


@pytest.fixture
def work(clock):
    """Makes layers of known length on the test's clock."""

    def make(forward_ms=1, backward_ms=2, **options):
        return Work(clock, forward_ms, backward_ms, **options)

    return make


@pytest.fixture
def tmr(clock):
    """A timer on the test's clock."""
    return CPUGPUTimer("cpu", clock=clock)


@pytest.fixture
def value():
    """An input that needs a gradient."""
    return torch.ones(3, requires_grad=True)


@pytest.fixture
def ms(tmr):
    """The times of a layer's region of ``tmr`` in milliseconds, in the order of their ends, of whichever model."""

    def read(name):
        found = [region.name for region in tmr.snapshot() if name in (region.name, region.name.partition(".")[2])]
        return [round(seconds * 1e3, 6) for seconds in tmr.get_time(found[0])] if found else []

    return read
