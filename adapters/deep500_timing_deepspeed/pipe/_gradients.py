"""Gradients after the backward passes: summed over tied layers, averaged over replicas, clipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from deep500_timing_deepspeed.pipe._grid import Grid
    from deep500_timing_deepspeed.pipe._module import PipelineModule

__all__ = ["clip", "reduce_gradients", "synchronise"]


def synchronise(module: PipelineModule, grid: Grid) -> None:
    """Give replicas the parameters of the first, and tied layers those of the first rank that has them."""
    with torch.no_grad():
        if grid.data is not None:
            source = dist.get_global_rank(grid.data, 0)
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor.data, src=source, group=grid.data)
        for key, (weights, _) in sorted(module.tied_weights().items()):
            if key in grid.tied:
                source = dist.get_global_rank(grid.tied[key], 0)
                for weight in weights:
                    dist.broadcast(weight.data, src=source, group=grid.tied[key])


def reduce_gradients(module: PipelineModule, grid: Grid) -> bool:
    """Sum the gradients of tied weights over their stages and average all over the replicas.

    Returns:
        Whether anything was sent.
    """
    sent = False
    for key, (weights, _) in sorted(module.tied_weights().items()):
        for weight in weights if key in grid.tied else ():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=grid.tied[key])
            sent = True
    if grid.data is None:
        return sent
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_kind.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
    for gradients in by_kind.values():
        flat = torch.cat([one.reshape(-1) for one in gradients])
        dist.all_reduce(flat, group=grid.data)
        flat /= grid.replicas
        parts = torch.split(flat, [one.numel() for one in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
    return True


def clip(module: PipelineModule, grid: Grid, most: float) -> torch.Tensor:
    """Scale all gradients of the model so that their norm is at most ``most``, as ``clip_grad_norm_`` does of one.

    Tied weights count once, on the first rank that has them.

    Returns:
        The norm before.
    """
    elsewhere = {
        id(weight)
        for key, (weights, _) in module.tied_weights().items()
        if key in grid.tied and dist.get_rank(grid.tied[key]) != 0
        for weight in weights
    }
    gradients: list[Any] = [one.grad for one in module.parameters() if one.grad is not None]
    counted: list[Any] = [one.grad for one in module.parameters() if one.grad is not None and id(one) not in elsewhere]
    square = torch.zeros((), dtype=torch.float64, device=module.device)
    for gradient in counted:
        square += torch.linalg.vector_norm(gradient).double() ** 2
    dist.all_reduce(square, group=grid.pipe)
    norm = square.sqrt().float()
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
    return norm
