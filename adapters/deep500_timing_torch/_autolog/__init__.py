"""Times an unchanged PyTorch program: the plug-in of ``deep500-timing run`` for PyTorch.

``deep500_timing.loop`` turns events into regions, ``_patches`` sees the events, ``_roots`` finds the models and times
their layers, ``_compilations`` keeps what ``torch.compile`` did, ``_workers`` times the workers of data loaders,
``_syncs`` counts waits for the GPU, ``_ddp`` keeps what DDP samples of its communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing.loop import Loops
from deep500_timing.runs import feeders
from deep500_timing_torch._autolog._compilations import Compilations
from deep500_timing_torch._autolog._ddp import DdpSamples
from deep500_timing_torch._autolog._patches import Patches
from deep500_timing_torch._autolog._roots import Layers, Roots, of_torch
from deep500_timing_torch._autolog._syncs import Syncs
from deep500_timing_torch._autolog._workers import Workers
from deep500_timing_torch._timer import CPUGPUTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Autolog

__all__ = ["install"]


def install(log: Autolog) -> Callable[[], None]:
    """Time what PyTorch does from now on; see ``docs/run-command.md``.

    Returns:
        What undoes it.
    """
    loops = of_torch(Loops.of(log, CPUGPUTimer))
    roots = Roots(loops)
    parts: list[Any] = [roots]
    feeds: list[Callable[[], object]] = [loops.pending_ns]
    if log.layers:  # before `Patches`: it runs a backward pass
        layers = Layers(loops)
        roots.when_found = layers.add
        parts.append(layers)
        feeds.append(layers.feed)
    patches = Patches(loops)
    workers, compilations, syncs = Workers(loops, patches), Compilations(loops), Syncs(loops)
    parts += [patches, compilations, syncs, DdpSamples(loops, patches)]
    feeds += [workers.feed, compilations.feed, syncs.feed]
    feeders.extend(feeds)
    if log.slow_steps:
        from deep500_timing_torch.slow_steps import SlowSteps

        slow = SlowSteps(loops.timer, log.slow_steps, batch_ns=lambda: loops.main.length_ns if loops.main else 0)
        log.before_report(slow.close)

    def undo() -> None:
        loops.finish()
        for part in parts:
            part.undo()
        for feed in feeds:
            feed()
            feeders.remove(feed)

    return undo
