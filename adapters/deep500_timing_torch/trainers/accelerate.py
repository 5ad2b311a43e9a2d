"""Times loops that are written with Hugging Face's Accelerate.

::

    from deep500_timing_torch.trainers.accelerate import TimerTracker, instrument

    accelerator = Accelerator(log_with=[TimerTracker(tmr)])     # keeps the logged values in the run
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    timed = instrument(accelerator, tmr)                        # until timed.close()
"""

from __future__ import annotations

import json
from numbers import Real
from typing import TYPE_CHECKING, Any

from accelerate.tracking import GeneralTracker

from deep500_timing.adapters import check_timer
from deep500_timing_torch._autolog._patches import Patches
from deep500_timing_torch._autolog._roots import Roots
from deep500_timing_torch._timer import CPUGPUTimer
from deep500_timing_torch.trainers._fit import CLIP, Fit, Means, guarded

if TYPE_CHECKING:
    from accelerate import Accelerator

    from deep500_timing import Timer

__all__ = ["Instrumented", "TimerTracker", "instrument"]


def instrument(accelerator: Accelerator, timer: Timer, *, prefix: str = "time") -> Instrumented:
    """Time a loop, as ``deep500-timing run`` does, and clipping. Call it after ``accelerator.prepare``.

    Args:
        accelerator: Has prepared the models, optimizers and loaders of the loop.
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
        self._means = Means(prefix)
        fit = self._fit = Fit(timer, accelerator.device.type)
        self._parts = Roots(fit.loops), Patches(fit.loops)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            fit.wrap(accelerator, name, CLIP)
        fit.wrap_checkpoint(accelerator, "save_state")

    def values(self) -> dict[str, float]:
        """The mean of each region since the last call, in seconds: for ``accelerator.log``."""
        return self._means.since_last(self._fit.timer)

    def close(self, *, failed: bool = False) -> None:
        """Undo the instrumentation.

        Args:
            failed: Whether the open regions have failed.
        """
        for part in self._parts:
            part.undo()
        self._fit.close(failed=failed)

    def __enter__(self) -> Instrumented:
        """Time the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The block has ended, by an exception or not."""
        self.close(failed=kind is not None)


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
