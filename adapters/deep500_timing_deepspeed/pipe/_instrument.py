"""DeepSpeed's own pipeline engine, timed without changing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deep500_timing import Timer, TimeType
from deep500_timing.adapters import Replaced
from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer
from deep500_timing_torch import CPUGPUTimer
from deep500_timing_torch.pipeline import Kind
from deep500_timing_torch.pipeline.engines import AttachedPipeline, Recorder, exchange_of

_KINDS = {
    "LoadMicroBatch": Kind.LOAD,
    "ForwardPass": Kind.FORWARD,
    "BackwardPass": Kind.BACKWARD,
    # Its messages are synchronous: the whole of one is a wait.
    "SendActivation": Kind.SEND_ACTIVATION,
    "SendGrad": Kind.SEND_GRADIENT,
    "RecvActivation": Kind.WAIT_ACTIVATION,
    "RecvGrad": Kind.WAIT_GRADIENT,
    "ReduceGrads": Kind.REDUCE,
    "ReduceTiedGrads": Kind.REDUCE,
    "OptimizerStep": Kind.STEP,
}
_OF_A_MICROBATCH = frozenset(_KINDS) - {"ReduceGrads", "ReduceTiedGrads", "OptimizerStep"}


def instrument_deepspeed(engine: Any, timer: Timer | None = None, *, keep: int = 64) -> DeepSpeedPipelineTimer:
    """Time DeepSpeed's ``PipelineEngine`` from now on, without a change to its code.

    Its own ``wall_clock_breakdown`` works meanwhile: DeepSpeed 0.19.8 starts a timer twice there and fails; the timers
    that stand in for its own count instead, and its lines are printed with their times.

    Args:
        engine: What ``deepspeed.initialize(model=PipelineModule(...))`` gives.
        timer: Where the times go; a new :class:`deep500_timing_torch.CPUGPUTimer` if None.
        keep: How many batches to keep action by action.

    Raises:
        TypeError: It is no such engine.
    """
    return DeepSpeedPipelineTimer(engine, timer, keep=keep).attach()


class DeepSpeedPipelineTimer(AttachedPipeline):
    """Times DeepSpeed's engine from :meth:`attach` to :meth:`detach`; see :func:`instrument_deepspeed`."""

    def __init__(self, engine: Any, timer: Timer | None = None, *, keep: int = 64) -> None:
        if not hasattr(type(engine), "_INSTRUCTION_MAP") or not hasattr(engine, "grid"):
            raise TypeError(
                f"instrument_deepspeed({type(engine).__name__}): it is not DeepSpeed's PipelineEngine. For a schedule "
                "of torch.distributed.pipelining call instrument_schedule."
            )
        self.engine = engine
        self.timer: Any = CPUGPUTimer() if timer is None else timer
        """Where the times are, those of DeepSpeed's names among them."""
        on_device = getattr(engine.device, "type", str(engine.device)).split(":")[0] != "cpu"
        self.recorder = Recorder(
            self.timer, "1f1b", engine.stage_id, replica=engine.grid.data_parallel_id, keep=keep, gpu=on_device
        )
        self._counts: dict[str, int] = {}
        self._exchange = exchange_of("deepspeed pipeline")

    def _time(self) -> Callable[[], object]:
        instructions = {kind: self._timed(kind.__name__, work) for kind, work in self.engine._INSTRUCTION_MAP.items()}
        device = None if self.recorder.gpu else "cpu"
        named = SynchronizedWallClockTimer(self.timer if device is None else None, device=device, reentrant=True)
        replaced = Replaced()
        replaced.put(self.engine, "_INSTRUCTION_MAP", instructions)
        replaced.put(self.engine, "train_batch", self._batch(self.engine.train_batch))
        replaced.put(self.engine, "timers", named)
        self.named = named
        """What stands in for the engine's ``timers``."""
        return replaced.undo

    def _batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self.recorder

        def train_batch(*args: Any, **kwargs: Any) -> Any:
            self._counts = {}
            with recorder.batch():
                with self.timer.region(TimeType.BATCH, gpu=recorder.gpu):
                    result = original(*args, **kwargs)
                if recorder.begun == 0:
                    recorder.warm_up = True  # It tells the shapes of its messages with the first of them.
            return result

        return train_batch

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        recorder, kind = self.recorder, _KINDS.get(name)
        if kind is None:
            return work

        def instruction(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_open:
                return work(engine, *args, **kwargs)
            number = -1
            if name in _OF_A_MICROBATCH:
                # It names buffers; micro-batches come in order.
                number = self._counts[name] = self._counts.get(name, -1) + 1
            stage = engine.stage_id if number >= 0 else -1
            if recorder.gpu and kind in (Kind.FORWARD, Kind.BACKWARD):
                return recorder.run_on_device((kind, stage), number, lambda: work(engine, *args, **kwargs))
            start_ns = recorder.now_ns()
            result = work(engine, *args, **kwargs)
            recorder.put(kind, stage, number, start_ns, recorder.now_ns())
            return result

        return instruction

    def _group(self) -> Any:
        return self.engine.mpu.get_pipe_parallel_group()
