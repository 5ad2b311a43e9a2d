"""The regions of one training under a trainer, and the wrappers that tell its loop what happens."""

from __future__ import annotations

import functools
from _thread import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from deep500_timing.adapters import GPU, Replaced, check_timer, outside_name, warn_once
from deep500_timing.exporters import BaseExporter
from deep500_timing.loop import BATCH, EPOCH, EPOCH_START, INSIDE, IO, NAMES, VALIDATION, Loops, limit
from deep500_timing_torch._autolog._engine import hide
from deep500_timing_torch._autolog._roots import of_torch
from deep500_timing_torch._timer import CPUGPUTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Autolog, Snapshot, Timer

    F = TypeVar("F", bound=Callable[..., Any])

FIT, CLIP, CHECKPOINT = "FIT", "clip", "CHECKPOINT"
_CLAIMED = {*NAMES, FIT, EPOCH, EPOCH_START, BATCH, CHECKPOINT, VALIDATION}
"""The regions that the plug-in of PyTorch leaves to a trainer's callback."""
_logs: list[Autolog] = []
"""The log of the process under ``deep500-timing run`` or ``autolog()``."""


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

    def since_last(self, timer: Timer, step: int | None = None) -> dict[str, float]:
        """The means since the last call."""
        timer.export(self, step=step)
        return self._values

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        self._values = {
            f"{outside_name(f'{self._prefix}/{one.name}')}{'_gpu' if one.device == GPU else ''}_s": one.stats.mean
            for one in snapshot
            if one.stats is not None
        }


class Fit:
    """The regions of one training: its :class:`~deep500_timing.loop.Loop`, and what only a trainer knows.

    Its methods may raise. The wrappers of :meth:`wrap` and hooks that are :func:`guarded` turn that into a warning.

    Args:
        timer: Records the regions.
        device: The type of the model's device. An accelerator times its regions too.
    """

    def __init__(self, timer: Timer, device: str) -> None:
        self.timer = timer
        self.loops = of_torch(Loops(timer))
        self.loop = self.loops.here()
        self.on_device = device not in ("cpu", "meta")
        if self.on_device:
            self.loops.time_on_device()
        self.skips = False
        """Whether the data is being skipped up to where a resumed training was: a wait for it is no IO."""
        self._thread = get_ident()
        """The thread that trains; 0 once the training has ended."""
        self._evaluates = False
        self._epoch_ns = 0
        """When the EPOCH began; 0 once its data has begun to come."""
        self._open: dict[int | str, int] = {}
        """The open events and regions in order, with their states."""
        self._replaced = Replaced()
        self._log = _logs[-1] if _logs else None
        self._stop_looking: Callable[[], object] = bool
        if self._log is not None:
            self._log.claim(*_CLAIMED)
            if self._log.timer() is timer:
                self._stop_looking = self._log.when_changed(self._leave_to_others)
                self._leave_to_others()
            self._log.begin()

    def _leave_to_others(self) -> None:
        # To timers of the program, where this one is that of `deep500-timing run`.
        if self._log is not None:
            self.loops.leave(self._log.taken)

    # --- regions -----------------------------------------------------------------------------------------------------

    def begin(self, what: int | str) -> bool:
        """Begin an event of the loop or a region; returns whether it is timed and no part of another."""
        if what in self._open or what in self.loops.off:
            return False
        state = 0
        if isinstance(what, str):
            self.timer.start(what)
        else:
            if what == IO:
                if self.skips:
                    return False
                self.begin_data(self.timer.now_ns())
            try:
                state = self.loop.begin(what)
            except Exception:  # the program has the region open
                self.loop.end_other()
                raise
        if state == INSIDE:
            return False
        self._open[what] = state
        return True

    def end(self, what: int | str, error: BaseException | None = None) -> None:
        """It has ended, if it is open, by an error or without. A wait that ends by ``StopIteration`` was none."""
        state = self._open.pop(what, None)
        if state is None:
            return
        if isinstance(what, str):
            (self.timer.end if error is None else self.timer.fail)(what)
        elif error is None:
            self.loop.end(state)
        elif what == IO and isinstance(error, StopIteration):
            self.loop.end_of_data(state)
        else:
            self.loop.fail(state)

    def cancel(self, what: int) -> None:
        """An event was none, if it is open."""
        state = self._open.pop(what, None)
        if state is not None:
            self.loop.cancel(state)

    # --- epochs and steps --------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        self.begin(EPOCH)
        self._epoch_ns = self.timer.now_ns()

    def begin_data(self, start_ns: int) -> None:
        """The EPOCH's data began to come at that time: what lies before it is the start of the EPOCH."""
        if self._epoch_ns:
            self.loops.record(EPOCH_START, self._epoch_ns, start_ns)
            self._epoch_ns = 0

    def add_wait(self, start_ns: int, end_ns: int) -> None:
        """Keep a wait for data that lies in the past."""
        self.begin_data(start_ns)
        self.loop.add(IO, start_ns, end_ns)

    def end_epoch(self) -> None:
        self.loop.pause()
        self.end(EPOCH)

    def restored(self, steps: int) -> None:
        """A training begins, or continues after this number of steps."""
        self.loops.first_step = steps
        self.loop.hook()
        if steps and self.timer.run is not None:
            self.timer.run.mark("checkpoint_restored", step=steps - 1)

    def wrap_evaluation(self, owner: Any, name: str, region: str = VALIDATION) -> None:
        """Time the function that evaluates. Nothing inside a call is timed, checkpoints excepted."""

        def begin() -> None:
            self._evaluates = True
            self.loop.begin_other()

        def end(_error: BaseException | None = None) -> None:
            self.loop.end_other()
            self._evaluates = False

        self.wrap(owner, name, region, before=begin, after=end, failed=end)

    def wrap_checkpoint(self, owner: Any, name: str) -> None:
        """Time the function that saves a checkpoint, also during an evaluation, and mark each in the run."""

        def saves() -> None:
            if not self._evaluates:
                self.loop.pause()

        def saved(_result: Any, start_ns: int, *_: Any, **__: Any) -> None:
            if self.timer.run is not None:
                dur_s = (self.timer.now_ns() - start_ns) / 1e9
                self.timer.run.mark("checkpoint_saved", step=self.loops.number - 1, dur_s=dur_s)

        self.wrap(owner, name, CHECKPOINT, before=saves, gets=saved, always=True)

    @guarded
    def close(self, *, failed: bool = False) -> None:
        """The training has ended: close the open regions, as failed if an exception ended it, and undo the wrappers."""
        self._thread = 0
        failed = failed and not limit.is_cut
        self._replaced.undo()
        error = RuntimeError() if failed else None
        regions = [what for what in self._open if isinstance(what, str)]
        for what in self._open.keys() - regions:
            guarded(self.end)(what, error)
        if failed and self.loop.is_in_step and BATCH not in self.loops.off:
            self.timer.start(BATCH)
            self.timer.fail(BATCH)
        guarded(self.loops.finish)()
        self._stop_looking()
        if self._log is not None:
            self._log.release(*_CLAIMED)
        for name in reversed(regions):
            guarded(self.end)(name, error)

    # --- wrappers ----------------------------------------------------------------------------------------------------

    def wrap(
        self,
        owner: Any,
        name: str,
        what: int | str = "",
        *,
        before: Callable[[], object] | None = None,
        sees: Callable[..., object] | None = None,
        after: Callable[[], object] | None = None,
        gets: Callable[..., object] | None = None,
        failed: Callable[[BaseException], object] | None = None,
        always: bool = False,
    ) -> None:
        """Time the calls of a function of an object, a class or a module until :meth:`close`.

        No exception of a hook reaches the training. A wait for data that ends by ``StopIteration`` is none.

        Args:
            owner: The owner of the function, or an object without it, which stays as it is.
            name: The function's name.
            what: The event or the region of a call; empty for none.
            before: Called before that begins.
            sees: Called after that with the arguments.
            after: Called after it ended.
            gets: Called after that with the result, the start and the arguments.
            failed: Called with the exception that ends a call.
            always: Whether to time it during an evaluation too.
        """
        original = getattr(owner, name, None)
        if original is None:
            return
        fit, timer = self, self.timer

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if fit._thread != get_ident() or (fit._evaluates and not always):
                return original(*args, **kwargs)
            is_ours, start_ns = False, 0
            try:
                if before is not None:
                    before()
                if sees is not None:
                    sees(*args, **kwargs)
                start_ns = timer.now_ns()
                is_ours = what != "" and fit.begin(what)
            except Exception as error:
                _warn(name, error)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                hide(error)
                try:
                    if is_ours:
                        fit.end(what, error)
                    if failed is not None:
                        failed(error)
                except Exception as ours:
                    _warn(name, ours)
                raise
            try:
                if is_ours:
                    fit.end(what)
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
