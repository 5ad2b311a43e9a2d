"""The reports of an engine: bubble, times under DeepSpeed's names, throughput, memory, lines on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deep500_timing import TimeType
from deep500_timing.adapters import DEADLINE_S, Exchange
from deep500_timing_torch.pipeline._calls import REGIONS
from deep500_timing_torch.pipeline._pipeline_timer import TimedPipeline, gather_of_ranks

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from deep500_timing_deepspeed.pipe._config import PipelineConfig
    from deep500_timing_deepspeed.pipe._module import PipelineModule
    from deep500_timing_deepspeed.pipe._ranks import Grid

DEEPSPEED_NAMES: dict[str, tuple[str, ...]] = {
    "fwd_microstep": ("forward", "pipeline loss"),
    "fwd": ("forward", "pipeline loss"),
    "bwd_microstep": ("backward", "backward input", "backward weight"),
    "bwd": ("backward", "backward input", "backward weight"),
    "bwd_inner_microstep": ("backward", "backward input", "backward weight"),
    "bwd_inner": ("backward", "backward input", "backward weight"),
    "bwd_allreduce_microstep": ("pipeline reduce",),
    "bwd_allreduce": ("pipeline reduce",),
    "step_microstep": ("pipeline step",),
    "step": ("pipeline step",),
    "batch_input": ("pipeline load",),
    "train_batch": ("BATCH",),
    "pipe_send_output": ("pipeline send activation",),
    "pipe_send_grad": ("pipeline send gradient",),
    "pipe_recv_input": ("pipeline receive activation", "pipeline wait for activation"),
    "pipe_recv_grad": ("pipeline receive gradient", "pipeline wait for gradient"),
}
"""Which regions make up DeepSpeed's timer of a name; those of passes are of each stage of the rank."""
_CONTINUED = ("pipeline loss", "backward weight", "pipeline wait for activation", "pipeline wait for gradient")
"""Regions that are the rest of what another of the same name began: they add to its time, and are not one more."""


class NamedTimes:
    """A timer of DeepSpeed's name, read from the engine's regions. Times are in milliseconds, as there."""

    def __init__(self, name: str, regions: Callable[[], Sequence[str]], timer: Any) -> None:
        self.name_ = name
        self._regions = regions
        self._timer = timer
        self._read = 0.0

    def _total(self) -> float:
        return sum(sum(self._timer.get_time(region)) for region in self._regions())

    def elapsed(self, reset: bool = True) -> float:
        """The sum since it was last read with ``reset``, in milliseconds."""
        total = self._total() * 1e3
        since = total - self._read
        if reset:
            self._read = total
        return since

    def mean(self) -> float | None:
        count = self.count()
        return self._total() / count * 1e3 if count else None

    def count(self) -> int:
        begun = (region for region in self._regions() if not region.endswith(_CONTINUED))
        return sum(len(self._timer.get_time(region)) for region in begun)


class Reports(TimedPipeline):
    """The part of the engine that reports."""

    module: PipelineModule
    config: PipelineConfig
    optimizer: Any
    timer: Any
    grid: Grid
    stage_id: int
    global_steps: int
    log_stage: int
    log_data_parallel_id: int
    _exchange: Exchange
    _timers: dict[str, NamedTimes]
    _additional: dict[str, torch.Tensor] | None
    _microbatch: int
    _samples: array[int]

    def train_batch_size(self) -> int:
        """Samples of a batch, over all replicas."""
        raise NotImplementedError

    def _group_and_exchange(self) -> tuple[Any, Exchange]:
        return self.grid.pipe, self._exchange

    def timers(self, name: str) -> NamedTimes:
        """The times that DeepSpeed's timer of a name would have; see ``DEEPSPEED_NAMES``.

        Raises:
            KeyError: DeepSpeed's pipeline engine has no such timer.
        """
        if name not in DEEPSPEED_NAMES:
            raise KeyError(f"timers({name!r}): DeepSpeed's engine has {', '.join(DEEPSPEED_NAMES)}.")
        if name not in self._timers:
            passes = set(REGIONS.values())

            def regions() -> list[str]:
                found = []
                for one in DEEPSPEED_NAMES[name]:
                    if one in passes:
                        found += [f"stage {stage} {one}" for stage in self.module.stage_numbers]
                    else:
                        found.append(one)
                return found

            self._timers[name] = NamedTimes(name, regions, self.timer)
        return self._timers[name]

    def samples_per_second(self) -> float | None:
        """Of the batches so far but the first, over all replicas; None before the second.

        Of a timer that keeps the last times alone, of those.
        """
        times = self.timer.get_time(TimeType.BATCH)
        if len(times) >= len(self._samples):
            times = times[1 - len(self._samples) :] if len(self._samples) > 1 else []
        return sum(self._samples[-len(times) :]) / sum(times) if times else None

    def memory(self) -> dict[str, int | None]:
        """Memory of this rank's stages in bytes: parameters, gradients, optimizer state, and the device's peak.

        The peak is that of the latest batch, None without a device.
        """
        parameters = list(self.module.parameters())
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        batches = self.recorder.batches
        return {
            "parameters_bytes": sum(one.nbytes for one in parameters),
            "gradients_bytes": sum(one.grad.nbytes for one in parameters if one.grad is not None),
            "optimizer_bytes": sum(
                one.nbytes for state in states for one in state.values() if isinstance(one, torch.Tensor)
            ),
            "peak_device_bytes": batches[-1].peak_bytes if batches else None,
        }

    def memory_of_ranks(self, *, deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
        """The :meth:`memory` of every rank of this pipeline, with its ``stages``. Every rank of the job calls it.

        Raises:
            PipelineError: Ranks did not answer in time.
        """
        report = {"stages": list(self.module.stage_numbers), **self.memory()}
        return gather_of_ranks("the memory of a pipeline", report, self.grid.pipe, self._exchange, deadline_s)

    def log_for_device(self, *msg: object) -> None:
        """Print a message with the place of this rank, if ``log_stage`` and ``log_data_parallel_id`` include it."""
        if self.log_stage in (-1, self.stage_id) and self.log_data_parallel_id in (-1, self.module.replica):
            print(
                f"RANK={self.grid.global_rank} PIPE-ID={self.stage_id} DATA-ID={self.module.replica} "
                f"MBATCH-ID={self._microbatch} STEP-ID={self.global_steps} ::",
                *msg,
                flush=True,
            )

    def tput_log(self, *msg: object) -> None:
        """Print a message on rank 0, in every ``steps_per_print``-th batch."""
        steps = self.config.steps_per_print
        if self.grid.global_rank == 0 and steps and self.global_steps % steps == 0:
            print(*msg, flush=True)

    def _print_progress(self, loss: torch.Tensor) -> None:
        if self.grid.global_rank != 0 or self.global_steps % (self.config.steps_per_print or 1):
            return
        rate = self.samples_per_second()
        more = "".join(f" {name}: {float(one):0.4f}" for name, one in (self._additional or {}).items())
        throughput = "" if rate is None else f" samples/sec: {rate:0.3f}"
        self.tput_log(f"steps: {self.global_steps} loss: {float(loss):0.4f}{more}{throughput}")
        if self.config.wall_clock_breakdown:
            means = {name: self.timers(name).mean() for name in DEEPSPEED_NAMES if not name.endswith("inner_microstep")}
            self.tput_log(
                "time (ms) | " + " | ".join(f"{name}: {mean:.2f}" for name, mean in means.items() if mean is not None)
            )
