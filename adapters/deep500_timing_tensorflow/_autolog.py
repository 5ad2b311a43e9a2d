"""The plug-ins of ``deep500-timing run`` for Keras and TensorFlow; see ``docs/run-command.md``."""

from __future__ import annotations

import functools
import sys
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from deep500_timing import TimeType
from deep500_timing.adapters import Replaced, warn_once
from deep500_timing_tensorflow._clock import CPUGPUTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Autolog

BATCH, IO, BACKWARD = (key.name for key in (TimeType.BATCH, TimeType.IO, TimeType.BACKWARD))
_OF_FIT = (BATCH, TimeType.EPOCH.name, IO, "VALIDATION")
"""The regions that the callback records where Keras runs on PyTorch, and the plug-in for PyTorch then does not."""


def _add_callback(name: str, log: Autolog) -> Callable[[], object]:
    """Add the timer's callback to each ``fit``, ``evaluate`` and ``predict`` of a Keras from now on."""
    kind: Any = sys.modules[name].callbacks.CallbackList
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        from deep500_timing_tensorflow import TimerCallback

        given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks is not None else []
        try:
            if not any(isinstance(one, TimerCallback) for one in given):
                given = [*given, TimerCallback(log.timer(CPUGPUTimer))]
                if kwargs.get("add_history"):  # a fit
                    log.claim(*_OF_FIT)
                    log.begin()
                callbacks = given
        except Exception as error:
            warn_once(f"Adding the timer's callback failed: {type(error).__name__}: {error}. The fit is not timed.")
        original(self, callbacks, *args, **kwargs)

    replaced = Replaced()
    replaced.put(kind, "__init__", __init__)
    return replaced.undo


install_keras = functools.partial(_add_callback, "keras")
install_tf_keras = functools.partial(_add_callback, "tf_keras")


class _Loop:
    """The state of a training loop that is written by hand with ``GradientTape``.

    A BATCH lasts from the end of one update to the end of the next.
    """

    def __init__(self, log: Autolog) -> None:
        self.log = log
        self.timer = log.timer(CPUGPUTimer)
        self.inside = False
        """Whether a call is being timed: those inside it are parts of it."""
        self.traced_update = False
        self.ended_ns = 0
        self.training: set[int] = set()

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

    def step(self) -> None:
        now = perf_counter_ns()
        if not {BATCH} & (self.log.taken | self.log.claimed):
            self.timer.record(BATCH, self.ended_ns, now)
        self.ended_ns = now
        self.log.begin()


def install_tensorflow(log: Autolog) -> Callable[[], object]:
    """Time loops that are written by hand: the data, the gradient, the update; a ``tf.function`` as one region."""
    import tensorflow as tf
    from tensorflow.python.data.ops import iterator_ops
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    loop = _Loop(log)
    replaced = Replaced()

    def put(owner: Any, name: str, timed: Callable[[Any, Callable[[], Any]], Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return timed(self, functools.partial(original, self, *args, **kwargs))
            except BaseException as error:
                # No frame of this module is for a traceback.
                trace = error.__traceback__
                while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
                    trace = trace.tb_next
                error.__traceback__ = trace
                raise

        replaced.put(owner, name, ours)

    def next_batch(_iterator: Any, call: Callable[[], Any]) -> Any:
        return loop.call(IO, call) if tf.executing_eagerly() else call()

    def gradient(_tape: Any, call: Callable[[], Any]) -> Any:
        # By now the optimizer is there. TensorFlow may be imported while Keras is, which cannot be waited for.
        for name in {"keras", "tf_keras"} & sys.modules.keys() - patched:
            patched.add(name)
            put(sys.modules[name].optimizers.Optimizer, "apply_gradients", update)
        return loop.call(BACKWARD, call) if tf.executing_eagerly() else call()

    def update(_optimizer: Any, call: Callable[[], Any]) -> Any:
        if not tf.executing_eagerly():
            loop.traced_update = True
            return call()
        outermost = not loop.inside
        result = loop.call("optimizer", call)
        if outermost:
            loop.step()
        return result

    def function(compiled: Any, call: Callable[[], Any]) -> Any:
        if loop.inside or not tf.executing_eagerly() or BATCH in log.claimed:
            return call()
        loop.traced_update = False
        result = loop.call("tf.function", call)
        if loop.traced_update:
            loop.training.add(id(compiled))
        if id(compiled) in loop.training:
            log.note("tf.function: what runs inside it is one region; FORWARD and BACKWARD are not told apart.")
            loop.step()
        return result

    patched: set[str] = set()
    put(iterator_ops.OwnedIterator, "__next__", next_batch)
    put(tf.GradientTape, "gradient", gradient)
    put(polymorphic_function.Function, "__call__", function)
    return replaced.undo
