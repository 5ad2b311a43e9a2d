"""What happens at each batch of a fit: the hooks before it, the train function, the hooks after it.

All that is ours and that Keras runs at every batch is in this file, in the hooks of ``_edges.py``, and in what they
call: ``_open_regions.py``, ``_fetches.py``, ``_traces.py`` and ``_epoch_totals.py``. After a step none of it is in a
cache any more, so it takes four times what it takes in a loop, and what counts is how much code and data it touches.
Compiled it takes four fifths of what it takes as Python, which is not worth a build.
"""

from __future__ import annotations

import itertools
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from deep500_timing import TimeType
from deep500_timing_tensorflow import _frames
from deep500_timing_tensorflow._capabilities import say_no_passes
from deep500_timing_tensorflow._fetches import Fetches
from deep500_timing_tensorflow._left_behind import leave_what_is_gone, to_be_left
from deep500_timing_tensorflow._open_regions import CALLBACKS, EPOCH_START, OpenRegions, first
from deep500_timing_tensorflow._phases import Execution, PhaseMatcher
from deep500_timing_tensorflow._traces import TraceCounts

if TYPE_CHECKING:
    from deep500_timing_tensorflow._epoch_totals import EpochTotals
    from deep500_timing_tensorflow._phases_contract import Phases
    from deep500_timing_tensorflow._wishes import Wishes

BATCH = TimeType.BATCH
BATCH_FIRST = first(BATCH)

_TRACING_TAKES_NS = 200_000
"""No function is traced or compiled in less."""


# The executions of every list of callbacks are numbered from another number on. A model that is fitted in a hook of its
# own fit has one graph for both, whose stamps are told apart by them; callbacks of one list count alike.
_fits = itertools.count()
_first_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class BatchTiming:
    """Times the batches of a fit, and what lies between two of them.

    Args:
        wishes: The callback's.
        model: The model that is fitted.
        callbacks: The list of callbacks that the fit is given; None for a loop that calls the hooks itself.
    """

    def __init__(self, wishes: Wishes, model: Any, callbacks: Any) -> None:
        self.wishes = wishes
        self.timer = wishes.timer
        self.regions = OpenRegions(wishes.timer)
        self.totals: EpochTotals | None = None
        self.matcher = PhaseMatcher(self, wishes)
        self._model = model
        self._callbacks = ref(callbacks) if callbacks is not None else None
        self._first_number = _first_number_for(callbacks)
        self._fetches = Fetches(self)
        self._forget_fit()

    def _forget_fit(self) -> None:
        # For a list that never begins a fit; whoever begins one says what can be timed in it.
        self._gpu = self._fetches_before_hooks = False
        self._phases: Phases | None = None
        self._fetches.times_io = False  # Whoever asks the data of a fit that is over.
        self._fetches = Fetches(self)
        self._traces: TraceCounts | None = None
        self._number = self._first_number
        self._idle_since_ns = 0
        self._began_ns = self._began_unix_ns = self._back_ns = 0
        self._opened_as: TimeType | str = BATCH
        self._callbacks_sum = [0, 0]  # Of the epoch's totals.
        self._batches_in_epoch = 0

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
        if to_be_left:
            leave_what_is_gone()
        function = self._model.__dict__.get("train_function")
        traces = self._traces
        if traces is None or traces.function is not function:
            traces = self._traces = TraceCounts(function)
            self._fetches.settle()
        elif self._batches_in_epoch or not traces.is_new:
            # What others did to the function in their hooks is not this execution's.
            traces.is_new = False
            if perf_counter_ns() - self._back_ns >= _TRACING_TAKES_NS:
                traces.grew()
        self._fetches.execution_begins(traces.is_new)
        self._number += 1
        if self._phases is not None:
            self._phases.prepare_step(self._number)
        self.hooks_end()
        self._opened_as = BATCH_FIRST if traces.is_new else BATCH
        self._began_ns = self.regions.start(self._opened_as, self._gpu)
        if self._phases is not None:
            self._began_unix_ns = time_ns()
            self._phases.step_begins(self)

    def batch_ends(self) -> None:
        """The train function returned, and its logs were awaited."""
        now_ns = now_unix_ns = 0
        if self._phases is not None:
            now_ns, now_unix_ns = self.timer.now_ns(), time_ns()
            self._phases.step_ends(self)
        opened_as, traces, fetches = self._opened_as, self._traces, self._fetches
        if opened_as not in self.regions.open or traces is None:
            self.regions.start(CALLBACKS)
            return
        steady = not traces.grew(fetches.size() if traces.needs_sizes else None)
        kept_as = BATCH if steady else BATCH_FIRST
        took_ns = self.regions.end(opened_as, kept_as) or 0
        self._back_ns = perf_counter_ns()  # The timer's clock may be its user's, and stand still.
        self.regions.start(CALLBACKS)  # Ours among them.
        wait_ns = fetches.wait_ns if self._fetches_before_hooks else 0
        steps = fetches.execution_ended(self._began_ns, took_ns, steady)
        self._batches_in_epoch += steps
        self.wishes.batches += steps
        if self.totals is not None:
            self.totals.add_execution(kept_as, took_ns, wait_ns, steps)
        if self._phases is not None:
            self.matcher.executed(
                Execution(self._number, self._began_ns, now_ns, self._began_unix_ns, now_unix_ns, steps, steady),
                self._phases,
            )

    def hooks_end(self) -> None:
        """The last callback has had its turn: what follows is Keras's."""
        took_ns = self.regions.end(CALLBACKS)
        if took_ns is not None:
            self._callbacks_sum[0] += took_ns
            self._callbacks_sum[1] += 1
        self._idle_since_ns = self.timer.now_ns()

    def pass_begins(self, key: TimeType) -> None:
        """The forward or the backward pass begins."""
        self.regions.start(key, gpu=self._gpu)

    def pass_ends(self, key: TimeType) -> None:
        """It came to its end."""
        self._end_and_add(key)

    def pass_is_not_told(self, key: TimeType) -> None:
        """The step ended inside a pass: where that ended cannot be told."""
        self.regions.drop(key)
        say_no_passes()

    def is_running(self) -> bool:
        """Whether this thread is inside the fit: what an exception leaves behind must not act any more."""
        if self._callbacks is None:
            return True
        callbacks = self._callbacks()
        return callbacks is not None and _frames.is_running(callbacks)

    def _end_and_add(self, key: TimeType | str) -> None:
        took_ns = self.regions.end(key)
        if self.totals is not None and took_ns is not None:
            self.totals.add(key, took_ns)

    def _record(self, key: TimeType | str, began_ns: int, ended_ns: int, count: int = 1) -> None:
        self.timer.record(key, began_ns, ended_ns)
        if self.totals is not None:
            self.totals.add(key, ended_ns - began_ns, count)


def _first_number_for(callbacks: Any) -> int:
    # A stamp keeps its number as a float: exact for two million fits of four thousand million executions.
    if callbacks is None:
        return next(_fits) << 32
    return _first_numbers.setdefault(callbacks, next(_fits) << 32)
