"""One log for each folder and clock of a process. Several timers may share it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from deep500_timing.runs._current import logs
from deep500_timing.runs._log import RunLog

if TYPE_CHECKING:
    from os import PathLike

    from deep500_timing._recording.recorder import Recorder


def attach(timer: Recorder, run: RunLog | str | PathLike[str], **settings: Any) -> RunLog:
    """Make a timer write to a run: to this process's log in that folder, or to a new one.

    Args:
        timer: The timer.
        run: A folder or a log.
        **settings: Of :class:`RunLog`, if a new one is made.

    Raises:
        ValueError: The log's timers have another host clock.
    """
    if isinstance(run, RunLog):
        run.attach(timer)
        logs.setdefault((run.folder, id(run.clock)), run)
        return run
    key = (os.path.abspath(os.fspath(run)), id(timer._clock))
    log = logs.get(key)
    if log is None or log.closed:
        log = logs[key] = RunLog(run, timer, **settings)
    else:
        log.attach(timer)
    return log
