"""Times on a device, for adapters.

Events in the device's streams time it. An adapter supplies a :class:`DeviceClock`, which records and reads them. The
pool of events, its collecting, forks and faults are the same for every device:

* :func:`pool_of` gives the :class:`EventPool` of a clock, which all timers of the process share.
* :func:`lazy_device` defers the search for a clock to the first ``gpu=True``.
* :mod:`~deep500_timing.devices.clocks` finds the clocks of every distribution by name.
* :class:`DeviceClockContract` is the suite of tests that a clock must pass.

``adapters/README.md`` has an adapter made of these.
"""

from __future__ import annotations

from importlib import import_module as _import_module

from deep500_timing._base.lazy import lazy_names as _lazy_names
from deep500_timing._base.warn import warn_once
from deep500_timing.devices._device import NULL_DEVICE, Device, EventPair, NullDevice, captures
from deep500_timing.devices._lazy import LazyDevice, lazy_device
from deep500_timing.devices._pool import EventPool, pool_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from deep500_timing._base.protocols import DeviceClock
    from deep500_timing.devices import clocks
    from deep500_timing.devices._contract import DeviceClockContract, DeviceRig

__all__ = [
    "NULL_DEVICE",
    "Device",
    "DeviceClock",
    "DeviceClockContract",
    "DeviceRig",
    "EventPair",
    "EventPool",
    "LazyDevice",
    "NullDevice",
    "captures",
    "clocks",
    "lazy_device",
    "pool_of",
    "warn_once",
]

__getattr__, __dir__ = _lazy_names(
    __name__,
    __all__,
    {
        "DeviceClock": "deep500_timing._base.protocols",
        "DeviceClockContract": "deep500_timing.devices._contract",
        "DeviceRig": "deep500_timing.devices._contract",
        "clocks": lambda: _import_module("deep500_timing.devices.clocks"),
    },
)
