"""The plug-ins of ``deep500-timing run`` for Keras and TensorFlow; see ``docs/run-command.md``."""

from __future__ import annotations

import functools
import sys
from threading import get_ident, local, main_thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from deep500_timing.adapters import Replaced, after_import, makers, warn_once
from deep500_timing.loop import (
    BACKWARD,
    BATCH,
    EPOCH,
    FORWARD,
    GRAD,
    INSIDE,
    IO,
    NAMES,
    NO_GRAD,
    STEP,
    VALIDATION,
    Loops,
)
from deep500_timing_tensorflow._clock import CPUGPUTimer
from deep500_timing_tensorflow._traces import Traces

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Autolog

_OF_FIT = (BATCH, EPOCH, NAMES[IO], VALIDATION)
"""The regions that the callback records where Keras runs on PyTorch, and the plug-in for PyTorch then does not."""
_CALLS = {"evaluate": "TEST", "test_on_batch": "TEST", "predict": "PREDICT", "predict_on_batch": "PREDICT"}
"""Methods of a Keras model that are timed as a whole, its set-up of them included, and their regions."""


class _Here(local):
    is_timed = False
    """Whether this thread is in a call that is timed as a whole: nothing inside is."""
    tape: Any = None
    """The outermost tape that is watching, and the state of its FORWARD."""
    state = INSIDE


_here = _Here()


def _time_models(name: str, log: Autolog) -> Callable[[], object]:
    """Add the timer's callback to each ``fit`` of a Keras from now on, and time its other calls as a whole."""
    keras: Any = sys.modules[name]
    original = keras.callbacks.CallbackList.__init__
    timer, replaced = log.timer(CPUGPUTimer), Replaced()
    fits: list[Any] = []

    @functools.wraps(original)
    def __init__(self: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        from deep500_timing_tensorflow import TimerCallback

        given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks is not None else []
        try:
            if not _here.is_timed and not any(isinstance(one, TimerCallback) for one in given):
                ours = TimerCallback(timer)
                ours._options.counts_samples = False  # No view of a run has them.
                given = [*given, ours]
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
        if _here.is_timed or region.is_open or "_use_cached_eval_dataset" in call.keywords:
            return call()
        loop = log.loops and log.loops.here()
        if region.name == "TEST" and loop:
            loop.pause()  # no part of a step
        _here.is_timed = True
        try:
            with region:
                return call()
        finally:
            _here.is_timed = False
            if loop:
                loop.forget_evaluation()  # on PyTorch

    def fit(model: Any, call: Callable[[], Any]) -> Any:
        fits.append(model)
        try:
            return call()
        finally:
            fits.pop()
            if not fits:
                log.release(*_OF_FIT)

    if keras.backend.backend() == "torch":
        _put(replaced, keras.optimizers.Optimizer, "apply", functools.partial(_step, log))
    _put(replaced, keras.Model, "fit", fit)
    replaced.put(keras.callbacks.CallbackList, "__init__", __init__)
    for method in _CALLS:
        _put(replaced, keras.Model, method, whole)
    return replaced.undo


def _step(log: Autolog, optimizer: Any, call: Callable[[], Any]) -> Any:
    loop = Loops.of(log, CPUGPUTimer).here()
    loop.begin_step(optimizer)
    result = call()
    loop.end_step(optimizer)
    return result


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


def install_tensorflow(log: Autolog) -> Callable[[], object]:
    """Time loops that are written by hand: data, tapes, gradients, updates; a ``tf.function`` as one region.

    FORWARD lasts as long as a tape watches, and until it is asked for a gradient.
    """
    import tensorflow as tf
    from tensorflow.python.data.ops import iterator_ops
    from tensorflow.python.eager.polymorphic_function import polymorphic_function
    from tensorflow.python.ops import script_ops

    loops = Loops.of(log, CPUGPUTimer)
    timer = loops.timer
    replaced, traces = Replaced(), Traces(timer)
    kinds: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
    """The event that a call of a compiled function is; one that neither updates nor asks for a gradient is not here."""
    traced: set[int] = set()
    """The events in the functions that are being traced, on any thread."""

    def is_seen() -> bool:
        return not _here.is_timed and bool(tf.executing_eagerly())

    def take(event: int, call: Callable[[], Any], source: int = 0) -> Any:
        loop = loops.here()
        state = loop.begin(event)
        if state == INSIDE:
            return call()
        try:
            result = call()
        except StopIteration:
            loop.end_of_data(state, source)
            raise
        except BaseException:
            loop.fail(state)
            raise
        loop.end(state)
        return result

    def iterate(_data: Any, call: Callable[[], Any]) -> Any:
        begun_ns, iterator = timer.now_ns(), call()
        if is_seen():
            loops.here().begin_data(id(iterator), begun_ns)
        return iterator

    def next_batch(iterator: Any, call: Callable[[], Any]) -> Any:
        return take(IO, call, id(iterator)) if is_seen() else call()

    def watch(tape: Any, call: Callable[[], Any]) -> Any:
        result = call()
        if _here.tape is None and is_seen():
            state = loops.here().begin(FORWARD)
            if state != INSIDE:
                _here.tape, _here.state = tape, state
        return result

    def watched(tape: Any, error: object = None) -> None:
        if _here.tape is tape:
            _here.tape, loop = None, loops.here()
            (loop.end if error is None else loop.fail)(_here.state)

    def leave(tape: Any, call: functools.partial[Any]) -> Any:
        watched(tape, *call.args[1:2])
        return call()

    def gradient(tape: Any, call: Callable[[], Any]) -> Any:
        if not tf.executing_eagerly():
            traced.add(GRAD)
        watched(tape)
        return take(BACKWARD, call) if is_seen() else call()

    def update(optimizer: Any, call: Callable[[], Any]) -> Any:
        if not tf.executing_eagerly():
            traced.add(STEP)
        return _step(log, optimizer, call) if is_seen() else call()

    def function(compiled: Any, call: Any) -> Any:
        if not tf.executing_eagerly() and compiled in kinds:
            traced.add(kinds[compiled])  # It may have its trace already.
        if not is_seen() or tf.config.functions_run_eagerly() or BATCH in log.claimed:
            return call()
        loops.here().end_at_limit(id(compiled))
        traced.clear()
        _here.is_timed, start_ns = True, timer.now_ns()
        try:
            result = traces.call(compiled, call)
        finally:
            _here.is_timed = False
        end_ns = timer.now_ns()
        loops.record("tf.function", start_ns, end_ns)
        if traced:
            kinds[compiled] = STEP if STEP in traced else GRAD
        event, loop = kinds.get(compiled, NO_GRAD), loops.here()
        if event == STEP:
            log.note("tf.function: a call is one region; FORWARD and BACKWARD are not told apart.")
        if not loop.depth:
            loop.add_unnamed(event, id(compiled), start_ns, end_ns)
        return result

    def evaluate(_model: Any, call: Callable[[], Any]) -> Any:
        return take(NO_GRAD, call) if is_seen() and _here.tape is None and BATCH not in log.claimed else call()

    def run_python(_registry: Any, call: Callable[[], Any]) -> Any:
        # What tf.data calls of the program: a generator, a function of `map`.
        ident = get_ident()
        if ident == main_thread().ident or ident in makers:
            return call()
        makers.add(ident)
        try:
            return call()
        finally:
            makers.discard(ident)

    put = functools.partial(_put, replaced)

    def watch_keras(name: str) -> None:
        # With another backend, TensorFlow may be imported too, and executes eagerly while JAX traces a step.
        keras: Any = sys.modules[name]
        if keras.backend.backend() == "tensorflow":
            put(keras.Model, "__call__", evaluate)
            kind = keras.optimizers.Optimizer  # Keras 3's `apply_gradients` calls its `apply`.
            put(kind, "apply" if hasattr(kind, "apply") else "apply_gradients", update)

    # A Keras that imports TensorFlow is not there yet.
    requests = [after_import(name, functools.partial(watch_keras, name)) for name in ("keras", "tf_keras")]
    put(script_ops.FuncRegistry, "__call__", run_python)
    put(tf.data.Dataset, "__iter__", iterate)
    put(iterator_ops.OwnedIterator, "__next__", next_batch)
    put(tf.GradientTape, "__enter__", watch)
    put(tf.GradientTape, "__exit__", leave)
    put(tf.GradientTape, "gradient", gradient)
    put(polymorphic_function.Function, "__call__", function)

    def undo() -> None:
        for take_back in requests:
            take_back()
        replaced.undo()

    return undo
