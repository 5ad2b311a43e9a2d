"""Where a schedule of PyTorch's is timed: its stages' passes, the issue of its messages and the waits for them.

Stages and schedules get functions of their own in the place of methods, as attributes of the object. The two functions
of the module through which every message goes are replaced while any schedule is timed, and pass through what is not
in a timed batch on the same thread.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from deep500_timing_torch.pipeline._actions import Kind

if TYPE_CHECKING:
    from deep500_timing_torch.pipeline._recorder import Recorder

__all__ = ["ACTIVE", "Hooks", "stages_of"]

_ABSENT = object()


class _Active(threading.local):
    """Which recorder the batch on this thread belongs to."""

    recorder: Recorder | None = None


ACTIVE = _Active()
Label = tuple[Kind, int, int]
"""What a message is: the kind of its issue, the stage, and the micro-batch."""
_ISSUE = {
    "get_fwd_recv_ops": Kind.RECEIVE_ACTIVATION,
    "get_fwd_send_ops": Kind.SEND_ACTIVATION,
    "get_bwd_recv_ops": Kind.RECEIVE_GRADIENT,
    "get_bwd_send_ops": Kind.SEND_GRADIENT,
}
_WAIT_OF = {
    Kind.RECEIVE_ACTIVATION: Kind.WAIT_ACTIVATION,
    Kind.SEND_ACTIVATION: Kind.WAIT_SENT,
    Kind.RECEIVE_GRADIENT: Kind.WAIT_GRADIENT,
    Kind.SEND_GRADIENT: Kind.WAIT_SENT,
}
_PASSES = {
    "forward_one_chunk": (Kind.FORWARD,),
    "backward_one_chunk": (Kind.BACKWARD, Kind.BACKWARD_INPUT),
    "backward_weight_one_chunk": (Kind.BACKWARD_WEIGHT,),
}
"""What they are, whole and where they do the first part alone."""


class _Works(list[Any]):
    """The handles of messages, with what each is."""

    __slots__ = ("labels",)
    labels: list[Label]


def stages_of(schedule: Any) -> list[Any]:
    """The stages that a schedule has on this rank.

    Raises:
        TypeError: It is no schedule of ``torch.distributed.pipelining``.
    """
    if hasattr(schedule, "_stages"):
        return list(schedule._stages)
    if hasattr(schedule, "_stage"):
        return [schedule._stage]
    raise TypeError(
        f"Timing a pipeline: {type(schedule).__name__} is no schedule of torch.distributed.pipelining. Pass what "
        "Schedule1F1B(stage, n_microbatches, loss_fn) gives; for DeepSpeed's engine call instrument_deepspeed."
    )


class Hooks:
    """The functions that stand in for those of one schedule and its stages."""

    def __init__(self, schedule: Any, recorder: Recorder) -> None:
        self._schedule = schedule
        self._recorder = recorder
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def attach(self) -> None:
        """Put them in."""
        schedule = self._schedule
        for stage in stages_of(schedule):
            for name in _ISSUE:
                self._replace(stage, name, self._labelling(stage, name))
            for name, kinds in _PASSES.items():
                if hasattr(stage, name):
                    self._replace(stage, name, self._pass(stage, name, *kinds))
        self._replace(schedule, "_step_microbatches", self._batch(schedule._step_microbatches))
        self._replace(schedule, "_maybe_compute_loss", self._loss(schedule._maybe_compute_loss))
        if hasattr(schedule, "_initialize_pp_stages"):
            self._replace(schedule, "_initialize_pp_stages", self._setup(schedule._initialize_pp_stages))
        _MODULE.acquire()

    def detach(self) -> None:
        """Take them out; what somebody else has put over them stays."""
        replaced, self._replaced = self._replaced, []
        for owner, name, before, ours in reversed(replaced):
            if owner.__dict__.get(name) is not ours:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        if replaced:
            _MODULE.release()

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        self._replaced.append((owner, name, owner.__dict__.get(name, _ABSENT), function))
        setattr(owner, name, function)

    def _batch(self, original: Any) -> Any:
        recorder = self._recorder

        def step_microbatches(*args: Any, **kwargs: Any) -> Any:
            # The engine opens a batch around more than the schedule, and closes it.
            own = not recorder.is_open
            if own:
                recorder.begin()
            before, ACTIVE.recorder = ACTIVE.recorder, recorder
            try:
                result = original(*args, **kwargs)
            except BaseException:
                ACTIVE.recorder = before
                recorder.settle()
                if own:
                    recorder.drop()
                raise
            ACTIVE.recorder = before
            recorder.settle()
            if own:
                recorder.commit()
            return result

        return step_microbatches

    def _pass(self, stage: Any, name: str, kind: Kind, kind_of_part: Kind | None = None) -> Any:
        recorder, original, index = self._recorder, getattr(stage, name), stage.stage_index
        now_ns, note, active = recorder.now_ns, recorder.noted.append, ACTIVE

        def one_chunk(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if active.recorder is not recorder or (kind is not Kind.FORWARD and not stage.has_backward):
                return original(chunk_id, *args, **kwargs)
            what = kind if kind_of_part is None or kwargs.get("full_backward", True) else kind_of_part
            if recorder.gpu:
                return recorder.run_on_device(what, index, chunk_id, lambda: original(chunk_id, *args, **kwargs))
            start_ns = now_ns()
            result = original(chunk_id, *args, **kwargs)
            note((what, index, chunk_id, start_ns, now_ns(), -1))
            return result

        return one_chunk

    def _loss(self, original: Any) -> Any:
        recorder, active = self._recorder, ACTIVE
        now_ns, note = recorder.now_ns, recorder.noted.append

        def maybe_compute_loss(
            stage: Any, output: Any, target_mbs: Any, mb_index: int, *args: Any, **kwargs: Any
        ) -> Any:
            if active.recorder is not recorder or not stage.is_last:
                return original(stage, output, target_mbs, mb_index, *args, **kwargs)
            start_ns = now_ns()
            result = original(stage, output, target_mbs, mb_index, *args, **kwargs)
            note((None, stage.stage_index, mb_index, start_ns, now_ns(), -1))
            return result

        return maybe_compute_loss

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

    def _labelling(self, stage: Any, name: str) -> Any:
        recorder, original, index = self._recorder, getattr(stage, name), stage.stage_index
        issue, active = _ISSUE[name], ACTIVE

        def get_ops(chunk_id: int) -> Any:
            ops = original(chunk_id)
            if ops and active.recorder is recorder:
                label = (issue, index, chunk_id)
                for op in ops:
                    op._deep500_timing_label = label
            return ops

        return get_ops


class _Module:
    """The functions of ``torch.distributed.pipelining.schedules`` that issue messages and wait for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._originals: dict[str, Any] = {}

    def acquire(self) -> None:
        """Replace them, unless they are."""
        from torch.distributed.pipelining import schedules

        with self._lock:
            self._users += 1
            if self._users == 1:
                names = {"_batch_p2p": _timed_issue, "_wait_batch_p2p": _timed_wait}
                for name, make in names.items():
                    self._originals[name] = getattr(schedules, name)
                    setattr(schedules, name, make(self._originals[name]))

    def release(self) -> None:
        """Put the originals back when nobody is left."""
        from torch.distributed.pipelining import schedules

        with self._lock:
            self._users -= 1
            if self._users == 0:
                for name, original in self._originals.items():
                    if getattr(getattr(schedules, name), "_deep500_timing", False):
                        setattr(schedules, name, original)
                self._originals = {}


_MODULE = _Module()


def _timed_issue(original: Any) -> Any:
    def batch_p2p(p2p_ops: list[Any], *args: Any, **kwargs: Any) -> Any:
        recorder = ACTIVE.recorder
        if recorder is None or not p2p_ops:
            return original(p2p_ops, *args, **kwargs)
        start_ns = recorder.now_ns()
        works = original(p2p_ops, *args, **kwargs)
        end_ns = recorder.now_ns()
        labels: list[Label] = []
        last: Label | None = None
        for op in p2p_ops:
            label: Label | None = getattr(op, "_deep500_timing_label", None)
            if label is None:
                continue
            labels.append(label)
            if label is not last:  # Several tensors of one message come one after the other.
                kind, stage, microbatch = last = label
                recorder.noted.append((kind, stage, microbatch, start_ns, end_ns, -1))
        if type(works) is list and len(labels) == len(p2p_ops):
            works = _Works(works)
            works.labels = labels
        return works

    batch_p2p._deep500_timing = True  # type: ignore[attr-defined]
    return batch_p2p


def _timed_wait(original: Any) -> Any:
    def wait_batch_p2p(work: Any) -> Any:
        recorder = ACTIVE.recorder
        if recorder is None or not work:
            return original(work)
        labels: list[Label] = getattr(work, "labels", [])
        note = recorder.noted.append
        end_ns = recorder.now_ns()
        if len(labels) != len(work):
            result = original(work)
            kind, stage, microbatch = _first_received(labels)
            note((_WAIT_OF[kind], stage, microbatch, end_ns, recorder.now_ns(), -1))
            return result
        # One by one, in the order in which PyTorch waits for them.
        for one, (kind, stage, microbatch) in zip(work, labels, strict=True):
            start_ns = end_ns
            original([one])
            end_ns = recorder.now_ns()
            note((_WAIT_OF[kind], stage, microbatch, start_ns, end_ns, -1))
        return None

    wait_batch_p2p._deep500_timing = True  # type: ignore[attr-defined]
    return wait_batch_p2p


def _first_received(labels: list[Label]) -> Label:
    # Messages that were put together by the backend have one handle: what is waited for is what comes in.
    received = [one for one in labels if _WAIT_OF[one[0]] is not Kind.WAIT_SENT]
    return (received or labels or [(Kind.SEND_ACTIVATION, -1, -1)])[0]
