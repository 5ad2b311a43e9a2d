"""Which ranks belong together: those of a pipeline, the replicas of a stage, the owners of tied weights."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from deep500_timing_deepspeed.pipe._module import PipelineModule

__all__ = ["Grid"]


class Grid:
    """The process groups of an engine. Every rank of the job makes it.

    Args:
        module: The model.
        timeout_s: After how many seconds without an answer an operation fails.
    """

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
        from deep500_timing_torch.pipeline._orders import rank_of_stage

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
