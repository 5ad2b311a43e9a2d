"""The logs of this process, for recorders without a timer, and what began it. It imports nothing."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

logs: dict[tuple[str, int], Any] = {}
"""Every :class:`~deep500_timing.runs.RunLog` by folder and clock. This module is below it."""
feeders: list[Callable[[], object]] = []
"""Called by a log's thread before each flush. They write queued records to the log. One may return the end of a BATCH
that its timer keeps later, in ns: it counts for the steps of what ended after it."""

launch = ""
"""The identifier of the ``deep500-timing run`` that this process is below; empty without one."""
starter = ""
"""The process below that which started this one: of the ranks of one host, their launcher."""
exit_code: object = None
"""What the program gave to ``sys.exit`` or ``SystemExit``, as far as it is seen."""
is_cut = False
"""Whether the program was ended after the last step of ``--steps``."""
unnamed: set[str] = set()
"""Folders of runs whose names are ours, and not the user's."""


def current() -> Any:
    """The log of this process on the system's clock; None without one."""
    return next((log for log in logs.values() if log.clock is None and not log.closed), None)
