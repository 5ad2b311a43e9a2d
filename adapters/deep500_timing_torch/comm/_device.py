"""Device times of operations between events on the current stream, collected without waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deep500_timing.adapters import warn_once
from deep500_timing.devices import EventPair as DevicePair
from deep500_timing.devices import EventPool, captures, pool_of
from deep500_timing.runs import feeders, logs
from deep500_timing_torch.comm._flight import RECORDER
from deep500_timing_torch.comm._log import LOG
from deep500_timing_torch.comm._settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

_pools: dict[torch.device, EventPool | None] = {}


def pool_for(tensor: torch.Tensor | None) -> EventPool | None:
    """The events of the tensor's device; None for the CPU and for a device that cannot be timed.

    An operation is ordered with the current stream of its tensor's device, whichever device is current.
    """
    if tensor is None or tensor.is_cpu:
        return None
    device = tensor.device
    try:
        return _pools[device]
    except KeyError:
        pass
    kind = device.type
    found = None
    if kind != "meta":
        from deep500_timing_torch import CudaEventClock

        try:
            clock: Any = CudaEventClock(str(device))
            found = pool_of(clock)
        except Exception as error:
            warn_once(
                f"Timing communication on {kind!r}: it has no events that can be timed, so times are the host's, "
                f"which end when the operation is queued: {error}",
                key=f"comm on {kind}",
            )
    _pools[device] = found
    return found


def is_captured(pool: EventPool, tensor: torch.Tensor) -> bool:
    """Whether an operation issued now is captured into a graph instead of run."""
    if tensor.device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    clock: Any = pool.clock
    return captures.under_way > 0 or bool(clock.is_capturing())


class Stretch:
    """A stretch of a device's time, given to a function when the device has passed it."""

    __slots__ = ("_fail", "_keep", "_pair", "_pool", "_start_ns")

    def __init__(self, pool: EventPool, name: str, start_ns: int) -> None:
        """Record the first event on the current stream.

        Args:
            pool: The events.
            name: The operation, for warnings.
            start_ns: When it began on the host, in ns.
        """
        self._pool = pool
        self._start_ns = start_ns
        self._pair = DevicePair(name, SETTINGS.now_ns)
        pool.begin(self._pair)

    def end(self, keep: Callable[[int, int], None], fail: Callable[[], None]) -> None:
        """Record the second event on the stream that is current now.

        Args:
            keep: Takes start and end in ns, placed on the host's clock when the device was there.
            fail: Called instead if the time is unknown.
        """
        self._keep = keep
        self._fail = fail
        self._pool.end(self._pair, self, self._start_ns, SETTINGS.now_ns())

    def drop(self) -> None:
        self._pool.drop(self._pair)

    # --- called by the pool ---------------------------------------------------------------------------------------

    def append(self, start_ns: int, end_ns: int) -> None:
        self._keep(start_ns, end_ns)

    @property
    def failed(self) -> int:
        """Zero. Adding to it reports a time that is unknown."""
        return 0

    @failed.setter
    def failed(self, value: int) -> None:
        self._fail()

    captured = failed


def collect(*, wait: bool) -> None:
    """Collect the device times that are known.

    Args:
        wait: Wait for the others; only for a user who asked for it by name.
    """
    for pool in list(_pools.values()):
        if pool is not None:
            pool.collect(wait=wait)
    RECORDER.collect(wait=wait)


def _feed() -> None:
    for pool in list(_pools.values()):
        if pool is not None:
            pool.collect(wait=False)
    RECORDER.feed(last=any(log.closing and not log.closed for log in logs.values()))
    LOG.drain(wait=False)


# Before a run is flushed, finished operations are counted and so queued for it.
feeders.append(_feed)
