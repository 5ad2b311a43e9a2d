"""Times a schedule of PyTorch: its stages' passes, the issue of its messages and the waits for them.

Methods of stages and schedules are replaced by attributes of the object. The two module functions that handle every
message are replaced while any schedule is timed; they pass calls outside of a timed batch on unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import schedules

from deep500_timing.adapters import Replaced, Watch
from deep500_timing_torch.pipeline._actions import Kind, PipelineError
from deep500_timing_torch.pipeline._calls import tag_messages, time_calls, time_issues, time_waits

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_torch.pipeline._recorder import Recorder

_MESSAGES = {
    "get_fwd_recv_ops": (Kind.RECEIVE_ACTIVATION, Kind.WAIT_ACTIVATION, "is_first"),
    "get_fwd_send_ops": (Kind.SEND_ACTIVATION, Kind.WAIT_SENT, "is_last"),
    "get_bwd_recv_ops": (Kind.RECEIVE_GRADIENT, Kind.WAIT_GRADIENT, "is_last"),
    "get_bwd_send_ops": (Kind.SEND_GRADIENT, Kind.WAIT_SENT, "is_first"),
}
"""Per method of a stage: the kind of the issue, the kind of the wait, and which stage has no such message."""
_PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def stages_of(schedule: Any) -> list[Any]:
    if hasattr(schedule, "_stages"):
        return list(schedule._stages)
    if hasattr(schedule, "_stage"):
        return [schedule._stage]
    raise TypeError(
        f"Timing a pipeline: {type(schedule).__name__} is no schedule of torch.distributed.pipelining. Pass what "
        "Schedule1F1B(stage, n_microbatches, loss_fn) gives; for DeepSpeed's engine call instrument_deepspeed."
    )


def require_private_names(doing: str, *wanted: tuple[Any, tuple[str, ...]]) -> None:
    """Refuse a PyTorch that lacks private names that this package stands on, before anything is replaced."""
    lacks = [name for owner, names in wanted for name in names if not hasattr(owner, name)]
    if lacks:
        raise PipelineError(
            f"{doing}: torch {torch.__version__} lacks {', '.join(lacks)}, on which it stands. It was tested with "
            "torch 2.13; install that version, or train without it."
        )


class Hooks:
    """The replaced functions of one schedule and its stages."""

    def __init__(self, schedule: Any, recorder: Recorder) -> None:
        self._schedule = schedule
        self._stages = stages_of(schedule)
        self._recorder = recorder
        self._replaced = Replaced()

    def attach(self) -> None:
        schedule = self._schedule
        stages = self._stages
        require_private_names(
            "Timing a pipeline",
            (schedules, ("_batch_p2p", "_wait_batch_p2p")),
            (schedule, ("_step_microbatches", *(["_compute_loss"] if any(one.is_last for one in stages) else []))),
            *((one, (*_MESSAGES, "forward_one_chunk", "backward_one_chunk", "has_backward")) for one in stages),
        )
        for stage in stages:
            for name, (issue, wait, without) in _MESSAGES.items():
                if not getattr(stage, without):
                    self._replaced.put(stage, name, self._messages(stage, name, issue, wait))
            forward, whole, part, weight = (self._recorder.codes.of(kind, stage.stage_index) for kind in _PASSES)
            self._time_pass(stage, "forward_one_chunk", _always(forward))
            self._time_pass(stage, "backward_one_chunk", _of_backward(whole, part))
            if hasattr(stage, "backward_weight_one_chunk"):
                self._time_pass(stage, "backward_weight_one_chunk", _always(weight))
        self._replaced.put(schedule, "_step_microbatches", self._batch(schedule._step_microbatches))
        for stage in stages:
            if stage.is_last:
                # The loss belongs to the micro-batch of the latest forward pass.
                code = self._recorder.codes.of(None, stage.stage_index)
                loss = time_calls(schedule._compute_loss, self._recorder.calls, _always(code))
                self._replaced.put(schedule, "_compute_loss", loss)
        if hasattr(schedule, "_initialize_pp_stages"):
            self._replaced.put(schedule, "_initialize_pp_stages", self._setup(schedule._initialize_pp_stages))
        _MODULE.__enter__()

    def detach(self) -> None:
        """Remove them; replacements that other tools made later stay."""
        if self._replaced:
            self._replaced.undo()
            _MODULE.__exit__()

    def _batch(self, original: Any) -> Any:
        recorder = self._recorder

        def step_microbatches(*args: Any, **kwargs: Any) -> Any:
            # The engine opens a batch around more than the schedule, and closes it.
            own = not recorder.is_open
            if own:
                recorder.begin()
            try:
                recorder.calls.active = True
                result = original(*args, **kwargs)
            except BaseException:
                recorder.calls.active = False
                recorder.settle()
                if own:
                    recorder.drop()
                raise
            recorder.calls.active = False
            recorder.settle(self._skipped())
            if own:
                recorder.commit()
            return result

        return step_microbatches

    def _skipped(self) -> frozenset[int]:
        """Codes of the calls that do nothing in a batch without training."""
        without = [stage.stage_index for stage in self._stages if not stage.has_backward]
        return frozenset(self._recorder.codes.of(kind, index) for index in without for kind in _PASSES[1:])

    def _time_pass(self, stage: Any, name: str, code_of: Callable[[dict[str, Any]], int]) -> None:
        recorder, original = self._recorder, getattr(stage, name)
        if not recorder.gpu:
            self._replaced.put(stage, name, time_calls(original, recorder.calls, code_of))
            return

        def one_chunk_on_device(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            # Without training a backward pass does nothing.
            if not (recorder.calls.active and (stage.has_backward or name == "forward_one_chunk")):
                return original(chunk_id, *args, **kwargs)
            return recorder.run_on_device(code_of(kwargs), chunk_id, lambda: original(chunk_id, *args, **kwargs))

        self._replaced.put(stage, name, one_chunk_on_device)

    def _messages(self, stage: Any, name: str, issue: Kind, wait: Kind) -> Any:
        of, index = self._recorder.codes.of, stage.stage_index
        incoming = wait is not Kind.WAIT_SENT
        return tag_messages(getattr(stage, name), self._recorder.calls, of(issue, index), of(wait, index), incoming)

    def _setup(self, original: Any) -> Any:
        recorder, schedule = self._recorder, self._schedule

        def initialize_pp_stages(
            stages: Any, args: Any, kwargs: Any, target: Any, forward: bool, backward: bool, **more: Any
        ) -> Any:
            if forward and backward == schedule._has_backward:
                return original(stages, args, kwargs, target, forward, backward, **more)
            start_ns = recorder.now_ns()
            result = original(stages, args, kwargs, target, forward, backward, **more)
            recorder.mark_warm_up()
            recorder.put(Kind.SETUP, -1, -1, start_ns, recorder.now_ns())
            return result

        return initialize_pp_stages


def _of_backward(whole: int, part: int) -> Callable[[dict[str, Any]], int]:
    return lambda given: whole if given.get("full_backward", True) else part


def _always(code: int) -> Callable[[dict[str, Any]], int]:
    return lambda _: code


# Another tool's replacement may do more than wait for each handle.
_MODULE = Watch(
    lambda: [
        (schedules, "_batch_p2p", time_issues),
        (schedules, "_wait_batch_p2p", lambda wait: time_waits(wait, wait.__module__ == schedules.__name__)),
    ]
)
"""The functions of ``torch.distributed.pipelining.schedules`` that issue messages and wait for them."""
