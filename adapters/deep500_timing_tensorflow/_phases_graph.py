"""FORWARD and BACKWARD on TensorFlow: stamps in the graph that the model's own train function is traced into.

When TensorFlow traces the train function while a fit is timed with phases, the step passes anchors that become a part
of the graph. So nothing is traced that would not be, and the model's functions stay its own: a later fit without the
callback runs the same graph, whose stamps nobody reads. A graph that was traced before has none, and none are made up.

The anchors are where TensorFlow calls a step for each replica and where it is asked for a gradient; those two are
watched, in TensorFlow and not on the model. The stamps go into a small ring in memory that is read now and then.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from deep500_timing_tensorflow._graph_timestamps import StepStamps, stamping, unwatch_tapes, watch_tapes
from deep500_timing_tensorflow._keras_facts import steps_per_execution
from deep500_timing_tensorflow._phases_contract import Stamps

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_tensorflow._phases_contract import PhasesListener

_RING_ROWS = 1024
"""More than the batches between two readings; 40 bytes each."""

_local = threading.local()
_lock = threading.Lock()
_users = 0
_original_call: Any = None
_of_models: WeakKeyDictionary[Any, GraphPhases] = WeakKeyDictionary()


def graph_phases_of(model: Any) -> GraphPhases:
    """What stamps the steps of a model, whoever asks: there is one graph."""
    found = _of_models.get(model)
    if found is None:
        found = _of_models[model] = GraphPhases()
    found.make_room(4 * steps_per_execution(model))
    return found


class StampRing:
    """Where a graph leaves its stamps: the newest rows, and how many there have been.

    Args:
        tf: TensorFlow.
        rows: How many rows to keep.
    """

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
                shape = tf.TensorShape((None, 5))
                made.append(tf.Variable(tf.zeros((rows, 5), tf.float64), trainable=False, shape=shape, name="stamps"))
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
        """Keep at least so many rows; those that are there are forgotten if there were too few."""
        if rows > self._rows:
            self._rows = rows
            self._stamps.assign(self._tf.zeros((rows, 5), self._tf.float64))
            self._kept.assign(rows)
            self._read = int(self._taken.numpy())

    def set_number(self, number: int) -> None:
        """The rows that come now are of that execution."""
        # To count takes a seventh of the time that to assign does, which beside a short step can be seen.
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
        # Nothing is counted before it is there: a step without data fails half-way.
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
        """Nothing is traced yet."""
        import tensorflow as tf

        self._tf: Any = tf
        self._ring = StampRing(self._tf)
        self._listeners: list[PhasesListener] = []

    def make_room(self, rows: int) -> None:
        """Lose no batch of an execution of that many."""
        self._ring.make_room(rows)

    def join(self, listener: PhasesListener) -> None:
        """A fit with phases begins."""
        if listener not in self._listeners:
            self.drain()  # What a fit without the callback has left is nobody's.
            self._listeners.append(listener)
            _watch(self._tf)

    def leave(self, listener: PhasesListener) -> None:
        """It came to its end, or was broken off."""
        self.step_ends(listener)
        if listener in self._listeners:
            self._listeners.remove(listener)
            _unwatch(self._tf)

    def prepare_step(self, number: int) -> None:
        """An execution is next; several callbacks of one fit count it alike."""
        self._ring.set_number(number)

    def step_begins(self, listener: PhasesListener) -> None:
        """What this thread traces from now on is a step of the fit."""
        _local.step = self, listener

    def step_ends(self, listener: PhasesListener) -> None:
        """The execution came to its end."""
        step = getattr(_local, "step", None)
        if step is not None and step[1] is listener:  # Not that of a fit that goes on.
            _local.step = None

    def drain(self) -> int:
        """Hand the newest stamps to the fits with phases.

        Returns:
            How many were lost.
        """
        rows, lost = self._ring.read()
        for listener in self._listeners:
            listener.matcher.take(rows)
        return lost

    def stamped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step that does what ``step`` does on one replica, and passes the anchors."""
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


def _watch(tf: Any) -> None:
    global _users, _original_call
    watch_tapes(tf)
    extended = _extended(tf)
    with _lock:
        _users += 1
        if _users == 1:
            original = _original_call = extended.call_for_each_replica

            def call_for_each_replica(self: Any, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
                step = getattr(_local, "step", None)
                if step is not None and step[1].is_running():
                    _local.step = None  # Not for what the step itself may call.
                    try:
                        return original(self, step[0].stamped(fn), args, kwargs)
                    finally:
                        _local.step = step
                return original(self, fn, args, kwargs)

            extended.call_for_each_replica = call_for_each_replica


def _extended(tf: Any) -> Any:
    # The class of all strategies, the default one among them, in which steps are called.
    return tf.compat.v1.distribute.StrategyExtended


def _unwatch(tf: Any) -> None:
    global _users
    unwatch_tapes(tf)
    with _lock:
        _users -= 1
        if _users == 0:
            _extended(tf).call_for_each_replica = _original_call


def _is_first_replica(tf: Any) -> bool:
    # All replicas do the same work at the same time: the first one's times stand for all.
    context = tf.distribute.get_replica_context()
    if context is None:
        return True
    number = tf.get_static_value(context.replica_id_in_sync_group)
    return number is None or int(number) == 0
