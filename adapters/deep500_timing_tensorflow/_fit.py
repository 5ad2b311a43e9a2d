"""What happens to the timer as Keras trains: regions open and close as the first and the last hook come.

Everything between two hooks has a name, so that an epoch adds up: EPOCH is EPOCH (start), the batches, CALLBACKS,
VALIDATION and EPOCH (end); on torch, where Keras fetches a batch before it calls the hooks, IO as well.
"""

from __future__ import annotations

import functools
import itertools
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from deep500_timing import RegionOpenError
from deep500_timing.adapters import warn_once
from deep500_timing_tensorflow import _keras
from deep500_timing_tensorflow._checkpoints import time_checkpoints
from deep500_timing_tensorflow._data import Batches, IteratedBatches, time_iterator
from deep500_timing_tensorflow._epoch import (
    BATCH,
    BATCH_FIRST,
    CALLBACKS,
    EPOCH,
    EPOCH_END,
    EPOCH_START,
    FIT,
    FIT_CALLBACKS,
    IO,
    PREDICT,
    TEST,
    VALIDATION,
    EpochTotals,
    Execution,
)
from deep500_timing_tensorflow._keras import guarded, warn_fault
from deep500_timing_tensorflow._phases_graph import StampedPhases
from deep500_timing_tensorflow._phases_torch import TorchPhases
from deep500_timing_tensorflow._regions import FitRegions, end_aborted_fits
from deep500_timing_tensorflow._traces import TraceCounts

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Timer

_TRACING_TAKES_NS = 200_000
"""No function is traced or compiled in less."""

# Executions of different lists have different numbers: a model that is fitted again in a hook of its fit has one graph
# for both, and the numbers tell their stamps apart. Callbacks of one list count alike.
_fits = itertools.count()
_first_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class CallbackOptions:
    """The arguments of one callback, and its counters over all its fits."""

    def __init__(self, timer: Timer, *, gpu: bool, io: bool | str, phases: bool, log_prefix: str | None) -> None:
        self.timer, self.gpu, self.io, self.phases, self.log_prefix = timer, gpu, io, phases, log_prefix
        self.totals: EpochTotals | None = None
        self.batches = self.withheld = 0

    def withhold(self, batches: int) -> None:
        self.withheld += batches


class FitTimer:
    """Times one call of ``fit``, ``evaluate`` or ``predict``: what one list of callbacks belongs to.

    Its methods are Keras's hooks, see ``sentinels_of``.
    """

    def __init__(self, options: CallbackOptions, model: Any, callbacks: Any = None) -> None:
        self.options = options
        self.timer = options.timer
        self.regions = FitRegions(options.timer, callbacks)
        self.steps_known: int | None = None
        self._open = self.regions.open
        self._now_ns = options.timer.now_ns
        self._model = model
        self._number = _first_number_for(callbacks)
        self._end_checkpoints: Callable[[], object] = lambda: None
        self._reset()

    def _reset(self) -> None:
        self._phases: StampedPhases | TorchPhases | None = None
        self._batches = Batches(self.regions)
        self._fetches_before_hooks = False
        self._traces: TraceCounts | None = None
        # Handles, as these regions are opened at every step.
        self._callbacks = self.timer.region(CALLBACKS)
        self._batch, self._first = self.timer.region(BATCH), self.timer.region(BATCH_FIRST)
        self._evaluated = False
        self._idle_since_ns = self._back_ns = 0
        self._totals = EpochTotals(0)

    def take_params(self, params: dict[str, Any] | None) -> None:
        """Note the length of the fit, if Keras knows it."""
        self.steps_known = (params or {}).get("steps")

    # --- fits, evaluations and predictions --------------------------------------------------------------------------

    @guarded
    def fit_begins(self, logs: Any = None) -> None:
        end_aborted_fits()
        self.regions.abort()  # The list may be its user's, and have had another fit.
        self._reset()
        options, model, regions = self.options, self._model, self.regions
        self._end_checkpoints = time_checkpoints(self.timer, regions.callbacks)
        backend = _keras.backend_of(model)
        regions.begin(FIT)
        regions.start(FIT_CALLBACKS)
        regions.gpu = options.gpu and _keras.can_time_gpu(backend, self.timer)
        self._batch, self._first = (self.timer.region(key, regions.gpu) for key in (BATCH, BATCH_FIRST))
        self._fetches_before_hooks = backend == "torch"
        self._traces = TraceCounts(vars(model).get("train_function"))
        if options.phases:
            self._phases = self._phases_of(model, backend)
        callbacks = regions.callbacks
        data = None if callbacks is None else _keras.data_of_loop(callbacks)
        several = _keras.steps_per_execution(model)
        self._batches = self._batches_in(data, backend, several)
        self._batches.times_io = _keras.can_time_io(options.io, backend, several, self._batches.is_seen)
        self._batches.steps_known = self.steps_known
        regions.on_abort = functools.partial(_abort, self._batches, self._phases, self._end_checkpoints)

    def _phases_of(self, model: Any, backend: str) -> StampedPhases | TorchPhases | None:
        reason = _keras.why_no_phases(model, backend)
        if reason is None:
            on_torch = backend == "torch"
            return TorchPhases(self.regions) if on_torch else StampedPhases(model, self.regions, self.options.withhold)
        warn_once(
            f"TimerCallback(phases=True): FORWARD and BACKWARD are not timed, the rest is. {reason}",
            key=f"callback phases {reason}",
        )
        return None

    def _batches_in(self, data: Any, backend: str, several: int) -> Batches:
        # Keras's data are not found in a loop that calls the hooks itself.
        if data is not None and backend in _keras.ON_TENSORFLOW:
            needs_sizes = self._traces is not None and self._traces.needs_sizes
            if self.options.io is not False or several > 1 or needs_sizes:
                from deep500_timing_tensorflow._data_tensorflow import SummedBatches, timed_dataset_at

                dataset = timed_dataset_at(data)
                if dataset is not None:
                    return SummedBatches(self.regions, several, dataset.sums)
        elif data is not None:
            iterated = IteratedBatches(self.regions, several, before_hooks=backend == "torch")
            if time_iterator(data, iterated):
                return iterated
        return Batches(self.regions, several)

    @guarded
    def fit_hooks_end(self, logs: Any = None) -> None:
        """The hooks at the begin of a fit are over."""
        self.regions.end(FIT_CALLBACKS)
        self._idle_since_ns = self.timer.now_ns()

    @guarded
    def fit_is_done(self, logs: Any = None) -> None:
        """Keras is done with the fit, and its last hooks begin."""
        self._drop_batch()
        self.regions.start(FIT_CALLBACKS)

    @guarded
    def fit_ends(self, logs: Any = None) -> None:
        self.regions.end(FIT_CALLBACKS)
        self._end_checkpoints()
        self.regions.on_abort = None
        self.regions.finish(FIT)
        if self._phases is not None:
            self._phases.leave()
        self._batches.times_io = False  # Keras's data may outlive the fit, and be asked again.
        self._reset()

    @guarded
    def test_hooks_begin(self, logs: Any = None) -> None:
        """An evaluation, inside a fit or alone, is next after the first hooks."""
        if FIT in self.regions.open:
            self._batches_are_over()
            self.regions.start(CALLBACKS)

    @guarded
    def test_begins(self, logs: Any = None) -> None:
        if FIT in self.regions.open:
            self.hooks_end()
            self.regions.start(VALIDATION)
        else:
            self.regions.begin(TEST)

    @guarded
    def test_ends(self, logs: Any = None) -> None:
        if VALIDATION in self.regions.open:
            self.regions.end_and_add(VALIDATION)
            self.regions.start(CALLBACKS)
        else:
            self.regions.finish(TEST)

    @guarded
    def test_hooks_end(self, logs: Any = None) -> None:
        """The last hook after an evaluation is over: Keras's work on its results is a part of the epoch's end."""
        self.hooks_end()
        self._evaluated = True

    @guarded
    def predict_begins(self, logs: Any = None) -> None:
        self.regions.begin(PREDICT)

    @guarded
    def predict_ends(self, logs: Any = None) -> None:
        self.regions.finish(PREDICT)

    # --- epochs -----------------------------------------------------------------------------------------------------

    @guarded
    def epoch_begins(self, epoch: int, logs: Any = None) -> None:
        self.regions.start(EPOCH)
        self._totals = EpochTotals(self.timer.now_ns(), self._settle)
        self.regions.totals = self.options.totals = self._totals
        self._batches.epoch_begins()
        self._evaluated = False
        self.regions.start(CALLBACKS)

    def _settle(self) -> None:
        # For a reader of the throughput meanwhile. Inside a batch that may be anywhere, such as in a user's trace.
        if EPOCH in self.regions.open:
            self._totals.lasts(self.timer.now_ns())
        if self.regions.is_own_thread() and not {BATCH, BATCH_FIRST} & self.regions.open.keys():
            self._batches.settle()

    def _batches_are_over(self) -> None:
        if self._idle_since_ns:
            self._drop_batch()
            self._batches.settle()
            self.regions.record(EPOCH_END, self._idle_since_ns, self.timer.now_ns(), 0 if self._evaluated else 1)
            self._idle_since_ns = 0

    @guarded
    def epoch_is_done(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keras is done with the epoch: its means go into the logs, and its last hooks begin."""
        self._batches_are_over()
        self.regions.start(CALLBACKS)
        if self._phases is not None:
            self._phases.settle()
        self._totals.ends(self.timer.now_ns())
        if self.options.log_prefix is not None and logs is not None:
            logs.update(self._totals.logs(self.options.log_prefix))

    @guarded
    def epoch_ends(self, epoch: int, logs: Any = None) -> None:
        self.hooks_end()
        self.regions.end(EPOCH)
        self._idle_since_ns = 0

    # --- batches ----------------------------------------------------------------------------------------------------
    # These run at every step and call few helpers: a step leaves the processor's caches cold, so that each Python
    # function costs a microsecond.

    def batch_hooks_begin(self, batch: int, logs: Any = None) -> None:
        """An execution of the train function is next after the first hooks."""
        try:
            if not self._totals.epoch_steps and self._idle_since_ns:
                # On torch the first batch is there already: the wait for it is IO.
                until_ns = self._batches.first_wait_ns if self._fetches_before_hooks else None
                self.regions.record(EPOCH_START, self._idle_since_ns, until_ns or self._now_ns())
            handle = self._callbacks
            try:
                handle.start()
            except RegionOpenError:
                handle = None
            self._open[CALLBACKS] = self._now_ns(), handle
        except Exception as error:
            warn_fault("on_train_batch_begin", error)

    def batch_begins(self, batch: int, logs: Any = None) -> None:
        try:
            batches, traces, phases = self._batches, self._traces, self._phases
            function = self._model.__dict__.get("train_function")
            if traces is None or traces.function is not function:
                traces = self._traces = TraceCounts(function)
                batches.settle()
            elif not traces.is_new and perf_counter_ns() - self._back_ns >= _TRACING_TAKES_NS:
                traces.grew()  # A trace in another callback's hook is not this execution's.
            execution = batches.running = Execution()
            execution.number = self._number = self._number + 1
            batches.index = batch
            if traces.is_new or not self._totals.epoch_steps:
                batches.execution_begins(traces.is_new)
            if phases is not None:
                phases.prepare_step(execution.number)
            self.hooks_end()
            key = execution.kept_as = BATCH_FIRST if traces.is_new else BATCH
            handle = self._first if traces.is_new else self._batch
            try:
                handle.start()
            except RegionOpenError:
                handle = None
            execution.began_ns = began_ns = self._now_ns()
            self._open[key] = began_ns, handle
            if phases is not None:
                execution.began_unix_ns = time_ns()
                phases.step_begins()
        except Exception as error:
            warn_fault("on_train_batch_begin", error)

    def batch_ends(self, batch: int, logs: Any = None) -> None:
        """The train function returned, and its logs are on the host."""
        try:
            batches, traces, phases, totals = self._batches, self._traces, self._phases, self._totals
            execution = batches.running
            if phases is not None:
                ended_unix_ns = time_ns()
                phases.step_ends()
            opened = None if execution is None else self._open.pop(execution.kept_as, None)
            if opened is None or execution is None or traces is None:
                self.regions.start(CALLBACKS)
                return
            execution.steady = steady = not traces.grew(batches.size() if traces.needs_sizes else None)
            began_ns, handle = opened
            ended_ns = self._now_ns()
            execution.took_ns = took_ns = ended_ns - began_ns
            if steady and handle is not None and execution.kept_as is BATCH:
                handle.end()
            else:
                opened_as, execution.kept_as = execution.kept_as, BATCH if steady else BATCH_FIRST
                self.regions.close(opened_as, opened, ended_ns, execution.kept_as)
            self._back_ns = perf_counter_ns()  # The timer's clock may be its user's, and stand still.
            handle = self._callbacks
            try:
                handle.start()
            except RegionOpenError:
                handle = None
            self._open[CALLBACKS] = self._now_ns(), handle
            if steady:
                totals.batch_ns += took_ns
                totals.waited_ns += batches.wait_before_ns
            batches.execution_ended(execution)
            steps = execution.steps
            if steady:
                totals.batch_steps += steps
            else:
                totals.add(BATCH_FIRST, took_ns, steps)
            totals.epoch_steps += steps
            self.options.batches += steps
            if phases is not None:
                execution.ended_unix_ns = ended_unix_ns
                phases.executed(execution)
        except Exception as error:
            warn_fault("on_train_batch_end", error)

    def hooks_end(self, *args: Any, **kwargs: Any) -> None:
        """The last callback's hook is over, and Keras goes on."""
        try:
            opened = self._open.pop(CALLBACKS, None)
            if opened is not None and opened[1] is not None:
                opened[1].end()
            self._idle_since_ns = now_ns = self._now_ns()  # Behind the region's own end, so that parts do not overlap.
            if opened is not None:
                began_ns, handle = opened
                if handle is None:
                    self.timer.record(CALLBACKS, began_ns, now_ns)
                totals = self._totals
                totals.callbacks_ns += now_ns - began_ns
                totals.callbacks_count += 1
        except Exception as error:
            warn_fault("hooks_end", error)

    def _drop_batch(self) -> None:
        # The data ended where the next batch would have begun.
        self._batches.running = None
        for key in (IO, BATCH, BATCH_FIRST):
            self.regions.drop(key)
        if self._phases is not None:
            self._phases.step_ends()


def _abort(batches: Batches, phases: StampedPhases | TorchPhases | None, end_checkpoints: Callable[[], object]) -> None:
    end_checkpoints()
    if phases is not None:
        phases.leave()
    try:
        batches.abort()
    finally:
        batches.times_io = False


def _first_number_for(callbacks: Any) -> int:
    # A stamp keeps its number as a float: exact for two million fits of four thousand million executions.
    if callbacks is None:
        return next(_fits) << 32
    return _first_numbers.setdefault(callbacks, next(_fits) << 32)
