"""One error for every failure in a batch. It names the rank at fault: each rank writes its error to the job's store."""

from __future__ import annotations

import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from deep500_timing.adapters import store_connection
from deep500_timing_torch.pipeline._actions import PipelineError

if TYPE_CHECKING:
    from collections.abc import Iterator


_WORDS = ("timed out", "timeout", "connect", "broken pipe", "gloo", "nccl", "socket")
_TALKS = ("torch.distributed", "deep500_timing_torch.pipeline._hooks", "deep500_timing_torch.comm")


def came_from_others(error: BaseException) -> bool:
    """Whether an operation between ranks failed, rather than this rank's own layers, loss or data.

    Backends raise plain ``RuntimeError``, so its text is asked; but only where the operation itself raised it. A
    layer's own "could not connect" is the layer's.
    """
    if isinstance(error, dist.DistError):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and raised_in.startswith(_TALKS) and any(word in text for word in _WORDS)


_GRACE_S = 0.5
"""Seconds to look for the errors of other ranks after this rank has failed."""
_STORE_S = 10.0
"""Seconds that the store may take. It answers in a millisecond, in seconds on an overloaded machine, and never if its
rank is dead."""


class Faults:
    """Tells ranks that failed from ranks that failed because another did."""

    def __init__(self, number: int) -> None:
        self._prefix = f"deep500_timing/pipeline/{number}"
        self._rank = dist.get_rank()
        self._world = dist.get_world_size()
        self.broken: str | None = None
        """The failure after which the engine cannot go on."""

    @contextmanager
    def named(self, doing: str) -> Iterator[None]:
        """Turn every failure within into one error that names the rank at fault."""
        try:
            yield
        except Exception as error:
            explained = self.explain(doing, error, own=not came_from_others(error))
            self.broken = str(explained)
            raise explained from error

    def explain(self, doing: str, error: BaseException, *, own: bool) -> PipelineError:
        """Return the error to raise, which names the rank at fault where it is known."""
        root = error
        while own and root.__cause__ is not None:  # PyTorch wraps a layer's error, with the shapes of its inputs.
            root = root.__cause__
        word = f"{type(root).__name__}: {str(root).strip()}"[:600]
        here = f"{doing}: rank {self._rank} failed with {word}."
        connection = store_connection()
        if connection is None:
            return PipelineError(here)
        found: dict[int, str] = {}
        text = ("own " if own else "met ") + word
        fault = connection.run(
            lambda transport: self._tell(transport.underlying_store, text, found, alone=own), _STORE_S + _GRACE_S
        )
        if own:
            return PipelineError(here)
        heard = dict(found)  # If the store was too slow, the thread that asks it goes on.
        culprits = {rank: one[4:] for rank, one in heard.items() if one.startswith("own ")}
        if culprits:
            others = "; ".join(f"rank {rank}: {one}" for rank, one in sorted(culprits.items()))
            return PipelineError(f"{doing}: another rank failed ({others}). This rank met {word}.")
        silent = [rank for rank in range(self._world) if rank != self._rank and rank not in heard]
        if fault is not None:
            about = f"and the job's store, on rank 0, does not answer ({fault})"
        elif silent:
            about = f"and ranks {silent} say nothing: they are dead, stopped, or still waiting"
        else:
            about = "as all others did"
        return PipelineError(f"{doing}: rank {self._rank} lost a rank it talks to, {about}. It met {word}.")

    def _tell(self, store: Any, text: str, found: dict[int, str], *, alone: bool) -> None:
        store.set(f"{self._prefix}/{self._rank}", text.encode())
        until = time.monotonic() + _GRACE_S
        while not alone:
            for rank in range(self._world):
                key = f"{self._prefix}/{rank}"
                if rank not in found and store.check([key]):
                    found[rank] = store.get(key).decode(errors="replace")
            if time.monotonic() > until or len(found) == self._world:
                return
            time.sleep(0.02)
