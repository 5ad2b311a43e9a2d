"""Activation checkpointing: repeated regions are counted as recomputed, and not timed a second time.

A checkpoint runs its part of the forward pass again in the backward pass, from PyTorch's own code, and stops it by an
exception as soon as it has what it needs. So the functions that it keeps for that are wrapped where it keeps them; the
rest of it is not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deep500_timing.adapters import begin_recomputation, end_recomputation

_MARK = "_deep500_timing_recomputes"


@contextmanager
def _recomputation() -> Iterator[None]:
    begin_recomputation()
    try:
        yield
    finally:
        end_recomputation()


def prepare() -> None:
    """See to it that recomputations are known as such, whichever kind of checkpoint makes them."""
    from torch.utils import checkpoint

    frame: Any = getattr(checkpoint, "_CheckpointFrame", None)
    if frame is not None and not hasattr(frame, _MARK):
        keep = frame.__init__

        @functools.wraps(keep)
        def keep_wrapped(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            keep(self, _recomputation()(recompute_fn), *args, **kwargs)

        frame.__init__ = keep_wrapped
        setattr(frame, _MARK, True)
    reentrant: Any = checkpoint.CheckpointFunction
    if not hasattr(reentrant, _MARK):
        forward = reentrant.forward

        @functools.wraps(forward)
        def forward_wrapped(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            outputs = forward(ctx, run_function, *args)
            ctx.run_function = _recomputation()(run_function)
            return outputs

        reentrant.forward = staticmethod(forward_wrapped)
        setattr(reentrant, _MARK, True)
