"""A schedule of PyTorch's made for one number of micro-batches and one shape of them, and how it is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as _schedules

from deep500_timing_torch.pipeline._hooks import Hooks, require_private_names
from deep500_timing_torch.pipeline._schedules import NAMES, SINGLE, order_of, rank_of_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deep500_timing_deepspeed.pipe._module import PipelineModule
    from deep500_timing_torch.pipeline._recorder import Recorder


class Runner:
    """Runs batches of one shape. Its stages share their modules with those of other runners, and nothing else."""

    def __init__(
        self,
        module: PipelineModule,
        group: Any,
        microbatches: int,
        loss_fn: Callable[[Any, Any], Any] | None,
        recorder: Recorder,
        *,
        backward: bool,
    ) -> None:
        self.in_setup = False
        """Whether shapes are being exchanged, in which the model and the loss are called on meaningless values."""
        self.stages = [
            PipelineStage(stage, number, module.total_stages, module.device, group=group)
            for number, stage in zip(module.stage_numbers, module.stages, strict=True)
        ]
        self._backward = backward
        self._schedule: Any = self._make(module, microbatches, loss_fn)
        self._schedule._has_backward = backward
        self._schedule._initialize_pp_stages = self._with_buffers_kept(self._schedule._initialize_pp_stages)
        self._hooks = Hooks(self._schedule, recorder)
        self._hooks.attach()

    def _make(self, module: PipelineModule, microbatches: int, loss_fn: Any) -> Any:
        loss = _no_loss if loss_fn is None else loss_fn
        if self._backward:
            kind = _schedules.get_schedule_class(NAMES[module.schedule])
            stages: Any = self.stages[0] if module.schedule in SINGLE else self.stages
            return kind(stages, microbatches, loss_fn=loss)
        # Forward passes in the order in which the training schedule begins its stages: breadth first.
        runtime: Any = _schedules._PipelineScheduleRuntime
        schedule: Any = runtime(self.stages, microbatches, loss_fn=loss_fn)
        order = {
            rank: [
                _schedules._Action(stage, _schedules.FORWARD, one)
                for stage in range(module.total_stages)
                if rank_of_stage(module.schedule, stage, module.num_stages) == rank
                for one in range(microbatches)
            ]
            for rank in range(module.num_stages)
        }
        # A multi-stage schedule takes stages to lie in turn, until its order of training says otherwise.
        schedule.stage_index_to_group_rank = {
            stage: rank_of_stage(module.schedule, stage, module.num_stages) for stage in range(module.total_stages)
        }
        # What _prepare_schedule_with_comms does, which asks for backward passes.
        schedule.pipeline_order_with_comms = _schedules._add_send_recv(
            order,
            stage_to_rank=lambda stage: schedule.stage_index_to_group_rank[stage],
            num_stages=module.total_stages,
        )
        for stage in self.stages:
            stage.stage_index_to_group_rank = schedule.stage_index_to_group_rank
        return schedule

    def run(self, inputs: Sequence[Any] | None, labels: Sequence[Any] | None, *, outputs: bool) -> list[Any]:
        """Run a batch."""
        losses: list[Any] = []
        for stage in self.stages:
            stage.has_backward = self._backward
            stage.clear_runtime_states()
        arguments = None if inputs is None else [one if isinstance(one, tuple) else (one,) for one in inputs]
        targets = None if labels is None else list(labels)
        self._schedule._step_microbatches(
            arguments, None, targets, losses if self._schedule._loss_fn is not None else None, return_outputs=outputs
        )
        return losses

    def outputs(self) -> list[Any]:
        """The outputs of the last stage by micro-batch, if it is on this rank and kept them."""
        return [one for stage in self.stages if stage.is_last for one in stage.output_chunks]

    def close(self) -> None:
        """Stop timing it."""
        self._hooks.detach()

    def _with_buffers_kept(self, original: Any) -> Any:
        # PyTorch finds shapes out by calling the model on memory as it is, which running statistics would take in.
        def initialize_pp_stages(*args: Any, **kwargs: Any) -> Any:
            kept = [(buffer, buffer.clone()) for stage in self.stages for buffer in stage.submod.buffers()]
            self.in_setup = True
            try:
                return original(*args, **kwargs)
            finally:
                self.in_setup = False
                with torch.no_grad():
                    for buffer, before in kept:
                        buffer.copy_(before)

        return initialize_pp_stages


def check_order(module: PipelineModule, microbatches: int) -> None:
    """Whether the module's schedule can have so many micro-batches."""
    require_private_names("Pipeline engine", (_schedules, ("_PipelineScheduleRuntime", "_Action", "_add_send_recv")))
    order_of(module.schedule, module.num_stages, microbatches, module.stages_per_rank)


def _no_loss(output: Any, _: Any) -> Any:
    return output
