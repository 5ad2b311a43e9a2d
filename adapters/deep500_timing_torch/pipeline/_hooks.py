"""Where a schedule of PyTorch's is timed: its stages' passes, the issue of its messages and the waits for them.

Stages and schedules get functions of their own in the place of methods, as attributes of the object. The two functions
of the module through which every message goes are replaced while any schedule is timed, and pass through what is not
in a timed batch on the same thread.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from deep500_timing_torch.pipeline._actions import Kind
from deep500_timing_torch.pipeline._notes import ISSUED, WAITED

if TYPE_CHECKING:
    from deep500_timing_torch.pipeline._notes import Label
    from deep500_timing_torch.pipeline._recorder import Recorder

__all__ = ["ACTIVE", "Hooks", "stages_of"]

_ABSENT = object()


class _Active(threading.local):
    """Which recorder the batch on this thread belongs to."""

    recorder: Recorder | None = None


ACTIVE = _Active()
_MESSAGES = {
    "get_fwd_recv_ops": (Kind.RECEIVE_ACTIVATION, Kind.WAIT_ACTIVATION, "is_first"),
    "get_fwd_send_ops": (Kind.SEND_ACTIVATION, Kind.WAIT_SENT, "is_last"),
    "get_bwd_recv_ops": (Kind.RECEIVE_GRADIENT, Kind.WAIT_GRADIENT, "is_last"),
    "get_bwd_send_ops": (Kind.SEND_GRADIENT, Kind.WAIT_SENT, "is_first"),
}
"""What their issue and the wait for them is, and which stage has none."""


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
        stages = stages_of(schedule)
        for stage in stages:
            for name, (issue, wait, without) in _MESSAGES.items():
                if not getattr(stage, without):
                    self._replace(stage, name, self._labelling(stage, name, issue, wait))
            self._replace(stage, "forward_one_chunk", self._pass(stage, "forward_one_chunk", Kind.FORWARD))
            self._replace(stage, "backward_one_chunk", self._backward(stage))
            name = "backward_weight_one_chunk"
            if hasattr(stage, name):
                self._replace(stage, name, self._pass(stage, name, Kind.BACKWARD_WEIGHT))
        self._replace(schedule, "_step_microbatches", self._batch(schedule._step_microbatches))
        if any(stage.is_last for stage in stages):
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
            recorder.running = True
            try:
                result = original(*args, **kwargs)
            except BaseException:
                recorder.running, ACTIVE.recorder = False, before
                recorder.settle()
                if own:
                    recorder.drop()
                raise
            recorder.running, ACTIVE.recorder = False, before
            recorder.settle()
            if own:
                recorder.commit()
            return result

        return step_microbatches

    # What follows runs several times for each micro-batch, after a pass that has emptied the caches: a few short
    # functions, whatever they need bound beforehand, that read the clock and note down whole numbers.

    def _pass(self, stage: Any, name: str, kind: Kind) -> Any:
        recorder, original = self._recorder, getattr(stage, name)
        now_ns, note, code = recorder.now_ns, recorder.noted.append, recorder.codes.of(kind, stage.stage_index)

        def one_chunk(*args: Any, **kwargs: Any) -> Any:
            if not recorder.running:
                return original(*args, **kwargs)
            start_ns = now_ns()
            result = original(*args, **kwargs)
            note((code, args[0] if args else -1, start_ns, now_ns(), -1))
            return result

        def one_chunk_on_device(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if not recorder.running:
                return original(chunk_id, *args, **kwargs)
            return recorder.run_on_device(code, chunk_id, lambda: original(chunk_id, *args, **kwargs))

        return one_chunk_on_device if recorder.gpu else one_chunk

    def _backward(self, stage: Any) -> Any:
        recorder, original, index = self._recorder, stage.backward_one_chunk, stage.stage_index
        now_ns, note = recorder.now_ns, recorder.noted.append
        whole, part = recorder.codes.of(Kind.BACKWARD, index), recorder.codes.of(Kind.BACKWARD_INPUT, index)

        def backward_one_chunk(*args: Any, **kwargs: Any) -> Any:
            if not (recorder.running and stage.has_backward):
                return original(*args, **kwargs)
            start_ns = now_ns()
            result = original(*args, **kwargs)
            end_ns = now_ns()
            code = part if "full_backward" in kwargs and not kwargs["full_backward"] else whole
            note((code, args[0] if args else -1, start_ns, end_ns, -1))
            return result

        def backward_on_device(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if not (recorder.running and stage.has_backward):
                return original(chunk_id, *args, **kwargs)
            code = whole if kwargs.get("full_backward", True) else part
            return recorder.run_on_device(code, chunk_id, lambda: original(chunk_id, *args, **kwargs))

        return backward_on_device if recorder.gpu else backward_one_chunk

    def _loss(self, original: Any) -> Any:
        recorder = self._recorder
        now_ns, note = recorder.now_ns, recorder.noted.append
        codes = {stage.stage_index: recorder.codes.of(None, stage.stage_index) for stage in stages_of(self._schedule)}

        def maybe_compute_loss(
            stage: Any, output: Any, target_mbs: Any, mb_index: int, *args: Any, **kwargs: Any
        ) -> Any:
            if not (recorder.running and stage.is_last):
                return original(stage, output, target_mbs, mb_index, *args, **kwargs)
            start_ns = now_ns()
            result = original(stage, output, target_mbs, mb_index, *args, **kwargs)
            note((codes[stage.stage_index], mb_index, start_ns, now_ns(), -1))
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

    def _labelling(self, stage: Any, name: str, issue: Kind, wait: Kind) -> Any:
        recorder, original, index = self._recorder, getattr(stage, name), stage.stage_index
        issued, waited = recorder.codes.of(issue, index), recorder.codes.of(wait, index)

        def get_ops(chunk_id: int) -> Any:
            ops = original(chunk_id)
            if recorder.running:
                label = (issued, waited, chunk_id)
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
    active = ACTIVE

    def batch_p2p(p2p_ops: list[Any], *args: Any, **kwargs: Any) -> Any:
        if not p2p_ops:
            return []  # As PyTorch does; the first and the last stage ask half of the time.
        recorder = active.recorder
        if recorder is None:
            return original(p2p_ops, *args, **kwargs)
        now_ns = recorder.now_ns
        start_ns = now_ns()
        works = original(p2p_ops, *args, **kwargs)
        end_ns = now_ns()
        labels: list[Label] = []
        for op in p2p_ops:
            try:
                labels.append(op._deep500_timing_label)
            except AttributeError:
                continue  # Somebody else's message.
        recorder.noted.append((ISSUED, labels, start_ns, end_ns, -1))
        if type(works) is list and len(labels) == len(p2p_ops):
            works = _Works(works)
            works.labels = labels
        return works

    batch_p2p._deep500_timing = True  # type: ignore[attr-defined]
    return batch_p2p


def _timed_wait(original: Any) -> Any:
    active = ACTIVE
    # What somebody else has put in its place does more than to wait.
    of_pytorch = getattr(original, "__module__", "") == "torch.distributed.pipelining.schedules"

    def wait_batch_p2p(work: Any) -> Any:
        if not work:
            return None
        recorder = active.recorder
        if recorder is None:
            return original(work)
        now_ns = recorder.now_ns
        labels = work.labels if type(work) is _Works else ()
        times_ns = [now_ns()]
        if of_pytorch and len(labels) == len(work):
            # As PyTorch does: one by one, in their order.
            for one in work:
                one.wait()
                times_ns.append(now_ns())
        else:
            original(work)
            times_ns.append(now_ns())
        recorder.noted.append((WAITED, labels, times_ns, 0, -1))
        return None

    wait_batch_p2p._deep500_timing = True  # type: ignore[attr-defined]
    return wait_batch_p2p
