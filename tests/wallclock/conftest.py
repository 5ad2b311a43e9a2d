"""What these tests share: clocks that move when told to."""

from __future__ import annotations

import pytest
from hypothesis import settings

from deep500_timing.devices import _pool as _device
from deep500_timing.testing import ManualClock, ManualDeviceClock

# How long an example takes depends on what else the machine does.
settings.register_profile("wallclock", deadline=None)
settings.load_profile("wallclock")


@pytest.fixture
def clock():
    """A host clock that stands still until it is moved."""
    return ManualClock()


@pytest.fixture
def device():
    """A device whose time stands still until it is moved."""
    device = ManualDeviceClock()
    yield device
    _device._ledgers.pop(device, None)
