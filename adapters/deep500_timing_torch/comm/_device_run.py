"""An operation on a device: events around it, finished when the device has passed the second one.

No future of the operation is asked for: a callback on a device's future makes one of PyTorch's pooled streams, perhaps
the user's own, wait for the operation and holds its outputs until then; and the handles of coalesced operations have
none before PyTorch 2.10, where asking ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing_torch.comm import _own_time
from deep500_timing_torch.comm._device import EventPair
from deep500_timing_torch.comm._log import LOG
from deep500_timing_torch.comm._records import DONE, FAILED, ISSUE, Record
from deep500_timing_torch.comm._settings import SETTINGS

if TYPE_CHECKING:
    from deep500_timing.devices import EventPool
    from deep500_timing_torch.comm._work import Tracker


class DeviceRun:
    """The pair of events around one operation."""

    __slots__ = ("device", "mark", "own", "record", "seq", "tracker")

    def __init__(
        self, record: Record, device: EventPool, start_ns: int, process_group: Any = None, tensor: Any = None
    ) -> None:
        """Queue the first event on the current stream, and let the backend time it if it can."""
        self.own = tensor is not None and _own_time.enable(process_group, tensor.device)
        self.record = record
        self.device = device
        self.seq: int | None = None
        self.tracker: Tracker | None = None
        self.mark = EventPair(device, record.label, start_ns, self._keep, self._fail, SETTINGS.device_store())

    def end(self, end_ns: int, seq: int | None) -> None:
        """Queue the second event: the current stream comes there when the operation is over."""
        self.record.on_device = True
        self.seq = seq
        LOG.put(self.record, ISSUE, self.mark.start_ns, end_ns)
        self.mark.end()

    def follow(self, tracker: Tracker, work: Any) -> None:
        """Learn of the completion of an asynchronous operation.

        By the backend's own events if it has them; else by an event behind the last wait for it, which it cannot have
        outlasted.

        Args:
            tracker: What counts it.
            work: Its one handle; None if it has several.
        """
        self.record.on_device = True
        if work is not None and self.own:
            self.mark.drop()
            tracker.expect()
            _own_time.follow(work, tracker)
        else:
            tracker.expect(self)
            self.record.upper_bound = True

    def end_for(self, tracker: Tracker) -> None:
        """Queue the second event behind the last wait for an asynchronous operation."""
        self.tracker = tracker  # not before: it would keep the tracker of a handle that nobody waits for
        self.mark.end()

    def _keep(self, start_ns: int, end_ns: int) -> None:
        # One communicator does one operation after another: it did not begin before the one issued earlier was over.
        group = self.record.group
        clock, before_ns = group.device_end
        if clock == SETTINGS.now_ns and before_ns > start_ns:
            start_ns = min(before_ns, end_ns)
        group.device_end = (SETTINGS.now_ns, end_ns)
        duration_ns = end_ns - start_ns
        start_ns = self.mark.start_ns
        end_ns = start_ns + duration_ns
        if self.tracker is not None:
            self.tracker.done(start_ns, end_ns)
        else:
            LOG.put(self.record, DONE, start_ns, end_ns, self.seq)

    def _fail(self) -> None:
        LOG.put(self.record, FAILED, 1, 0)
