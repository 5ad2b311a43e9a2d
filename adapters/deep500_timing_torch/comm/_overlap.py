"""How much of each bucket of a backward pass on a device was hidden behind computing.

Three things are known when the device has passed all of it, none of them by waiting: by how much each bucket was issued
before the computing was over (two events on the stream that computes), how long each took (the backend's own events),
and how long the stream then stood still. One communicator does one bucket after another, so a bucket ran from the later
of its issue and the end of the one before. What of it lies behind the end of the computing, and behind the bucket
before, is its exposed time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing_torch.comm._log import LOG
from deep500_timing_torch.comm._records import EXPOSED, PAIR, UNTIMED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing_torch.comm._records import Record


class DeviceOverlap:
    """The buckets of one backward pass, in the order in which they were issued.

    Args:
        records: Where the times of each go.
        start_ns: When the computing was over, on the host.
    """

    def __init__(self, records: Sequence[Record], start_ns: int) -> None:
        count = len(records)
        self._records = records
        self._start_ns = start_ns
        self._ahead_ns = [0] * count
        self._duration_ns: list[int | None] = [None] * count
        self._stood_ns: int | None = None
        self._complete = True
        # Pieces come on whatever thread collects them; who takes the last token adds them up. Taking one is atomic.
        self._tokens = [None] * (2 * count)

    def issued(self, index: int, ahead_ns: int) -> None:
        """A bucket was issued so long before the computing was over."""
        self._ahead_ns[index] = ahead_ns
        self._piece()

    def took(self, index: int, duration_ns: int | None) -> None:
        """A bucket took so long; None if that cannot be had."""
        self._duration_ns[index] = duration_ns
        self._piece()

    def stood(self, stood_ns: int | None) -> None:
        """The stream that computes stood still so long for all of them; None if that cannot be had."""
        self._stood_ns = stood_ns
        self._piece()

    def unknown(self) -> None:
        """Something is missing that every bucket's exposed time would need."""
        self._complete = False

    def _piece(self) -> None:
        try:
            self._tokens.pop()
        except IndexError:
            self._add_up()

    def _add_up(self) -> None:
        durations = [duration for duration in self._duration_ns if duration is not None]
        if not self._complete or len(durations) < len(self._records):
            # Without every duration only their sum is known: the stream stood still for the last of them.
            if self._stood_ns is None:
                LOG.put(self._records[-1], UNTIMED, 0, 0)
            else:
                LOG.put(self._records[-1], EXPOSED, self._start_ns, self._start_ns + self._stood_ns)
            return
        ended = reached = 0  # from the end of the computing on
        for index, duration in enumerate(durations):
            issued = -self._ahead_ns[index]
            ended = duration + (issued if index == 0 else max(ended, issued))
            exposed = min(max(ended - reached, 0), duration)
            begins_ns = self._start_ns + reached
            reached = max(reached, ended)
            LOG.put(self._records[index], EXPOSED, begins_ns, begins_ns + exposed)
            LOG.put(self._records[index], PAIR, duration, exposed)
