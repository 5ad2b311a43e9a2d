"""Which logs this process has, for what is recorded by no timer. Imports nothing, so that asking costs nothing."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

logs: dict[tuple[str, int], Any] = {}
"""Every :class:`~deep500_timing.runs.RunLog` by folder and clock; this stands below it."""
feeders: list[Callable[[], object]] = []
"""Called by a log's thread before each flush: who queues what belongs into runs hands it over then."""


def current() -> Any:
    """The log of this process on the system's clock, for what is recorded by no timer; None if there is none."""
    return next((log for log in logs.values() if log.clock is None and not log.closed), None)
