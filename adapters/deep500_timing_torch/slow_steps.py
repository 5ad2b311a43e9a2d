"""Keeps traces of the slowest steps: ``trace_slow_steps``."""

from __future__ import annotations

import atexit
import os
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.optim.optimizer as optim
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling

from deep500_timing import Timer, TimeType
from deep500_timing.adapters import Replaced, rank_and_world, warn_once
from deep500_timing.runs import feeders

__all__ = ["SlowSteps", "trace_slow_steps"]

TABLE, BUDGET = "slow_steps", 0.05
_RATIO, _LEAST, _RECENT = 4, 20, 101
"""A slow step takes more than so many medians of the recent steps, of at least so many."""
_STARTS = (profiler.profile, "_prepare_trace"), (profiler.emit_nvtx, "__enter__"), (profiler.emit_itt, "__enter__")
"""What begins a profile. PyTorch allows one at a time, so ours ends before another begins."""
_RANGE = profiler.record_function
cuda: Any = torch.cuda
_autograd: Any = torch.autograd
_is_on = _autograd._profiler_enabled
_LOG_LEVEL = "KINETO_LOG_LEVEL"


def trace_slow_steps(timer: Timer, k: int = 3, *, budget: float = BUDGET) -> SlowSteps:
    """Keep a trace of ``torch.profiler`` for steps that take more than 4 times the median.

    The profiler records single steps, and the trace of a usual step is dropped. Traces are written to the folder
    ``slow_steps`` of the run. ``deep500-timing why`` names their operators. A step ends with ``optimizer.step()``.

    On an accelerator, the end of each recorded step synchronizes the device. While the program's own profiler is on,
    no step is recorded.

    Args:
        timer: A timer that writes a run.
        k: Most traces to keep.
        budget: Share of the time that starting and stopping the profiler may take. It decides how many steps are
            recorded: a slow step that happens once may be missed. 1 records every second step.

    Returns:
        What ends it, by ``close()``. It ends itself with the k-th trace. While one is on, another call returns it.

    Raises:
        ValueError: The timer writes no run, ``k`` is below 1, or ``budget`` is not above 0.
    """
    if timer.run is None:
        raise ValueError("Tracing slow steps: the timer writes no run. Make it with CPUGPUTimer(run=FOLDER).")
    if k < 1 or not budget > 0:
        raise ValueError(f"Tracing slow steps with k={k} and budget={budget}: k is 1 or more, budget above 0.")
    return _active[0] if _active else SlowSteps(timer, k, budget)


class SlowSteps:
    """Traces slow steps until :meth:`close`. Made by :func:`trace_slow_steps`, whose arguments it has.

    The timer may get its run later. ``batch_ns`` gives the length of the step that has just ended; the timer's BATCH
    does if it is None.
    """

    def __init__(self, timer: Timer, k: int, budget: float = BUDGET, batch_ns: Callable[[], int] | None = None) -> None:
        self._timer, self._left, self._budget, self._length = timer, k, budget, batch_ns
        self._pid, self._thread = os.getpid(), 0
        self._profile: Any = None
        self._kept: deque[tuple[Any, int, int]] = deque()
        self._replaced = Replaced()
        self._stepped: set[int] = set()
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._began_ns = self._head_ns = self._cost_ns = self._windows = 0
        self._rest = 0
        """Steps that are not recorded, before the next one that is."""
        self._open: set[int] = set()
        """Ranges of ``record_function`` that began in a recorded step. PyTorch crashes if one ends under a later
        profile, so none begins before."""
        self._left_open: list[Any] = []
        self._hook = optim.register_optimizer_step_post_hook(self._after_step)
        for owner, name in _STARTS:
            self._put(owner, name, self._start_of_another)
        self._put(_RANGE, "__enter__", self._enter)
        self._put(_RANGE, "__exit__", self._exit)
        feeders.append(self._write)
        atexit.register(self.close)
        _active.append(self)

    def close(self) -> None:
        """Record no more, and write what is kept."""
        self._end()
        self._write()
        if self in _active:
            _active.remove(self)
            feeders.remove(self._write)
            atexit.unregister(self.close)

    def _end(self) -> None:
        self._hook.remove()
        self._replaced.undo()
        self._stop()

    def _put(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def call(one: Any, *args: Any, **kwargs: Any) -> Any:
            return ours(original, one, *args, **kwargs)

        self._replaced.put(owner, name, call)

    def _start_of_another(self, original: Any, one: Any, *args: Any, **kwargs: Any) -> Any:
        if one is not self._profile:
            self._stop()
        return original(one, *args, **kwargs)

    def _enter(self, original: Any, one: Any) -> Any:
        if self._profile is not None:
            self._open.add(id(one))
        return original(one)

    def _exit(self, original: Any, one: Any, *error: Any) -> Any:
        if id(one) in self._open:
            self._open.remove(id(one))
            if self._profile is None and _is_on():
                self._left_open.append(one)  # under the program's own profile, which would crash
                return None
        return original(one, *error)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling() or os.getpid() != self._pid:
            return
        self._thread = self._thread or get_ident()
        # Of several optimizers, as in a GAN, the one that steps again ends the step.
        if self._thread != get_ident() or (self._stepped and id(optimizer) not in self._stepped):
            self._stepped.add(id(optimizer))
            return
        self._stepped = {id(optimizer)}
        try:
            self._end_step()
        except Exception as error:
            warn_once(f"Tracing slow steps ended: {type(error).__name__}: {error}. The training goes on.")
            self._profile = None
            self._end()

    def _end_step(self) -> None:
        now = self._timer.now_ns()
        usual = median(self._recent) if len(self._recent) >= _LEAST else 0
        took = self._took(now, _RATIO * usual) if self._began_ns else 0
        if took:
            self._recent.append(took)
        if self._profile is not None:
            recorded = self._stop()
            if took > _RATIO * usual:
                self._kept.append((recorded, self._began_ns, now - self._began_ns))
                self._left -= 1
                if not self._left:
                    self._end()
                    return
            del recorded  # which takes time, too
            self._windows += 1
            # Uneven, for steps that are slow at a period.
            cost_ns = self._cost_ns + self._timer.now_ns() - now
            self._rest = int(cost_ns / (self._budget * usual) * (0.5 + self._windows * 0.618 % 1))
        elif not self._began_ns:
            self._start()  # The first start takes longer, so it is in the first step.
            self._stop()
        elif self._rest > 0:
            self._rest -= 1
        elif usual and not self._kept and not self._open:
            began_ns = self._timer.now_ns()
            self._start()
            self._cost_ns = self._timer.now_ns() - began_ns
        self._began_ns = self._timer.now_ns()

    def _took(self, now: int, limit: float) -> int:
        # A validation or a checkpoint between two BATCHes is no part of a step.
        if self._length is not None:
            return self._length()
        window_ns, head_ns = now - self._began_ns, self._head_ns
        region: Any = self._timer.region(TimeType.BATCH)
        self._head_ns = now - region._start_ns if region.is_open else 0
        if window_ns <= limit or not self._head_ns or not head_ns:
            return window_ns
        tail_ns = int(1e9 * self._timer.get_time(TimeType.BATCH)[-1]) - head_ns
        return min(self._head_ns + max(tail_ns, 0), window_ns)

    def _start(self) -> None:
        if _is_on():
            warn_once("Tracing slow steps: another profiler is on. No step is recorded until it ends.")
            return
        on_cuda = cuda.is_initialized()
        if on_cuda and cuda.is_current_stream_capturing():
            return
        # Kineto reads it once. Above 5 it does not print two lines for each profile.
        is_loud = not self._began_ns and _LOG_LEVEL not in os.environ
        if is_loud:
            os.putenv(_LOG_LEVEL, "6")
        self._profile = profiler.profile(use_kineto=True, use_device="cuda" if on_cuda else None)
        self._profile.__enter__()
        if is_loud:
            os.unsetenv(_LOG_LEVEL)

    def _stop(self) -> Any:
        stopped, self._profile = self._profile, None
        if stopped is not None and self._thread == get_ident():
            stopped.__exit__(None, None, None)
        return stopped

    def _write(self) -> None:
        # On the log's thread. Meanwhile no step is recorded.
        run = self._timer.run
        while self._kept and run is not None:
            kept, start_ns, dur_ns = self._kept[0]
            try:
                run.declare(TABLE, start_ns="time", dur_ns="int", file="name")
                folder = Path(run.folder, TABLE)
                folder.mkdir(parents=True, exist_ok=True)
                number = 1
                while os.path.lexists(path := folder / f"rank-{rank_and_world()[0]}-{number}.json"):
                    number += 1
                path.touch(exist_ok=False)  # It is no link that others have made.
                kept.export_chrome_trace(str(path))
                run.add(TABLE, (start_ns, dur_ns, f"{TABLE}/{path.name}"))
            finally:
                self._kept.popleft()


_active: list[SlowSteps] = []
