"""The regions of one training under a trainer, and the wrappers that start and end them."""

from __future__ import annotations

import functools
from _thread import get_ident
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from deep500_timing import TimeType
from deep500_timing.adapters import GPU, Replaced, check_timer, outside_name, warn_once
from deep500_timing.exporters import BaseExporter
from deep500_timing.loop import BETWEEN, NAMES
from deep500_timing_torch._autolog._engine import hide
from deep500_timing_torch._timer import CPUGPUTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Autolog, Snapshot, Timer

    F = TypeVar("F", bound=Callable[..., Any])
    Mark = tuple[str, int, int]

IO, COPY, FORWARD, _, BACKWARD, _, OPTIMIZER, _ = NAMES
EPOCH, BATCH = TimeType.EPOCH.name, TimeType.BATCH.name
FIT, EPOCH_START, CLIP = "FIT", f"{EPOCH} (start)", "clip"
CHECKPOINT, VALIDATION = "CHECKPOINT", "VALIDATION"
PREPARE, LOSS, GRADIENTS, NEXT, OTHER = BETWEEN
BETWEEN_BATCHES = "between batches"
"""The region between two regions inside an EPOCH, outside of each BATCH."""
_CLAIMED = {*NAMES, FIT, EPOCH, EPOCH_START, BATCH, CHECKPOINT, VALIDATION}
"""The regions that the plug-in of PyTorch leaves to a trainer's callback."""
_ON_DEVICE = frozenset({COPY, FORWARD, BACKWARD, CLIP, OPTIMIZER})
_MOST_MARKS = 64
"""So many are flushed at the end of a BATCH: about eight BATCHes without accumulation."""
_logs: list[Autolog] = []
"""The log of the process under ``deep500-timing run`` or ``autolog()``."""


_GAPS = {IO: PREPARE, COPY: PREPARE, OPTIMIZER: NEXT, (FORWARD, BACKWARD): LOSS}
_GAPS |= {(one, two): GRADIENTS for one in (BACKWARD, CLIP) for two in (CLIP, OPTIMIZER)}
"""The region between two regions inside a BATCH, by both or by the first alone; those of ``deep500-timing run``."""


def _warn(name: str, error: Exception) -> None:
    warn_once(
        f"Timing the training failed in {name}: {type(error).__name__}: {error}. The training goes on; its times are "
        "incomplete.",
        key=f"trainer {name} {type(error).__name__}",
    )


def guarded(method: F) -> F:
    """Make a hook harmless: an exception in it costs a warning, never the training."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            _warn(method.__qualname__, error)
            return None

    return call  # type: ignore[return-value]


class TrainerTimer:
    """The common part of the trainers' callbacks: the timer, and one training at a time.

    Args:
        timer: The timer to record with; None makes one.
    """

    def __init__(self, timer: Timer | None = None) -> None:
        if timer is not None:
            check_timer(f"{type(self).__name__}({timer!r})", timer)
        self.timer = CPUGPUTimer() if timer is None else timer
        self._training: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and its own timer, and no training."""
        return {**vars(self), "_training": None}

    def _end(self, *, failed: bool) -> None:
        training, self._training = self._training, None
        if training is not None:
            training.fit.close(failed=failed)


class Means(BaseExporter):
    """The mean of each region in seconds, by names such as ``time/BATCH_s``."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix
        self._values: dict[str, float] = {}

    def since_last(self, fit: Fit, step: int | None = None) -> dict[str, float]:
        """The means since the last call."""
        fit.flush()
        fit.timer.export(self, step=step)
        return self._values

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        self._values = {
            f"{outside_name(f'{self._prefix}/{one.name}')}{'_gpu' if one.device == GPU else ''}_s": one.stats.mean
            for one in snapshot
            if one.stats is not None
        }


class Fit:
    """The regions of one training: which are open, and where the current BATCH began.

    Its methods may raise. The wrappers of :meth:`wrap` and hooks that are :func:`guarded` turn that into a warning.

    A call of a hook costs the memory that it touches, because PyTorch has replaced the contents of the processor's
    caches. So a hook only marks what has ended. Every few BATCHes the time between the marks is recorded.

    Args:
        timer: Records the regions.
        device: The type of the model's device. An accelerator times its regions too.
        evaluates: Returns whether an evaluation runs; one that :meth:`wrap_evaluation` has wrapped is known.
    """

    def __init__(self, timer: Timer, device: str, evaluates: Callable[[], bool] | None = None) -> None:
        self.timer = timer
        self.here = self._thread = get_ident()
        """The thread that trains; 0 while an evaluation runs, which is no part of the training."""
        self.open: dict[str, int] = {}
        """The open regions in order, with the time when each began."""
        self.marks: list[Mark] = []
        """The regions that ended since the last flush, with their start and end."""
        self.batch_ns = 0
        """When the current BATCH began; 0 outside of one."""
        self.on_device = device not in ("cpu", "meta")
        self.batches_ns = 0
        """The total time of the recorded BATCHes."""
        self.epoch_ns = 0
        """When the EPOCH began, until its first BATCH begins; then 0."""
        self._data_ns = 0
        """When the EPOCH's data began to come."""
        self._evaluates = evaluates
        self._step = self._trained_step = -1
        self._replaced = Replaced()
        self._log = _logs[-1] if _logs else None
        if self._log is not None:
            self._log.claim(*_CLAIMED)
            self._log.begin()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread trains, and no evaluation runs."""
        return self.here == get_ident() and not (self._evaluates is not None and self._evaluates())

    def _is_taken(self, name: str) -> bool:
        # Another timer of the program records it, and this one is that of `deep500-timing run`.
        return self._log is not None and name in self._log.taken and self._log.timer() is self.timer

    # --- regions -----------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Open a region, unless it is open or another timer records it."""
        if name not in self.open and (self._log is None or not self._is_taken(name)):
            start_ns = self.timer.now_ns()
            self.timer.start(name, self.on_device and name in _ON_DEVICE)
            self.open[name] = start_ns

    def end(self, name: str, *, failed: bool = False) -> None:
        """Close a region, if it is open; one that an exception ended is counted as failed."""
        start_ns = self.open.pop(name, None)
        if start_ns is not None:
            if failed:
                self.timer.fail(name)
            else:
                self.timer.end(name, self.on_device and name in _ON_DEVICE)
            self.marks.append((name, start_ns, self.timer.now_ns()))

    def cancel(self, name: str) -> None:
        """Forget an open region: there was nothing to time."""
        if self.open.pop(name, None) is not None:
            self.timer.cancel(name)

    def record(self, name: str, start_ns: int, end_ns: int) -> None:
        """Keep a region that lies in the past, unless another timer records it."""
        if end_ns > start_ns > 0 and (self._log is None or not self._is_taken(name)):
            self.timer.record(name, start_ns, end_ns)

    def add(self, name: str, start_ns: int, end_ns: int) -> None:
        """Keep a region that has ended, and mark it."""
        self.record(name, start_ns, end_ns)
        self.marks.append((name, start_ns, end_ns))
        if len(self.marks) > 1000:  # of a BATCH that does not end
            self.flush()

    def mark(self, name: str) -> None:
        """Mark this moment, as if a region had lasted no time: what follows is a region up to the next."""
        now = self.timer.now_ns()
        self.marks.append((name, now, now))

    def flush(self) -> None:
        """Record the time between two marks that lie in no other as a region that is named by both."""
        marks, self.marks[:] = self.marks[:], []
        if self.batch_ns and marks:  # it has not ended
            marks.append((BATCH, self.batch_ns, marks[-1][2]))
        outer: list[Mark] = []
        inner: list[Mark] = []
        for mark in marks:
            name, start_ns, end_ns = mark
            first = len(outer)
            while first and outer[first - 1][1] >= start_ns:
                first -= 1
            if name == BATCH:
                inner = outer[first:]
                for (last, _, last_ns), (after, after_ns, _) in pairwise([*inner, (NEXT, end_ns, end_ns)]):
                    self.record(_GAPS.get((last, after)) or _GAPS.get(last, OTHER), last_ns, after_ns)
            outer[first:] = [mark]
        if EPOCH in self.open and not self.epoch_ns:
            for (_, _, last_ns), (_, after_ns, _) in pairwise(outer):
                if last_ns >= self._data_ns:
                    self.record(BETWEEN_BATCHES, last_ns, after_ns)
        # The time after the last one is still to come.
        self.marks += (inner if self.batch_ns else outer)[-1:]

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        self.flush()
        self.start(EPOCH)
        self.epoch_ns = self.timer.now_ns()

    def end_epoch(self) -> None:
        self.mark(EPOCH)
        self.flush()
        self.end(EPOCH)

    def begin_data(self, start_ns: int) -> None:
        """The EPOCH's data began to come at that time: what lies before it is the start of the EPOCH."""
        if self.epoch_ns:
            self.record(EPOCH_START, self.epoch_ns, start_ns)
            self.epoch_ns, self._data_ns = 0, start_ns

    def begin_batch(self, start_ns: int, step: int) -> None:
        """A BATCH began at that time. One that did not end with an optimizer step is no BATCH."""
        if self.epoch_ns:
            self.begin_data(start_ns)
        self.batch_ns, self._step = start_ns, step
        self.timer.step(step, time_ns=start_ns)

    def end_batch(self) -> None:
        if self.batch_ns:
            start_ns, now = self.batch_ns, self.timer.now_ns()
            self.batch_ns, self._trained_step = 0, self._step
            self.batches_ns += now - start_ns
            self.add(BATCH, start_ns, now)
            if len(self.marks) >= _MOST_MARKS:
                self.flush()

    def restored(self, steps: int) -> None:
        """A training continues after this number of steps."""
        self._trained_step = steps - 1
        if self.timer.run is not None:
            self.timer.run.mark("checkpoint_restored", step=steps - 1)

    def wrap_evaluation(self, owner: Any, name: str, region: str = VALIDATION) -> None:
        """Time the function that evaluates. Nothing inside a call is timed, checkpoints excepted."""

        def pauses(thread: int) -> Callable[..., None]:
            return lambda _error=None: setattr(self, "here", thread and self._thread)

        self.wrap(owner, name, region, before=pauses(0), after=pauses(1), failed=pauses(1))

    def wrap_checkpoint(self, owner: Any, name: str) -> None:
        """Time the function that saves a checkpoint, also during an evaluation, and mark each in the run."""

        def saved(_result: Any, start_ns: int, *_: Any, **__: Any) -> None:
            if self.timer.run is not None:
                dur_s = (self.timer.now_ns() - start_ns) / 1e9
                self.timer.run.mark("checkpoint_saved", step=self._trained_step, dur_s=dur_s)

        self.wrap(owner, name, CHECKPOINT, gets=saved, while_paused=True)

    @guarded
    def close(self, *, failed: bool = False) -> None:
        """The training has ended: close the open regions, as failed if an exception ended it, and undo the wrappers."""
        self.here = self._thread = 0
        self._replaced.undo()
        guarded(self.flush)()
        if self._log is not None:
            self._log.release(*_CLAIMED)
        if self.batch_ns and failed and not self._is_taken(BATCH):
            self.timer.start(BATCH)
            self.timer.fail(BATCH)
        self.batch_ns = 0
        for name in reversed(list(self.open)):
            guarded(self.end)(name, failed=failed)

    # --- wrappers ----------------------------------------------------------------------------------------------------

    def wrap(
        self,
        owner: Any,
        name: str,
        region: str = "",
        *,
        before: Callable[[], object] | None = None,
        sees: Callable[..., object] | None = None,
        after: Callable[[], object] | None = None,
        gets: Callable[..., object] | None = None,
        failed: Callable[[BaseException], object] | None = None,
        while_paused: bool = False,
    ) -> None:
        """Time the calls of a function of an object, a class or a module until :meth:`close`.

        No exception of a hook reaches the training.

        Args:
            owner: The owner of the function, or an object without it, which stays as it is.
            name: The function's name.
            region: The region of a call.
            before: Called before the region starts.
            sees: Called after that with the arguments.
            after: Called after the region ended.
            gets: Called after that with the result, the start and the arguments.
            failed: Called with the exception that ends a call.
            while_paused: Whether to time it during an evaluation too.
        """
        original = getattr(owner, name, None)
        if original is None:
            return
        fit, timer, on_device, is_open = self, self.timer, self.on_device and region in _ON_DEVICE, False
        # A hook is called often: the region is opened here, without Fit.start and Fit.end.
        # To read the thread takes a fifth of the time. Only functions of classes and modules run on other threads too.
        is_shared = isinstance(owner, (type, ModuleType))

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_open
            if (
                not fit.here
                or (is_shared and fit.here != get_ident())
                or (fit._evaluates is not None and fit._evaluates())
            ) and not (while_paused and fit._thread == get_ident()):
                return original(*args, **kwargs)
            is_ours, start_ns = False, 0
            try:
                if before is not None:
                    before()
                if sees is not None:
                    sees(*args, **kwargs)
                start_ns = timer.now_ns()
                if region and not is_open and (fit._log is None or not fit._is_taken(region)):
                    timer.start(region, on_device)
                    is_ours = is_open = True
            except Exception as error:
                _warn(name, error)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                hide(error)
                try:
                    if is_ours:
                        is_open = False
                        timer.fail(region)
                    if failed is not None:
                        failed(error)
                except Exception as ours:
                    _warn(name, ours)
                raise
            try:
                if is_ours:
                    is_open = False
                    timer.end(region, on_device)
                    fit.marks.append((region, start_ns, timer.now_ns()))
                if after is not None:
                    after()
                if gets is not None:
                    gets(result, start_ns, *args, **kwargs)
            except Exception as error:
                _warn(name, error)
            return result

        call._torchdynamo_inline = original  # type: ignore[attr-defined]
        # Where another has wrapped it since, `call` stays below that, and does nothing once the fit is closed.
        self._replaced.put(owner, name, call)
