"""Times on a device: what an adapter is made of, and what to time with it beside regions.

A device is timed by events in its streams. An adapter brings a :class:`DeviceClock`, which records and reads them; the
pool of events over it, their collecting, forks and faults are here and are the same for every device:

* :func:`pool_of` gives the :class:`EventPool` of a clock, which all timers of the process share.
* :func:`find_late` makes what a timer takes in the place of a clock that is to be looked for at the first ``gpu=True``.
* :mod:`~deep500_timing.devices.clocks` finds the clocks of every distribution by name.
* :class:`DeviceClockContract` is the suite of tests that a clock must pass.

See ``adapters/README.md`` for an adapter made of nothing else.
"""

from __future__ import annotations

from deep500_timing.devices._null import NULL_DEVICE, Device, NullDevice
from deep500_timing.devices._queue import EventPair, captures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from deep500_timing._ground.protocols import DeviceClock
    from deep500_timing._ground.warn import warn_once
    from deep500_timing.devices import clocks
    from deep500_timing.devices._contract import DeviceClockContract, DeviceRig
    from deep500_timing.devices._late import LateDevice, find_late
    from deep500_timing.devices._pool import EventPool, pool_of

__all__ = [
    "NULL_DEVICE",
    "Device",
    "DeviceClock",
    "DeviceClockContract",
    "DeviceRig",
    "EventPair",
    "EventPool",
    "LateDevice",
    "NullDevice",
    "captures",
    "clocks",
    "find_late",
    "pool_of",
    "warn_once",
]

# A timer without a device needs the null device and nothing else of it.
_LAZY = {
    "DeviceClock": "_ground.protocols",
    "DeviceClockContract": "devices._contract",
    "DeviceRig": "devices._contract",
    "EventPool": "devices._pool",
    "LateDevice": "devices._late",
    "find_late": "devices._late",
    "pool_of": "devices._pool",
    "warn_once": "_ground.warn",
}


def __getattr__(name: str) -> Any:
    """Import the other public names on first use."""
    from importlib import import_module

    if name == "clocks":
        return import_module("deep500_timing.devices.clocks")
    if name in _LAZY:
        value = getattr(import_module(f"deep500_timing.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'deep500_timing.devices' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, imported yet or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
