"""FORWARD and BACKWARD on TensorFlow: a train function of the same model that stamps its steps.

The model's own train function is not touched. Keras is asked for a second one, traced with anchors, which runs in its
place while the callback is there; its stamps go into a small ring in memory that is read now and then.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from deep500_timing_tensorflow._anchors import StepStamps, stamping, watched_tapes
from deep500_timing_tensorflow._keras_facts import steps_per_execution
from deep500_timing_tensorflow._phases import Stamps
from deep500_timing_tensorflow._step import warn_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deep500_timing_tensorflow._phases import PhaseMatcher

_RING_ROWS = 1024
"""More than the batches between two readings; 32 bytes each."""

_MISSING: Any = object()


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
        made: list[Any] = []

        def make() -> None:
            with tf.init_scope(), tf.device("/CPU:0"):
                made.append(tf.Variable(tf.zeros((rows, 4), tf.float64), trainable=False, name="stamps"))
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
        # Nothing is counted before it is there: a step without data fails half-way.
        with tf.control_dependencies([row]):
            place = self._taken.read_value() % self._rows
            written = self._stamps.scatter_nd_update(tf.reshape(place, (1, 1)), row[None])
        with tf.control_dependencies([written]):
            self._taken.assign_add(1)

    def read(self) -> list[Stamps]:
        """The rows since the last reading, in order; those that the ring has lost are left out."""
        rows, self._eager = self._eager, []
        taken = int(self._taken.numpy())
        if taken > self._read:
            stamps = self._stamps.numpy()
            oldest = max(self._read, taken - self._rows)
            rows += [Stamps(*map(float, stamps[place % self._rows])) for place in range(oldest, taken)]
            self._read = taken
        return rows


class GraphPhases:
    """Stamps the steps of one model on TensorFlow.

    Args:
        model: The model, of Keras 3 or of tf_keras.
    """

    def __init__(self, model: Any) -> None:
        """Nothing is traced yet."""
        import tensorflow as tf

        self._tf: Any = tf
        self._model = model
        self._ring = StampRing(self._tf, max(_RING_ROWS, 4 * steps_per_execution(model)))
        self._readers: list[PhaseMatcher] = []
        self._original: Callable[..., Any] | None = None
        self._stamped: Callable[..., Any] | None = None

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], listeners: list[Any]) -> Any:
        """Execute the stamped train function in place of ``function``."""
        for listener in listeners:
            if listener.matcher not in self._readers:
                self._readers.append(listener.matcher)
        if function is not self._original:
            self._original = function
            self._stamped = self._make()
        if self._stamped is None:
            return function(*args)
        with watched_tapes(self._tf), self._stamped_step():
            return self._stamped(*args)

    def drain(self) -> None:
        """Hand the newest stamps to whoever reads them."""
        rows = self._ring.read()
        for reader in self._readers:
            reader.take(rows)

    def leave(self, reader: PhaseMatcher) -> None:
        """Hand a reader nothing any more."""
        if reader in self._readers:
            self._readers.remove(reader)

    def _make(self) -> Callable[..., Any] | None:
        attributes = vars(self._model)
        names = ("train_function", "train_tf_function")
        before = {name: attributes.get(name, _MISSING) for name in names}
        try:
            with self._stamped_step():
                self._model.make_train_function(force=True)
            made: Callable[..., Any] = attributes["train_function"]
            return made
        except Exception as error:
            warn_fault("making a stamped train function", error)
            return None
        finally:
            _put_back(attributes, before)

    @contextlib.contextmanager
    def _stamped_step(self) -> Iterator[None]:
        # Keras looks train_step up when it makes the train function, tf_keras whenever it traces.
        attributes = vars(self._model)
        before = {"train_step": attributes.get("train_step", _MISSING)}
        attributes["train_step"] = self._wrap(self._model.train_step)
        try:
            yield
        finally:
            _put_back(attributes, before)

    def _wrap(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        tf = self._tf

        def stamped(data: Any) -> Any:
            if not _is_first_replica(tf):
                return train_step(data)
            stamps = StepStamps(tf)
            with stamping(stamps):
                outputs = train_step(stamps.data(data))
            self._ring.put(stamps)
            return outputs

        # Neither Keras has AutoGraph convert a step; it must not begin with this one.
        unconverted: Callable[..., Any] = tf.autograph.experimental.do_not_convert(stamped)
        return unconverted


def _is_first_replica(tf: Any) -> bool:
    # All replicas do the same work at the same time: the first one's times stand for all.
    context = tf.distribute.get_replica_context()
    if context is None:
        return True
    number = tf.get_static_value(context.replica_id_in_sync_group)
    return number is None or int(number) == 0


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = value
