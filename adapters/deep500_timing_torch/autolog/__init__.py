"""Times an unchanged PyTorch program: the plug-in of ``deep500-timing run`` for PyTorch.

``_steps`` turns events into regions, ``_patches`` sees the events, ``_roots`` finds the models, ``_compilations`` keeps
what ``torch.compile`` did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing_torch._timer import CPUGPUTimer
from deep500_timing_torch.autolog._compilations import Compilations
from deep500_timing_torch.autolog._patches import Patches
from deep500_timing_torch.autolog._roots import Roots
from deep500_timing_torch.autolog._steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Autolog

__all__ = ["install"]


def install(log: Autolog) -> Callable[[], None]:
    """Time what PyTorch does from now on; see ``docs/run-command.md``.

    Returns:
        What undoes it.
    """
    steps = Steps(log, log.timer(CPUGPUTimer))
    parts = (Roots(steps), Patches(steps), Compilations(steps))

    def undo() -> None:
        steps.finish()
        for part in parts:
            part.undo()

    return undo
