"""Times loops that are written with Hugging Face's Accelerate.

::

    from deep500_timing_torch.trainers.accelerate import TimerTracker, instrument

    accelerator = Accelerator(log_with=[TimerTracker(tmr)])     # keeps the logged values in the run
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    timed = instrument(accelerator, tmr)                        # until timed.close()
"""

from __future__ import annotations

import functools
import json
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from accelerate.tracking import GeneralTracker

from deep500_timing.adapters import check_timer
from deep500_timing_torch._timer import CPUGPUTimer
from deep500_timing_torch.trainers._data import Data
from deep500_timing_torch.trainers._fit import BACKWARD, CLIP, FORWARD, OPTIMIZER, Fit, Means, guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelerate import Accelerator

    from deep500_timing import Timer

__all__ = ["Instrumented", "TimerTracker", "instrument"]


def instrument(accelerator: Accelerator, timer: Timer, *, prefix: str = "time") -> Instrumented:
    """Time a loop: BATCH, IO, copies, FORWARD, BACKWARD, clip, optimizer. Call it after ``accelerator.prepare``.

    A BATCH is one step of each prepared optimizer with all its micro-batches. It begins with the first wait for data
    after the last one. Nothing is timed while no prepared model is in training mode.

    Args:
        accelerator: Its prepared models, optimizers and loaders are timed.
        timer: The timer to record with.
        prefix: Begins the names of :meth:`Instrumented.values`.

    Raises:
        TypeError: ``timer`` is not a timer.
        ValueError: Nothing has been prepared.
    """
    check_timer(f"instrument(accelerator, {timer!r})", timer)
    if not accelerator._optimizers:
        raise ValueError(
            "Instrumenting an Accelerator: it has no optimizer. Call `accelerator.prepare(model, optimizer, loader)` "
            "first."
        )
    return Instrumented(accelerator, timer, prefix)


class Instrumented:
    """The timing of a loop, until :meth:`close`; as a context it ends with its block."""

    def __init__(self, accelerator: Accelerator, timer: Timer, prefix: str) -> None:
        """Made by :func:`instrument`."""
        self._accelerator = accelerator
        self._means = Means(prefix)
        self._stepped: set[int] = set()
        self._steps = 0
        fit = self._fit = Fit(timer, accelerator.device.type, self._evaluates)
        Data(fit, counts=False, each=self._waits)
        # Hooks: a function in place of `forward` would serve copies of the model too.
        self._hooks = [model.register_forward_pre_hook(_Hook(self._begin_forward)) for model in accelerator._models]
        self._hooks += [
            model.register_forward_hook(_Hook(self._end_forward), always_call=True) for model in accelerator._models
        ]
        engine = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
        self._has_engine = engine is not None  # of DeepSpeed: `accelerator.backward` steps its optimizer
        fit.wrap(engine or accelerator, "backward", BACKWARD)
        fit.wrap(engine, "step", OPTIMIZER)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            fit.wrap(accelerator, name, CLIP)
        for optimizer in accelerator._optimizers:
            after = functools.partial(self._end_step, id(optimizer))
            fit.wrap(optimizer, "step", before=self._begin_step, after=after, failed=self._fail_step)
        fit.wrap_checkpoint(accelerator, "save_state")

    def values(self) -> dict[str, float]:
        """The mean of each region since the last call, in seconds: for ``accelerator.log``."""
        return self._means.since_last(self._fit)

    def close(self, *, failed: bool = False) -> None:
        """Undo the instrumentation.

        Args:
            failed: Whether the open regions have failed.
        """
        for hook in self._hooks:
            hook.remove()
        self._fit.close(failed=failed)

    def __enter__(self) -> Instrumented:
        """Time the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The block has ended, by an exception or not."""
        self.close(failed=kind is not None)

    def _evaluates(self) -> bool:
        models = self._accelerator._models
        return bool(models) and not any(model.training for model in models)

    def _waits(self) -> None:
        if not self._fit.batch_ns:
            self._fit.begin_batch(self._fit.timer.now_ns(), self._steps)

    def _begin_forward(self) -> None:
        if torch.is_grad_enabled() and self._fit.is_here:
            self._fit.start(FORWARD)

    def _end_forward(self) -> None:
        if self._fit.is_here:
            self._fit.end(FORWARD)

    def _begin_step(self) -> None:
        if self._accelerator.sync_gradients and not self._has_engine:
            self._fit.start(OPTIMIZER)

    def _fail_step(self, error: BaseException) -> None:
        self._fit.end(OPTIMIZER, failed=True)

    def _end_step(self, optimizer: int) -> None:
        self._fit.end(OPTIMIZER)
        if self._accelerator.sync_gradients:
            self._stepped.add(optimizer)
            if len(self._stepped) == len(self._accelerator._optimizers):
                self._stepped.clear()
                self._steps += 1
                self._fit.end_batch()


class _Hook:
    """A hook of a module that is none in a copy of the module."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = guarded(call)

    def __call__(self, *args: Any) -> None:
        self._call()

    def __reduce__(self) -> tuple[type[_Hook], tuple[Callable[[], object]]]:
        return _Hook, (bool,)


class TimerTracker(GeneralTracker):  # type: ignore[misc, unused-ignore]
    """Keeps what ``accelerator.log`` logs in the timer's run: the table ``logged`` of numbers by name and step.

    The step is -1 where the program gives none.

    Args:
        timer: The values go to its run; None makes a timer.
        run: The run's folder, if the timer writes none yet.
    """

    name = "deep500_timing"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, timer: Timer | None = None, run: str | None = None) -> None:
        if timer is not None:
            check_timer(f"TimerTracker({timer!r})", timer)
        super().__init__()
        self.timer = CPUGPUTimer() if timer is None else timer
        self._folder = run

    @property
    def tracker(self) -> Timer:
        """The timer."""
        return self.timer

    @guarded
    def start(self) -> None:
        """The program begins to track."""
        if self.timer.run is None and self._folder is not None:
            from deep500_timing.runs import attach

            attach(self.timer, self._folder)
        if self.timer.run is not None:
            self.timer.run.declare("logged", time="time", step="int", name="name", value="float")

    @guarded
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The program's settings: an event of the run."""
        if self.timer.run is not None:
            self.timer.run.event("configuration", json.dumps(values, default=str))

    @guarded
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep the numbers among the values."""
        run = self.timer.run
        if run is not None:
            now = self.timer.now_ns()
            number = -1 if step is None else step
            rows = [(now, number, name, float(value)) for name, value in values.items() if isinstance(value, Real)]
            run.add("logged", *rows)

    @guarded
    def finish(self) -> None:
        """The program has ended: write the rest."""
        if self.timer.run is not None:
            self.timer.run.flush()
