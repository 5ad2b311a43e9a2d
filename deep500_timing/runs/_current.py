"""Which logs this process has, for what is recorded by no timer. Imports nothing, so that asking costs nothing."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing.runs._log import RunLog

logs: dict[tuple[str, int], RunLog] = {}
"""By folder and clock."""
feeders: list[Callable[[], object]] = []
"""Called by a log's thread before each flush: who queues what belongs into runs hands it over then."""


def current() -> RunLog | None:
    """The log of this process on the system's clock, for what is recorded by no timer; None if there is none."""
    return next((log for log in logs.values() if log.clock is None and not log.closed), None)
