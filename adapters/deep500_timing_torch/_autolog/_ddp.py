"""Keeps what PyTorch's DDP samples of its backward passes, for findings about communication.

DDP hands its buckets to the process group in C++, where only the compiled kernel sees each operation. It times its own
communication in the first steps and in one of a hundred, by the host's clock or by CUDA events.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.nn.parallel import DistributedDataParallel

from deep500_timing.adapters import warn_once

if TYPE_CHECKING:
    from deep500_timing.loop import Loops
    from deep500_timing_torch._autolog._patches import Patches

TABLE = "ddp_samples"
_COMMUNICATION, _HIDDEN = "backward_comm_time", "backward_compute_comm_overlap_time"


class DdpSamples:
    """Reads the newest sample of each model after steps of which the loops tell."""

    def __init__(self, loops: Loops, patches: Patches) -> None:
        self._loops, self._patches = loops, patches
        self._models: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """By model: its number, and the iteration of its newest sample."""
        patches.put_after(DistributedDataParallel, "__init__", self._made)
        loops.when_stepped.append(self._stepped)

    def undo(self) -> None:
        self._loops.when_stepped.remove(self._stepped)

    def _made(self, _result: None, _begun_ns: int, model: Any, *_: Any) -> None:
        self._models[model] = len(self._models), 0

    def _stepped(self, _step: int) -> None:
        run = self._loops.timer.run
        if run is None or self._patches.sees_buckets:
            return
        try:
            for model, (number, known) in list(self._models.items()):
                sample = model._get_ddp_logging_data()
                iteration = sample.get("iteration", 0)
                if iteration != known and _COMMUNICATION in sample:
                    self._models[model] = number, iteration
                    run.declare(TABLE, time="time", model="int", communication_ns="int", hidden_ns="int")
                    run.add(TABLE, (perf_counter_ns(), number, sample[_COMMUNICATION], sample.get(_HIDDEN, 0)))
        except Exception as error:
            self._models.clear()
            warn_once(f"What DDP samples of its communication is not kept: {type(error).__name__}: {error}.")
