"""An operation on a device: marked by events around it, finished when the device has passed the second one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing_torch.comm._device import EventPair
from deep500_timing_torch.comm._log import DONE, FAILED, ISSUE, LOG, Record
from deep500_timing_torch.comm._settings import SETTINGS

if TYPE_CHECKING:
    from deep500_timing.devices._pool import DeviceLedger
    from deep500_timing_torch.comm._work import Tracker


class DeviceRun:
    """The pair of events around one operation."""

    __slots__ = ("device", "mark", "record", "seq", "tracker")

    def __init__(self, record: Record, device: DeviceLedger, start_ns: int) -> None:
        """Queue the first event on the current stream."""
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

    def _keep(self, start_ns: int, end_ns: int) -> None:
        if self.tracker is not None:
            self.tracker.done(start_ns, end_ns)
        else:
            LOG.put(self.record, DONE, start_ns, end_ns, self.seq)

    def _fail(self) -> None:
        LOG.put(self.record, FAILED, 1, 0)
