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

import atexit
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from deep500_timing._base.fork import after_fork
from deep500_timing._base.names import CPU
from deep500_timing._base.warn import warn_once

if TYPE_CHECKING:
    from os import PathLike

    from deep500_timing.runs import Run
    from deep500_timing.timer import Timer

__all__ = ["GlobalTimer", "global_timer", "read_rank_logs"]

FOLDER = "time_log"
_FLUSH_S = 1.0
_MOST_WAITING = 1 << 20
"""Lines that wait in memory while the file cannot be written; older ones are dropped and counted."""


class GlobalTimer:
    """Times named stages and writes a line for each, from a background thread.

    Args:
        folder: Where the files go; made when there is something to write. A file that is there is never written to:
            the next run of a rank writes ``timer_rank0.1.log``.
        timer: What times; None makes one of the process's own at the first start.
        rank: Which rank this is; ``torch.distributed`` or the launcher are asked if None.
        flush_s: Seconds between writes; None leaves all to :meth:`dump`.
    """

    def __init__(
        self,
        folder: str | PathLike[str] = FOLDER,
        *,
        timer: Timer | None = None,
        rank: int | None = None,
        flush_s: float | None = _FLUSH_S,
    ) -> None:
        self.folder = os.fspath(folder)
        self.rank = rank
        self.dropped = 0
        """Lines that could not be written and were too many to be kept."""
        self._timer = timer
        self._flush_s = flush_s
        self._forget()
        _timers.append(self)

    def _forget(self) -> None:
        self._source: Any = None
        self._offset_ns = 0
        self._file: Any = None
        self._thread: threading.Thread | None = None
        self._waiting: dict[tuple[str, int], deque[tuple[int, int]]] = {}
        self._cuda: dict[tuple[str, int], dict[int, int]] = {}
        self._done: dict[tuple[str, int], int] = {}
        self._unwritten: deque[str] = deque()
        self._lock = threading.RLock()
        self._has_exit = False

    @property
    def timer(self) -> Timer:
        """What times the stages: its snapshot has their statistics."""
        if self._timer is None:
            self._timer = self._new_timer()
        return self._timer

    def _new_timer(self) -> Timer:
        from deep500_timing.timer import Timer

        return Timer()

    def _on_device(self) -> bool:
        # A stage is timed on the device if there is one; that there is none is said by the word in its line.
        device = self.timer.device.find()
        return not device.is_null

    def start(self, name: str) -> None:
        """Begin a stage on the calling thread.

        Raises:
            RegionOpenError: It has begun already.
            InvalidKeyError: The name is not a non-empty string.
        """
        if self._source is None:
            self._begin()
        self.timer.start(name, self._on_device())

    def stop(self, name: str) -> None:
        """End a stage. Never waits for the device.

        Raises:
            RegionNotOpenError: The thread has not begun it.
        """
        self.timer.end(name, self._on_device())

    def dump(self) -> None:
        """Write everything that has ended, waiting for times that are still on their way from the device."""
        self._flush(wait=True, final=True)

    def _begin(self) -> None:
        from deep500_timing._summary.snapshot import take_anchor
        from deep500_timing.runs._source import Source, Threads

        with self._lock:
            if self._source is not None:
                return
            anchor = take_anchor(self.timer.now_ns)
            self._offset_ns = anchor.unix_ns - anchor.host_ns
            self._source = Source(self.timer, Threads())
            if not self._has_exit:
                atexit.register(self._at_exit)
                self._has_exit = True
            if self._flush_s is not None:
                self._thread = threading.Thread(target=self._work, name="deep500-timing rank log", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        pause = threading.Event()  # A daemon's: the process may end while it waits.
        while not pause.wait(self._flush_s):
            self._flush(wait=False, final=False)

    def _at_exit(self) -> None:
        self._flush(wait=False, final=True)

    def _flush(self, *, wait: bool, final: bool) -> None:
        if self._source is None:
            return
        with self._lock:
            try:
                if final:
                    self._source.collect_device(wait=wait)
                self._take()
                self._queue_lines(final)
                self._write()
            except Exception as error:
                warn_once(
                    f"Writing times to {self.folder} failed and is tried again: {type(error).__name__}: {error}. The "
                    "program goes on.",
                    key=f"rank log {self.folder}",
                )

    def _take(self) -> None:
        for part in self._source.take(None):
            key = part.region, part.thread
            pairs = part.pairs.tolist()
            if part.device == CPU:
                self._waiting.setdefault(key, deque()).extend((start, end) for start, end in pairs)
            elif part.ordinals is not None:
                of_host = self._cuda.setdefault(key, {})
                for ordinal, (start, end) in zip(part.ordinals.tolist(), pairs, strict=True):
                    if ordinal >= 0:
                        of_host[ordinal] = end - start

    def _queue_lines(self, final: bool) -> None:
        from deep500_timing.runs._lines import Line, write_line

        rank = self._rank()
        lines = []
        for key, waiting in self._waiting.items():
            of_host = self._cuda.setdefault(key, {})
            done = self._done.setdefault(key, 0)
            # A line waits for the device's time, unless a later one has come or nothing more will.
            newest = max(of_host, default=-1)
            on_device = self._on_device()
            while waiting and (final or not on_device or done <= newest):
                start, end = waiting.popleft()
                cuda = of_host.pop(done, None)
                done += 1
                lines.append(Line(rank, key[0], start + self._offset_ns, end + self._offset_ns, end - start, cuda))
            self._done[key] = done
        lines.sort(key=lambda line: line.end_ns)
        self._unwritten.extend(map(write_line, lines))
        while len(self._unwritten) > _MOST_WAITING:
            self._unwritten.popleft()
            self.dropped += 1

    def _rank(self) -> int:
        from deep500_timing._distributed.launchers import known_rank_and_world

        return (known_rank_and_world()[0] or 0) if self.rank is None else self.rank

    def _write(self) -> None:
        if not self._unwritten:
            return
        from deep500_timing.runs._format import LogFile
        from deep500_timing.runs._lines import name_of_file

        session = 0
        while self._file is None:
            os.makedirs(self.folder, exist_ok=True)
            try:
                self._file = LogFile(os.path.join(self.folder, name_of_file(self._rank(), session)))
            except FileExistsError:
                session += 1
        text = "".join(self._unwritten)
        self._file.append(text.encode("utf-8", "backslashreplace"))
        self._unwritten.clear()


_timers: list[GlobalTimer] = []


@after_fork
def _forget_all() -> None:
    # The file and the thread are the parent's; a child that times stages writes another file.
    for timer in _timers:
        timer._forget()


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
