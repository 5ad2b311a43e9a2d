"""An engine among its ranks: process groups, schedules, reductions, and errors that name the rank at fault."""

from __future__ import annotations

import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as _schedules
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from deep500_timing.adapters import store_connection
from deep500_timing_torch.pipeline import PipelineError, order_of
from deep500_timing_torch.pipeline.engines import NAMES, SINGLE, rank_of_stage, require_private_names, time_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deep500_timing_deepspeed.pipe._module import PipelineModule
    from deep500_timing_torch.pipeline.engines import Recorder


class Runner:
    """Runs batches of one shape. Its stages share their modules with those of other runners, and nothing else."""

    def __init__(
        self,
        module: PipelineModule,
        group: Any,
        key: tuple[int, int],
        loss_fn: Callable[[Any, Any], Any] | None,
        recorder: Recorder,
        *,
        backward: bool,
    ) -> None:
        self.key = key
        """The number of micro-batches, and what tells the shapes of their inputs apart."""
        self.stages = [
            PipelineStage(stage, number, module.total_stages, module.device, group=group)
            for number, stage in zip(module.stage_numbers, module.stages, strict=True)
        ]
        self._backward = backward
        self._schedule: Any = self._make(module, key[0], loss_fn)
        self._schedule._has_backward = backward
        self._schedule._initialize_pp_stages = self._with_buffers_kept(self._schedule._initialize_pp_stages)
        self.close = time_schedule(self._schedule, recorder)

    def _make(self, module: PipelineModule, microbatches: int, loss_fn: Any) -> Any:
        if self._backward:
            kind = _schedules.get_schedule_class(NAMES[module.schedule])
            stages: Any = self.stages[0] if module.schedule in SINGLE else self.stages
            return kind(stages, microbatches, loss_fn=loss_fn or (lambda output, _: output))
        # Forward passes in the order in which the training schedule begins its stages: breadth first.
        runtime: Any = _schedules._PipelineScheduleRuntime
        schedule: Any = runtime(self.stages, microbatches, loss_fn=loss_fn)
        # A multi-stage schedule takes stages to lie in turn, until its order of training says otherwise.
        rank_of = {
            stage: rank_of_stage(module.schedule, stage, module.num_stages) for stage in range(module.total_stages)
        }
        order: dict[int, list[Any]] = {rank: [] for rank in range(module.num_stages)}
        for stage, rank in rank_of.items():
            order[rank] += [_schedules._Action(stage, _schedules.FORWARD, one) for one in range(microbatches)]
        # What _prepare_schedule_with_comms does, which asks for backward passes.
        schedule.pipeline_order_with_comms = _schedules._add_send_recv(
            order, stage_to_rank=rank_of.__getitem__, num_stages=module.total_stages
        )
        for one in (schedule, *self.stages):
            one.stage_index_to_group_rank = rank_of
        return schedule

    def run(self, inputs: Sequence[Any] | None, labels: Sequence[Any] | None, *, outputs: bool) -> list[Any]:
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

    def _with_buffers_kept(self, original: Any) -> Any:
        # PyTorch finds shapes out by calling the model on memory as it is, which running statistics would take in.
        def initialize_pp_stages(*args: Any, **kwargs: Any) -> Any:
            kept = [(buffer, buffer.clone()) for stage in self.stages for buffer in stage.submod.buffers()]
            try:
                return original(*args, **kwargs)
            finally:
                with torch.no_grad():
                    for buffer, before in kept:
                        buffer.copy_(before)

        return initialize_pp_stages


def check_order(module: PipelineModule, microbatches: int) -> None:
    """Whether the module's schedule can have so many micro-batches."""
    require_private_names("Pipeline engine", (_schedules, ("_PipelineScheduleRuntime", "_Action", "_add_send_recv")))
    order_of(module.schedule, module.num_stages, microbatches, module.stages_per_rank)


class Grid:
    """The process groups of an engine. Every rank of the job makes it."""

    def __init__(self, module: PipelineModule, timeout_s: float) -> None:
        ranks, replicas = module.num_stages, module.replicas
        timeout = timedelta(seconds=timeout_s)
        self.replicas = replicas
        self.global_rank = dist.get_rank()
        self.control: Any = dist.new_group(backend="gloo", timeout=timeout)
        """All ranks, on the host."""
        self.pipe_ranks = [rank * replicas + module.replica for rank in range(ranks)]
        # Every rank makes every group, in one order.
        make = partial(dist.new_subgroups_by_enumeration, timeout=timeout)
        self.pipe: Any = make([[rank * replicas + replica for rank in range(ranks)] for replica in range(replicas)])[0]
        """The ranks of this pipeline."""
        self.data: Any = None
        """The replicas of this rank's stages; None if there is one."""
        if replicas > 1:
            self.data = make([[rank * replicas + replica for replica in range(replicas)] for rank in range(ranks)])[0]
        self.tied: dict[str, Any] = {}
        """The ranks of this pipeline with the weights of a key, where there are several."""
        for key, owners in sorted(module.tied_ranks().items()):
            group = make([[rank * replicas + replica for rank in owners] for replica in range(replicas)])[0]
            if group is not None:
                self.tied[key] = group

    def agree(self, values: list[int]) -> list[list[int]]:
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
        for key, weights in sorted(module.tied_weights().items()):
            if key in grid.tied:
                source = dist.get_global_rank(grid.tied[key], 0)
                for weight in weights:
                    dist.broadcast(weight.data, src=source, group=grid.tied[key])


def reduce_gradients(module: PipelineModule, grid: Grid) -> None:
    """Sum the gradients of tied weights over their stages and average all over the replicas."""
    for key, weights in sorted(module.tied_weights().items()):
        for weight in weights if key in grid.tied else ():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=grid.tied[key])
    if grid.data is None:
        return
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


def clip(module: PipelineModule, grid: Grid, most: float) -> torch.Tensor:
    """Scale all gradients of the model so that their norm is at most ``most``, as ``clip_grad_norm_`` does of one.

    Tied weights count once, on the first rank that has them.
    """
    elsewhere = {
        id(weight)
        for key, weights in module.tied_weights().items()
        if key in grid.tied and dist.get_rank(grid.tied[key]) != 0
        for weight in weights
    }
    counted = [one.grad for one in module.parameters() if one.grad is not None and id(one) not in elsewhere]
    square = get_total_norm(counted).to(module.device, torch.float64) ** 2
    dist.all_reduce(square, group=grid.pipe)
    norm = square.sqrt().float()
    clip_grads_with_norm_(module.parameters(), most, norm)
    return norm


# --- faults -----------------------------------------------------------------------------------------------------------

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
        fault = connection.run(lambda store: self._tell(store, text, found, alone=own), _STORE_S + _GRACE_S)
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
