"""From events of a training loop to regions: the BATCH, and the time between two events.

The events are the begin and the end of a wait for data, a copy, a call of a model, a backward pass, an optimizer's
step, a checkpoint, and the switch of a model to evaluation. A BATCH lasts from the end of an optimizer's step to the
end of the next, so that accumulated micro-batches are one. It ends early at an evaluation, a checkpoint or the end of
the data; the time of these is no BATCH's. Where several optimizers step, as in a GAN, it ends when data is fetched, or
when one of them steps again.

The time between two events is a region by what came before it and what comes after it, see ``BETWEEN``.

Events of the thread that trains make BATCHes. On other threads each region stands alone.

This module runs as plain Python and, with the C types of ``_steps.pxd``, compiled: each step of the program passes
through it ten times.
"""

from __future__ import annotations

from _thread import get_ident
from time import perf_counter_ns
from weakref import ref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import cython
    import torch

    from deep500_timing import Autolog, Timer
else:
    from deep500_timing._base import cython_stub as cython

if not cython.compiled:
    clock_ns = perf_counter_ns
    thread_id = get_ident

IO, COPY, FORWARD, NO_GRAD, BACKWARD, GRAD, STEP = range(7)
"""The events."""
NAMES = ("IO", "copy", "FORWARD", "FORWARD (no grad)", "BACKWARD", "autograd.grad", "optimizer")
"""The region of each event."""
EVENTS = dict(zip(NAMES, range(7), strict=True))
"""The events by their regions, for other modules: compiled, the constants above are C integers."""
PREPARE, LOSS, GRADIENTS, NEXT, OTHER = "prepare batch", "loss", "gradients", "between steps", "other code"
BETWEEN = (PREPARE, LOSS, GRADIENTS, NEXT, OTHER)
"""The regions between two events: data and a model, a model and BACKWARD, BACKWARD and the optimizer's step (clipping,
unscaling), that step and what follows it (schedules, logging, an environment), and any other two."""
_MORE = ("CHECKPOINT", "VALIDATION", "compile")
_NONE = -1
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
        self.regions: dict[str, Any] = {}
        self._by_event: list[Any] = []
        self._last = _NONE
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
        self._begin_log = log.begin
        self._refresh()
        log.when_changed(self._refresh)
        log.before_report(self.finish)

    # --- regions -----------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self._off = self.log.taken | self.log.claimed
        if "BATCH" in self._off:  # another divides it
            self._off |= {*BETWEEN, "EPOCH (start)"}
        on_device = {NAMES[event] for event in (FORWARD, NO_GRAD, BACKWARD, STEP)} if self.on_device else ()
        self.regions = {
            name: NoRegion() if name in self._off else self.timer.region(name, gpu=name in on_device)
            for name in (*NAMES, *_MORE)
        }
        self._by_event = [self.regions[name] for name in NAMES]

    def find_device(self, parameters: Any) -> None:
        """Time on the accelerator from now on if a parameter is there. Asks no driver."""
        if not self.on_device and any(one.device.type not in ("cpu", "meta") for one in parameters):
            self.on_device = True
            self._refresh()

    def record(self, name: str, start_ns: int, end_ns: int) -> None:
        """Keep a region that lies in the past, unless another records it."""
        if end_ns > start_ns > 0 and name not in self._off:
            self.timer._keep(name, start_ns, end_ns)

    def is_here(self) -> bool:
        """Whether the caller is the thread that trains, and in no event."""
        return not self.depth and (self.thread == 0 or self.thread == thread_id())

    # --- events ------------------------------------------------------------------------------------------------------

    def begin(self, event: int) -> bool:
        """An event begins: a wait for data, a call of a model, a backward pass.

        Returns:
            Whether it is of the thread that trains, and in no other event.
        """
        here = not self.depth and (self.thread == 0 or self.thread == thread_id())
        if here:
            if event in (IO, FORWARD):
                self.thread = thread_id()
            self._enter(event)
        if event in (FORWARD, NO_GRAD):
            self.in_forward = True
        elif event != IO:
            self.in_backward = True
        self._by_event[event].start()
        return here

    def end(self, event: int, here: bool) -> None:
        """It ends.

        Args:
            event: The same.
            here: What :meth:`begin` returned.
        """
        self._by_event[event].end()
        if event in (FORWARD, NO_GRAD):
            self.in_forward = False
        elif event != IO:
            self.in_backward = False
        if here:
            self._leave(event)
            if event in (BACKWARD, GRAD):
                self._end_backward()

    def fail(self, event: int, here: bool) -> None:
        """It has raised an error."""
        self.timer.fail(NAMES[event])
        if event in (FORWARD, NO_GRAD):
            self.in_forward = False
        elif event != IO:
            self.in_backward = False
        if here:
            self.depth = 0

    @cython.locals(now=cython.longlong)  # type: ignore[untyped-decorator, unused-ignore]
    def _enter(self, event: int) -> None:
        # What lies between the last event and this one is a region.
        now = clock_ns()
        if self._probe is not None and event in (IO, FORWARD, NO_GRAD):
            self._look_for_a_step(now)
        self._begins_batch = False
        if event == IO:
            self._fetched_ns = now
            self._begins_batch = not (self._eval_ns or (self._batch_ns and not self._ended_ns))
            if self._begins_batch:
                self._end_batch()
        elif event != NO_GRAD and self._eval_ns:
            self._end_of_evaluation(event, now)
        if self._batch_ns:
            self._record_between(event, now)
        elif not self._eval_ns:
            self._batch_ns = now
        self.depth = 1

    def _leave(self, event: int) -> None:
        self.depth = 0
        self._last, self._last_ns = event, clock_ns()
        if self._eval_ns and event == NO_GRAD:
            self._evaluated_ns = self._last_ns

    def _record_between(self, event: int, now: int) -> None:
        last = self._last
        if last == _NONE:
            return
        if last == STEP:
            name = NEXT
        elif last == FORWARD and event in (BACKWARD, GRAD):
            name = LOSS
        elif last in (BACKWARD, GRAD) and event == STEP:
            name = GRADIENTS
        elif last in (IO, COPY):
            name = PREPARE
        else:
            name = OTHER
        self.record(name, self._last_ns, now)

    def _end_batch(self) -> None:
        if self._ended_ns:
            self.record("BATCH", self._batch_ns, self._ended_ns)
            self._batch_ns, self._ended_ns = self._ended_ns, 0
            self._stepped.clear()

    def pause(self) -> None:
        """What comes is no part of a BATCH, if one has just ended: an evaluation, a checkpoint."""
        if self._batch_ns:
            self._record_between(_NONE, clock_ns())
        if self._ended_ns:
            self._end_batch()
            self._batch_ns = 0
        self._last = _NONE

    # --- data --------------------------------------------------------------------------------------------------------

    def end_of_data(self) -> None:
        """An iterator of a data loader has no more."""
        self.depth = 0
        if self._eval_ns:
            self._evaluated_ns = clock_ns()
        elif self._begins_batch:  # there is none
            self._batch_ns, self._last = 0, _NONE
        else:
            self._last, self._last_ns = IO, clock_ns()

    def copied(self, start_ns: int) -> None:
        """A tensor has been copied to a device, outside of every event."""
        if not self._batch_ns:
            return
        self._record_between(COPY, start_ns)
        self._last, self._last_ns = COPY, clock_ns()
        self.record(NAMES[COPY], start_ns, self._last_ns)

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self, optimizer: object) -> None:
        """A hook: an optimizer begins its step."""
        self._has_hooked, ident = True, id(optimizer)
        if self.in_backward or (self.thread != 0 and self.thread != thread_id()):
            return
        if self._open_steps:
            if ident != self._open_steps[len(self._open_steps) - 1]:  # compiled, an index from the end is not checked
                self._open_steps.append(ident)  # one optimizer within another
                return
            self._open_steps.pop()  # the last one raised
            self.depth -= 1
            self.timer.fail(NAMES[STEP])
        if not self.depth:
            self._begin_step(ident)
        self._open_steps.append(ident)
        self.depth += 1
        self._by_event[STEP].start()

    def _begin_step(self, ident: object) -> None:
        self._probe = None
        if ident in self._stepped:
            self._end_batch()
        self._enter(STEP)
        self.depth = 0

    def end_step(self, optimizer: object) -> None:
        """A hook: an optimizer ends its step."""
        if self.in_backward:
            self._in_backward_stepped = True
            return
        if not self._open_steps or id(optimizer) != self._open_steps[len(self._open_steps) - 1]:
            return
        self._open_steps.pop()
        if self._open_steps:
            return
        self._by_event[STEP].end()
        self.depth -= 1
        if not self.depth:
            self._leave(STEP)
            self._end_step(id(optimizer))

    def _end_step(self, ident: object) -> None:
        self._ended_ns = self._last_ns
        self._stepped.add(ident)
        self.steps += 1
        begun_ns = clock_ns() if self.steps == 1 else 0
        self._begin_log()
        if begun_ns:
            self.record("deep500-timing (start)", begun_ns, clock_ns())

    def _end_backward(self) -> None:
        if not self.steps:
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
        self.record(NAMES[STEP], self._last_ns, now)
        self._last, self._last_ns = STEP, now
        self._end_step(_UNHOOKED)
        self.log.note(
            "optimizer: it is not one of torch.optim, so its times hold all between BACKWARD and the next batch."
        )

    def called(self, model: Any, evaluates: bool) -> None:
        """A call of a model, outermost, has ended; a backward pass may follow."""
        if self._has_hooked:
            return
        if not evaluates:
            self._model = ref(model)
        elif not self.steps:
            self.log.saw("calls of a model without gradients")

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
        self._eval_ns, self._evaluated_ns = clock_ns(), 0

    def end_evaluation(self) -> None:
        """``model.train()`` was called."""
        if self._eval_ns:
            self._record_evaluation(clock_ns())

    def _end_of_evaluation(self, event: int, now: int) -> None:
        # It trains, without `train()`; the data of this batch was fetched since the last call under evaluation.
        if event in (BACKWARD, GRAD) and self._evaluated_ns:
            self._trains_in_eval = True
            self._evaluated_ns = 0
        last_ns = self._evaluated_ns
        self._record_evaluation(last_ns)
        self._batch_ns = self._fetched_ns if self._fetched_ns > last_ns > 0 else now

    def _record_evaluation(self, end_ns: int) -> None:
        if self._evaluated_ns:
            self.record("VALIDATION", self._eval_ns, end_ns)
        self._eval_ns, self._last = 0, _NONE

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
