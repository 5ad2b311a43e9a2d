"""A timer for the whole program that writes a line for each time, in a file for each rank.

::

    from deep500_timing import global_timer            # or from deep500_timing_torch, for CUDA times

    global_timer.start("forward")
    ...
    global_timer.stop("forward")
    global_timer.dump()

``time_log/timer_rank0.log`` then holds::

    [RANK 0] forward, start=1716182684.282194, end=1716182685.123003, cpu_dur=0.840809s, cuda_dur=830.512ms

:func:`read_rank_logs` reads such a folder as the tables of a run. A run itself, ``Timer(run="folder")``, holds more
in a twentieth of the bytes.
"""

from __future__ import annotations

import os
import threading
from os import PathLike
from typing import TYPE_CHECKING, Any

from deep500_timing._base.fork import after_fork

if TYPE_CHECKING:
    from deep500_timing.runs import Run
    from deep500_timing.runs._lines import LineLog
    from deep500_timing.timer import Timer

__all__ = ["GlobalTimer", "global_timer", "read_rank_logs"]

FOLDER = "time_log"
_lock = threading.Lock()


@after_fork
def _renew_lock() -> None:
    # A thread that does not exist in the child may hold it.
    global _lock
    _lock = threading.Lock()


class GlobalTimer:
    """Times named stages and writes a line for each, from a background thread.

    Args:
        folder: The folder of the files; made when there is something to write. An existing file is never written to:
            the next run of a rank writes ``timer_rank0.1.log``.
        timer: The timer of the stages; None makes one at the first start.
        rank: The rank of this process; from ``torch.distributed`` or the launcher if None.
        flush_s: Seconds between writes; None leaves all to :meth:`dump`.
    """

    def __init__(
        self,
        folder: str | PathLike[str] = FOLDER,
        *,
        timer: Timer | None = None,
        rank: int | None = None,
        flush_s: float | None = 1.0,
    ) -> None:
        self.folder = os.fspath(folder)
        self.rank = rank
        self._timer = timer
        self._flush_s = flush_s
        self._log: LineLog | None = None

    @property
    def timer(self) -> Timer:
        """The timer of the stages: its snapshot has their statistics."""
        if self._timer is None:
            self._timer = self._new_timer()
        return self._timer

    def _new_timer(self) -> Timer:
        from deep500_timing.timer import Timer

        return Timer()

    def _on_device(self) -> bool:
        # A stage is timed on the device if there is one; its line says if there is none.
        return not self.timer.device.find().is_null

    def start(self, name: str) -> None:
        """Begin a stage on the calling thread.

        Raises:
            RegionOpenError: It has begun already.
            InvalidKeyError: The name is not a non-empty string.
        """
        if self._log is None or self._log.closed:
            from deep500_timing.runs._lines import LineLog

            with _lock:
                if self._log is None or self._log.closed:
                    self._log = LineLog(self.folder, self.timer, rank=self.rank, flush_s=self._flush_s)
        self.timer.start(name, self._on_device())

    def stop(self, name: str) -> None:
        """End a stage. Never waits for the device.

        Raises:
            RegionNotOpenError: The thread has not begun it.
        """
        self.timer.end(name, self._on_device())

    def dump(self) -> None:
        """Write everything that has ended, and wait for pending device times."""
        if self._log is not None:
            self._log.dump()


global_timer = GlobalTimer()


def read_rank_logs(folder: str | PathLike[str] = FOLDER, *, engine: Any = "duckdb") -> Run:
    """Read the logs of all ranks in a folder as the tables of a run.

    A line has no threads and no steps; stages called ``BATCH`` count the steps. Times are in steps of a microsecond, as
    in the lines.

    Args:
        folder: Where ``timer_rank0.log`` and the others are.
        engine: As for :meth:`deep500_timing.runs.Run.open`.

    Raises:
        FileNotFoundError: There is no such folder, or no such log in it.
        MissingPackageError: A package that reading a run needs is not installed.
    """
    from deep500_timing.runs._lines import run_of_lines

    return run_of_lines(os.fspath(folder), engine)
