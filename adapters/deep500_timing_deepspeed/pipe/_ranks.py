"""The process groups of an engine, and what it reduces over them: gradients, clipping, first parameters."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from deep500_timing_deepspeed.pipe._module import PipelineModule


class Grid:
    """The process groups of an engine. Every rank of the job makes it."""

    def __init__(self, module: PipelineModule, timeout_s: float) -> None:
        ranks, replicas = module.num_stages, module.replicas
        timeout = timedelta(seconds=timeout_s)
        self.replicas = replicas
        self.global_rank = dist.get_rank()
        self.control: Any = dist.new_group(backend="gloo", timeout=timeout)
        """All ranks, on the host."""
        self.pipe: Any = None
        """The ranks of this pipeline."""
        self.data: Any = None
        """The replicas of this rank's stages."""
        self.tied: dict[str, Any] = {}
        """The ranks of this pipeline with the weights of a key, where there are several."""
        for replica in range(replicas):
            members = [rank * replicas + replica for rank in range(ranks)]
            group = dist.new_group(members, timeout=timeout)
            if self.global_rank in members:
                self.pipe, self.pipe_ranks = group, members
        for rank in range(ranks):
            members = [rank * replicas + replica for replica in range(replicas)]
            group = dist.new_group(members, timeout=timeout) if replicas > 1 else None
            if self.global_rank in members:
                self.data = group
        owners = self._owners(module)
        for key in sorted(owners):
            for replica in range(replicas):
                members = [rank * replicas + replica for rank in owners[key]]
                group = dist.new_group(members, timeout=timeout)
                if self.global_rank in members:
                    self.tied[key] = group

    @staticmethod
    def _owners(module: PipelineModule) -> dict[str, list[int]]:
        # The same on every rank, those without the weights included.
        from deep500_timing_torch.pipeline._schedules import rank_of_stage

        found = {}
        for key, numbers in module.tied_keys.items():
            ranks = sorted(
                {rank_of_stage(module.schedule, module.stage_owner(one), module.num_stages) for one in numbers}
            )
            if len(ranks) > 1:
                found[key] = ranks
        return found

    def agree(self, values: list[int]) -> list[list[int]]:
        """The numbers of every rank, by rank."""
        own = torch.tensor(values, dtype=torch.int64)
        found = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own, group=self.control)
        return [one.tolist() for one in found]


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
    """Sum the gradients of tied weights over their stages and average all over the replicas."""
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
