"""FORWARD and BACKWARD on TensorFlow: stamps in the graph that the model's own train function is traced into.

When TensorFlow traces the train function while a fit is timed with phases, the step passes anchors that become a part
of the graph. This causes no retracing: a later fit without the callback runs the same graph, and its stamps are not
read. A graph that was traced before has no stamps.

The anchors are at the call of a step for each replica, and at the call for its gradient; those two are watched, in
TensorFlow and not on the model. The stamps go into a small ring in memory that is read now and then.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from deep500_timing import TimeType
from deep500_timing.adapters import Watch, warn_once
from deep500_timing_tensorflow._keras import steps_per_execution, warn_no_phases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deep500_timing_tensorflow._regions import Execution, Regions

_RING_ROWS = 1024
"""More than the batches between two readings; 24 bytes each."""
_SETTLE_EVERY = 256
"""Batches after which the stamps are read."""
_TOLERANCE_NS = 50_000
"""Tolerance of stamps at the two ends of an execution, which come from two clocks read one after the other."""
NOT_PASSED = float("nan")

_local = threading.local()


# --- the stamps of one step -------------------------------------------------------------------------------------------


class StepStamps:
    """The stamps of one step: of one trace, or in eager mode of one execution; its graph's optimizer cannot move them.

    A ``tf.timestamp`` has no inputs, so nothing but an order between operations holds it in place, and Grappler changes
    such orders: it splits an ``IdentityN`` that joins a stamp to the values which are to wait for it. Here the values
    are packed into an ``Optional``, which Grappler does not look into; the stamp is taken after that, packed together
    with it, and later operations use the unpacked values. Nothing is copied, and values are passed on unchanged, so the
    results of the step are the same to the last bit.
    """

    def __init__(self, tf: Any) -> None:
        self._tf = tf
        self._eager = bool(tf.executing_eagerly())
        self.data_s: Any = NOT_PASSED
        self.loss_s: Any = NOT_PASSED
        self.gradients_s: Any = NOT_PASSED
        self.gradient_calls = 0

    def data(self, batch: Any) -> Any:
        """Stamp the moment at which the batch is there."""
        if self._eager:
            self.data_s = time.time()
            return batch
        tf = self._tf
        leaves = tf.nest.flatten(batch)
        # Variables, iterators and other arguments of a step are not data.
        places = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) and not isinstance(leaf, tf.Variable)
        ]
        found = [leaves[place] for place in places]
        parts, self.data_s = self._stamp(tf.nest.flatten(found, expand_composites=True))
        for place, leaf in zip(places, tf.nest.pack_sequence_as(found, parts, expand_composites=True), strict=True):
            leaves[place] = leaf
        return tf.nest.pack_sequence_as(batch, leaves)

    def gradient(
        self, original: Callable[..., Any], tape: Any, target: Any, sources: Any, output_gradients: Any, more: Any
    ) -> Any:
        """Compute the gradients, and stamp the moments before and after."""
        self.gradient_calls += 1
        if self._eager:
            self.loss_s = time.time()
            found = original(tape, target, sources, output_gradients, **more)
            self.gradients_s = time.time()
            return found
        tf = self._tf
        targets = tf.nest.flatten(target)
        given = output_gradients is not None
        seeds = tf.nest.flatten(output_gradients) if given else [tf.ones_like(part) for part in targets]
        # The backward pass starts from the seeds, so it starts after the stamp. Only tensors are replaced: a None
        # among the seeds differs from a one.
        hung = [place for place, seed in enumerate(seeds) if isinstance(seed, tf.Tensor)]
        passed, self.loss_s = self._stamp(targets, also=[seeds[place] for place in hung])
        for place, seed in zip(hung, passed[len(targets) :], strict=True):
            seeds[place] = seed
        with tf.control_dependencies([self.loss_s]):
            found = original(
                tape, target, sources, tf.nest.pack_sequence_as(output_gradients if given else target, seeds), **more
            )
        parts = tf.nest.flatten(found, expand_composites=True)  # Sparse gradients as well.
        places = [place for place, part in enumerate(parts) if part is not None]
        passed, self.gradients_s = self._stamp([parts[place] for place in places])
        for place, part in zip(places, passed, strict=True):
            parts[place] = part
        return tf.nest.pack_sequence_as(found, parts, expand_composites=True)

    def _stamp(self, values: list[Any], also: Sequence[Any] = ()) -> tuple[list[Any], Any]:
        # Returns values and `also`, passed on, and the moment at which all values were there.
        tf = self._tf
        if not values:
            return list(also), tf.timestamp()
        taken: list[Any] = []

        # Without a custom gradient the packing would stop the gradients of an outer tape.
        def pass_on(*parts: Any) -> Any:
            there = _pack(tf, parts[: len(values)])
            with tf.control_dependencies([there]):
                stamp = tf.timestamp()
            there, rest, stamp = _unpack(
                tf, _pack(tf, [there, _pack(tf, parts[len(values) :] or [stamp]), stamp]), [there, there, stamp]
            )
            taken.append(stamp)
            passed = _unpack(tf, there, parts[: len(values)])
            if also:
                passed = [*passed, *_unpack(tf, rest, parts[len(values) :])]
            return passed, lambda *gradients: gradients

        return list(tf.custom_gradient(pass_on)(*values, *also)), taken[0]

    def row(self) -> Any:
        """The three stamps."""
        if self.gradient_calls != 1:
            # Which of several gradients is the backward pass cannot be told.
            self.loss_s = self.gradients_s = NOT_PASSED
        stamps = self.data_s, self.loss_s, self.gradients_s
        if self._eager:
            return stamps
        tf = self._tf
        return tf.stack([tf.cast(stamp, tf.float64) for stamp in stamps])


def _pack(tf: Any, parts: Any) -> Any:
    return tf.raw_ops.OptionalFromValue(components=list(parts))


def _unpack(tf: Any, packed: Any, like: Any) -> list[Any]:
    parts = tf.raw_ops.OptionalGetValue(
        optional=packed, output_types=[part.dtype for part in like], output_shapes=[part.shape for part in like]
    )
    return list(parts)


@contextlib.contextmanager
def stamping(stamps: StepStamps | None) -> Iterator[None]:
    """Let the gradients that this thread asks a tape for be stamped."""
    outer = getattr(_local, "stamps", None)
    _local.stamps = stamps
    try:
        yield
    finally:
        _local.stamps = outer


def _stamped_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(tape: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **more: Any) -> Any:
        stamps: StepStamps | None = getattr(_local, "stamps", None)
        if stamps is None or args:
            return original(tape, target, sources, output_gradients, *args, **more)
        with stamping(None):  # Not those that are asked for meanwhile.
            return stamps.gradient(original, tape, target, sources, output_gradients, more)

    return gradient


WATCHED_TAPES = Watch(lambda: [(sys.modules["tensorflow"].GradientTape, "gradient", _stamped_gradient)])
"""While it is entered, ``tf.GradientTape.gradient`` stamps on threads that are stamping."""


# --- from stamps to regions -------------------------------------------------------------------------------------------


class Stamps(NamedTuple):
    """When a batch passed the anchors, in seconds since 1970; NaN for one that it did not pass."""

    data_s: float
    loss_s: float
    gradients_s: float


def record_phases(regions: Regions, execution: Execution, batches: Sequence[Stamps]) -> None:
    """Record FORWARD and BACKWARD of an execution's batches; those whose stamps contradict it count as failed."""
    began_ns, ended_ns = execution.began_ns, execution.began_ns + execution.took_ns
    for stamps in batches:
        if math.isnan(stamps.loss_s) or math.isnan(stamps.gradients_s):
            warn_no_phases()
            continue
        # A float of seconds since 1970 is 238 ns coarse and a stamp is a whole number of microseconds.
        moments = [round(at_s * 1e6) * 1_000 - execution.began_unix_ns + began_ns for at_s in stamps]
        inside = began_ns - _TOLERANCE_NS <= moments[0] and moments[-1] <= ended_ns + _TOLERANCE_NS
        if not inside or moments != sorted(moments):
            _fail_phases(regions, 1)
            continue
        data_ns, loss_ns, gradients_ns = (min(max(moment, began_ns), ended_ns) for moment in moments)
        for key, start_ns, end_ns in ((TimeType.FORWARD, data_ns, loss_ns), (TimeType.BACKWARD, loss_ns, gradients_ns)):
            regions.record(key, start_ns, end_ns)


def _fail_phases(regions: Regions, batches: int) -> None:
    for key in (TimeType.FORWARD, TimeType.BACKWARD) * batches:
        regions.timer.start(key)
        regions.timer.fail(key)


# --- the steps of a fit -----------------------------------------------------------------------------------------------


class StampedPhases:
    """Times the steps of one fit on TensorFlow by the stamps of its model."""

    def __init__(self, model: Any, fit: Regions) -> None:
        self.fit = fit
        self.stamps: list[Stamps] = []
        """Those that are not matched yet."""
        self._executions: list[Execution] = []
        self.ring = ring = _ring_of(model)
        ring.drain()  # The stamps of a fit without the callback belong to no timer.
        ring.readers.append(self)
        WATCHED_TAPES.__enter__()
        _WATCHED_STEPS.__enter__()

    def leave(self) -> None:
        self.step_ends()
        self.ring.readers.remove(self)
        _WATCHED_STEPS.__exit__()
        WATCHED_TAPES.__exit__()

    def step_begins(self) -> None:
        _local.phases = self

    def step_ends(self) -> None:
        if getattr(_local, "phases", None) is self:  # Not that of a fit that goes on.
            _local.phases = None

    def executed(self, execution: Execution) -> None:
        """An execution is over."""
        self._executions.append(execution)
        if len(self._executions) * execution.steps >= _SETTLE_EVERY:
            self.settle()

    def settle(self) -> None:
        """Record the phases of every execution that is over; of batches without them they count as failed."""
        if not self._executions:
            return
        lost = self.ring.drain()
        executions, self._executions = self._executions, []
        stamps, self.stamps = self.stamps, []
        place = 0
        for execution in executions:
            began_s = (execution.began_unix_ns - _TOLERANCE_NS) / 1e9
            ended_s = (execution.ended_unix_ns + _TOLERANCE_NS) / 1e9
            while place < len(stamps) and stamps[place].data_s < began_s:
                place += 1  # Of a step that another callback or another fit ran in between.
            own = [one for one in stamps[place : place + execution.steps] if one.data_s <= ended_s]
            place += len(own)
            missing = execution.steps - len(own)
            if missing and not (lost or own):
                warn_once(
                    "TimerCallback(phases=True): the model was traced before without phases, so FORWARD and BACKWARD "
                    "are left out where that graph runs; the rest is timed. Tracing it again would cost as much as its "
                    "first batch did: compile the model again, or train with phases from its first fit.",
                    key="callback traced before",
                )
                missing = 0
            _fail_phases(self.fit, missing)
            record_phases(self.fit, execution, own)


class StampRing:
    """Holds the stamps that a graph leaves: the newest rows, and their number so far."""

    def __init__(self, tf: Any, rows: int = _RING_ROWS) -> None:
        """Make the variables, on the CPU and outside of any distribution strategy."""
        self._tf = tf
        self.rows = rows
        self._read = 0
        self._eager: list[Stamps] = []
        self.readers: list[StampedPhases] = []
        """The fits that want the stamps."""
        made: list[Any] = []

        def make() -> None:
            with tf.init_scope(), tf.device("/CPU:0"):
                made.append(tf.Variable(tf.zeros((rows, 3), tf.float64), trainable=False, name="stamps"))
                made.append(tf.Variable(tf.zeros((), tf.int64), trainable=False, name="stamps_taken"))

        # A strategy's scope would copy the variables to each replica; scopes belong to threads.
        thread = threading.Thread(target=make, name="stamp ring")
        thread.start()
        thread.join()
        self._stamps, self._taken = made

    def put(self, stamps: StepStamps) -> None:
        """Keep a step's stamps; in a graph, whenever the graph executes."""
        row = stamps.row()
        if isinstance(row, tuple):
            self._eager.append(Stamps(*row))
            return
        tf = self._tf
        # Counted after it is written: a step without data fails half-way.
        with tf.control_dependencies([row]):
            place = self._taken.read_value() % self.rows
            written = self._stamps.scatter_nd_update(tf.reshape(place, (1, 1)), row[None])
        with tf.control_dependencies([written]):
            self._taken.assign_add(1)

    def read(self) -> tuple[list[Stamps], int]:
        """The rows since the last reading, in order, and how many the ring has lost."""
        rows, self._eager = self._eager, []
        lost = 0
        taken = int(self._taken.numpy())
        if taken > self._read:
            stamps = self._stamps.numpy()
            oldest = max(self._read, taken - self.rows)
            lost = oldest - self._read
            rows += [Stamps(*stamps[place % self.rows].tolist()) for place in range(oldest, taken)]
            self._read = taken
        return rows, lost

    def drain(self) -> int:
        """Hand the newest stamps to the fits that want them, and return how many were lost."""
        rows, lost = self.read()
        for phases in self.readers:
            phases.stamps.extend(rows)
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


_rings: WeakKeyDictionary[Any, list[StampRing]] = WeakKeyDictionary()


def _ring_of(model: Any) -> StampRing:
    # Longer executions, which are of another graph, get a larger ring; the graphs of before may write to the earlier.
    rings, rows = _rings.setdefault(model, []), max(_RING_ROWS, 4 * steps_per_execution(model))
    if not rings or rings[-1].rows < rows:
        import tensorflow as tf

        rings.append(StampRing(tf, rows))
    return rings[-1]


def _is_first_replica(tf: Any) -> bool:
    # All replicas do the same work at the same time: the first one's times stand for all.
    context = tf.distribute.get_replica_context()
    if context is None:
        return True
    number = tf.get_static_value(context.replica_id_in_sync_group)
    return number is None or int(number) == 0


def _stamped_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_for_each_replica(self: Any, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        phases: StampedPhases | None = getattr(_local, "phases", None)
        if phases is not None and phases.fit.is_running():
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
