"""From events of a training loop to regions: the BATCH, and the time between two events.

The events are the begin and the end of a wait for data, a copy, a call of a model, a backward pass, an optimizer's
step, a checkpoint, and the switch of a model to evaluation. A BATCH lasts from the end of an optimizer's step to the
end of the next, so that accumulated micro-batches are one. It ends early at an evaluation, a checkpoint or the end of
the data; the time of these is no BATCH's. Where several optimizers step, as in a GAN, it ends when data is fetched, or
when one of them steps again.

The time between two events is a region by what came before it: ``loss`` after FORWARD, ``after BACKWARD`` (clipping,
unscaling), ``after optimizer`` (schedules, logging), ``after IO``.

Events of the thread that trains make BATCHes. On other threads each region stands alone.
"""

from __future__ import annotations

from _thread import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from deep500_timing import Autolog, Timer

IO, COPY, FORWARD, NO_GRAD, BACKWARD, STEP = "IO", "copy", "FORWARD", "FORWARD (no grad)", "BACKWARD", "optimizer"
GAPS = {
    IO: "after IO",
    COPY: "after IO",
    FORWARD: "loss",
    NO_GRAD: "after FORWARD (no grad)",
    BACKWARD: "after BACKWARD",
    STEP: "after optimizer",
}
"""The region between an event and the next, by the event."""
_PHASES = (IO, COPY, FORWARD, NO_GRAD, BACKWARD, STEP, "autograd.grad", "CHECKPOINT", "VALIDATION", "compile")
_UNHOOKED = "an optimizer without hooks"


class NoRegion:
    """A region that another records."""

    def start(self) -> None:
        """Do nothing."""

    end = start


class Steps:
    """The state of the training loop.

    Args:
        log: Of the process.
        timer: What records the regions.
    """

    def __init__(self, log: Autolog, timer: Timer) -> None:
        self.log = log
        self.timer = timer
        self.on_device = False
        """Whether a model's parameters are on an accelerator, and so regions are timed there too."""
        self.thread = 0
        """The thread that trains; 0 before it is known."""
        self.depth = 0
        """Events of that thread that are open."""
        self.in_forward = self.in_backward = False
        self.steps = 0
        self._last = ""
        self._last_ns = 0
        self._batch_ns = 0
        self._ended_ns = 0
        self._stepped: set[object] = set()
        self._open_steps: list[int] = []
        self._in_backward_stepped = False
        self._eval_ns = 0
        self._evaluated_ns = 0
        self._fetched_ns = 0
        self._begins_batch = False
        """Whether the wait for data that is open is the first event of a BATCH."""
        self._trains_in_eval = False
        self._has_hooked = False
        self._model: Callable[[], Any] = _no_model
        self._probe: tuple[torch.Tensor, int, int, int] | None = None
        self._off: frozenset[str] = frozenset()
        self._refresh()
        log.when_changed(self._refresh)
        log.before_report(self.finish)

    # --- regions -----------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self._off = self.log.taken | self.log.claimed
        if "BATCH" in self._off:  # another divides it
            self._off |= {*GAPS.values(), "EPOCH (start)"}
        self.regions: dict[str, Any] = {
            name: NoRegion() if name in self._off else self.timer.region(name, gpu=self._gpu(name)) for name in _PHASES
        }

    def _gpu(self, name: str) -> bool:
        return self.on_device and name in (FORWARD, NO_GRAD, BACKWARD, STEP)

    def find_device(self, parameters: Any) -> None:
        """Time on the accelerator from now on if a parameter is there. Asks no driver."""
        if not self.on_device and any(one.device.type not in ("cpu", "meta") for one in parameters):
            self.on_device = True
            self._refresh()

    def record(self, name: str, start_ns: int, end_ns: int) -> None:
        """Keep a region that lies in the past, unless another records it."""
        if name not in self._off and end_ns > start_ns > 0:
            self.timer.record(name, start_ns, end_ns)

    def is_here(self) -> bool:
        """Whether the caller is the thread that trains, and in no event."""
        return not self.depth and (self.thread == get_ident() or not self.thread)

    # --- events of the thread that trains ----------------------------------------------------------------------------

    def enter(self, what: str) -> None:
        """An event begins: what lies between the last one and this is a region."""
        now = perf_counter_ns()
        if self._probe is not None and what in (IO, FORWARD, NO_GRAD):
            self._look_for_a_step(now)
        self._begins_batch = False
        if what == IO:
            self._fetched_ns = now
            self._begins_batch = not (self._eval_ns or (self._batch_ns and not self._ended_ns))
            if self._begins_batch:
                self._end_batch()
        elif what != NO_GRAD and self._eval_ns:
            self._end_of_evaluation(what, now)
        if self._batch_ns:
            if self._last:
                self.record(GAPS[self._last], self._last_ns, now)
        elif not self._eval_ns:
            self._batch_ns = now
        self.depth = 1

    def leave(self, what: str) -> None:
        """It ends."""
        self.depth = 0
        self._last, self._last_ns = what, perf_counter_ns()
        if self._eval_ns:
            self._evaluated_ns = self._last_ns if what == NO_GRAD else self._evaluated_ns

    def _end_batch(self) -> None:
        if self._ended_ns:
            self.record("BATCH", self._batch_ns, self._ended_ns)
            self._batch_ns, self._ended_ns = self._ended_ns, 0
            self._stepped.clear()

    def pause(self) -> None:
        """What comes is no part of a BATCH, if one has just ended: an evaluation, a checkpoint."""
        now = perf_counter_ns()
        if self._last and self._batch_ns:
            self.record(GAPS[self._last], self._last_ns, now)
        if self._ended_ns:
            self._end_batch()
            self._batch_ns = 0
        self._last = ""

    # --- data --------------------------------------------------------------------------------------------------------

    def end_of_data(self) -> None:
        """An iterator of a data loader has no more."""
        self.depth = 0
        if self._eval_ns:
            self._evaluated_ns = perf_counter_ns()
        elif self._begins_batch:  # there is none
            self._batch_ns, self._last = 0, ""
        else:
            self._last, self._last_ns = IO, perf_counter_ns()

    def copied(self, start_ns: int) -> None:
        """A tensor has been copied to a device, outside of every event."""
        if not self._batch_ns:
            return
        if self._last:
            self.record(GAPS[self._last], self._last_ns, start_ns)
        self._last, self._last_ns = COPY, perf_counter_ns()
        self.record(COPY, start_ns, self._last_ns)

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self, optimizer: object) -> None:
        """A hook: an optimizer begins its step."""
        self._has_hooked, ident = True, id(optimizer)
        if self.thread not in (0, get_ident()) or self.in_backward:
            return
        if self._open_steps:
            if ident != self._open_steps[-1]:
                self._open_steps.append(ident)  # one optimizer within another
                return
            self._open_steps.pop()  # the last one raised
            self.depth -= 1
            self.timer.fail(STEP)
        if not self.depth:
            self._begin_step(ident)
        self._open_steps.append(ident)
        self.depth += 1
        self.regions[STEP].start()

    def _begin_step(self, ident: object) -> None:
        self._probe = None
        if ident in self._stepped:
            self._end_batch()
        self.enter(STEP)
        self.depth = 0

    def end_step(self, optimizer: object) -> None:
        """A hook: an optimizer ends its step."""
        if self.in_backward:
            self._in_backward_stepped = True
            return
        if not self._open_steps or id(optimizer) != self._open_steps[-1]:
            return
        self._open_steps.pop()
        if self._open_steps:
            return
        self.regions[STEP].end()
        self.depth -= 1
        if not self.depth:
            self.leave(STEP)
            self._end_step(id(optimizer))

    def _end_step(self, ident: object) -> None:
        self._ended_ns = self._last_ns
        self._stepped.add(ident)
        self.steps += 1
        begun_ns = 0 if self.log.begun else perf_counter_ns()
        self.log.begin()
        if begun_ns:
            self.record("deep500-timing (start)", begun_ns, perf_counter_ns())

    def end_backward(self) -> None:
        """A backward pass has ended, outside of every other event."""
        self.log.saw("backward passes")
        if self._in_backward_stepped:  # optimizers that step as soon as their gradient is there
            self._in_backward_stepped = False
            if _UNHOOKED in self._stepped:
                self._end_batch()
            self._end_step(_UNHOOKED)
        elif not self._has_hooked:
            self._probe = _state_of(self._model())

    def _look_for_a_step(self, now: int) -> None:
        # Since the backward pass a parameter has changed, or lost its gradient, and no hook of PyTorch was called.
        probe, self._probe = self._probe, None
        if probe is None or self._last != BACKWARD:
            return
        parameter, version, gradient, of_gradient = probe
        grad = parameter.grad
        if parameter._version == version and grad is not None and (id(grad), grad._version) == (gradient, of_gradient):
            return
        if _UNHOOKED in self._stepped:
            self._end_batch()
        self.record(STEP, self._last_ns, now)
        self._last, self._last_ns = STEP, now
        self._end_step(_UNHOOKED)
        self.log.note(
            "optimizer: it is not one of torch.optim, so its times hold all between BACKWARD and the next batch."
        )

    def called(self, model: Any, evaluates: bool) -> None:
        """A call of a model, outermost, has ended; a backward pass may follow."""
        if evaluates:
            self.log.saw("calls of a model without gradients")
        elif not self._has_hooked:
            self._model = ref(model)

    # --- evaluation --------------------------------------------------------------------------------------------------

    @property
    def evaluates(self) -> bool:
        """Whether ``model.eval()`` was called since the last step."""
        return self._eval_ns > 0

    def begin_evaluation(self) -> None:
        """``model.eval()`` was called."""
        if self._eval_ns or not self.steps or self._trains_in_eval:
            return
        self.pause()
        self._eval_ns, self._evaluated_ns = perf_counter_ns(), 0

    def end_evaluation(self) -> None:
        """``model.train()`` was called."""
        if self._eval_ns:
            self._record_evaluation(perf_counter_ns())

    def _end_of_evaluation(self, what: str, now: int) -> None:
        # It trains, without `train()`; the data of this batch was fetched since the last call under evaluation.
        if what == BACKWARD and self._evaluated_ns:
            self._trains_in_eval = True
            self._evaluated_ns = 0
        last_ns = self._evaluated_ns
        self._record_evaluation(last_ns)
        self._batch_ns = self._fetched_ns if self._fetched_ns > last_ns > 0 else now

    def _record_evaluation(self, end_ns: int) -> None:
        if self._evaluated_ns:
            self.record("VALIDATION", self._eval_ns, end_ns)
        self._eval_ns, self._last = 0, ""

    def counts_as_evaluation(self, training: bool, grad: bool) -> bool:
        """Whether a call of a model, outermost, is no training."""
        return not grad or (not training and self._eval_ns > 0)

    def finish(self) -> None:
        """The program ends: record the last complete BATCH and VALIDATION."""
        if self._eval_ns:
            self._record_evaluation(self._evaluated_ns)
        self._end_batch()
        self._batch_ns = 0


def _no_model() -> None:
    return None


def _state_of(model: Any) -> tuple[torch.Tensor, int, int, int] | None:
    for parameter in model.parameters() if model is not None else ():
        grad = parameter.grad
        if grad is not None:
            return parameter, parameter._version, id(grad), grad._version
    return None
