"""Keeps what PyTorch's DDP samples of its backward passes, for findings about communication.

DDP hands its buckets to the process group in C++, where only the compiled kernel sees each operation. It times its own
communication in the first steps and in one of a hundred, by the host's clock or by CUDA events.
"""

from __future__ import annotations

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
    """Reads the newest samples after steps of which the loops tell: of all models together, as they are of one step."""

    def __init__(self, loops: Loops, patches: Patches) -> None:
        self._loops, self._patches = loops, patches
        self._models: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """By model, the iteration of its newest sample."""
        patches.put_after(DistributedDataParallel, "__init__", self._made)
        loops.when_stepped.append(self._stepped)

    def undo(self) -> None:
        self._loops.when_stepped.remove(self._stepped)

    def _made(self, _result: None, _begun_ns: int, model: Any, *_: Any) -> None:
        self._models[model] = 0

    def _stepped(self, _step: int) -> None:
        run = self._loops.timer.run
        if run is None or self._patches.sees_buckets:
            return
        try:
            newest = []
            for model, known in list(self._models.items()):
                sample = model._get_ddp_logging_data()
                iteration = sample.get("iteration", 0)
                if iteration != known and _COMMUNICATION in sample:
                    self._models[model] = iteration
                    newest.append((sample[_COMMUNICATION], sample.get(_HIDDEN, 0)))
            if newest:
                run.declare(TABLE, time="time", communication_ns="int", hidden_ns="int")
                run.add(TABLE, (self._loops.timer.now_ns(), *map(sum, zip(*newest, strict=True))))
        except Exception as error:
            self._models.clear()
            warn_once(f"What DDP samples of its communication is not kept: {type(error).__name__}: {error}.")
