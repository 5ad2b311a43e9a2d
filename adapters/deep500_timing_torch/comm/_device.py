"""Device times of operations: a pair of events on the streams concerned, collected without ever waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import warn_once
from deep500_timing.devices import EventPair as DevicePair
from deep500_timing.devices import EventPool, pool_of
from deep500_timing_torch.comm._settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_pools: dict[str, EventPool | None] = {}


def pool_for(tensor: torch.Tensor) -> EventPool | None:
    """The events of the device that holds a tensor; None for the CPU and for a device that cannot be timed.

    An operation is ordered with the current stream of its tensor's device, whichever device is current.
    """
    device = str(tensor.device)
    try:
        return _pools[device]
    except KeyError:
        pass
    kind = tensor.device.type
    found = None
    if kind not in ("cpu", "meta"):
        from deep500_timing_torch import CudaEventClock

        try:
            clock: Any = CudaEventClock(device)
            found = pool_of(clock)
        except Exception as error:
            warn_once(
                f"Timing communication on {kind!r}: it has no events that can be timed, so times are the host's, "
                f"which end when the operation is queued: {error}",
                key=f"comm on {kind}",
            )
    _pools[device] = found
    return found


class EventPair:
    """A stretch of a device's time, and where it goes when the device has passed it."""

    __slots__ = ("_device", "_extra", "_fail", "_keep", "_pair", "start_ns")

    def __init__(
        self,
        device: EventPool,
        name: str,
        start_ns: int,
        keep: Callable[[int, int], None],
        fail: Callable[[], None],
        extra: Any,
    ) -> None:
        """Queue the first event.

        Args:
            device: The events.
            name: What is timed, for warnings.
            start_ns: When it began on the host, in ns.
            keep: Takes start and end in ns, placed where the device was then on the host's clock.
            fail: Called instead if the time cannot be had.
            extra: Intervals of a timer that take the time as well, or None.
        """
        self._device = device
        self._keep = keep
        self._fail = fail
        self._extra = extra
        self.start_ns = start_ns
        self._pair = DevicePair(name, SETTINGS.now_ns)
        device.begin(self._pair)

    def end(self) -> None:
        """Queue the second event, on the stream that is current now."""
        self._device.end(self._pair, self, self.start_ns, SETTINGS.now_ns())

    def drop(self) -> None:
        """Take back the first event."""
        self._device.drop(self._pair)

    # --- where the time goes --------------------------------------------------------------------------------------

    def append(self, start_ns: int, end_ns: int) -> None:
        """Take the time."""
        self._keep(start_ns, end_ns)
        if self._extra is not None:
            self._extra.append(start_ns, end_ns)

    @property
    def failed(self) -> int:
        """None so far; adding to it counts the time as one that cannot be had."""
        return 0

    @failed.setter
    def failed(self, value: int) -> None:
        self._fail()
        if self._extra is not None:
            self._extra.failed += value

    @property
    def captured(self) -> int:
        """None so far; adding to it counts the time as one that was captured into a graph."""
        return 0

    @captured.setter
    def captured(self, value: int) -> None:
        self._fail()
        if self._extra is not None:
            self._extra.captured += value


def collect(*, wait: bool) -> None:
    """Collect the device times that are there.

    Args:
        wait: Wait for the others; only for a user who asked for it by name.
    """
    from deep500_timing_torch.comm import _own_time

    for pool in list(_pools.values()):
        if pool is not None:
            pool.collect(wait=wait)
    _own_time.collect(wait=wait)
