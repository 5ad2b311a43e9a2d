"""What happens to the timer as a Keras model trains: regions open and close as the hooks come.

Where the wait for data lies differs. On TensorFlow and JAX the train function fetches its batch, so a batch begins with
its begin hook. On torch the fetch comes before the begin hook, so a batch begins where the one before it ended. BATCH
thus contains its IO on every backend.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from deep500_timing import TimeType
from deep500_timing_tensorflow import _choices
from deep500_timing_tensorflow._keras_facts import backend_of, count_steps, steps_per_execution
from deep500_timing_tensorflow._phases import Execution, PhaseMatcher
from deep500_timing_tensorflow._regions import EXECUTION, FIT, PREDICT, TEST, VALIDATION, OpenRegions, first
from deep500_timing_tensorflow._step import ArmedStep, TraceWatch
from deep500_timing_tensorflow._tally import EpochTally

if TYPE_CHECKING:
    from deep500_timing import Timer
    from deep500_timing_tensorflow._step import Phases

BATCH, EPOCH, IO = TimeType.BATCH, TimeType.EPOCH, TimeType.IO


class FitTiming:
    """Times the fits of one callback, one after another.

    Args:
        timer: Where the times go.
        gpu: Whether batches are to be timed on the GPU as well.
        io: ``"auto"``, True or False, see ``TimerCallback``.
        phases: Whether the forward and the backward pass are to be timed.
    """

    def __init__(self, timer: Timer, *, gpu: bool, io: bool | str, phases: bool) -> None:
        """See the class."""
        self.timer = timer
        self.regions = OpenRegions(timer)
        self.tally: EpochTally | None = None
        self._wants_gpu, self._wants_io, self.wants_phases = gpu, io, phases
        # Functions that were executed before, and so are past their first tracing.
        self._seen: WeakSet[Any] = WeakSet()
        self._model: Any = None
        self._watch: TraceWatch | None = None
        self._armed: ArmedStep | None = None
        self._phases: Phases | None = None
        self.matcher = PhaseMatcher(self)
        self._forget_fit()

    def _forget_fit(self) -> None:
        self._backend = ""
        self.gpu = False
        self._fetches = False
        self._fetches_before_begin = False
        self._steps_per_execution = 1
        self._steps_known: int | None = None
        self._forget_batch()

    def _forget_batch(self) -> None:
        self._began_ns = self._began_unix_ns = 0
        self._index = 0
        self.steady = True
        self._traced = False
        self._fetched = 0
        self._samples: int | None = 0
        self._counter_before: int | None = None

    @property
    def withheld(self) -> int:
        """Batches whose phases contradicted the batch."""
        return self.matcher.withheld

    # --- fits, evaluations and predictions ------------------------------------------------------------------------

    def attach(self, model: Any) -> None:
        """A model is about to fit, evaluate or predict: what an earlier one left open was broken off."""
        self.abandon()
        if model is not self._model:
            self._watch = None
            if self._phases is not None:
                self._phases.leave(self.matcher)
            self._phases = None
        self._model = model

    def abandon(self) -> None:
        """Count what is open as failed."""
        self._disarm()
        self.matcher.forget()
        self.regions.fail_all()
        self._forget_fit()

    def _disarm(self) -> None:
        if self._armed is not None:
            self._armed.forget(self)
            self._armed = None

    def fit_begins(self, steps: int | None) -> None:
        """A fit of that many batches an epoch, None if unknown."""
        self.abandon()
        model = self._model
        self._backend = backend_of(model)
        self._fetches_before_begin = self._backend == "torch"
        self._steps_per_execution = steps_per_execution(model)
        self._steps_known = steps
        self.regions.start(FIT)
        self.gpu = self._wants_gpu and _choices.can_time_gpu(self._backend, self.timer)
        if self.wants_phases:
            self._phases = _choices.phases_for(model, self._backend, self._phases)
        self._fetches = _choices.can_fetch(self._wants_io, model, self._backend, phases=self._phases is not None)
        self.matcher.stamps_io = self._phases is not None and self._wants_io is not False and not self._fetches
        if self._watch is None and _choices.traces(model, self._backend):
            self._watch = TraceWatch(model)

    def fit_ends(self) -> None:
        """The fit came to its end."""
        self._drop_batch()
        self.regions.end(FIT)
        self._forget_fit()

    def test_begins(self) -> None:
        """An evaluation, inside a fit or by itself."""
        self._drop_batch()
        self.regions.start(VALIDATION if FIT in self.regions else TEST)

    def test_ends(self) -> None:
        """It came to its end."""
        self._end_and_add(VALIDATION if VALIDATION in self.regions else TEST)

    def predict_begins(self) -> None:
        """A prediction."""
        self.regions.start(PREDICT)

    def predict_ends(self) -> None:
        """It came to its end."""
        self.regions.end(PREDICT)

    # --- epochs -----------------------------------------------------------------------------------------------------

    def epoch_begins(self) -> None:
        """An epoch."""
        self.regions.start(EPOCH)
        self.tally = EpochTally(self.timer.now_ns())
        if self._fetches_before_begin:
            self._open_batch()

    def epoch_ends(self, logs: dict[str, Any] | None, prefix: str | None) -> None:
        """It came to its end; its means go into Keras's logs if there is a prefix."""
        self._drop_batch()
        self.matcher.settle(self._phases)
        self._end_and_add(EPOCH)
        if prefix is not None and logs is not None and self.tally is not None:
            logs.update(self.tally.logs(prefix))

    def _end_and_add(self, key: TimeType | str) -> None:
        took_ns = self.regions.end(key)
        if self.tally is not None and took_ns is not None:
            self.tally.add(key, took_ns)

    # --- batches ----------------------------------------------------------------------------------------------------

    def batch_begins(self, index: int) -> None:
        """The begin hook: the batch is there on torch, and about to be fetched elsewhere."""
        if self._fetches_before_begin:
            self._end_and_add(IO)
        else:
            self._open_batch()
        self._index = index
        if self._steps_per_execution > 1:
            self._counter_before = count_steps(self._model)
        self._armed = ArmedStep.arm(
            self._model,
            self,
            backend=self._backend,
            fetch=self._fetches and not self._fetches_before_begin,
            phases=self._phases,
            watch=self._watch,
        )
        self._began_unix_ns = time.time_ns()

    def _open_batch(self) -> None:
        self._forget_batch()
        function = vars(self._model).get("train_function")
        if isinstance(function, ArmedStep):
            function = function.function
        self.steady = function is None or function in self._seen
        several = self._steps_per_execution > 1
        self.regions.start(self._batch_key(), gpu=self.gpu and not several)
        if several and self.gpu:
            self.regions.start(EXECUTION if self.steady else first(EXECUTION), gpu=True)
        self._began_ns = self.timer.now_ns()
        if self._fetches_before_begin and self._fetches:
            self.regions.start(IO)

    def _batch_key(self) -> TimeType | str:
        return BATCH if self.steady else first(BATCH)

    def batch_ends(self) -> None:
        """The end hook: the train function returned, and its logs were awaited."""
        now_ns = self.timer.now_ns()
        key = self._batch_key()
        if key not in self.regions:
            return
        steady = self.steady and not self._traced
        kept_as = BATCH if steady else first(BATCH)
        self.regions.end(EXECUTION)
        self.regions.end(first(EXECUTION))
        steps = self._steps_ran()
        if steps == 1 and kept_as == key:
            self.regions.end(key)
        else:
            # What was opened as one batch was several, or traced: keep it as what it was, an equal share for each.
            self.regions.drop(key)
            self._record_shares(kept_as, now_ns, steps)
        if self.tally is not None:
            self.tally.add(kept_as, now_ns - self._began_ns, steps)
            samples = self._samples if self._fetched == steps else None
            self.tally.add_execution(self._began_ns, now_ns, steps=steps, samples=samples, steady=steady)
        if self._phases is not None:
            self.matcher.executed(
                Execution(self._began_ns, now_ns, self._began_unix_ns, time.time_ns(), steps, steady), self._phases
            )
        function = vars(self._model).get("train_function")
        if function is not None:
            self._seen.add(function.function if isinstance(function, ArmedStep) else function)
        self._armed = None
        if self._fetches_before_begin:
            self._open_batch()

    def _record_shares(self, key: TimeType | str, now_ns: int, steps: int) -> None:
        took_ns = now_ns - self._began_ns
        edges = [self._began_ns + took_ns * share // steps for share in range(steps + 1)]
        for share in range(steps):
            self.timer.record(key, edges[share], edges[share + 1])

    def _steps_ran(self) -> int:
        # The end hook's index counts steps that did not run when an execution is cut short by the end of the data.
        most = self._steps_per_execution
        if most == 1:
            return 1
        if self._fetched:
            return self._fetched
        after = count_steps(self._model)
        if self._counter_before is not None and after is not None and after > self._counter_before:
            return min(after - self._counter_before, most)
        return most if self._steps_known is None else max(min(most, self._steps_known - self._index), 1)

    def _drop_batch(self) -> None:
        # The data ended where the next batch would have begun.
        for key in (IO, EXECUTION, first(EXECUTION), BATCH, first(BATCH)):
            self.regions.drop(key)
        self._disarm()

    # --- what happens inside the execution, see StepListener ----------------------------------------------------------

    def fetch_begins(self) -> None:
        """The train function waits for a batch."""
        if self._fetches:
            self.regions.start(IO)

    def fetch_ends(self, samples: int | None) -> None:
        """The batch is there."""
        self._end_and_add(IO)
        self.given(samples)

    def fetch_finds_none(self) -> None:
        """There is no further batch."""
        self.regions.drop(IO)

    def given(self, samples: int | None) -> None:
        """The train function has a batch."""
        self._fetched += 1
        self._samples = None if samples is None or self._samples is None else self._samples + samples

    def data_ends(self) -> None:
        """The execution had no batch at all."""
        self._drop_batch()

    def pass_changes(self, done: TimeType | None, begun: TimeType | None) -> None:
        """On torch, the step goes from one pass to the next."""
        if done is not None:
            self._end_and_add(done if self.steady else first(done))
        if begun is not None:
            self.regions.start(begun if self.steady else first(begun), gpu=self.gpu)

    def pass_not_found(self, key: TimeType) -> None:
        """On torch, the step ended inside a pass: where that ended cannot be told."""
        self.regions.drop(key if self.steady else first(key))
        _choices.say_no_passes()

    def step_traced(self) -> None:
        """The execution traced or compiled."""
        self._traced = True

    def step_fails(self) -> None:
        """The execution raises, most often out of the fit."""
        self.abandon()
