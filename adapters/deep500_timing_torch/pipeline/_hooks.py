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
    from collections.abc import Callable

    from deep500_timing_torch.pipeline._recorder import Recorder

__all__ = ["ACTIVE", "Hooks", "stages_of"]

_ABSENT = object()


class _Active(threading.local):
    """Which recorder the batch on this thread belongs to."""

    recorder: Recorder | None = None


ACTIVE = _Active()
Label = tuple[Kind, int, int]
"""What a message is: the kind of wait for it, the stage, and the micro-batch."""
_ISSUE = {
    "get_fwd_recv_ops": (Kind.RECEIVE_ACTIVATION, Kind.WAIT_ACTIVATION),
    "get_fwd_send_ops": (Kind.SEND_ACTIVATION, Kind.WAIT_SENT),
    "get_bwd_recv_ops": (Kind.RECEIVE_GRADIENT, Kind.WAIT_GRADIENT),
    "get_bwd_send_ops": (Kind.SEND_GRADIENT, Kind.WAIT_SENT),
}


class _Works(list[Any]):
    """The handles of messages, with what each is."""

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
            self._replace(stage, "forward_one_chunk", self._pass(stage, "forward_one_chunk", _forward))
            self._replace(stage, "backward_one_chunk", self._pass(stage, "backward_one_chunk", _backward))
            if hasattr(stage, "backward_weight_one_chunk"):
                self._replace(
                    stage, "backward_weight_one_chunk", self._pass(stage, "backward_weight_one_chunk", _weight)
                )
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
                if own:
                    recorder.drop()
                raise
            finally:
                ACTIVE.recorder = before
            if own:
                _safely(recorder, "a batch", recorder.commit)
            return result

        return step_microbatches

    def _pass(self, stage: Any, name: str, kind_of: Callable[[dict[str, Any]], Kind]) -> Any:
        recorder, original, index = self._recorder, getattr(stage, name), stage.stage_index
        now_ns = recorder.now_ns

        def one_chunk(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if ACTIVE.recorder is not recorder:
                return original(chunk_id, *args, **kwargs)
            kind = kind_of(kwargs)
            if kind is not Kind.FORWARD and not stage.has_backward:
                return original(chunk_id, *args, **kwargs)
            if recorder.gpu:
                return recorder.run_on_device(kind, index, chunk_id, lambda: original(chunk_id, *args, **kwargs))
            start_ns = now_ns()
            result = original(chunk_id, *args, **kwargs)
            end_ns = now_ns()
            try:
                recorder.put(kind, index, chunk_id, start_ns, end_ns)
            except Exception as error:
                recorder.fault("a pass", error)
            return result

        return one_chunk

    def _loss(self, original: Any) -> Any:
        recorder = self._recorder
        now_ns = recorder.now_ns

        def maybe_compute_loss(
            stage: Any, output: Any, target_mbs: Any, mb_index: int, *args: Any, **kwargs: Any
        ) -> Any:
            if ACTIVE.recorder is not recorder or not stage.is_last:
                return original(stage, output, target_mbs, mb_index, *args, **kwargs)
            start_ns = now_ns()
            result = original(stage, output, target_mbs, mb_index, *args, **kwargs)
            end_ns = now_ns()
            try:
                recorder.timer.record("pipeline loss", start_ns, end_ns)
                recorder.extend_forward(stage.stage_index, mb_index, end_ns)
            except Exception as error:
                recorder.fault("a loss", error)
            return result

        return maybe_compute_loss

    def _setup(self, original: Any) -> Any:
        recorder, schedule = self._recorder, self._schedule
        now_ns = recorder.now_ns

        def initialize_pp_stages(
            stages: Any, args: Any, kwargs: Any, target: Any, forward: bool, backward: bool, **more: Any
        ) -> Any:
            if forward and backward == schedule._has_backward:
                return original(stages, args, kwargs, target, forward, backward, **more)
            start_ns = now_ns()
            result = original(stages, args, kwargs, target, forward, backward, **more)
            try:
                recorder.mark_warm_up()
                recorder.put(Kind.SETUP, -1, -1, start_ns, now_ns())
            except Exception as error:
                recorder.fault("the exchange of shapes", error)
            return result

        return initialize_pp_stages

    def _labelling(self, stage: Any, name: str) -> Any:
        recorder, original, index = self._recorder, getattr(stage, name), stage.stage_index
        issue, _ = _ISSUE[name]

        def get_ops(chunk_id: int) -> Any:
            ops = original(chunk_id)
            if ACTIVE.recorder is recorder:
                for op in ops:
                    op._deep500_timing_label = (issue, index, chunk_id)
            return ops

        return get_ops


def _forward(_: dict[str, Any]) -> Kind:
    return Kind.FORWARD


def _backward(kwargs: dict[str, Any]) -> Kind:
    return Kind.BACKWARD if kwargs.get("full_backward", True) else Kind.BACKWARD_INPUT


def _weight(_: dict[str, Any]) -> Kind:
    return Kind.BACKWARD_WEIGHT


_WAIT_OF = dict(_ISSUE.values())


def _safely(recorder: Recorder, doing: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        recorder.fault(doing, error)


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
        try:
            labels = [getattr(op, "_deep500_timing_label", None) for op in p2p_ops]
            known = [label for label in labels if label is not None]
            for label in dict.fromkeys(known):
                kind, stage, microbatch = label
                recorder.put(kind, stage, microbatch, start_ns, end_ns)
            if type(works) is list and len(known) == len(labels):
                works = _Works(works)
                works.labels = known
        except Exception as error:
            recorder.fault("the issue of messages", error)
        return works

    batch_p2p._deep500_timing = True  # type: ignore[attr-defined]
    return batch_p2p


def _timed_wait(original: Any) -> Any:
    def wait_batch_p2p(work: Any) -> Any:
        recorder = ACTIVE.recorder
        if recorder is None or not work:
            return original(work)
        labels: list[Label] = getattr(work, "labels", [])
        if len(labels) == len(work):
            # One by one, in the order in which PyTorch waits for them.
            for one, label in zip(work, labels, strict=True):
                _wait(recorder, original, [one], label)
            return None
        return _wait(recorder, original, work, _first_received(labels))

    wait_batch_p2p._deep500_timing = True  # type: ignore[attr-defined]
    return wait_batch_p2p


def _first_received(labels: list[Label]) -> Label | None:
    # Messages that were put together by the backend have one handle: what is waited for is what comes in.
    received = [one for one in labels if _WAIT_OF[one[0]] is not Kind.WAIT_SENT]
    known = received or labels
    return known[0] if known else None


def _wait(recorder: Recorder, original: Any, work: Any, label: Label | None) -> Any:
    start_ns = recorder.now_ns()
    result = original(work)
    end_ns = recorder.now_ns()
    try:
        kind, stage, microbatch = label or (Kind.SEND_ACTIVATION, -1, -1)
        recorder.put(_WAIT_OF[kind], stage, microbatch, start_ns, end_ns)
    except Exception as error:
        recorder.fault("a wait", error)
    return result
