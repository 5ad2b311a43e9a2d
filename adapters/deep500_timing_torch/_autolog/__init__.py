"""Times an unchanged PyTorch program: the plug-in of ``deep500-timing run`` for PyTorch.

``_steps`` turns events into regions, ``_patches`` sees the events, ``_roots`` finds the models and times their layers,
``_compilations`` keeps what ``torch.compile`` did, ``_workers`` times the workers of data loaders, ``_syncs`` counts
waits for the GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deep500_timing import compiled
from deep500_timing.runs import feeders
from deep500_timing_torch._timer import CPUGPUTimer

if not compiled:  # a compiled form of the steps reads a compiled recorder's C structures
    from deep500_timing._base.plain import load_plain

    load_plain(__name__, Path(__file__).parent, ("_steps",))

from deep500_timing_torch._autolog._compilations import Compilations
from deep500_timing_torch._autolog._patches import Patches
from deep500_timing_torch._autolog._roots import Layers, Roots
from deep500_timing_torch._autolog._steps import Steps
from deep500_timing_torch._autolog._syncs import Syncs
from deep500_timing_torch._autolog._workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Autolog

__all__ = ["install"]


def install(log: Autolog) -> Callable[[], None]:
    """Time what PyTorch does from now on; see ``docs/run-command.md``.

    Returns:
        What undoes it.
    """
    steps = Steps(log, log.timer(CPUGPUTimer), torch.is_grad_enabled)
    roots = Roots(steps)
    parts: list[Any] = [roots]
    feeds: list[Callable[[], object]] = [steps.drain]
    if log.layers:  # before `Patches`: it runs a backward pass
        layers = Layers(steps)
        roots.when_found = layers.add
        parts.append(layers)
        feeds.append(layers.feed)
    patches = Patches(steps)
    workers, compilations, syncs = Workers(steps, patches), Compilations(steps), Syncs(steps)
    parts += [patches, compilations, syncs]
    feeds += [workers.feed, compilations.feed, syncs.feed]
    feeders.extend(feeds)
    if log.slow_steps:
        from deep500_timing_torch.slow_steps import SlowSteps

        log.before_report(SlowSteps(steps.timer, log.slow_steps, batch_ns=lambda: steps.batch_ns).close)

    def undo() -> None:
        steps.finish()
        for part in parts:
            part.undo()
        for feed in feeds:
            feed()
            feeders.remove(feed)

    return undo
