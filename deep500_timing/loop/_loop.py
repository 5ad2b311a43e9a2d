# cython: always_allow_keywords=False
"""The training loop of one thread: where its steps begin and end, what is an evaluation, and the times between events.

**A step ends where the program comes round again.** An optimizer's step is its end. That it has ended is known at the
next wait for data, or as the same optimizer steps again after another event. So accumulated micro-batches are one
BATCH, and so are several optimizers in turn, as in a GAN, and an optimizer that steps once for each group of
parameters. One that has not stepped before, after all others of the round are gone, begins another training. A captured
graph that steps an optimizer is replayed once in a step. A BATCH lasts from the end of a step to
the end of the next. It begins later after an evaluation, a checkpoint and the end of the data, whose time is no
BATCH's.

Where no optimizer is seen, a step is one round: from one wait for data to the next, or, where nothing waits for data,
from one call of a model or backward pass to the next of the same. Gradients alone are none: they are checked.

**Calls without gradients** in a row are a phase, until training goes on. It is an evaluation if data is fetched between
the calls, or if the program has said so (``model.eval()``). Many calls without data in each round are a policy that
generates, which is a part of the step, and so are the calls of a program with an environment. Few calls that are not
named an evaluation are a part of it too: a teacher.
"""

from __future__ import annotations

import threading
from _thread import get_ident
from contextlib import suppress
from sys import modules
from time import perf_counter_ns
from weakref import ref

from deep500_timing._recording.recorder import Region
from deep500_timing.loop._events import (
    BACKWARD,
    COPY,
    EPOCH,
    EPOCH_START,
    FORWARD,
    GENERATE,
    GRAD,
    HERE,
    INSIDE,
    IO,
    NAMES,
    NO_GRAD,
    NOTHING,
    REPLAY,
    ROLLOUT,
    ROWS,
    STEP,
    VALIDATION,
)
from deep500_timing.loop._limit import limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import cython

else:
    from deep500_timing._base import plain as cython

if not cython.compiled:
    clock_ns = perf_counter_ns
    thread_id = get_ident

_PREPARE, _LOSS, _GRADIENTS, _NEXT, _OTHER, _BATCH = range(8, 14)
"""The places in ROWS of the times between events, and of BATCH."""
_LOOK_UNTIL, _LOOK_EVERY = 10, 100
"""The log has a line for each of the first steps, then of one in a hundred and of the one after that."""

_MANY_CALLS = 8
"""So many calls without gradients in a row are a phase, regardless of the program's mode."""
_ROUNDS_OF_A_POLICY = 8
"""A policy generates at least once in so many steps, if it does not act in an environment."""
_ENVIRONMENTS = ("gymnasium", "gym", "pettingzoo", "dm_env", "envpool")
"""Packages of environments. What has imported one acts in it, however quick that is beside the model."""
_SURE, _SURE_AT_END, _SURE_WITHOUT_GRADIENTS, _SURE_OF_ACTING = 20, 10, 1000, 20_000
"""So many rounds without an optimizer are steps: with gradients; when the program ends; without any gradient, and of
those with an environment: a rollout before the first update may be long."""
_MOST_ROWS, _MOST_EPOCHS = 1024, 16
"""Times between events that are kept until a step ends, for which there are arrays in C as long; and iterators over
data that have begun and not ended."""
_UNHOOKED, _TOLD = -1, -2
"""Stand for the identity of an optimizer that tells nothing of its steps, and for a trainer."""


class Phase:
    """Calls without gradients in a row, or what follows ``model.eval()``."""

    def __init__(self, start_ns: int, loop: Loop, rows: int, *, is_said: bool) -> None:
        self.start_ns = start_ns
        self.first_ns = 0
        """Its first wait for data or call."""
        self.end_ns = 0
        """The end of its last call, or of its data."""
        self.calls = self.calls_ns = 0
        self.is_said = is_said
        self.has_environment = _has_environment()
        self.fetches = 0
        """Calls for which data was fetched."""
        self.has_ended = False
        """Whether its data has ended."""
        self.is_fetching = False
        self.is_over = False
        """Whether what follows its last call is no part of it: a checkpoint, other data."""
        self.is_left = False
        """Whether the program has said that it is over, as each of its steps may: behind a wait for data."""
        self.rows = rows
        self.data_ns = 0
        """Where its first data began, if that was fetched before ``eval()``."""
        self.last, self.last_ns = loop.last, loop.last_ns

    @property
    def evaluates_data(self) -> bool:
        """Whether data was fetched between its calls, and not only for the first one."""
        return self.fetches > 1 or (self.fetches > 0 and self.has_ended)

    @property
    def is_certain(self) -> bool:
        """Whether its calls are no part of a forward pass."""
        return self.calls > 0 and (self.is_said or self.evaluates_data or self.calls >= _MANY_CALLS)

    def leave(self, now: int) -> None:
        """What comes is no part of it, unless it is another of its calls."""
        if not self.is_over:
            self.is_over = True
            self.end_ns = now if self.is_said else self.end_ns

    @property
    def acts(self) -> bool:
        """Whether half of its time lies between the calls: in an environment."""
        return self.has_environment or 2 * self.calls_ns < self.end_ns - self.first_ns


def _has_environment() -> bool:
    return not modules.keys().isdisjoint(_ENVIRONMENTS)


class ThreadLoops:
    """The loop of each thread, to which events are told, and what all loops read: the base of :class:`Loops`."""

    def __init__(self) -> None:
        self._local: Any = None
        self._newest: Loop | None = None
        self.version = 0
        """Grows with each change of who records what."""
        self.in_backward: Loop | None = None
        """The loop that began the newest backward pass."""
        self.first_step: int | None = None
        """The program's number of the first step; None for a run that counts them itself."""
        self.is_grad_enabled: Callable[[], bool] = lambda: True
        """Whether the framework computes gradients now."""
        self.before_wait: Callable[[int], object] | None = None
        """Called with the time as a wait for data begins: ends a step whose end is not seen."""

    def here(self) -> Loop:
        """The loop of the calling thread."""
        return self._here()

    def _here(self) -> Loop:
        loop = self._newest
        if loop is None or loop.thread != thread_id():
            if self._local is None:
                self._local = _Local(self)
            loop = self._newest = self._local.loop
        return loop

    # In one call: a further one costs half a microsecond in a step whose work has filled the caches.
    def begin(self, event: int) -> int:
        """As :meth:`Loop.begin` of the calling thread's loop."""
        return self._here().begin(event)

    def begin_call(self, model: Any) -> int:
        """As :meth:`Loop.begin_call`."""
        return self._here().begin_call(model)

    def end(self, state: int) -> None:
        """As :meth:`Loop.end`."""
        self._here().end(state)

    def end_call(self, model: Any, state: int) -> None:
        """As :meth:`Loop.end_call`."""
        self._here().end_call(model, state)

    def begin_step(self, optimizer: object) -> None:
        """As :meth:`Loop.begin_step`."""
        self._here().begin_step(optimizer)

    def end_step(self, optimizer: object) -> None:
        """As :meth:`Loop.end_step`."""
        self._here().end_step(optimizer)


class _Local(threading.local):
    # `threading.local` calls this again in each thread.
    def __init__(self, loops: Any) -> None:
        self.loop = Loop(loops)


class Loop:
    """The loop of one thread. Made by :class:`Loops`, which has one for each thread."""

    def __init__(self, loops: Any) -> None:
        self.loops = loops
        self._timer = loops.timer
        self._handles = loops.handles
        self._version = -1
        self._ours: list[Any] = []
        """The regions of ROWS on this thread; None where another records it, or a device's clock."""
        self.trains = False
        """Whether it has the BATCHes of the process."""
        self.has_called = False
        """Whether a model was called."""
        self.has_hooked = False
        """Whether an optimizer tells of its steps."""
        self._looks = True
        """Whether it is looked at what a backward pass is followed by: an update that nothing tells of."""
        self.thread = get_ident()
        self._thread = threading.current_thread()
        self.is_of_engine = loops.is_engine()
        """Whether the thread is the framework's own, and runs parts of a backward pass that another thread began."""
        self.depth = 0
        """Events that are open."""
        self._open: list[Any] = [None] * len(NAMES)
        self._begun_ns = 0
        self.in_forward = self.in_backward = self._waits = self._has_waited = False
        self.stepped = 0
        """How often an optimizer has begun to step."""
        self.rounds = 0
        """Steps of this loop."""
        self._is_limited = limit.steps > 0
        self.batches_ns = 0
        """The total time of its BATCHes."""
        self._numbered = -1
        """The rounds before the newest step that was given its number."""
        self._model: Callable[[], Any] = lambda: None
        self._probe: tuple[Callable[[], object], object] | None = None
        self._in_backward_stepped = self._trains_in_eval = False
        self._open_step = 0
        """The identity of the optimizer that steps; one that steps within it is part of that."""
        self._known: dict[int, Callable[[], object]] = {}
        """Each optimizer that has stepped, by its identity; None is returned for one that is gone."""
        if not cython.compiled:
            self._row_places, self._row_starts_ns, self._row_ends_ns = ([0] * _MOST_ROWS for _ in range(3))
        self.reset()

    def reset(self) -> None:
        """Forget the current round."""
        self.last, self.last_ns = NOTHING, 0
        self._batch_ns = 0
        """When the round began; 0 before it is known."""
        self._ended_ns = 0
        """The end of the round's last optimizer step; 0 for none."""
        self._stepped: set[int] = set()
        """The optimizers that have stepped in it, by their identity."""
        self._has_moved = False
        """Whether there was an event since the last optimizer step began."""
        self._has_events = False
        """Whether there was one in the round."""
        self._has_trained = False
        """Whether there were gradients since the last step."""
        self._begins_batch = self._epoch_goes_on = False
        self._fetched_ns = self._fetched_rows = self._round_ns = self._made_ns = self._data_ns = 0
        self._trained_ns = 0
        """The end of the last event with gradients, or of the last step."""
        self._rows = 0
        """How many times between events there are in the round."""
        self._phase: Phase | None = None
        self._phase_round = -1
        self._policy = ""
        """What the first phase of many calls would be called, if it is a policy's: each has that name."""
        self._held: tuple[str, int, int, bool] | None = None
        """The first phase that may be a policy's, until the next one."""
        self._epochs: dict[int, tuple[int, int, bool]] = {}
        """Of each iterator over data: when it was made, the rounds by then, and whether no step was under way."""
        self._epoch_ns = self._epoch_over_ns = self._epoch_ended_ns = self._fetches = 0
        self._single: tuple[int, int, int, int] | None = None
        """Of data of one batch that has ended before anything was trained on: see :meth:`end_of_data`."""
        self._leader: tuple[int, int] | None = None
        """What begins a round where no optimizer is seen."""
        self._in_round = self._has_gradients = self._round_trains = False
        self._found: list[tuple[int, int]] = []
        self._has_only_rounds = False
        """Whether rounds have been taken for steps."""
        self._new_round = 0
        """The rounds before the newest optimizer: one of each step, as of an inner loop, begins no training."""
        self._passes = self._passes_before = 0
        """Backward passes since the last step, and of a step: the most of an optimizer that tells of its steps."""
        self._untold: list[int] = []
        """When the program came round again after such a pass, since an optimizer told of a step."""

    def may_train(self) -> bool:
        """Whether no other thread is known to train."""
        main = None if self.trains else self.loops.main
        return main is None or not main._thread.is_alive()

    def _now(self) -> int:
        return clock_ns() if self._timer._native else self._timer._read_clock()

    def _resolve(self) -> None:
        loops, timer = self.loops, self._timer
        self._version = loops.version
        self._ours = [
            timer._find(name) if loops.is_plain(name) and place != COPY else None for place, name in enumerate(ROWS)
        ]

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def _keep(self, place: int, start_ns: int, end_ns: int) -> None:
        # As `Loops.record`, for a region of ROWS.
        if not end_ns > start_ns > 0:
            return
        if self._version != self.loops.version:
            self._resolve()
        region = self._ours[place]
        if region is not None:
            region._intervals.append(start_ns, end_ns)

    # --- events ------------------------------------------------------------------------------------------------------

    def begin(self, event: int, called: int = 0) -> int:
        """An event begins: a wait for data, a call of a model, a backward pass.

        Args:
            event: ``IO``, ``FORWARD``, ``NO_GRAD``, ``BACKWARD`` or ``GRAD``; of a trainer also ``COPY``, and ``STEP``
                for a part of a step that :meth:`complete_step` ends.
            called: The identity of the model.

        Returns:
            The state for :meth:`end` or :meth:`fail`. ``INSIDE`` if the event lies in one that is timed: these do
            nothing then.
        """
        now = self._now()
        if event == IO:
            if self._waits:
                return INSIDE  # one loader within another
        elif self.in_forward or self.in_backward or self.is_of_engine:
            return INSIDE
        here = not self.depth
        if here:
            self._begun_ns = now
            self._enter(event, now, called)
        elif self._open_step:
            self._has_moved = True  # its closure evaluates the model
        if event == IO:
            self._waits = True
        elif event in (FORWARD, NO_GRAD):
            self.in_forward = self.has_called = True
        else:
            self.in_backward = True
            self.loops.in_backward = self
        self._start(event, now)
        return event + HERE if here else event

    def begin_call(self, model: Any) -> int:
        """A model, which has ``training``, is called. Returns a state, as :meth:`begin` does."""
        if self.in_forward or self.in_backward or self.is_of_engine:
            return INSIDE
        phase = self._phase
        is_evaluated = phase is not None and self.rounds and phase.is_said and not model.training
        event = NO_GRAD if is_evaluated or not self.loops.is_grad_enabled() else FORWARD
        return self.begin(event, id(model))

    def end(self, state: int) -> None:
        """An event ends; ``state`` is what :meth:`begin` returned."""
        if state == INSIDE:
            return
        event = state % HERE
        now = self._end(event)
        self._close(event)
        if state >= HERE:
            self._leave(event, now)
            if event in (BACKWARD, GRAD):
                self._end_backward()

    def end_call(self, model: Any, state: int) -> None:
        """The call of a model ends; a backward pass may follow."""
        self.end(state)
        if self._looks and state % HERE == FORWARD:
            self._model = ref(model)

    def fail(self, state: int) -> None:
        """An event, or the call of a model, has raised an error."""
        self._drop(state, self.loops.timer.fail)

    def cancel(self, state: int) -> None:
        """An event was none."""
        self._drop(state, self.loops.timer.cancel)
        if self._rows and self._row_ends_ns[self._rows - 1] == self._begun_ns:
            self._rows -= 1  # the time before it

    def _drop(self, state: int, drop: Callable[[str], None]) -> None:
        if state == INSIDE:
            return
        event = state % HERE
        if NAMES[event] not in self.loops.off:
            drop(NAMES[event])
        self._close(event)
        if state >= HERE:
            self.depth = 0

    def add(self, event: int, start_ns: int, end_ns: int) -> None:
        """Keep an event that lies in the past, and in no other."""
        self._begun_ns = start_ns
        self._enter(event, start_ns)
        self.loops.record(NAMES[event], start_ns, end_ns)
        self._leave(event, end_ns)

    def add_unnamed(self, event: int, ident: int, start_ns: int, end_ns: int) -> None:
        """Keep an event that lies in the past and that an adapter has recorded under another name.

        The times before and after it have no names either.

        Args:
            event: ``STEP``, or ``GRAD`` where a step follows.
            ident: The identity of what did it; an optimizer that has stepped once begins the next round.
            start_ns: When it began.
            end_ns: When it ended.
        """
        if event != NO_GRAD:
            self._end_phase(event, start_ns)
        self.last = NOTHING
        if event == STEP:
            self.hook()
            if ident not in self._known:
                self._known[ident] = bool  # it is not gone
                self._tell_of_training()
            if ident in self._stepped:
                self._end_batch()
            self._begin_step(ident, start_ns)
        else:
            self._enter(event, start_ns, ident)
        self._leave(event, end_ns)
        self.last = NOTHING
        if event == STEP:
            self._end_step(ident)

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def _start(self, event: int, now: int) -> None:
        # An open region is closed by the same handle, regardless of the recorder of the region by then.
        if self._version != self.loops.version:
            self._resolve()
        region = self._ours[event]
        if region is not None and not region._is_open and self._timer._enabled:
            self._open[event] = region
            region._start_ns, region._is_open = now, True
        else:
            handle = self._open[event] = self._handles[event]
            handle.start()

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def _end(self, event: int) -> int:
        # Returns the time.
        region = self._ours[event]
        if region is not None and region is self._open[event] and region._is_open and not region._end_has_more:
            now = self._now()
            region._is_open = False
            region._intervals.append(region._start_ns, now)
            return now
        self._open[event].end()
        return self._now()

    def _close(self, event: int) -> None:
        if event == IO:
            self._waits = False
        elif event in (FORWARD, NO_GRAD):
            self.in_forward = False
        else:
            self.in_backward = False

    def _enter(self, event: int, now: int, called: int = 0) -> None:
        # An event that no other holds begins.
        if self.last == BACKWARD and event in (IO, FORWARD, NO_GRAD):
            self._look_for_a_step(now)
        if not self.has_hooked:
            if event not in (IO, NO_GRAD):  # as this may end a round
                self._end_phase(event, now)
            self._look_for_a_round(event, now, called)
        phase = self._phase
        if event == IO:
            phase = self._begin_wait(now)
        if self._is_limited:
            self._end_at_limit()
        if event == NO_GRAD:
            self._end_left()
            phase = self._phase
            if phase is None:
                has_fetched = self._fetched_ns >= self._trained_ns and self._fetched_ns > 0
                start_ns = self._fetched_ns if has_fetched else now
                rows = self._fetched_rows if has_fetched else self._rows
                self._phase = phase = Phase(start_ns, self, rows, is_said=False)
                phase.is_fetching, phase.first_ns = has_fetched, start_ns
            phase.first_ns = phase.first_ns or now
        elif phase is not None and event != IO:
            self._end_phase(event, now)
            phase = None
        if self._batch_ns:
            if phase is None or not phase.is_certain:
                self._between(event, now)
        elif phase is None or not phase.is_certain:
            self._batch_ns = now
            if self._single is not None and self.rounds == self._single[1] and event not in (IO, NO_GRAD):
                _, _, self._batch_ns, self.last_ns = self._single
                self.last = IO
                self._between(event, now)
        self._has_events = self._has_moved = True
        self.depth = 1
        if self._numbered != self.rounds and self._batch_ns and not self._ended_ns:
            self._numbered = self.rounds
            if self.loops.first_step is not None:
                self._timer.step(self.loops.number, time_ns=self._batch_ns)

    def _leave(self, event: int, now: int) -> None:
        phase = self._phase
        if event == NO_GRAD and phase is not None:
            if phase.is_fetching and not phase.calls:
                phase.data_ns = 0  # what came before was no data of it
            phase.calls += 1
            phase.calls_ns += now - self._begun_ns
            phase.fetches += phase.is_fetching
            phase.is_fetching = phase.is_over = False
            phase.start_ns = phase.start_ns or phase.first_ns
            phase.end_ns = now
            if phase.is_certain:
                self._rows = min(self._rows, phase.rows)
        elif event in (FORWARD, BACKWARD, GRAD):
            self._has_trained = True
            self._trained_ns = now
        self.depth = 0
        self.last, self.last_ns = event, now

    def _between(self, event: int, now: int) -> None:
        if self.last == NOTHING or now <= self.last_ns:
            return
        last = self.last
        if last in (STEP, REPLAY) and event != STEP:
            place = _NEXT
        elif last in (IO, COPY):
            place = _PREPARE
        elif last == FORWARD and event in (BACKWARD, GRAD):
            place = _LOSS
        elif last in (BACKWARD, GRAD) and event == STEP:
            place = _GRADIENTS
        else:
            place = _OTHER
        if self.may_train() and self._rows < _MOST_ROWS:
            self._row_places[self._rows] = place
            self._row_starts_ns[self._rows], self._row_ends_ns[self._rows] = self.last_ns, now
            self._rows += 1

    # --- data --------------------------------------------------------------------------------------------------------

    def _begin_wait(self, now: int) -> Phase | None:
        if self.loops.before_wait is not None:
            self.loops.before_wait(now)
        self._end_single()
        phase = self._phase
        self._fetches += 1
        self._has_waited = True
        self._fetched_ns, self._data_ns, self._made_ns = now, self._made_ns or now, 0
        if phase is not None:
            phase.is_fetching = True
            phase.first_ns = phase.first_ns or now
        self._begins_batch = not ((phase is not None and phase.is_certain) or (self._batch_ns and not self._ended_ns))
        if self._epoch_over_ns and not self._ended_ns:
            if self._batch_ns:
                self._epoch_goes_on = True  # its last step has not ended
            else:
                self._end_epoch(self._epoch_over_ns)
        if self._begins_batch:
            over_ns, goes_on = self._epoch_over_ns, self._epoch_goes_on
            self._end_batch()
            if over_ns and not goes_on:  # a loader that is one batch ahead: the last step came after the data's end
                self._batch_ns, self.last = 0, NOTHING
        self._fetched_rows = self._rows
        return phase

    def begin_data(self, source: int, start_ns: int) -> None:
        """An iterator over data has been made.

        Args:
            source: Its identity.
            start_ns: When that began.
        """
        if not self.depth:
            if self.loops.before_wait is not None:
                self.loops.before_wait(start_ns)
            phase = self._phase
            if phase is not None and phase.has_ended:
                phase.leave(start_ns)
            if self.may_train() and not self.evaluates:
                self.loops.record(EPOCH_START, start_ns, self._now())
            has_trained = self._has_trained and (self.rounds or self._passes)  # a call alone prepares the first step
            is_in_step = has_trained or self._ended_ns or self._fetched_ns >= self._batch_ns
            if not (is_in_step or (phase is not None and phase.is_certain)):
                self._batch_ns, self.last = 0, NOTHING  # it began by calls between two epochs
                self._rows = 0
            if len(self._epochs) >= _MOST_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[source] = start_ns, self.rounds, self._ended_ns > 0 or not self._batch_ns
            self._fetches, self._made_ns = 0, start_ns

    def end_of_data(self, state: int, source: int = 0) -> None:
        """An iterator has no more data, and its wait was no wait for data.

        A loader that fetches one batch ahead says so before its only batch is trained on. That is an epoch if a step
        follows, and one alone.
        """
        now = self._now()
        self._drop(state, self.loops.timer.cancel)
        if state < HERE:
            return
        phase = self._phase
        begun_ns, rounds, is_between = self._epochs.pop(source, (0, 0, False))
        has_trained = self._has_trained or self._has_only_rounds or rounds < self.rounds
        if phase is not None and phase.calls and begun_ns and rounds < self.rounds:
            phase.leave(now)  # the data of the training
        elif phase is not None and phase.calls:
            phase.end_ns, phase.has_ended = now, True
        elif self._begins_batch or (is_between and phase is None and not has_trained):  # there is none
            if begun_ns and self._fetches == 2:  # the batch, and the end
                self._single = begun_ns, self.rounds, self._batch_ns, now
            self._batch_ns, self.last = 0, NOTHING
            self._rows = 0
        elif phase is None:
            self.last, self.last_ns = IO, now
        if begun_ns and self.rounds > rounds:
            self._end_epoch(self._epoch_over_ns)
            self._epoch_ns, self._epoch_over_ns, self._epoch_goes_on = begun_ns, now, False

    def _end_single(self) -> None:
        single, self._single = self._single, None
        if single is not None and self.rounds == single[1] + 1:
            self._epoch_ns, self._epoch_over_ns, self._epoch_goes_on = single[0], self._trained_ns, False
            if not self._ended_ns:
                self._end_epoch(self._trained_ns)

    def _end_epoch(self, end_ns: int) -> None:
        # It has ended with its last step, which may end after the data.
        if end_ns:
            if self.trains:
                self.loops.record(EPOCH, max(self._epoch_ns, self._epoch_ended_ns), end_ns)
            self._epoch_ended_ns, self._epoch_over_ns = end_ns, 0

    def copied(self, start_ns: int) -> None:
        """A tensor has been copied to a device, outside of every event."""
        phase = self._phase
        if not self._batch_ns or (phase is not None and phase.is_certain):
            return
        self._between(COPY, start_ns)
        self.last, self.last_ns = COPY, self._now()
        self.loops.record(NAMES[COPY], start_ns, self.last_ns)

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self, optimizer: object) -> None:
        """An optimizer begins to step."""
        loops = self.loops
        self.hook()
        self.stepped += 1
        if self.in_backward or self.is_of_engine:
            return
        ident, now = id(optimizer), self._now()
        if self._open_step:
            if ident != self._open_step:
                return
            self.depth -= 1  # the last one raised
            if NAMES[STEP] not in loops.off:
                loops.timer.fail(NAMES[STEP])
        if not self.depth:
            if self._begins_training(ident, optimizer):
                self._end_batch()
            self._begin_step(ident, now)
        self._open_step = ident
        self.depth += 1
        self._start(STEP, now)

    def hook(self) -> None:
        """An optimizer tells of its steps."""
        self.has_hooked, self._looks = True, False
        if self._passes:
            self._passes_before, self._passes = max(self._passes_before, self._passes), 0
            if self._untold:
                self._untold.clear()

    def _begins_training(self, ident: int, optimizer: object) -> bool:
        # It has not stepped before, and no other that has stepped in the round is left.
        known = self._known
        stepped = known.get(ident)
        if stepped is not None and stepped() is optimizer and not (self._stepped and _UNHOOKED in self._stepped):
            return False
        begins = False not in [known.get(one, object)() is None for one in self._stepped]
        self._tell_of_training()
        with suppress(TypeError):  # it has no weak references
            known[ident] = ref(optimizer)
        return begins

    def _tell_of_training(self) -> None:
        # What steps for the first time, and late, begins another one: its steps are not compared with those before.
        run = self.loops.timer.run
        if run is not None and self.rounds > self._new_round + _LOOK_UNTIL:
            run.event("training")
        self._new_round = self.rounds

    def _begin_step(self, ident: int, now: int, event: int = STEP) -> None:
        self._probe = None
        if not self.trains:
            self.loops.train(self)
        if self._phase is not None:
            self._end_phase(STEP, now)
        if self._ended_ns and ident in self._stepped and (self._has_moved or not self._has_events):
            self._end_batch()
        self._has_moved = False
        if self._is_limited:
            self._end_at_limit()
        if self._batch_ns:
            self._between(event, now)
        else:
            self._batch_ns = now - 1  # it is longer than its only event, by which it is known to hold that

    def end_step(self, optimizer: object) -> None:
        """It has stepped."""
        if self.in_backward or self.is_of_engine:
            loop = self if self.in_backward else self.loops.in_backward
            if loop is not None:
                loop._in_backward_stepped = True
            return
        ident = id(optimizer)
        if ident != self._open_step:
            return
        self._open_step = 0
        now = self._end(STEP)
        self.depth -= 1
        if not self.depth:
            self._leave(STEP, now)
            self._end_step(ident)

    def skip_step(self, optimizer: object) -> None:
        """An optimizer was not stepped, as its gradients were no numbers: the round has ended all the same."""
        if not (self.depth or self.in_backward):
            self.loops.skipped += 1
            self._end_step_now(id(optimizer))

    def complete_step(self) -> None:
        """A step ends now, and with it the BATCH: a trainer says so."""
        self._end_step_now(_TOLD)
        self._end_batch()

    def _end_step_now(self, ident: int) -> None:
        self.hook()
        now = self._now()
        if self.last == STEP and self._batch_ns:  # an optimizer's part of it
            self._between(NOTHING, now)
            self.last_ns = now
        self._begin_step(ident, now)
        self._leave(STEP, now)
        self._end_step(ident)

    def begin_other(self) -> None:
        """What comes is no part of the training until :meth:`end_other`: a trainer evaluates."""
        self.pause()
        self.in_forward = self.in_backward = self._waits = True
        self.depth = 1

    def end_other(self) -> None:
        """The training goes on, and no event is open."""
        self.in_forward = self.in_backward = self._waits = False
        self.depth = 0

    def begin_capture(self) -> int:
        """What comes is captured into a graph, and does not happen; returns the state for :meth:`end_capture`."""
        if self.in_forward or self.in_backward:
            return INSIDE
        self.in_forward = self.in_backward = True
        self.depth += 1
        return self.stepped

    def end_capture(self, state: int) -> bool:
        """The graph is complete. Returns whether it steps an optimizer."""
        if state == INSIDE:
            return False
        self.in_forward = self.in_backward = self._in_backward_stepped = False
        self.depth -= 1
        if not self.depth:
            self.pause()
        return self.stepped > state

    def begin_replay(self, graph: object) -> int:
        """A graph that steps an optimizer is replayed; returns a state, as :meth:`begin` does."""
        if self.depth:
            return INSIDE
        now = self._now()
        if id(graph) in self._stepped:
            self._end_batch()
        self._begin_step(id(graph), now, REPLAY)
        self.depth = 1
        self._start(REPLAY, now)
        return REPLAY + HERE

    def end_replay(self, graph: object) -> None:
        """It has been started."""
        self._leave(REPLAY, self._end(REPLAY))
        self._end_step(id(graph))

    def _end_step(self, ident: int) -> None:
        is_first = not self._ended_ns
        self._ended_ns = self._trained_ns = self.last_ns
        self._stepped.add(ident)
        self._has_trained = False
        if is_first:
            self._count_round()

    def _count_round(self) -> None:
        self.rounds += 1
        if self._is_limited and self.trains and self.loops.has_batches:
            limit.done += 1
        if self.rounds == 1 and not self.has_called:
            self.loops.when_uncalled()
        if self.trains and (self.rounds <= _LOOK_UNTIL or self.rounds % _LOOK_EVERY <= 1):
            self.loops.tell_of_steps()

    def _end_batch(self) -> None:
        # The program has come round again.
        if not self._ended_ns:
            return
        if self.trains:
            self._record_rows()
            self._keep(_BATCH, self._batch_ns, self._ended_ns)
            self.batches_ns += self._ended_ns - self._batch_ns
        self._rows = 0
        if self._epoch_over_ns:
            self._end_epoch(self._ended_ns)
        self._batch_ns, self._ended_ns = self._ended_ns, 0
        self._stepped.clear()
        self._has_events = self._has_moved
        if self._phase is not None:
            self._phase.rows = 0

    def end_at_limit(self, ident: int) -> None:
        """End the program if what comes begins the step after the last: by the optimizers that have stepped."""
        if self._is_limited and ident in self._stepped:
            self._end_batch()
            self._end_at_limit()

    def _end_at_limit(self) -> None:
        # Where no optimizer tells, nothing else shows that the round is over.
        is_over = not self._ended_ns or _UNHOOKED in self._stepped
        if is_over and self.trains and limit.is_over and self.loops.has_batches:
            self._end_batch()
            self._batch_ns, self.last = 0, NOTHING
            limit.end_program()

    def _record_rows(self) -> None:
        for at in range(self._rows):
            self._keep(self._row_places[at], self._row_starts_ns[at], self._row_ends_ns[at])

    def pause(self) -> None:
        """The next call is no part of a BATCH or of an evaluation, if one has just ended: a checkpoint."""
        if self.depth or not self.may_train():
            return
        self._end_left()
        phase = self._phase
        if phase is not None and not phase.calls:
            phase.start_ns = 0  # it begins with its first call
        elif phase is not None and not phase.is_over:
            is_evaluation = self.evaluates
            phase.leave(self._now())
            if is_evaluation:
                return
        if self._batch_ns:
            self._between(NOTHING, self._now())
        if self._ended_ns or not self._has_events:
            self._end_batch()
            self._batch_ns = 0
        self.last = NOTHING

    def _end_backward(self) -> None:
        self._passes += 1
        if self._in_backward_stepped:  # optimizers that step as soon as their gradient is there
            self._in_backward_stepped = False
            self._step_unhooked()
        elif self._looks and not self._has_only_rounds:
            model = self._model()
            self._probe = None if model is None else self.loops.state_of(model, self.has_hooked)
        elif self.rounds and self._passes >= self._passes_before:
            self._looks = True  # the next pass is one more than a step has

    def _step_unhooked(self) -> None:
        self.loops.train(self)
        if _UNHOOKED in self._stepped:
            self._end_batch()
            if not self.has_hooked:
                self._known[_UNHOOKED] = type(None)  # it is gone, where an optimizer follows
        self._passes_before, self._passes = self._passes, 0
        self._end_step(_UNHOOKED)

    def _look_for_a_step(self, now: int) -> None:
        # The program comes round again after a backward pass, and no optimizer has told of a step. Has a parameter
        # changed, or lost its gradient?
        probe, self._probe = self._probe, None
        if probe is None or probe[0]() == probe[1]:
            if len(self._untold) < self._passes_before:
                self._untold.append(now)
            return
        if self.has_hooked:  # not by the optimizer that told of its steps: since then each round was one too
            self._end_batch()
            for ended_ns in self._untold:
                self._ended_ns = ended_ns
                self._count_round()
                self._end_batch()
            self._untold.clear()
            self._passes, self.has_hooked = 1, False
        self.loops.record(NAMES[STEP], self.last_ns, now)
        self.last, self.last_ns = STEP, now
        if _UNHOOKED in self._stepped:  # at first it may only perturb the model, before an optimizer steps
            self.loops.note(
                "optimizer: it is not one of torch.optim, so its times hold all between BACKWARD and the next batch."
            )
        self._step_unhooked()

    @property
    def pending_ns(self) -> int:
        """The end of a BATCH that is kept with the next step, in ns; 0 for none."""
        return self._ended_ns if len(self._stepped) < 2 else 0

    @property
    def length_ns(self) -> int:
        """The length of the BATCH that an optimizer's step has just ended."""
        return self._ended_ns - self._batch_ns

    # --- rounds without an optimizer ---------------------------------------------------------------------------------

    def _look_for_a_round(self, event: int, now: int, called: int) -> None:
        if not self.may_train() or self._has_steps:
            return
        if event == IO:
            leader = (IO, 0)
        else:
            leader = (event, called)
            if event in (BACKWARD, GRAD):
                self._has_gradients = self._round_trains = True
            if self._leader is not None and self._leader != leader:
                self._in_round = True
                return
        if self._leader != leader:  # the first event, or the first wait for data
            self._leader, self._round_ns, self._in_round = leader, now, event not in (IO, GRAD)
            self._round_trains = event in (BACKWARD, GRAD)
            self._found.clear()
            return
        if self._in_round:
            if self._batch_ns:
                self._between(event, now)
            self.last = NOTHING
            self._end_round(now)
        self._round_ns, self._in_round, self._round_trains = now, event not in (IO, GRAD), event in (BACKWARD, GRAD)

    @property
    def _has_steps(self) -> bool:
        # Of an optimizer, be it one that tells nothing of them.
        return self.has_hooked or (self.rounds > 0 and not self._has_only_rounds)

    def _end_round(self, now: int) -> None:
        if self._has_gradients and not self._round_trains:
            return  # an evaluation
        self._found.append((self._round_ns, now))
        found, enough = len(self._found), _SURE if self._has_gradients else _SURE_WITHOUT_GRADIENTS
        if self.trains or (found >= enough and (enough == _SURE or found >= _SURE_OF_ACTING or not _has_environment())):
            self._keep_rounds()

    def _keep_rounds(self) -> None:
        self.loops.train(self)
        self._record_rows()
        self._batch_ns, self._rows, self._has_only_rounds = 0, 0, True
        if not self._has_gradients:
            self._phase = None
        for start_ns, end_ns in self._found:
            self._keep(_BATCH, start_ns, end_ns)
            self._count_round()
        self._found.clear()

    # --- evaluation --------------------------------------------------------------------------------------------------

    @property
    def evaluates(self) -> bool:
        """Whether it is known that an evaluation runs."""
        phase = self._phase
        if phase is None or phase.is_over:
            return False
        return phase.evaluates_data or (phase.is_said and self.rounds > 0)

    def begin_evaluation(self) -> None:
        """A model is switched to evaluation."""
        if self.depth or self._trains_in_eval or self.is_of_engine:
            return
        now = self._now()
        phase = self._phase
        if phase is not None and phase.is_left and self.last in (IO, COPY):
            phase.is_left = False  # the next step of it
        elif phase is not None and phase.is_over:
            self._end_phase(NOTHING, 0)  # another one follows the checkpoint
            phase = None
        if phase is None:
            phase = self._phase = Phase(now, self, self._rows, is_said=True)
            if self.last in (IO, COPY) and self._fetched_ns >= self._trained_ns:
                phase.data_ns = max(self._data_ns, self._trained_ns)
        elif not phase.calls:
            phase.is_said = True

    def end_evaluation(self) -> None:
        """A model is switched to training."""
        phase = self._phase
        if phase is not None and not self.depth:
            if phase.calls:
                phase.leave(self._now())
            if phase.calls and phase.data_ns:
                phase.is_left = True
            else:
                self._end_phase(NOTHING, 0)

    def forget_evaluation(self) -> None:
        """The calls without gradients, up to now, have a region around them."""
        self._phase = None

    def _end_left(self) -> None:
        if self._phase is not None and self._phase.is_left:
            self._end_phase(NOTHING, 0)

    def _end_phase(self, event: int, now: int) -> None:
        # Training goes on: was it a phase?
        phase, self._phase = self._phase, None
        if phase is None:
            return
        name = self._name_of(phase)
        if event in (BACKWARD, GRAD) and phase.is_said and phase.calls == 1 and self.last == NO_GRAD:
            self._trains_in_eval = True  # it trains, without `train()`
            name = ""
        if name == VALIDATION:
            self._end_of_evaluation(phase, now)
        elif name:
            self._record_policy(phase, name)

    def _name_of(self, phase: Phase) -> str:
        # VALIDATION, "generate", "rollout", or "" for a part of the step.
        since, self_round = self.rounds - self._phase_round, self._phase_round
        if not phase.is_certain:
            return ""
        if phase.evaluates_data:
            is_of_each_step = self_round >= 0 and since <= 1 and not (phase.has_ended or phase.is_said)
            return "" if is_of_each_step else VALIDATION
        if phase.calls >= _MANY_CALLS or phase.has_environment:
            self._phase_round = self.rounds
            name = self._policy = self._policy or (ROLLOUT if phase.acts else GENERATE)
            if self_round < 0 and (self.rounds <= _ROUNDS_OF_A_POLICY or phase.acts):
                start_ns = phase.start_ns if self.rounds else phase.first_ns
                self._held = name, start_ns, phase.end_ns, phase.is_said
                # The next one tells which it is. Until then it is in no BATCH: an evaluation would make that too long.
                return VALIDATION if phase.is_said or self.rounds else ""
            is_policy = since <= 1 or (not self._has_waited and (since <= _ROUNDS_OF_A_POLICY or phase.acts))
            return name if is_policy else VALIDATION
        # Before the first step a model in evaluation may be one that never trains.
        return VALIDATION if self.rounds or phase.calls > 1 else ""

    def _end_of_evaluation(self, phase: Phase, now: int) -> None:
        if phase.data_ns and (phase.fetches or phase.has_ended):  # each of its steps says so, behind its wait
            phase.start_ns = phase.first_ns = phase.data_ns
        self._rows = min(self._rows, phase.rows)
        if self._round_trains and not self._has_steps:
            self._end_round(phase.start_ns)
            self._in_round = self._round_trains = False
        if self._ended_ns:
            self._end_batch()
        self._end_epoch(self._epoch_over_ns)
        if not self._has_trained:
            self._batch_ns = self._fetched_ns if self._fetched_ns >= phase.end_ns else now
            self._rows = 0
        self.last = IO if self._fetched_ns >= phase.end_ns else NOTHING
        if self._held is not None and self._held[2] == phase.end_ns:
            return  # it may be a policy's
        self._settle(VALIDATION)
        start_ns = phase.start_ns if self.rounds else phase.first_ns
        if self.may_train():
            self.loops.record(VALIDATION, start_ns, phase.end_ns)

    def _record_policy(self, phase: Phase, name: str) -> None:
        self._settle(name)
        self._rows = min(self._rows, phase.rows)
        last, last_ns = self.last, self.last_ns
        self.last, self.last_ns = phase.last, phase.last_ns
        self._between(NO_GRAD, phase.first_ns)
        self.last, self.last_ns = last, max(last_ns, phase.end_ns)
        if self.may_train():
            self.loops.record(name, phase.first_ns, phase.end_ns)

    def _settle(self, name: str) -> None:
        # The first phase was what the second one is.
        held, self._held = self._held, None
        if held is not None and self.may_train():
            self.loops.record(VALIDATION if name == VALIDATION else held[0], held[1], held[2])

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._batch_ns > 0 and not self._ended_ns

    def finish(self) -> None:
        """The program ends: record the last complete BATCH, EPOCH and evaluation."""
        probe = None if self.has_hooked else self._probe
        # The last update may change nothing that is looked at: then it comes after as many passes as the one before.
        if probe is not None and (probe[0]() != probe[1] or self._passes == self._passes_before):
            self._step_unhooked()
        if not self.has_hooked and (self._has_only_rounds or len(self._found) >= _SURE_AT_END):
            ended_ns = self._trained_ns if self._has_gradients else self.last_ns
            if self._in_round and ended_ns > self._round_ns:
                # A BATCH is longer than its only event, by which it is known to hold it.
                self._found.append((self._round_ns, ended_ns + (self._begun_ns == self._round_ns)))
            self._round_trains = False
            self._keep_rounds()
        self._end_left()
        phase, self._phase = self._phase, None
        if self.rounds:
            if phase is not None and phase.is_certain and (phase.is_said or phase.evaluates_data):
                self._end_of_evaluation(phase, phase.end_ns)
            if self._held is not None:
                is_once = self._held[0] == GENERATE and self.rounds - self._phase_round > _ROUNDS_OF_A_POLICY
                self._settle(VALIDATION if self._held[3] or is_once else self._held[0])
        self._end_single()
        self._end_batch()
        self._end_epoch(self._epoch_over_ns)
        # The last epoch may be left before its data ends. Data that began before another epoch is no epoch's.
        begun_ns = max([begun for begun, rounds, _ in self._epochs.values() if rounds < self.rounds], default=0)
        if self._epoch_ended_ns and begun_ns > self._epoch_ns and self._trained_ns > self._epoch_ended_ns:
            self._epoch_ns = begun_ns
            self._end_epoch(self._trained_ns)
        self.reset()
