"""``deep500-timing run`` and ``deep500_timing.autolog()``: time a program that was not edited.

``command`` reads the command line, ``program`` runs a script as Python itself would, ``startup`` is the folder that a
child process finds on ``PYTHONPATH``, ``autolog`` holds the timer, the plug-ins and the report at the end. No module
here imports a framework.
"""

from __future__ import annotations

import os
import sys
import time

from deep500_timing._base.settings import JOBS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from os import PathLike


def nothing_timed(why: str) -> str:
    """The line of a process in which nothing was timed; its children wrote nothing into the run's folder either."""
    from deep500_timing.runs import _current

    error, code = getattr(sys, "last_value", None), _current.exit_code
    if error is not None or code:
        status = f"with exit status {code if isinstance(code, int) else 1}"
        how = status if error is None else f"by {type(error).__name__}"
        return f"deep500-timing: nothing was timed: the program ended {how} before its first step.\n"
    return (
        f"deep500-timing: nothing was timed: {why}, and no program that it started wrote a run here. Time it by hand: "
        "`import deep500_timing as timer`.\n"
    )


def folder_of(run: str | PathLike[str] | None, program: str | None = None) -> str:
    """The absolute path of the run's folder: as given, or ``runs/PROGRAM-TIME``, under a batch system ``-JOB``."""
    if run is not None:
        return os.path.abspath(os.fspath(run))
    name = os.path.basename(os.path.abspath(program or sys.argv[0] or "run"))
    name = name.removesuffix(".py").removesuffix(".sh").removesuffix("__main__") or "run"
    job = next((os.environ[job] for job in JOBS if os.environ.get(job)), None)
    return os.path.abspath(os.path.join("runs", f"{name}-{job or time.strftime('%Y%m%d-%H%M%S')}"))


def files_of(folder: str) -> set[str]:
    """The names in a folder: a run that was there before is no sign that this program was timed."""
    return set(os.listdir(folder)) if os.path.isdir(folder) else set()
