"""The plug-ins of ``deep500-timing run`` for Keras and TensorFlow; see ``docs/run-command.md``."""

from __future__ import annotations

import functools
import sys
from threading import local
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from deep500_timing import TimeType
from deep500_timing.adapters import Replaced, after_import, warn_once
from deep500_timing_tensorflow._clock import CPUGPUTimer
from deep500_timing_tensorflow._traces import Traces

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Autolog

BATCH, IO, BACKWARD = (key.name for key in (TimeType.BATCH, TimeType.IO, TimeType.BACKWARD))
_KERASES = ("keras", "tf_keras")
_WITHOUT = 4
"""Steps without an update before a program is taken to have no optimizer: it may be accumulating."""
_OF_FIT = (BATCH, TimeType.EPOCH.name, IO, "VALIDATION")
"""The regions that the callback records where Keras runs on PyTorch, and the plug-in for PyTorch then does not."""


_CALLS = {"evaluate": "TEST", "test_on_batch": "TEST", "predict": "PREDICT", "predict_on_batch": "PREDICT"}
"""Methods of a Keras model that are timed as a whole, its set-up of them included, and their regions."""


def _time_models(name: str, log: Autolog) -> Callable[[], object]:
    """Add the timer's callback to each ``fit`` of a Keras from now on, and time its other calls as a whole."""
    keras: Any = sys.modules[name]
    original = keras.callbacks.CallbackList.__init__
    timer, replaced, here = log.timer(CPUGPUTimer), Replaced(), _Here()

    @functools.wraps(original)
    def __init__(self: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        from deep500_timing_tensorflow import TimerCallback

        given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks is not None else []
        try:
            if not here.is_timed and not any(isinstance(one, TimerCallback) for one in given):
                given = [*given, TimerCallback(timer)]
                if kwargs.get("add_history"):  # a fit
                    log.claim(*_OF_FIT)
                    log.begin()
                callbacks = given
        except Exception as error:
            warn_once(f"Adding the timer's callback failed: {type(error).__name__}: {error}. The fit is not timed.")
        original(self, callbacks, *args, **kwargs)

    def whole(_model: Any, call: functools.partial[Any]) -> Any:
        region = timer.region(_CALLS[call.func.__name__])
        # Inside a fit, its callback times the validation; inside another of these calls, that one is timed.
        if here.is_timed or region.is_open or "_use_cached_eval_dataset" in call.keywords:
            return call()
        here.is_timed = True
        try:
            with region:
                return call()
        finally:
            here.is_timed = False

    replaced.put(keras.callbacks.CallbackList, "__init__", __init__)
    for method in _CALLS:
        _put(replaced, keras.Model, method, whole)
    return replaced.undo


class _Here(local):
    is_timed = False
    """Whether this thread is in a call that is timed as a whole."""


def _put(replaced: Replaced, owner: Any, name: str, timed: Callable[[Any, functools.partial[Any]], Any]) -> None:
    # Replace a method; a traceback has no frame of this module.
    original = getattr(owner, name)

    @functools.wraps(original)
    def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return timed(self, functools.partial(original, self, *args, **kwargs))
        except BaseException as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
                trace = trace.tb_next
            error.__traceback__ = trace
            raise

    replaced.put(owner, name, ours)


install_keras = functools.partial(_time_models, "keras")
install_tf_keras = functools.partial(_time_models, "tf_keras")


class _Loop:
    """The state of a training loop that is written by hand with ``GradientTape``.

    A BATCH lasts from the end of one step to the end of the next. A step ends with its first optimizer's update; in a
    program without an optimizer, where data or a gradient is asked for after a gradient.
    """

    def __init__(self, log: Autolog) -> None:
        self.log = log
        self.timer = log.timer(CPUGPUTimer)
        self.inside = False
        """Whether a call is being timed: those inside it are parts of it."""
        self.traced_update = self.traced_gradient = False
        self.ended_ns = 0
        self.training: WeakSet[Any] = WeakSet()
        """The compiled functions that update."""
        self.asking: WeakSet[Any] = WeakSet()
        """Those that ask for a gradient."""
        self._updated: set[int] = set()
        """The optimizers, and compiled functions, that have updated in this step."""
        self._has_optimizer = self._has_gradient = False
        self._gradients = 0
        self._without: list[int] = []
        """Where steps without an update ended, until there are enough to believe it."""
        log.before_report(self.next_begins)

    def gradient_ended(self) -> None:
        """A gradient is there, and an update may follow."""
        self._has_gradient = True

    def next_begins(self) -> None:
        """Data, or a gradient, is asked for: without an optimizer, the step with the last gradient is over."""
        if self._has_gradient and not self._has_optimizer:
            self._without.append(perf_counter_ns())
            self._gradients += 1
            if self._gradients >= _WITHOUT:
                for end_ns in self._without:
                    self._end(end_ns)
                self._without.clear()
        self._has_gradient = False

    def call(self, name: str, call: Callable[[], Any]) -> Any:
        """Call a function inside a region of that name, unless it lies in another of these."""
        if self.inside or name in self.log.taken or name in self.log.claimed:
            return call()
        self.ended_ns = self.ended_ns or perf_counter_ns()
        self.inside = True
        self.timer.start(name)
        try:
            result = call()
        except StopIteration:
            self.timer.cancel(name)
            raise
        except BaseException:
            self.timer.fail(name)
            raise
        finally:
            self.inside = False
        self.timer.end(name)
        return result

    def updated(self, what: object) -> None:
        """An optimizer, or a compiled function, has updated. The first that does so again ends the next step."""
        self._has_optimizer = True
        if self._updated and id(what) not in self._updated:
            self._updated.add(id(what))
            return
        self._updated = {id(what)}
        self._end(perf_counter_ns())

    def _end(self, end_ns: int) -> None:
        if not {BATCH} & (self.log.taken | self.log.claimed) and end_ns > self.ended_ns:
            self.timer.record(BATCH, self.ended_ns, end_ns)
        self.ended_ns = end_ns
        self.log.begin()


def install_tensorflow(log: Autolog) -> Callable[[], object]:
    """Time loops that are written by hand: the data, the gradient, the update; a ``tf.function`` as one region."""
    import tensorflow as tf
    from tensorflow.python.data.ops import iterator_ops
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    loop = _Loop(log)
    replaced = Replaced()

    put = functools.partial(_put, replaced)

    def watch_optimizers(name: str) -> None:
        kind: Any = sys.modules[f"{name}.optimizers"].Optimizer
        for method in {"apply", "apply_gradients"} & {*dir(kind)}:  # Keras 3's one calls the other.
            put(kind, method, update)

    def next_batch(_iterator: Any, call: Callable[[], Any]) -> Any:
        if not tf.executing_eagerly():
            return call()
        loop.next_begins()
        return loop.call(IO, call)

    def gradient(_tape: Any, call: Callable[[], Any]) -> Any:
        if not tf.executing_eagerly():
            loop.traced_gradient = True
            return call()
        if loop.inside:
            return call()
        loop.next_begins()
        result = loop.call(BACKWARD, call)
        loop.gradient_ended()
        return result

    def update(optimizer: Any, call: Callable[[], Any]) -> Any:
        if not tf.executing_eagerly():
            loop.traced_update = True
            return call()
        outermost = not loop.inside
        result = loop.call("optimizer", call)
        if outermost:
            loop.updated(optimizer)
        return result

    def function(compiled: Any, call: Any) -> Any:
        if loop.inside or not tf.executing_eagerly() or BATCH in log.claimed:
            return call()
        loop.traced_update = loop.traced_gradient = False
        result = loop.call("tf.function", functools.partial(traces.call, compiled, call))
        if loop.traced_update:
            loop.training.add(compiled)
        if loop.traced_gradient:
            loop.asking.add(compiled)
        if compiled in loop.training:
            log.note("tf.function: what runs inside it is one region; FORWARD and BACKWARD are not told apart.")
            loop.updated(compiled)
        elif compiled in loop.asking:
            loop.next_begins()
            loop.gradient_ended()
        return result

    traces = Traces(loop.timer)
    # A Keras that imports TensorFlow is not there yet.
    requests = [after_import(f"{name}.optimizers", functools.partial(watch_optimizers, name)) for name in _KERASES]
    put(iterator_ops.OwnedIterator, "__next__", next_batch)
    put(tf.GradientTape, "gradient", gradient)
    put(polymorphic_function.Function, "__call__", function)

    def undo() -> None:
        for take_back in requests:
            take_back()
        replaced.undo()

    return undo
