"""FORWARD and BACKWARD on TensorFlow: stamps in the graph that the model's own train function is traced into.

When TensorFlow traces the train function while a fit is timed with phases, the step passes anchors that become a part
of the graph. This causes no retracing: a later fit without the callback runs the same graph, and its stamps are not
read. A graph that was traced before has no stamps.

The anchors are at the call of a step for each replica, and at the call for its gradient; those two are watched, in
TensorFlow and not on the model. The stamps go into a small ring in memory that is read now and then.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from deep500_timing import TimeType
from deep500_timing.adapters import Watch
from deep500_timing_tensorflow._epoch import first
from deep500_timing_tensorflow._graph_timestamps import WATCHED_TAPES, StepStamps, stamping
from deep500_timing_tensorflow._keras import steps_per_execution, warn_no_phases, warn_traced_before

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deep500_timing_tensorflow._epoch import Execution
    from deep500_timing_tensorflow._regions import FitRegions

_RING_ROWS = 1024
"""More than the batches between two readings; 32 bytes each."""
_SETTLE_EVERY = 256
"""Batches after which the stamps are read."""
_TOLERANCE_NS = 50_000
"""Tolerance of stamps, which are whole microseconds, at the two ends of an execution."""

_local = threading.local()
_rings: WeakKeyDictionary[Any, StampRing] = WeakKeyDictionary()


class Stamps(NamedTuple):
    """When a batch passed the anchors, in seconds since 1970; NaN for one that it did not pass."""

    number: int
    data_s: float
    loss_s: float
    gradients_s: float


def record_phases(regions: FitRegions, execution: Execution, batches: Sequence[Stamps]) -> int:
    """Record FORWARD and BACKWARD of an execution's batches.

    Returns:
        The batches whose stamps contradict the execution; their phases count as failed.
    """
    withheld = 0
    for stamps in batches:
        if math.isnan(stamps.loss_s) or math.isnan(stamps.gradients_s):
            warn_no_phases()
        elif _contradicts(stamps, execution):
            withheld += 1
        else:
            data_ns, loss_ns, gradients_ns = (_place_ns(at_s, execution) for at_s in stamps[1:])
            for key, began_ns, ended_ns in (
                (TimeType.FORWARD, data_ns, loss_ns),
                (TimeType.BACKWARD, loss_ns, gradients_ns),
            ):
                regions.record(key if execution.steady else first(key), began_ns, ended_ns)
    _fail_phases(regions, withheld)
    return withheld


def _fail_phases(regions: FitRegions, batches: int) -> None:
    for key in (TimeType.FORWARD, TimeType.BACKWARD) * batches:
        regions.timer.start(key)
        regions.timer.fail(key)


def _place_ns(stamp_s: float, execution: Execution) -> int:
    """The moment of a stamp on the timer's clock, within its execution.

    A float of seconds since 1970 is 238 ns coarse and a stamp is a whole number of microseconds, so it is rounded to
    one. A place outside the execution comes from that rounding and from reading two clocks.
    """
    place_ns = round(stamp_s * 1e6) * 1_000 - execution.began_unix_ns + execution.began_ns
    return min(max(place_ns, execution.began_ns), execution.began_ns + execution.took_ns)


def _contradicts(stamps: Stamps, execution: Execution) -> bool:
    slack_s = _TOLERANCE_NS / 1e9
    inside = stamps.data_s >= execution.began_unix_ns / 1e9 - slack_s and (
        stamps.gradients_s <= execution.ended_unix_ns / 1e9 + slack_s
    )
    in_order = stamps.data_s <= stamps.loss_s <= stamps.gradients_s
    room_s = execution.took_ns / 1e9 + slack_s
    return not (inside and in_order and stamps.gradients_s - stamps.data_s <= room_s)


class StampedPhases:
    """Times the steps of one fit on TensorFlow by the stamps of its model."""

    def __init__(self, model: Any, regions: FitRegions, withhold: Callable[[int], None]) -> None:
        import tensorflow as tf

        self.regions = regions
        self._withhold = withhold
        self._executions: deque[Execution] = deque()
        self._stamps: list[Stamps] = []
        ring = _rings.get(model)
        if ring is None:
            ring = _rings[model] = StampRing(tf)
        self.ring = ring
        ring.make_room(4 * steps_per_execution(model))
        ring.drain()  # The stamps of a fit without the callback belong to no timer.
        ring.readers.append(self)
        WATCHED_TAPES.__enter__()
        _WATCHED_STEPS.__enter__()

    def leave(self) -> None:
        self.step_ends()
        if self in self.ring.readers:
            self.ring.readers.remove(self)
            _WATCHED_STEPS.__exit__()
            WATCHED_TAPES.__exit__()
        self._executions.clear()
        self._stamps.clear()

    def prepare_step(self, number: int) -> None:
        """Note the number of the next execution; the callbacks of one fit count alike."""
        self.ring.set_number(number)

    def step_begins(self) -> None:
        _local.phases = self

    def step_ends(self) -> None:
        if getattr(_local, "phases", None) is self:  # Not that of a fit that goes on.
            _local.phases = None

    def take(self, stamps: Sequence[Stamps]) -> None:
        self._stamps.extend(stamps)

    def executed(self, execution: Execution) -> None:
        self._executions.append(execution)
        if len(self._executions) * execution.steps >= _SETTLE_EVERY:
            self.settle()

    def settle(self) -> None:
        """Read the stamps, and record the phases of every execution that is over."""
        if not self._executions:
            return
        lost = self.ring.drain()
        stamps: dict[int, list[Stamps]] = {}
        for row in self._stamps:
            stamps.setdefault(row.number, []).append(row)
        self._stamps.clear()
        while self._executions:
            execution = self._executions.popleft()
            # Another callback's steps before the next execution carry the same number, and come after its own.
            own = stamps.get(execution.number, [])[: execution.steps]
            missing = execution.steps - len(own)
            if missing and not (lost or own):
                warn_traced_before()
                missing = 0
            _fail_phases(self.regions, missing)
            self._withhold(missing + record_phases(self.regions, execution, own))


class StampRing:
    """Holds the stamps that a graph leaves: the newest rows, and their number so far."""

    def __init__(self, tf: Any, rows: int = _RING_ROWS) -> None:
        """Make the variables, on the CPU and outside of any distribution strategy."""
        self._tf = tf
        self._rows = rows
        self._read = 0
        self._eager: list[Stamps] = []
        self._eager_number = 0
        self.readers: list[StampedPhases] = []
        """The fits that want the stamps."""
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

    def drain(self) -> int:
        """Hand the newest stamps to the fits that want them, and return how many were lost."""
        rows, lost = self.read()
        for phases in self.readers:
            phases.take(rows)
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
            self.put(stamps)
            return outputs

        return stamped


def _stamped_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_for_each_replica(self: Any, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        phases: StampedPhases | None = getattr(_local, "phases", None)
        if phases is not None and phases.regions.is_running():
            _local.phases = None  # Not for calls inside the step.
            try:
                return original(self, phases.ring.stamped(fn), args, kwargs)
            finally:
                _local.phases = phases
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
