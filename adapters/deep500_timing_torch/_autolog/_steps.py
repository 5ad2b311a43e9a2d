"""From events of a training loop to regions: the BATCH, and the time between two events.

The events are the begin and the end of a wait for data, a copy, a call of a model, a backward pass, an optimizer's
step, a checkpoint, and the switch of a model to evaluation. A BATCH lasts from the end of an optimizer's step to the
end of the next, so that accumulated micro-batches are one. It ends early at an evaluation, a checkpoint or the end of
the data; the time of these is no BATCH's. Where several optimizers step, as in a GAN, it ends when data is fetched, or
when one of them steps again.

The time between two events is a region by what came before it and what comes after it, see ``BETWEEN``.

Events of the thread that trains make BATCHes. On other threads each region stands alone.

This module runs as plain Python and, with the C types of ``_steps.pxd``, compiled: each step of the program passes
through it eight times. The cost of a call is the memory that it touches, because PyTorch has replaced the contents of
the processor's caches. So times wait in one small buffer, and go to their regions many at once: when the buffer is
full, when the log is written, and before the report. Plain Python has no buffer.
"""

from __future__ import annotations

from _thread import get_ident
from time import perf_counter_ns
from weakref import ref

from deep500_timing import TimeType
from deep500_timing._recording.recorder import Region

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import cython
    import torch

    from deep500_timing import Autolog, Timer
else:
    from deep500_timing._base import plain as cython

if not cython.compiled:
    from deep500_timing._base.plain import in_c

    put = take = in_c
    address = id
    clock_ns = perf_counter_ns
    thread_id = get_ident

IO, COPY, FORWARD, NO_GRAD, BACKWARD, GRAD, STEP = range(7)
"""The events."""
NAMES = (
    TimeType.IO.name,
    "copy",
    TimeType.FORWARD.name,
    f"{TimeType.FORWARD.name} (no grad)",
    TimeType.BACKWARD.name,
    "autograd.grad",
    "optimizer",
)
"""The region of each event."""
EVENTS = dict(zip(NAMES, range(7), strict=True))
"""The events by their regions, for other modules: compiled, the constants are C integers."""
PREPARE, LOSS, GRADIENTS, NEXT, OTHER = "prepare batch", "loss", "gradients", "between steps", "other code"
BETWEEN = (PREPARE, LOSS, GRADIENTS, NEXT, OTHER)
"""The regions between two events: data and a model, a model and BACKWARD, BACKWARD and the optimizer's step (clipping,
unscaling), that step and what follows it (schedules, logging, an environment), and any other two."""
BATCH = TimeType.BATCH.name
ROWS = (*NAMES, *BETWEEN, BATCH)
"""All regions with times in the buffer, those of the events first."""
_PREPARE, _LOSS, _GRADIENTS, _NEXT, _OTHER, _BATCH = range(7, 13)
HERE, INSIDE = 16, -1
"""The states of :meth:`Steps.begin`: HERE is added to an event that divides a BATCH, INSIDE is one within another."""
_LOOK_UNTIL, _LOOK_EVERY = 10, 100
"""Timers of the user's own are looked for at each of the first steps, then at one in a hundred."""
_START_SHOWN_NS = 1_000_000
"""The start of the log is a region from this length on."""
_MORE = ("CHECKPOINT", "VALIDATION", "compile")
_NONE = -1
_NEVER_NS = 1 << 62
_UNHOOKED = -1
"""Stands for the identity of an optimizer that calls no hooks."""


class NoRegion:
    """A region that another records."""

    is_open = False

    def start(self) -> None:
        """Do nothing."""

    end = start


class Steps:
    """The state of the training loop.

    Args:
        log: Of the process.
        timer: What records the regions.
        is_grad_enabled: ``torch.is_grad_enabled``; this module does not import PyTorch.
    """

    def __init__(self, log: Autolog, timer: Timer, is_grad_enabled: Callable[[], bool]) -> None:
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
        self.when_stepped: Callable[[int], None] | None = None
        """Called with the number of each of the first steps, of one in a hundred, and of the one after that."""
        self.regions: dict[str, Any] = {}
        self._ours: list[Region | None] = []
        """The regions of ``ROWS`` on the thread that trains; None where another records it, or a device's clock."""
        self._waiting = 0
        """The times that wait in ``_buffer``: for each a place in ROWS, the start and the end."""
        self._last = _NONE
        self._last_ns = 0
        self._batch_ns = 0
        self._ended_ns = 0
        self._first_stepped = 0
        """The optimizer that stepped first in this BATCH, by its identity; 0 for none."""
        self._stepped: set[int] = set()
        """The others that stepped in it."""
        self._has_several = False
        """Whether several optimizers have stepped in one BATCH: the next one may end later."""
        self._open_step = 0
        """The identity of the optimizer that steps; one that steps within it is part of that."""
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
        self._is_grad_enabled = is_grad_enabled
        self._refresh()
        log.when_changed(self._refresh)
        log.before_report(self.finish)
        log.after_fork(self.forget)

    # --- regions -----------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        was_off, self._off = self._off, self.log.taken | self.log.claimed
        if BATCH in was_off and BATCH not in self._off:  # a trainer has ended: what came before is its own
            self._batch_ns = self._ended_ns = self._eval_ns = 0
            self._last = _NONE
        if BATCH in self._off:  # another divides it
            self._off |= {*BETWEEN, "EPOCH (start)"}
        on_device = {NAMES[event] for event in (FORWARD, NO_GRAD, BACKWARD, STEP)} if self.on_device else ()
        self.regions = {
            name: NoRegion() if name in self._off else self.timer.region(name, gpu=name in on_device)
            for name in (*NAMES, *_MORE)
        }
        self.drain()
        self._ours = []

    def _resolve(self) -> None:
        # On the thread that trains.
        for place, name in enumerate(ROWS):
            is_ours = name not in self._off and (place > STEP or isinstance(self.regions[name], Region))
            self._ours.append(self.timer._find(name) if is_ours else None)

    def find_device(self, parameters: Any) -> None:
        """Time on the accelerator from now on if a parameter is there. Asks no driver."""
        if not self.on_device and any(one.device.type not in ("cpu", "meta") for one in parameters):
            self.on_device = True
            self._refresh()

    def record(self, name: str, start_ns: int, end_ns: int) -> None:
        """Keep a region that lies in the past, unless another records it."""
        if end_ns > start_ns > 0 and name not in self._off:
            self.timer._keep(name, start_ns, end_ns)

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def _keep(self, place: int, start_ns: int, end_ns: int) -> None:
        # The same for a region of ROWS, on the thread that trains.
        if not end_ns > start_ns > 0:
            return
        if not self._ours:
            self._resolve()
        if cython.compiled:
            put(self, place, start_ns, end_ns)
        else:
            region = self._ours[place]
            if region is not None:
                region._intervals.append(start_ns, end_ns)

    def drain(self) -> int:
        """Give the times that wait to their regions. On any thread: nothing in it gives up the GIL.

        Returns:
            The end of a BATCH that is kept with the next step, in ns; 0 for none.
        """
        if cython.compiled:
            take(self)
        return 0 if self._has_several or BATCH in self._off else self._ended_ns

    def forget(self) -> None:
        """Drop what is the parent's, as this process was forked: the times that wait, and the count of steps."""
        self._waiting = self.steps = 0

    def is_here(self) -> bool:
        """Whether the caller is the thread that trains, and in no event."""
        return not self.depth and (self.thread == 0 or self.thread == thread_id())

    # --- events ------------------------------------------------------------------------------------------------------

    def begin(self, event: int) -> int:
        """An event begins: a wait for data, a call of a model, a backward pass.

        Returns:
            The state for :meth:`end` or :meth:`fail`: the event, with ``HERE`` added if it divides a BATCH. ``INSIDE``,
            which is below 0, if the event lies in one that is timed; call neither then.
        """
        now = clock_ns()
        if event == IO:
            if self.depth and self.timer._find(TimeType.IO).is_open:
                return INSIDE  # one loader within another
        elif self.in_forward or self.in_backward:
            return INSIDE
        here = not self.depth and (self.thread == 0 or self.thread == thread_id())
        if here:
            if event in (IO, FORWARD):
                self.thread = thread_id()
            self._enter(event, now)
        self._within(event, True)
        self._start(event, now, here)
        return event + HERE if here else event

    def begin_call(self, model: Any) -> int:
        """A model is called. Returns a state, as :meth:`begin` does."""
        if self.in_forward or self.in_backward:
            return INSIDE
        if not self._is_grad_enabled() or (self._eval_ns and not model.training):
            return self.begin(NO_GRAD)
        return self.begin(FORWARD)

    def end(self, state: int) -> None:
        """An event ends; ``state`` is what :meth:`begin` returned."""
        event, here = state % HERE, state >= HERE
        if event == IO and self.thread != thread_id():
            here = False  # meanwhile another thread was found to train
        now = self._end(event, here)
        self._within(event, False)
        if here:
            self._leave(event, now)
            if event in (BACKWARD, GRAD) and (self._in_backward_stepped or not self._has_hooked):
                self._end_backward()

    def end_call(self, model: Any, state: int) -> None:
        """The call of a model ends; a backward pass may follow."""
        self.end(state)
        if self._has_hooked:
            return
        if state % HERE == FORWARD:
            self._model = ref(model)
        elif not self.steps:
            self.log.saw("calls of a model without gradients")

    def fail(self, state: int) -> None:
        """An event, or the call of a model, has raised an error."""
        event = state % HERE
        if NAMES[event] not in self._off:
            self.timer.fail(NAMES[event])
        self._within(event, False)
        if state >= HERE:
            self.depth = 0

    def _within(self, event: int, is_open: bool) -> None:
        if event in (FORWARD, NO_GRAD):
            self.in_forward = is_open
        elif event != IO:
            self.in_backward = is_open

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def _start(self, event: int, now: int, here: bool) -> None:
        region = self._ours[event] if here else None
        if region is not None:
            region._start_ns, region._is_open = now, True
        else:
            self.regions[NAMES[event]].start()

    @cython.locals(region=Region, now=cython.longlong)  # type: ignore[untyped-decorator, unused-ignore]
    def _end(self, event: int, here: bool) -> int:
        # Returns the time.
        region = self._ours[event] if here else None
        if region is None or not region._is_open or region._end_has_more:
            self.drain()
            self.regions[NAMES[event]].end()
            return clock_ns()
        now = clock_ns()
        region._is_open = False
        self._keep(event, region._start_ns, now)
        return now

    def _enter(self, event: int, now: int) -> None:
        # What lies between the last event and this one is a region.
        if not self._ours:
            self._resolve()
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

    def _leave(self, event: int, now: int) -> None:
        self.depth = 0
        self._last, self._last_ns = event, now
        if self._eval_ns and event == NO_GRAD:
            self._evaluated_ns = self._last_ns

    def _record_between(self, event: int, now: int) -> None:
        last = self._last
        if last == _NONE:
            return
        if last == STEP:
            row = _NEXT
        elif last == FORWARD and event in (BACKWARD, GRAD):
            row = _LOSS
        elif last in (BACKWARD, GRAD) and event == STEP:
            row = _GRADIENTS
        elif last in (IO, COPY):
            row = _PREPARE
        else:
            row = _OTHER
        self._keep(row, self._last_ns, now)

    def _end_batch(self) -> None:
        if self._ended_ns:
            self._keep(_BATCH, self._batch_ns, self._ended_ns)
            self._batch_ns, self._ended_ns = self._ended_ns, 0
            self._first_stepped = 0
            if self._has_several:
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

    def end_of_data(self, state: int) -> bool:
        """An iterator of a data loader has no more, and its wait was no wait for data.

        Returns:
            Whether it is the data of the thread that trains.
        """
        if NAMES[IO] not in self._off:
            self.timer.cancel(NAMES[IO])
        if state < HERE or self.thread != thread_id():
            return False
        self.depth = 0
        if self._eval_ns:
            self._evaluated_ns = clock_ns()
        elif self._begins_batch:  # there is none
            self._batch_ns, self._last = 0, _NONE
        else:
            self._last, self._last_ns = IO, clock_ns()
        return True

    def copied(self, start_ns: int) -> None:
        """A tensor has been copied to a device, outside of every event."""
        if not self._batch_ns:
            return
        self._record_between(COPY, start_ns)
        self._last, self._last_ns = COPY, clock_ns()
        self.record(NAMES[COPY], start_ns, self._last_ns)

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self, optimizer: object) -> None:
        self._has_hooked = True
        if self.in_backward:
            return
        if self.thread != 0 and self.thread != thread_id():
            if self.steps:
                return
            self._train_here()
        ident, now = address(optimizer), clock_ns()
        if self._open_step:
            if ident != self._open_step:
                return
            self.depth -= 1  # the last one raised
            if NAMES[STEP] not in self._off:
                self.timer.fail(NAMES[STEP])
        if not self.depth:
            self._probe = None
            self._end_batch_of(ident)
            self._enter(STEP, now)
            self.depth = 0
        self._open_step = ident
        self.depth += 1
        self._start(STEP, now, self.depth == 1)

    def _train_here(self) -> None:
        # The first optimizer steps: the thread that was taken for the one that trains only fetches data, or acts.
        self.drain()
        self._ours = []
        self.thread, self.depth, self._last = thread_id(), 0, _NONE
        self._batch_ns, self._eval_ns = _NEVER_NS, 0  # the beginning of this BATCH is not known

    def end_step(self, optimizer: object) -> None:
        if self.in_backward:
            self._in_backward_stepped = True
            return
        ident = address(optimizer)
        if ident != self._open_step:
            return
        self._open_step = 0
        now = self._end(STEP, self.depth == 1)
        self.depth -= 1
        if not self.depth:
            self._leave(STEP, now)
            self._end_step(ident)

    def _end_batch_of(self, ident: int) -> None:
        # An optimizer that steps again begins the next BATCH.
        if self._first_stepped == ident or (self._has_several and ident in self._stepped):
            self._end_batch()

    def _end_step(self, ident: int) -> None:
        self._ended_ns = self._last_ns
        if not self._first_stepped:
            self._first_stepped = ident
        elif self._first_stepped != ident:
            self._stepped.add(ident)
            self._has_several = True
        self.steps += 1
        past = self.steps % _LOOK_EVERY  # also the step after one in a hundred: what began with that ends
        if self.steps > _LOOK_UNTIL and past > 1:
            return
        if past != 1 or not self.log.begun:
            begun_ns = clock_ns()
            self.log.begin(look=True)
            if self.steps == 1 and clock_ns() - begun_ns >= _START_SHOWN_NS:
                self.record("deep500-timing (start)", begun_ns, clock_ns())
        if self.when_stepped is not None:
            self.when_stepped(self.steps)

    def _end_backward(self) -> None:
        if not self.steps:
            self.log.saw("backward passes")
        if self._in_backward_stepped:  # optimizers that step as soon as their gradient is there
            self._in_backward_stepped = False
            self._end_batch_of(_UNHOOKED)
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
        self._end_batch_of(_UNHOOKED)
        self.record(NAMES[STEP], self._last_ns, now)
        self._last, self._last_ns = STEP, now
        self._end_step(_UNHOOKED)
        self.log.note(
            "optimizer: it is not one of torch.optim, so its times hold all between BACKWARD and the next batch."
        )

    @property
    def batch_ns(self) -> int:
        """The length of the BATCH that an optimizer's step has just ended."""
        return self._ended_ns - self._batch_ns

    # --- evaluation --------------------------------------------------------------------------------------------------

    @property
    def evaluates(self) -> bool:
        """Whether ``model.eval()`` was called since the last step."""
        return self._eval_ns > 0

    def begin_evaluation(self) -> None:
        if self._eval_ns or not self.steps or self._trains_in_eval:
            return
        self.pause()
        self._eval_ns, self._evaluated_ns = clock_ns(), 0

    def end_evaluation(self) -> None:
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

    def finish(self) -> None:
        """The program ends: record the last complete BATCH and VALIDATION."""
        if self._eval_ns:
            self._record_evaluation(self._evaluated_ns)
        self._end_batch()
        self._batch_ns = 0
        self.drain()


def _no_model() -> None:
    return None


def _state_of(model: Any) -> tuple[torch.Tensor, int, int, int] | None:
    for parameter in model.parameters() if model is not None else ():
        grad = parameter.grad
        if grad is not None:
            return parameter, parameter._version, id(grad), grad._version
    return None
