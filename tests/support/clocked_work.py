"""An operation of PyTorch with two passes that move a clock that otherwise stands still."""

from __future__ import annotations

import torch


class Work(torch.autograd.Function):
    """The identity, which takes so many milliseconds forward and backward."""

    @staticmethod
    def forward(ctx, value, clock, forward_ms, backward_ms):
        """Move the clock, and hand the value on."""
        ctx.clock, ctx.backward_ms = clock, backward_ms
        clock.advance_ns(forward_ms * 1_000_000)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Move the clock, and hand the gradient on."""
        ctx.clock.advance_ns(ctx.backward_ms * 1_000_000)
        return gradient, None, None, None
