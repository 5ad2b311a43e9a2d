"""The relation of a monotonic clock to Unix time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_TRIES = 32


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """One moment on two clocks. The Unix time of ``t`` on the host's clock is ``unix_ns + t - host_ns``."""

    host_ns: int
    """Time on the timer's host clock, in nanoseconds."""
    unix_ns: int
    """In nanoseconds since 1970."""
    width_ns: int
    """Time between the two readings of the host clock around the reading of Unix time."""


def take_anchor(now_ns: Callable[[], int]) -> ClockAnchor:
    """Read both clocks 32 times and keep the narrowest reading.

    Unix time may be stepped and slewed, so an anchor is exact only at its own time. Take new ones in a long run.

    Args:
        now_ns: The host's clock.
    """
    narrowest: ClockAnchor | None = None
    for _ in range(_TRIES):
        before_ns = now_ns()
        unix_ns = time.time_ns()
        after_ns = now_ns()
        width_ns = after_ns - before_ns
        if narrowest is None or width_ns < narrowest.width_ns:
            narrowest = ClockAnchor(before_ns + width_ns // 2, unix_ns, width_ns)
    assert narrowest is not None
    return narrowest
