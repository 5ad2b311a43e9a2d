"""Clocks of a host and a device for tests of their times together."""

from __future__ import annotations

from deep500_timing.testing import ManualDeviceClock


class Together:
    """A host clock on one timeline with a device."""

    def __init__(self, device):
        """Of that device."""
        self.device = device

    def now_ns(self):
        """The device's time."""
        return self.device.now_ns


class Interleaved(ManualDeviceClock):
    """A device on which other calls, each once, come amid the record of an event: those of another thread."""

    def __init__(self):
        """None yet."""
        super().__init__()
        self.amid = []

    def record(self, event, stream):
        """Record it, and make the next of the calls."""
        super().record(event, stream)
        if self.amid:
            self.amid.pop()()
