"""The loss of a batch on every rank: over micro-batches, replicas and the model's additional losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deep500_timing_torch.pipeline._orders import rank_of_stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing_deepspeed.pipe._grid import Grid
    from deep500_timing_deepspeed.pipe._module import PipelineModule
    from deep500_timing_deepspeed.pipe._runner import Runner

__all__ = ["Losses", "joined"]


class Losses:
    """The part of the engine that adds up losses."""

    module: PipelineModule
    grid: Grid
    num_stages: int
    _runners: dict[bool, tuple[tuple[int, int], Runner]]
    _additional: dict[str, torch.Tensor] | None
    _totals: dict[str, torch.Tensor] | None

    def is_last_stage(self) -> bool:
        """Whether the last stage is on this rank."""
        raise NotImplementedError

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """The model's ``get_additional_losses``, averaged over the latest batch, on every rank."""
        return self._additional

    def _loss(self, output: Any, label: Any) -> Any:
        assert self.module.loss_fn is not None
        loss = self.module.loss_fn(output, label)
        if not self._runners[True][1].in_setup:
            found = self.module.get_additional_losses()
            if found is not None:
                totals = self._totals or {}
                for name, one in found.items():
                    totals[name] = totals.get(name, 0) + one.detach()
                self._totals = totals
        return loss

    def _shared_loss(
        self, losses: Sequence[torch.Tensor], microbatches: int, *, broadcast: bool = True
    ) -> torch.Tensor:
        names = list(self.module.get_additional_losses() or {}) if self.module.training else []
        device = self.module.device
        values = torch.zeros(1 + len(names), dtype=torch.float32, device=device)
        if self.is_last_stage():
            totals = [torch.stack([one.float() for one in losses]).sum()]
            totals += [torch.as_tensor((self._totals or {})[name]).float() for name in names]
            values = torch.stack([one.to(device).reshape(()) for one in totals]) / microbatches
            if self.grid.data is not None:
                dist.all_reduce(values, group=self.grid.data)
                values /= self.grid.replicas
        if broadcast and self.num_stages > 1:
            last = rank_of_stage(self.module.schedule, self.module.total_stages - 1, self.num_stages)
            dist.broadcast(values, src=self.grid.pipe_ranks[last], group=self.grid.pipe)
        if names:
            self._additional = dict(zip(names, values[1:], strict=True))
        return values[0]

    def _mean_output(self, outputs: Sequence[Any]) -> Any:
        if not isinstance(outputs[0], torch.Tensor):
            return tuple(self._mean_output(parts) for parts in zip(*outputs, strict=True))
        mean = torch.stack(list(outputs)).mean(0)
        if self.grid.data is not None:
            dist.all_reduce(mean, group=self.grid.data)
            mean /= self.grid.replicas
        return mean


def joined(outputs: Sequence[Any]) -> Any:
    """Join the outputs of micro-batches; for tuples, each element."""
    if not isinstance(outputs[0], torch.Tensor):
        return tuple(joined(parts) for parts in zip(*outputs, strict=True))
    return torch.cat(list(outputs)) if outputs[0].dim() else torch.stack(list(outputs))
