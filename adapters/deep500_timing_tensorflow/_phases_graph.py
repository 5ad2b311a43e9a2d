"""FORWARD and BACKWARD on TensorFlow: stamps in the graph that the model's own train function is traced into.

When TensorFlow traces the train function while a fit is timed with phases, the step passes anchors that become a part
of the graph. This causes no retracing: a later fit without the callback runs the same graph, and its stamps are not
read. A graph that was traced before has no stamps.

The anchors are at the call of a step for each replica, and at the call for its gradient; those two are watched, in
TensorFlow and not on the model. The stamps go into a small ring in memory that is read now and then.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from deep500_timing.adapters import Watch
from deep500_timing_tensorflow._execution import Stamps
from deep500_timing_tensorflow._graph_timestamps import WATCHED_TAPES, StepStamps, stamping
from deep500_timing_tensorflow._keras import steps_per_execution

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_tensorflow._phases import PhaseMatcher

_RING_ROWS = 1024
"""More than the batches between two readings; 32 bytes each."""

_local = threading.local()
_of_models: WeakKeyDictionary[Any, GraphPhases] = WeakKeyDictionary()


def graph_phases_of(model: Any) -> GraphPhases:
    found = _of_models.get(model)
    if found is None:
        found = _of_models[model] = GraphPhases()
    found.make_room(4 * steps_per_execution(model))
    return found


class StampRing:
    """Holds the stamps that a graph leaves: the newest rows, and their number so far."""

    def __init__(self, tf: Any, rows: int = _RING_ROWS) -> None:
        """Make the variables, on the CPU and outside of any distribution strategy."""
        self._tf = tf
        self._rows = rows
        self._read = 0
        self._eager: list[Stamps] = []
        self._eager_number = 0
        made: list[Any] = []

        def make() -> None:
            with tf.init_scope(), tf.device("/CPU:0"):
                shape = tf.TensorShape((None, 4))
                made.append(tf.Variable(tf.zeros((rows, 4), tf.float64), trainable=False, shape=shape, name="stamps"))
                made.extend(
                    tf.Variable(tf.zeros((), tf.int64), trainable=False, name=name)
                    for name in ("stamps_taken", "stamps_kept", "execution")
                )
                made.append(tf.constant(1, tf.int64))

        # A strategy's scope would copy the variables to each replica; scopes belong to threads.
        thread = threading.Thread(target=make, name="stamp ring")
        thread.start()
        thread.join()
        self._stamps, self._taken, self._kept, self._number, one = made
        self._count_one = functools.partial(tf.raw_ops.AssignAddVariableOp, resource=self._number.handle, value=one)
        self._kept.assign(rows)

    def make_room(self, rows: int) -> None:
        """Keep at least so many rows; a ring that grows forgets its rows."""
        if rows > self._rows:
            self._rows = rows
            self._stamps.assign(self._tf.zeros((rows, 4), self._tf.float64))
            self._kept.assign(rows)
            self._read = int(self._taken.numpy())

    def set_number(self, number: int) -> None:
        # Counting takes a seventh of the time of assigning, which shows in a short step.
        if number == self._eager_number + 1:
            self._count_one()
        elif number != self._eager_number:
            self._number.assign(number)
        self._eager_number = number

    def put(self, stamps: StepStamps) -> None:
        """Keep a step's stamps; in a graph, whenever the graph executes."""
        row = stamps.row()
        if isinstance(row, tuple):
            self._eager.append(Stamps(self._eager_number, *row))
            return
        tf = self._tf
        # Counted after it is written: a step without data fails half-way.
        with tf.control_dependencies([row]):
            place = self._taken.read_value() % self._kept.read_value()
            number = tf.cast(self._number.read_value(), tf.float64)
            written = self._stamps.scatter_nd_update(
                tf.reshape(place, (1, 1)), tf.concat([number[None], row], axis=0)[None]
            )
        with tf.control_dependencies([written]):
            self._taken.assign_add(1)

    def read(self) -> tuple[list[Stamps], int]:
        """The rows since the last reading, in order, and how many the ring has lost."""
        rows, self._eager = self._eager, []
        lost = 0
        taken = int(self._taken.numpy())
        if taken > self._read:
            stamps = self._stamps.numpy()
            oldest = max(self._read, taken - self._rows)
            lost = oldest - self._read
            kept = [stamps[place % self._rows].tolist() for place in range(oldest, taken)]
            rows += [Stamps(int(number), *times) for number, *times in kept]
            self._read = taken
        return rows, lost


class GraphPhases:
    """Stamps the steps of one model on TensorFlow."""

    has_stamps = True

    def __init__(self) -> None:
        import tensorflow as tf

        self._tf: Any = tf
        self._ring = StampRing(self._tf)
        self._matchers: list[PhaseMatcher] = []

    def make_room(self, rows: int) -> None:
        self._ring.make_room(rows)

    def join(self, matcher: PhaseMatcher) -> None:
        if matcher not in self._matchers:
            self.drain()  # The stamps of a fit without the callback belong to no timer.
            self._matchers.append(matcher)
            WATCHED_TAPES.__enter__()
            _WATCHED_STEPS.__enter__()

    def leave(self, matcher: PhaseMatcher) -> None:
        self.step_ends(matcher)
        if matcher in self._matchers:
            self._matchers.remove(matcher)
            _WATCHED_STEPS.__exit__()
            WATCHED_TAPES.__exit__()

    def prepare_step(self, number: int) -> None:
        """Note the number of the next execution; the callbacks of one fit count alike."""
        self._ring.set_number(number)

    def step_begins(self, matcher: PhaseMatcher) -> None:
        """A trace on this thread is now a step of the fit."""
        _local.step = self, matcher

    def step_ends(self, matcher: PhaseMatcher) -> None:
        step = getattr(_local, "step", None)
        if step is not None and step[1] is matcher:  # Not that of a fit that goes on.
            _local.step = None

    def drain(self) -> int:
        """Hand the newest stamps to the fits with phases."""
        rows, lost = self._ring.read()
        for matcher in self._matchers:
            matcher.take(rows)
        return lost

    def stamped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The same step on one replica, with the anchors."""
        tf = self._tf

        def stamped(*args: Any, **kwargs: Any) -> Any:
            if not _is_first_replica(tf):
                return step(*args, **kwargs)
            stamps = StepStamps(tf)
            with stamping(stamps):
                outputs = step(*stamps.data(args), **kwargs)
            self._ring.put(stamps)
            return outputs

        return stamped


def _stamped_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_for_each_replica(self: Any, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        step = getattr(_local, "step", None)
        if step is not None and step[1].regions.is_running():
            _local.step = None  # Not for calls inside the step.
            try:
                return original(self, step[0].stamped(fn), args, kwargs)
            finally:
                _local.step = step
        return original(self, fn, args, kwargs)

    return call_for_each_replica


# The class of all strategies, the default one among them, in which steps are called.
_WATCHED_STEPS = Watch(
    lambda: [(sys.modules["tensorflow"].compat.v1.distribute.StrategyExtended, "call_for_each_replica", _stamped_steps)]
)


def _is_first_replica(tf: Any) -> bool:
    # All replicas do the same work at the same time: the first one's times stand for all.
    context = tf.distribute.get_replica_context()
    if context is None:
        return True
    number = tf.get_static_value(context.replica_id_in_sync_group)
    return number is None or int(number) == 0
