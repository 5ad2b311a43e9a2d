"""Device times of operations: a pair of events on the streams concerned, collected without ever waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._ground.warn import warn_once
from deep500_timing.devices import EventPair as DevicePair
from deep500_timing.devices._pool import DeviceLedger, ledger_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_ledgers: dict[str, DeviceLedger | None] = {}


def pool_for(tensor: torch.Tensor) -> DeviceLedger | None:
    """The events of the device that holds a tensor; None for the CPU and for a device that cannot be timed."""
    kind = tensor.device.type
    try:
        return _ledgers[kind]
    except KeyError:
        pass
    found = None
    if kind not in ("cpu", "meta"):
        from deep500_timing_torch import CudaEventClock

        try:
            found = ledger_of(CudaEventClock(kind))
        except Exception as error:
            warn_once(
                f"Timing communication on {kind!r}: it has no events that can be timed, so times are the host's, "
                f"which end when the operation is queued: {error}",
                about=f"comm on {kind}",
            )
    _ledgers[kind] = found
    return found


class EventPair:
    """A stretch of a device's time that is being marked: what a :class:`DeviceLedger` takes for a region.

    It is also where the ledger puts the time, when the device has passed it.
    """

    __slots__ = ("_device", "_extra", "_fail", "_keep", "_pair", "start_ns")

    def __init__(
        self,
        device: DeviceLedger,
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
            keep: Takes start and end in ns, placed where it began on the host.
            fail: Called instead if the time cannot be had.
            extra: Intervals of a timer that take the time as well, or None.
        """
        self._device = device
        self._keep = keep
        self._fail = fail
        self._extra = extra
        self.start_ns = start_ns
        self._pair = DevicePair(name)
        device.begin(self._pair)

    def end(self) -> None:
        """Queue the second event, on the stream that is current now."""
        self._device.end(self._pair, self, self.start_ns, 0)

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
    for ledger in list(_ledgers.values()):
        if ledger is not None:
            ledger.collect(wait=wait)
