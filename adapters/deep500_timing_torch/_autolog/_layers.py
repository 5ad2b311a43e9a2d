"""Times the layers of the models that a program calls: ``deep500-timing run --layers``."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import warn_once
from deep500_timing_torch.layers import LayerTimer
from deep500_timing_torch.layers._private import check

if TYPE_CHECKING:
    from deep500_timing_torch._autolog._steps import Steps


class Layers:
    """Attaches a layer timer to each model, until it is undone."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._timers: list[LayerTimer] = []
        steps.log.before_report(self._report)
        with suppress(RuntimeError):  # which attaching raises too
            check()  # now: it runs a backward pass, which is timed later

    def add(self, model: Any) -> None:
        """Time the layers of a model from now on."""
        try:
            self._timers.append(LayerTimer(model, self._steps.timer).attach())
        except Exception as error:
            warn_once(
                f"Timing the layers of {type(model).__name__} failed: {type(error).__name__}: {error}. The program "
                "goes on without their times."
            )

    def undo(self) -> None:
        """Restore the models."""
        for timer in self._timers:
            timer.detach()

    def feed(self) -> None:
        """Write the layers once there is a log, which begins after the first call of a model."""
        for layers in self._timers:
            if not layers._written:
                layers._write()

    def _report(self) -> None:
        self.undo()
        width = shutil.get_terminal_size((120, 24)).columns
        for timer in self._timers:
            self._steps.log.note("\n".join(("", *(f"  {line}" for line in timer.table(width=width).splitlines()), "")))
