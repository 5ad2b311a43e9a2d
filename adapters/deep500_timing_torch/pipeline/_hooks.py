"""Times a schedule of PyTorch: its stages' passes, the issue of its messages and the waits for them.

Methods of stages and schedules are replaced by attributes of the object. The two module functions that handle every
message are replaced while any schedule is timed; they pass calls outside of a timed batch on unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.pipelining import schedules

from deep500_timing.adapters import Replaced, Watch
from deep500_timing_torch.pipeline._actions import Kind, PipelineError

if TYPE_CHECKING:
    from deep500_timing_torch.pipeline._recorder import ActionKey, Recorder

_MESSAGES = {
    "get_fwd_recv_ops": (Kind.RECEIVE_ACTIVATION, Kind.WAIT_ACTIVATION, "is_first"),
    "get_fwd_send_ops": (Kind.SEND_ACTIVATION, Kind.WAIT_SENT, "is_last"),
    "get_bwd_recv_ops": (Kind.RECEIVE_GRADIENT, Kind.WAIT_GRADIENT, "is_last"),
    "get_bwd_send_ops": (Kind.SEND_GRADIENT, Kind.WAIT_SENT, "is_first"),
}
"""Per method of a stage: the kind of the issue, the kind of the wait, and which stage has no such message."""
_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_TAG = "_deep500_timing_message"


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


def time_schedule(schedule: Any, recorder: Recorder) -> Callable[[], None]:
    """Replace the functions of a schedule and its stages.

    Returns:
        What puts them back; replacements that other tools made later stay.
    """
    stages = stages_of(schedule)
    require_private_names(
        "Timing a pipeline",
        (schedules, ("_batch_p2p", "_wait_batch_p2p")),
        (schedule, ("_step_microbatches", *(["_compute_loss"] if any(one.is_last for one in stages) else []))),
        *((one, (*_MESSAGES, "forward_one_chunk", "backward_one_chunk", "has_backward")) for one in stages),
    )
    replaced = Replaced()
    for stage in stages:
        index = stage.stage_index
        for name, (issue, wait, without) in _MESSAGES.items():
            if not getattr(stage, without):
                replaced.put(stage, name, _tag_messages(getattr(stage, name), recorder, (issue, index), (wait, index)))
        for name, kind in (
            ("forward_one_chunk", Kind.FORWARD),
            ("backward_one_chunk", Kind.BACKWARD),
            ("backward_weight_one_chunk", Kind.BACKWARD_WEIGHT),
        ):
            if hasattr(stage, name):
                replaced.put(stage, name, _time_pass(stage, getattr(stage, name), recorder, kind))
        if stage.is_last:
            # The loss belongs to the micro-batch of the latest forward pass.
            replaced.put(schedule, "_compute_loss", _time_calls(schedule._compute_loss, recorder, (None, index)))
    replaced.put(schedule, "_step_microbatches", _time_batch(schedule._step_microbatches, stages, recorder))
    if hasattr(schedule, "_initialize_pp_stages"):
        replaced.put(schedule, "_initialize_pp_stages", _time_setup(schedule, recorder))
    _MODULE.__enter__()

    def undo() -> None:
        if replaced:
            replaced.undo()
            _MODULE.__exit__()

    return undo


def _time_batch(function: Any, stages: list[Any], recorder: Recorder) -> Any:
    def step_microbatches(*args: Any, **kwargs: Any) -> Any:
        # The engine opens a batch around more than the schedule.
        with nullcontext() if recorder.is_open else recorder.batch():
            recorder.active = True
            try:
                result = function(*args, **kwargs)
            except BaseException:
                recorder.settle()
                raise
            # A schedule calls the backward pass of its stages without training too, where it does nothing.
            without = [stage.stage_index for stage in stages if not stage.has_backward]
            recorder.settle({(kind, index) for index in without for kind in _BACKWARD})
        return result

    return step_microbatches


def _time_setup(schedule: Any, recorder: Recorder) -> Any:
    function = schedule._initialize_pp_stages

    def initialize_pp_stages(
        stages: Any, args: Any, kwargs: Any, target: Any, forward: bool, backward: bool, **more: Any
    ) -> Any:
        if forward and backward == schedule._has_backward:
            return function(stages, args, kwargs, target, forward, backward, **more)
        start_ns = recorder.now_ns()
        result = function(stages, args, kwargs, target, forward, backward, **more)
        recorder.warm_up = True
        recorder.put(Kind.SETUP, -1, -1, start_ns, recorder.now_ns())
        return result

    return initialize_pp_stages


def _time_pass(stage: Any, function: Callable[..., Any], recorder: Recorder, kind: Kind) -> Any:
    whole, part = (kind, stage.stage_index), (Kind.BACKWARD_INPUT, stage.stage_index)
    if not recorder.gpu:
        return _time_calls(function, recorder, whole, part)

    @functools.wraps(function)
    def one_chunk_on_device(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if not (recorder.active and (stage.has_backward or kind is Kind.FORWARD)):
            return function(chunk_id, *args, **kwargs)
        place = whole if kwargs.get("full_backward", True) else part
        return recorder.run_on_device(place, chunk_id, lambda: function(chunk_id, *args, **kwargs))

    return one_chunk_on_device


class _Message(NamedTuple):
    recorder: Recorder
    issued: ActionKey
    waited: ActionKey
    microbatch: int


class _Handles(list[Any]):
    """The handles of issued messages; ``messages`` has one entry per operation, None for an unknown operation."""

    messages: list[_Message | None]


def _time_calls(
    function: Callable[..., Any], recorder: Recorder, whole: ActionKey, part: ActionKey | None = None
) -> Any:
    """Time each call of a function that takes the micro-batch as first argument; ``part`` is a part of a backward."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.active:
            return function(*args, **kwargs)
        start_ns = recorder.now_ns()
        result = function(*args, **kwargs)
        place = whole if part is None or kwargs.get("full_backward", True) else part
        recorder.note(place, _microbatch(args), start_ns, recorder.now_ns())
        return result

    return call


def _tag_messages(function: Callable[..., Any], recorder: Recorder, issued: ActionKey, waited: ActionKey) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        operations = function(*args, **kwargs)
        if recorder.active:
            message = _Message(recorder, issued, waited, _microbatch(args))
            for operation in operations:
                setattr(operation, _TAG, message)
        return operations

    return call


def time_issues(function: Callable[..., Any]) -> Any:
    """Time each call of a function that issues a list of operations and returns a list of handles."""

    @functools.wraps(function)
    def call(operations: Any, *args: Any, **kwargs: Any) -> Any:
        messages = [getattr(operation, _TAG, None) for operation in operations]
        recorder = _recorder_of(messages)
        if recorder is None:
            return function(operations, *args, **kwargs)
        start_ns = recorder.now_ns()
        issued = function(operations, *args, **kwargs)
        end_ns = recorder.now_ns()
        before = None
        for message in messages:
            if message is not None and message is not before:  # One call makes several operations of one message.
                recorder.note(message.issued, message.microbatch, start_ns, end_ns)
            before = message
        handles = _Handles(issued)
        handles.messages = messages
        return handles

    return call


def time_waits(function: Callable[..., Any], each: bool) -> Any:
    @functools.wraps(function)
    def call(handles: Any) -> Any:
        messages = handles.messages if isinstance(handles, _Handles) else []
        recorder = _recorder_of(messages)
        if recorder is None:
            return function(handles)
        start_ns = recorder.now_ns()
        if each and len(handles) == len(messages):
            for handle, message in zip(handles, messages, strict=True):
                handle.wait()
                end_ns = recorder.now_ns()
                if message is not None:
                    recorder.note(message.waited, message.microbatch, start_ns, end_ns)
                start_ns = end_ns
            return None
        result = function(handles)
        # One wait for several messages counts as a wait for the first incoming one: sends complete without the peer.
        known = [message for message in messages if message is not None]
        message = next((one for one in known if one.waited[0] is not Kind.WAIT_SENT), known[0])
        recorder.note(message.waited, message.microbatch, start_ns, recorder.now_ns())
        return result

    return call


def _microbatch(args: tuple[Any, ...]) -> int:
    return args[0] if args and type(args[0]) is int else -1


def _recorder_of(messages: list[_Message | None]) -> Recorder | None:
    for message in messages:
        if message is not None:
            return message.recorder if message.recorder.active else None
    return None


# Another tool's replacement may do more than wait for each handle.
_MODULE = Watch(
    lambda: [
        (schedules, "_batch_p2p", time_issues),
        (schedules, "_wait_batch_p2p", lambda wait: time_waits(wait, wait.__module__ == schedules.__name__)),
    ]
)
"""The functions of ``torch.distributed.pipelining.schedules`` that issue messages and wait for them."""
