"""The wait at the end of a backward pass for what was issued in it, which DDP does from C++."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from deep500_timing_torch.comm._device import EventPair
from deep500_timing_torch.comm._log import LOG, fault
from deep500_timing_torch.comm._overlap import DeviceOverlap
from deep500_timing_torch.comm._records import EXPOSED, UNTIMED
from deep500_timing_torch.comm._settings import SETTINGS

if TYPE_CHECKING:
    from deep500_timing.devices import EventPool
    from deep500_timing_torch.comm._records import Record


class Sent(Protocol):
    """An operation that was issued in a backward pass."""

    record: Record
    done_ns: int
    """When it was done, 0 while it is not."""

    @property
    def waited(self) -> bool:
        """Whether a caller has waited for it already."""
        ...

    def exposed(self, start_ns: int, end_ns: int) -> None:
        """Take what was waited for it."""


class BackwardWait:
    """What was issued in the backward pass that runs now."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.sent: list[Sent] = []
        self._callback: Any = torch.autograd.Variable._execution_engine.queue_callback

    def watch(self, device: EventPool | None) -> None:
        """Ask the engine to call back when everything is computed; only inside a backward pass.

        The engine calls back in the order of asking, and DDP asks for its waiting after its last bucket is sent: what
        is asked for now comes before that, and what is asked for inside a callback comes after it.
        """
        self._callback(lambda: self._computed(device))

    def _computed(self, device: EventPool | None) -> None:
        # The backward pass has computed everything; DDP is about to wait for its buckets.
        try:
            sent, self.sent = self.sent, []
            now_ns = SETTINGS.now_ns()
            pair = None
            if device is not None and sent:
                pair = self._marked(sent, device, now_ns)
            self._callback(lambda: _waited(sent, now_ns, pair))
        except Exception as error:
            fault("the wait at the end of a backward pass", error)

    def _marked(self, sent: list[Sent], device: EventPool, now_ns: int) -> EventPair:
        # From the end of the computing to the end of the wait, on the stream that computes.
        record = sent[-1].record
        joining: list[Any] = [operation for operation in sent if hasattr(operation, "join")]
        if len(joining) == len(sent):
            overlap = DeviceOverlap([operation.record for operation in sent], now_ns)
            for index, operation in enumerate(joining):
                operation.join(overlap, index)
            return EventPair(
                device,
                record.label,
                now_ns,
                lambda start_ns, end_ns: overlap.stood(end_ns - start_ns),
                lambda: overlap.stood(None),
                None,
            )

        def keep(start_ns: int, end_ns: int) -> None:
            LOG.put(record, EXPOSED, start_ns, end_ns)

        return EventPair(device, record.label, now_ns, keep, lambda: LOG.put(record, UNTIMED, 0, 0), None)


def _waited(sent: list[Sent], start_ns: int, pair: EventPair | None) -> None:
    # Whoever waits at the end of a backward pass has waited.
    try:
        if SETTINGS.timer is not None:
            SETTINGS.region("the wait at the end of a backward pass", start_ns, SETTINGS.now_ns())
        if pair is not None:
            pair.end()
            return
        reached_ns = start_ns
        for operation in sent:
            if operation.waited or not operation.done_ns:
                continue
            # They are waited for in this order: one that is done while an earlier one is waited for costs nothing.
            exposed_ns = max(operation.done_ns - reached_ns, 0)
            operation.exposed(reached_ns, reached_ns + exposed_ns)
            reached_ns += exposed_ns
    except Exception as error:
        fault("the wait at the end of a backward pass", error)
