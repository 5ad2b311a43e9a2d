"""What happens to the timer as Keras trains: regions open and close as the first and the last hook come.

Everything between two hooks has a name, so that an epoch adds up: EPOCH is EPOCH (start), the batches, CALLBACKS,
VALIDATION and EPOCH (end); on torch, where Keras fetches a batch before it calls the hooks, IO as well.

A :class:`FitTiming` belongs to one list of callbacks, that is to one call of ``fit``, ``evaluate`` or ``predict``. One
that is called inside another has its own, so neither breaks the other off.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize, ref

from deep500_timing import TimeType
from deep500_timing_tensorflow import _capabilities, _frames
from deep500_timing_tensorflow._epoch_totals import EpochTotals
from deep500_timing_tensorflow._fetches import Fetches, fetches_of
from deep500_timing_tensorflow._keras_facts import backend_of, steps_per_execution
from deep500_timing_tensorflow._open_regions import (
    CALLBACKS,
    EPOCH_END,
    EPOCH_START,
    FIT,
    FIT_CALLBACKS,
    PREDICT,
    TEST,
    VALIDATION,
    OpenRegions,
    first,
)
from deep500_timing_tensorflow._phases import Execution, PhaseMatcher
from deep500_timing_tensorflow._traces import TraceCounts

if TYPE_CHECKING:
    from deep500_timing_tensorflow._phases_contract import Phases
    from deep500_timing_tensorflow._wishes import Wishes

BATCH, EPOCH = TimeType.BATCH, TimeType.EPOCH
BATCH_FIRST = first(BATCH)

# What times the passes of fits whose list is gone. To leave it takes locks and puts functions of the framework back, so
# that waits for the next use of a callback: see `FitTiming._list_is_gone`.
_to_be_left: deque[tuple[Phases, FitTiming]] = deque()


# The executions of every list of callbacks are numbered from another number on. A model that is fitted in a hook of its
# own fit has one graph for both, whose stamps are told apart by them; callbacks of one list count alike.
_fits = itertools.count()
_first_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def leave_what_is_gone() -> None:
    """Let go of what fits that are gone have watched; inside a hook, where nothing of ours is under way."""
    while _to_be_left:
        phases, timing = _to_be_left.popleft()
        phases.leave(timing)


class FitTiming:
    """Times what one list of callbacks belongs to.

    Args:
        wishes: The callback's.
        model: The model that the list was given.
        callbacks: The list; None for a loop that calls the hooks itself.
    """

    def __init__(self, wishes: Wishes, model: Any, callbacks: Any = None) -> None:
        self.wishes = wishes
        self.timer = wishes.timer
        self.regions = OpenRegions(wishes.timer)
        self.totals: EpochTotals | None = None
        self.steps_known: int | None = None
        self.matcher = PhaseMatcher(self, wishes)
        self._model = model
        self._thread = get_ident()
        self._callbacks = ref(callbacks) if callbacks is not None else None
        if callbacks is not None:
            finalize(callbacks, self._list_is_gone).atexit = False
        self._first_number = _first_number_for(callbacks)
        self._fetches = Fetches(self)
        self._settle_what_can_be_timed()

    def _settle_what_can_be_timed(self) -> None:
        # For a list that never begins a fit; `fit_begins` settles it for one that does.
        self._gpu = self._fetches_before_hooks = False
        self._phases: Phases | None = None
        self._fetches.times_io = False  # Whoever asks the data of a fit that is over.
        self._fetches = Fetches(self)
        self._traces: TraceCounts | None = None
        self._number = self._first_number
        self._idle_since_ns = 0
        self._began_ns = self._began_unix_ns = 0
        self._opened_as: TimeType | str = BATCH
        # Nanoseconds and number of the epoch's, of regions that each batch adds to.
        self._callbacks_sum, self._batch_sum = [0, 0], [0, 0]
        self._batches_in_epoch = 0
        self._evaluated = False

    # --- what was broken off ----------------------------------------------------------------------------------------

    def is_broken_off(self) -> bool:
        """Whether what this times has ended without a hook, as far as this thread can tell."""
        return self._thread == get_ident() and not self.is_running()

    def break_off(self) -> None:
        """Count what is open as failed."""
        if self._phases is not None:
            self._phases.leave(self)
        self.matcher.forget()
        self._fail_all()
        self._settle_what_can_be_timed()

    def _list_is_gone(self) -> None:
        # Keras has let go of the list: after an exception or Ctrl-C without a hook. The collector finds that out
        # anywhere, between two lines of ours and in the middle of the user's trace too. So no lock is taken here, and
        # nothing is asked of the framework or changed in it.
        if self._phases is not None:
            _to_be_left.append((self._phases, self))
        self.matcher.forget()
        self._model = None  # What waits to be left must not keep it.
        if self._thread == get_ident():  # Regions belong to their thread.
            self._fail_all()
            self._settle_what_can_be_timed()

    def _fail_all(self) -> None:
        self._epoch_lasts()
        self.regions.fail_all()

    def _epoch_lasts(self) -> None:
        if EPOCH in self.regions and self.totals is not None:
            self.totals.lasts(self.timer.now_ns())

    # --- the hooks of others ----------------------------------------------------------------------------------------

    def _hooks_begin(self, key: str = CALLBACKS) -> None:
        self.regions.start(key)

    def hooks_end(self) -> None:
        """The last callback has had its turn: what follows is Keras's."""
        took_ns = self.regions.end(CALLBACKS)
        if took_ns is not None:
            self._callbacks_sum[0] += took_ns
            self._callbacks_sum[1] += 1
        self._idle_since_ns = self.timer.now_ns()

    def fit_hooks_end(self) -> None:
        """The same of the hooks at the begin and the end of a fit."""
        self.regions.end(FIT_CALLBACKS)
        self._idle_since_ns = self.timer.now_ns()

    def _end_and_add(self, key: TimeType | str) -> None:
        took_ns = self.regions.end(key)
        if self.totals is not None and took_ns is not None:
            self.totals.add(key, took_ns)

    def _record(self, key: TimeType | str, began_ns: int, ended_ns: int, count: int = 1) -> None:
        self.timer.record(key, began_ns, ended_ns)
        if self.totals is not None:
            self.totals.add(key, ended_ns - began_ns, count)

    # --- fits, evaluations and predictions --------------------------------------------------------------------------

    def fit_begins(self) -> None:
        """A fit."""
        leave_what_is_gone()
        self.break_off()  # The list may be its user's, and have had another fit.
        self._thread = get_ident()
        wishes, model = self.wishes, self._model
        backend = backend_of(model)
        self.regions.start(FIT)
        self._hooks_begin(FIT_CALLBACKS)
        self._fetches_before_hooks = backend == "torch"
        self._gpu = wishes.gpu and _capabilities.can_time_gpu(backend, self.timer)
        self._traces = TraceCounts(vars(model).get("train_function"))
        if wishes.phases:
            self._phases = _capabilities.phases_for(model, backend)
            if self._phases is not None:
                self._phases.join(self)
        self._fetches = fetches_of(
            self,
            None if self._callbacks is None else self._callbacks(),
            backend,
            several=steps_per_execution(model),
            wanted=wishes.io,
            counts=self._traces.needs_sizes,
            phases=self._phases is not None,
        )
        self._fetches.steps_known = self.steps_known
        self.matcher.stamps_io = backend != "torch" and wishes.io is not False and not self._fetches.times_io

    def fit_is_done(self) -> None:
        """Keras is done with the fit, and its last hooks begin."""
        self._drop_batch()
        self._hooks_begin(FIT_CALLBACKS)

    def fit_ends(self) -> None:
        """The last hook of the fit is over."""
        self.fit_hooks_end()
        self.regions.end(FIT)
        if self._phases is not None:
            self._phases.leave(self)
        used_tensorflow = self._fetches.uses_tensorflow
        self._settle_what_can_be_timed()
        if used_tensorflow:
            from deep500_timing_tensorflow._data_tensorflow import prepare_for_more_fits

            prepare_for_more_fits()

    def test_is_next(self) -> None:
        """An evaluation, inside a fit or by itself, after the hooks that come first."""
        if FIT in self.regions:
            self._batches_are_over()
            self._hooks_begin()

    def test_begins(self) -> None:
        """The evaluation itself."""
        if FIT in self.regions:
            self.hooks_end()
            self.regions.start(VALIDATION)
        else:
            self.regions.start(TEST)

    def test_ends(self) -> None:
        """It came to its end."""
        self.regions.end(TEST)
        if VALIDATION in self.regions:
            self._end_and_add(VALIDATION)
            self._hooks_begin()

    def validation_is_over(self) -> None:
        """The last hook after an evaluation is over: what Keras does with it is a part of the epoch's end."""
        self.hooks_end()
        self._evaluated = True

    def predict_begins(self) -> None:
        """A prediction."""
        self.regions.start(PREDICT)

    def predict_ends(self) -> None:
        """It came to its end."""
        self.regions.end(PREDICT)

    # --- epochs -----------------------------------------------------------------------------------------------------

    def epoch_begins(self) -> None:
        """An epoch, whose first hooks begin."""
        self.regions.start(EPOCH)
        self.totals = self.wishes.totals = EpochTotals(self.timer.now_ns(), self._settle_fetches)
        self._callbacks_sum, self._batch_sum = self.totals.sum_of(CALLBACKS), self.totals.sum_of(BATCH)
        self._batches_in_epoch = 0
        self._fetches.epoch_begins()
        self._evaluated = False
        self._hooks_begin()

    def _settle_fetches(self) -> None:
        # For who asks for the throughput meanwhile. Inside a batch this may be anywhere, such as in a user's trace.
        self._epoch_lasts()
        if self._thread == get_ident() and BATCH not in self.regions and BATCH_FIRST not in self.regions:
            self._fetches.settle()

    def _batches_are_over(self) -> None:
        if self._idle_since_ns:
            self._drop_batch()
            self._fetches.settle()
            self._record(EPOCH_END, self._idle_since_ns, self.timer.now_ns(), 0 if self._evaluated else 1)
            self._idle_since_ns = 0

    def epoch_is_done(self, logs: dict[str, Any] | None) -> None:
        """Keras is done with the epoch: its means go into the logs, and its last hooks begin."""
        self._batches_are_over()
        self._hooks_begin()  # Ours among them.
        self.matcher.settle(self._phases)
        if self.totals is not None:
            self.totals.ends(self.timer.now_ns())
            if self.wishes.log_prefix is not None and logs is not None:
                logs.update(self.totals.logs(self.wishes.log_prefix))

    def epoch_ends(self) -> None:
        """The last hook of the epoch is over."""
        self.hooks_end()
        self.regions.end(EPOCH)
        self._idle_since_ns = 0

    # --- batches ----------------------------------------------------------------------------------------------------

    def batch_is_next(self, index: int) -> None:
        """An execution of the train function, after the hooks that come first."""
        self._fetches.index = index
        if not self._batches_in_epoch and self._idle_since_ns:
            # On torch the first batch is there already: what was waited for it is IO.
            until_ns = self._fetches.first_wait_ns if self._fetches_before_hooks else None
            self._record(EPOCH_START, self._idle_since_ns, until_ns or self.timer.now_ns())
        self.regions.start(CALLBACKS)

    def batch_begins(self) -> None:
        """The train function is next."""
        if _to_be_left:
            leave_what_is_gone()
        function = self._model.__dict__.get("train_function")
        if self._traces is None or self._traces.function is not function:
            self._traces = TraceCounts(function)
            self._fetches.settle()
        elif self._batches_in_epoch or not self._traces.is_new:
            self._traces.grew()  # What others did to the function in their hooks is not this execution's.
        self._fetches.execution_begins(self._traces.is_new)
        self._number += 1
        if self._phases is not None:
            self._phases.prepare_step(self._number)
        self.hooks_end()
        self._opened_as = BATCH_FIRST if self._traces.is_new else BATCH
        self._began_ns = self.regions.start(self._opened_as, self._gpu)
        if self._phases is not None:
            self._began_unix_ns = time.time_ns()
            self._phases.step_begins(self)

    def batch_ends(self) -> None:
        """The train function returned, and its logs were awaited."""
        now_ns = now_unix_ns = 0
        if self._phases is not None:
            now_ns, now_unix_ns = self.timer.now_ns(), time.time_ns()
            self._phases.step_ends(self)
        opened_as = self._opened_as
        if opened_as not in self.regions.open or self._traces is None:
            self.regions.start(CALLBACKS)
            return
        steady = not self._traces.grew(self._fetches.size() if self._traces.needs_sizes else None)
        kept_as = BATCH if steady else BATCH_FIRST
        took_ns = self.regions.end(opened_as, kept_as) or 0
        self.regions.start(CALLBACKS)  # Ours among them.
        wait_ns = self._fetches.wait_ns if self._fetches_before_hooks else 0
        steps = self._fetches.execution_ended(self._began_ns, took_ns, steady)
        self._batches_in_epoch += steps
        self.wishes.batches += steps
        if self.totals is not None:
            if steady:
                self._batch_sum[0] += took_ns
                self._batch_sum[1] += steps
            else:
                self.totals.add(kept_as, took_ns, steps)
            self.totals.add_execution(took_ns + wait_ns, steps, steady)
        if self._phases is not None:
            self.matcher.executed(
                Execution(self._number, self._began_ns, now_ns, self._began_unix_ns, now_unix_ns, steps, steady),
                self._phases,
            )

    def _drop_batch(self) -> None:
        # The data ended where the next batch would have begun.
        for key in (TimeType.IO, BATCH, BATCH_FIRST):
            self.regions.drop(key)
        if self._phases is not None:
            self._phases.step_ends(self)

    # --- what the phases on torch tell --------------------------------------------------------------------------------

    def pass_begins(self, key: TimeType) -> None:
        """The forward or the backward pass begins."""
        self.regions.start(key, gpu=self._gpu)

    def pass_ends(self, key: TimeType) -> None:
        """It came to its end."""
        self._end_and_add(key)

    def pass_is_not_told(self, key: TimeType) -> None:
        """The step ended inside a pass: where that ended cannot be told."""
        self.regions.drop(key)
        _capabilities.say_no_passes()

    def is_running(self) -> bool:
        """Whether this thread is inside the fit: what an exception leaves behind must not act any more."""
        if self._callbacks is None:
            return True
        callbacks = self._callbacks()
        return callbacks is not None and _frames.is_running(callbacks)


def _first_number_for(callbacks: Any) -> int:
    # A stamp keeps its number as a float: exact for two million fits of four thousand million executions.
    if callbacks is None:
        return next(_fits) << 32
    return _first_numbers.setdefault(callbacks, next(_fits) << 32)
