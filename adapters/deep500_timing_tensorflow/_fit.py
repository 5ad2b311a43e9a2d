"""What happens to the timer as Keras trains: regions open and close as the first and the last hook come.

Everything between two hooks has a name, so that an epoch adds up: EPOCH is EPOCH (start), the batches, CALLBACKS,
VALIDATION and EPOCH (end); on torch, where Keras fetches a batch before it calls the hooks, IO as well.

A :class:`FitTiming` belongs to one list of callbacks, that is to one call of ``fit``, ``evaluate`` or ``predict``. One
that is called inside another has its own, so neither breaks the other off.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import finalize

from deep500_timing import TimeType
from deep500_timing.adapters import ask_before_reading
from deep500_timing_tensorflow import _capabilities, _frames
from deep500_timing_tensorflow._batches import BATCH, BATCH_FIRST, BatchTiming
from deep500_timing_tensorflow._broken_off import tell_when_broken_off
from deep500_timing_tensorflow._epoch_totals import EpochTotals
from deep500_timing_tensorflow._fetches import fetches_of
from deep500_timing_tensorflow._keras_facts import backend_of, steps_per_execution
from deep500_timing_tensorflow._left_behind import leave_what_is_gone, to_be_left
from deep500_timing_tensorflow._open_regions import (
    CALLBACKS,
    EPOCH_END,
    FIT,
    FIT_CALLBACKS,
    PREDICT,
    TEST,
    VALIDATION,
)
from deep500_timing_tensorflow._traces import TraceCounts

if TYPE_CHECKING:
    from deep500_timing_tensorflow._wishes import Wishes

EPOCH = TimeType.EPOCH


class FitTiming(BatchTiming):
    """Times what one list of callbacks belongs to.

    Args:
        wishes: The callback's.
        model: The model that the list was given.
        callbacks: The list; None for a loop that calls the hooks itself.
    """

    totals: EpochTotals | None

    def __init__(self, wishes: Wishes, model: Any, callbacks: Any = None) -> None:
        super().__init__(wishes, model, callbacks)
        self.steps_known: int | None = None
        self._evaluated = False
        self._thread = get_ident()
        self._in_a_loop = False
        if callbacks is not None:
            finalize(callbacks, self._list_is_gone).atexit = False

    # --- what was broken off ----------------------------------------------------------------------------------------

    def _begins(self) -> None:
        self._thread = get_ident()
        self._in_a_loop = self.is_running()  # Not in one of the user's own, of which nothing can be seen.
        ask_before_reading(self.timer, self)

    def end_what_is_over(self) -> None:
        """Break off what has ended without a hook, as far as this thread can tell."""
        if self.regions.open and self._in_a_loop and self._thread == get_ident() and not self.is_running():
            self.break_off()

    def broken_off(self) -> None:
        """An exception ends the batches, and with them the fit."""
        self._fetches.broken_off()
        self.break_off()

    def break_off(self) -> None:
        """Count what is open as failed."""
        if self._phases is not None:
            self._phases.leave(self)
        self.matcher.forget()
        self._fail_all()
        self._forget_fit()

    def _list_is_gone(self) -> None:
        # Keras has let go of the list: after an exception or Ctrl-C without a hook. The collector finds that out
        # anywhere, between two lines of ours and in the middle of the user's trace too. So no lock is taken here, and
        # nothing is asked of the framework or changed in it.
        if self._phases is not None:
            to_be_left.append((self._phases, self))
        self.matcher.forget()
        self._model = None  # What waits to be left must not keep it.
        if self._thread == get_ident():  # Regions belong to their thread.
            self._fail_all()
            self._forget_fit()

    def _fail_all(self) -> None:
        self._epoch_lasts()
        self.regions.fail_all()

    def _epoch_lasts(self) -> None:
        if EPOCH in self.regions and self.totals is not None:
            self.totals.lasts(self.timer.now_ns())

    # --- the hooks of others ----------------------------------------------------------------------------------------

    def _hooks_begin(self, key: str = CALLBACKS) -> None:
        self.regions.start(key)

    def fit_hooks_end(self) -> None:
        """The same of the hooks at the begin and the end of a fit."""
        self.regions.end(FIT_CALLBACKS)
        self._idle_since_ns = self.timer.now_ns()

    # --- fits, evaluations and predictions --------------------------------------------------------------------------

    def fit_begins(self) -> None:
        """A fit."""
        leave_what_is_gone()
        self.break_off()  # The list may be its user's, and have had another fit.
        self._begins()
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
        callbacks = None if self._callbacks is None else self._callbacks()
        data = None if callbacks is None else _frames.data_of_loop(callbacks)
        self._fetches = fetches_of(
            self,
            data,
            backend,
            several=steps_per_execution(model),
            wanted=wishes.io,
            counts=self._traces.needs_sizes,
            phases=self._phases is not None,
        )
        self._fetches.steps_known = self.steps_known
        if data is not None and backend in _capabilities.ENTERS_ITS_DATA:
            tell_when_broken_off(data, self)
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
        self._forget_fit()
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
            self._begins()
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
        self._begins()
        self.regions.start(PREDICT)

    def predict_ends(self) -> None:
        """It came to its end."""
        self.regions.end(PREDICT)

    # --- epochs -----------------------------------------------------------------------------------------------------

    def epoch_begins(self) -> None:
        """An epoch, whose first hooks begin."""
        self.regions.start(EPOCH)
        self.totals = self.wishes.totals = EpochTotals(self.timer.now_ns(), self._settle_fetches)
        self._callbacks_sum = self.totals.sum_of(CALLBACKS)
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

    def _drop_batch(self) -> None:
        # The data ended where the next batch would have begun.
        for key in (TimeType.IO, BATCH, BATCH_FIRST):
            self.regions.drop(key)
        if self._phases is not None:
            self._phases.step_ends(self)
