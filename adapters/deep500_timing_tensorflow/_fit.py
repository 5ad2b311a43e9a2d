"""What happens to the timer as Keras trains: regions open and close as the first and the last hook come.

Everything between two hooks has a name, so that an epoch adds up: EPOCH is EPOCH (start), the batches, CALLBACKS,
VALIDATION and EPOCH (end); on torch, where Keras fetches a batch before it calls the hooks, IO as well.

Keras calls no hook after an exception or Ctrl-C. The regions of such a fit stay open, and count as running, until a
callback is next given a model; then they are closed as failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any
from weakref import ref

from deep500_timing.adapters import warn_once
from deep500_timing.loop import limit
from deep500_timing_tensorflow import _keras
from deep500_timing_tensorflow._data import Batches, batches_of
from deep500_timing_tensorflow._keras import TraceCounts, guarded, warn_fault
from deep500_timing_tensorflow._phases import StampedPhases
from deep500_timing_tensorflow._phases_torch import TorchPhases
from deep500_timing_tensorflow._regions import (
    BATCH,
    CALLBACKS,
    COMPILE,
    EPOCH,
    EPOCH_END,
    EPOCH_START,
    FIT,
    IO,
    PREDICT,
    TEST,
    VALIDATION,
    EpochTotals,
    Execution,
    Key,
    Regions,
    Throughput,
)
from deep500_timing_tensorflow._traces import NEW_SHAPES, note_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Timer

_TRACING_TAKES_NS = 200_000
"""No function is traced or compiled in less."""


@dataclass(eq=False)
class CallbackOptions:
    """The arguments of one callback, and its counters over all its fits."""

    timer: Timer
    gpu: bool = False
    io: bool | str = "auto"
    phases: bool = False
    log_prefix: str | None = None
    counts_samples: bool = True
    """Whether the samples of batches are counted where TensorFlow logs an error for that."""
    fit: Callable[[], FitTimer | None] = lambda: None
    """The fit whose epoch began last, if it is still there."""
    totals: EpochTotals | None = None
    """Those of that epoch."""
    batches: int = 0

    def throughput(self) -> Throughput | None:
        """The rates of the newest epoch until now."""
        fit = self.fit()
        if fit is not None:
            fit.settle()
        return None if self.totals is None else self.totals.throughput(self.timer.now_ns())


class FitTimer(Regions):
    """Times one call of ``fit``, ``evaluate`` or ``predict``: what one list of callbacks belongs to.

    ``before_epoch_begin`` is called before the hooks ``on_epoch_begin`` of all other callbacks, ``after_epoch_begin``
    after them, and so on.
    """

    def __init__(self, options: CallbackOptions, model: Any, callbacks: Any = None) -> None:
        super().__init__(options.timer, callbacks)
        self.options = options
        self._model = ref(model)
        self._batches = Batches(self)
        self._phases: StampedPhases | TorchPhases | None = None
        self._traces = TraceCounts(None)
        self._end_checkpoints: Callable[[], object] = lambda: None
        self._idle_since_ns = self._back_ns = 0
        self._traced = 0
        """Executions that traced or compiled."""
        self._make_handles()

    def _make_handles(self) -> None:
        # These regions are opened at every step.
        self._hooks = self.handle(CALLBACKS)
        self._batch = self.timer.region(BATCH, self.gpu)

    def settle(self) -> None:
        """Read what is not read yet, for a reader of the throughput."""
        # Inside a batch the caller may be anywhere, such as in a user's trace, where nothing can be read.
        if self.is_own_thread() and BATCH not in self.open:
            self._batches.settle()

    # --- the begin and the end of a loop, and what an exception leaves ------------------------------------------------

    def _begin(self, key: Key) -> None:
        self._thread = get_ident()
        if self not in _unfinished:
            _unfinished.append(self)
        self.start(key)

    def _finish(self, key: Key) -> None:
        self.end(key)
        if not self.open and self in _unfinished:
            _unfinished.remove(self)

    def abort(self) -> None:
        """Close the regions that an exception left open; a fit that came to its end has none."""
        if self in _unfinished:
            _unfinished.remove(self)
        if not self.open:
            return
        try:
            self._batches.abort()
        finally:
            if EPOCH in self.open:
                self.totals.ended_ns = self.now_ns()
            if self.is_own_thread():
                self.fail_all()
            self.open.clear()
            self._leave()

    def _leave(self) -> None:
        self._end_checkpoints()
        if self._phases is not None:
            self._phases.leave()
        self._batches.times_io = False  # Keras's data may outlive the fit, and be asked again.
        self._batches, self._phases, self.execution = Batches(self), None, None

    # --- fits, evaluations and predictions ----------------------------------------------------------------------------

    @guarded
    def before_train_begin(self, logs: Any = None) -> None:
        end_aborted_fits()
        self.abort()  # The list may be its user's, and have had another fit.
        options, model, callbacks = self.options, self._model(), self.callbacks
        self._end_checkpoints = _keras.time_checkpoints(self.timer, callbacks)
        backend, several = _keras.backend_of(model), _keras.steps_per_execution(model)
        # The look for a GPU is no part of the fit.
        self.gpu = options.gpu and _keras.can_time_gpu(backend, self.timer)
        self._make_handles()
        self._begin(FIT)
        self.start(CALLBACKS)
        self.fetches_before_hooks = backend == "torch"
        self._traces = TraceCounts(vars(model).get("train_function"))
        if options.phases:
            reason = _keras.why_no_phases(model, backend)
            if reason is None:
                self._phases = TorchPhases(self) if backend == "torch" else StampedPhases(model, self)
            else:
                warn_once(
                    f"TimerCallback(phases=True): FORWARD and BACKWARD are not timed, the rest is. {reason}",
                    key=f"callback phases {reason}",
                )
        data = _keras.data_of_loop(callbacks)
        _keras.note_fit(self.timer, model, backend, data)
        if backend in _keras.ON_TENSORFLOW and options.io is False and several == 1 and not self._traces.needs_sizes:
            data = None
        counts = options.counts_samples or bool(getattr(model, "jit_compile", False))  # XLA compiles for each size
        self._batches = batches_of(data, self, backend, several, counts_samples=counts)
        self._batches.times_io = _keras.can_time_io(options.io, backend, several, self._batches.is_seen)

    @guarded
    def after_train_begin(self, logs: Any = None) -> None:
        self.end(CALLBACKS)
        self._idle_since_ns = self.now_ns()

    @guarded
    def before_train_end(self, logs: Any = None) -> None:
        self._drop_batch()
        self.start(CALLBACKS)

    @guarded
    def after_train_end(self, logs: Any = None) -> None:
        self.end(CALLBACKS)
        self._finish(FIT)
        self._leave()

    @guarded
    def before_test_begin(self, logs: Any = None) -> None:
        if FIT in self.open:  # An evaluation inside a fit, else one alone.
            self._batches_are_over()
            self.start(VALIDATION)
            self.start(CALLBACKS)
        else:
            self._begin(TEST)

    @guarded
    def before_test_end(self, logs: Any = None) -> None:
        if VALIDATION in self.open:
            self.start(CALLBACKS)

    @guarded
    def after_test_end(self, logs: Any = None) -> None:
        self.hooks_end()
        if FIT not in self.open:
            self._finish(TEST)

    @guarded
    def before_predict_begin(self, logs: Any = None) -> None:
        self._begin(PREDICT)

    @guarded
    def after_predict_end(self, logs: Any = None) -> None:
        self._finish(PREDICT)

    # --- epochs -------------------------------------------------------------------------------------------------------

    @guarded
    def before_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.totals = self.options.totals = EpochTotals(self.start(EPOCH))
        self.options.fit = ref(self)
        self._batches.first_wait_ns = None
        self.start(CALLBACKS)

    def _batches_are_over(self) -> None:
        if self._idle_since_ns:
            self._drop_batch()
            self._batches.settle()
            self.record(EPOCH_END, self._idle_since_ns, self.now_ns())
            self._idle_since_ns = 0

    def _drop_batch(self) -> None:
        # The data ended where the next batch would have begun.
        self.execution = None
        for key in (IO, BATCH):
            self.drop(key)
        if self._phases is not None:
            self._phases.step_ends()

    @guarded
    def before_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # A validation lasts until here: what is made of its results is a part of it.
        if self.end(VALIDATION) is None:
            self._batches_are_over()
        if self._phases is not None:
            self._phases.settle()
        # It ends before the hooks, so that a hook that reports the times of this epoch has its length.
        self.totals.ended_ns = now_ns = self.now_ns()
        self.end(EPOCH)
        self.start(CALLBACKS)
        if self.options.log_prefix is not None and logs is not None:
            logs.update(self.totals.logs(self.options.log_prefix, now_ns))

    @guarded
    def after_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.hooks_end()
        self._idle_since_ns = 0

    # --- batches ------------------------------------------------------------------------------------------------------
    # These run at every step and call few helpers: a step leaves the processor's caches cold, so that each Python
    # function costs a microsecond.

    def before_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if limit.is_over:
            self._end_at_limit()
        try:
            if not self.totals.epoch_steps and self._idle_since_ns:
                # On torch the first batch is there already: the wait for it is IO.
                until_ns = self._batches.first_wait_ns if self.fetches_before_hooks else None
                self.record(EPOCH_START, self._idle_since_ns, until_ns or self.now_ns())
            self._hooks.start()
            self.open[CALLBACKS] = self.now_ns(), self._hooks
        except Exception as error:
            warn_fault("on_train_batch_begin", error)

    def after_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """An execution of the train function is next."""
        try:
            traces, phases = self._traces, self._phases
            function = vars(self._model()).get("train_function")
            if traces.function() is not function:
                traces = self._traces = TraceCounts(function)
                self._batches.settle()
            elif perf_counter_ns() - self._back_ns >= _TRACING_TAKES_NS:
                traces.grew()  # A trace in another callback's hook is not this execution's.
            execution = self.execution = Execution()
            execution.index = batch
            self.hooks_end()
            handle = self._batch
            if handle.is_open:  # By its user.
                handle = self.handle(BATCH)
            handle.start()
            execution.began_ns = began_ns = self.now_ns()
            self.open[BATCH] = began_ns, handle
            if phases is not None:
                execution.began_unix_ns = time_ns()
                phases.step_begins()
        except Exception as error:
            warn_fault("on_train_batch_begin", error)

    def before_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The train function returned, and its logs are on the host."""
        try:
            batches, traces, phases, totals = self._batches, self._traces, self._phases, self.totals
            execution, self.execution = self.execution, None
            if phases is not None:
                ended_unix_ns = time_ns()
                phases.step_ends()
            opened = self.open.pop(BATCH, None)
            if execution is None or opened is None:
                self.start(CALLBACKS)
                return
            ended_ns = self.now_ns()
            opened[1].end()
            execution.took_ns = took_ns = ended_ns - execution.began_ns
            execution.steady = steady = not traces.grew(batches.size() if traces.needs_sizes else None)
            self._back_ns = perf_counter_ns()  # The timer's clock may be its user's, and stand still.
            self._hooks.start()
            self.open[CALLBACKS] = self.now_ns(), self._hooks
            if not steady:
                self._note_trace(execution)
            batches.execution_ended(execution)
            steps = execution.steps
            total = totals.batch if steady else totals.sums[COMPILE]
            total[0] += took_ns
            total[1] += steps
            totals.epoch_steps += steps
            limit.done += 1
            self.options.batches += steps
            if phases is not None:
                execution.ended_unix_ns = ended_unix_ns
                phases.executed(execution)
        except Exception as error:
            warn_fault("on_train_batch_end", error)

    def _end_at_limit(self) -> None:
        # What is open has not failed.
        self._drop_batch()
        for key in reversed([*self.open]):
            self._finish(key)
        self._leave()
        limit.end_program()

    def _note_trace(self, execution: Execution) -> None:
        # The first trace of a fit is its start; each later one is a fault, told with its reason.
        began_ns, took_ns = execution.began_ns, execution.took_ns
        self.timer.record(COMPILE, began_ns, began_ns + took_ns)
        self._traced += 1
        reason = "a batch of another shape" if self._traces.needs_sizes else NEW_SHAPES
        note_trace(self.timer, "the train step of fit", self._traced, took_ns, reason)

    def hooks_end(self, *args: Any, **kwargs: Any) -> None:
        """The last callback's hook is over, and Keras goes on."""
        try:
            opened = self.open.pop(CALLBACKS, None)
            if opened is not None:
                opened[1].end()
            self._idle_since_ns = now_ns = self.now_ns()  # Behind the region's own end, so that parts do not overlap.
            if opened is not None:
                total = self.totals.callbacks
                total[0] += now_ns - opened[0]
                total[1] += 1
        except Exception as error:
            warn_fault("hooks_end", error)

    after_epoch_begin = after_train_batch_end = after_test_begin = hooks_end


_unfinished: list[FitTimer] = []
"""The fits, evaluations and predictions that have begun and not ended, of all threads."""


def end_aborted_fits() -> None:
    """Close what an exception has left of every fit of this thread, and of those whose list is gone."""
    for fit in reversed(_unfinished.copy()):
        if not fit.is_running():
            fit.abort()
