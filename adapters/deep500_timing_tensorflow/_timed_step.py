"""Times a custom training step on TensorFlow, compiled by ``tf.function`` or not."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from deep500_timing import TimingError
from deep500_timing.adapters import check_timer, warn_once
from deep500_timing_tensorflow._keras import warn_fault, why_no_stamps
from deep500_timing_tensorflow._phases import WATCHED_TAPES, Stamps, StepStamps, record_phases, stamping
from deep500_timing_tensorflow._regions import BATCH, COMPILE, Execution, Regions

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Timer


def timed_step(step: Callable[..., Any], timer: Timer, *, gpu: bool = False) -> Callable[..., Any]:
    """The same training step, which also times BATCH, FORWARD and BACKWARD.

    ::

        @tf.function
        def train_step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        step = timer.timed_step(train_step, tmr)
        for x, y in tmr.iterate(dataset):  # IO
            step(x, y)

    FORWARD goes from the arguments to the loss, BACKWARD from the loss to the gradients, by stamps in the graph that
    its optimizer cannot move; the rest of BATCH is the update. Calls that trace are in ``"compile"`` as well. The step
    has to ask one tape for one gradient, on its thread; otherwise, and where stamps are impossible (XLA, op
    determinism, a GPU), BATCH alone is timed and one warning says why.

    Args:
        step: A Python function, which then runs eagerly, or a ``tf.function``, which is traced again with its options.
        timer: Where the times go.
        gpu: Whether BATCH is timed on the GPU as well, which waits for it, see ``CPUGPUTimer``.

    Raises:
        TypeError: ``timer`` is not a timer, or ``step`` is not callable.
    """
    if not callable(step):
        raise TypeError(f"timed_step({step!r}): pass a function, or the result of tf.function.")
    check_timer(f"timed_step(step, {timer!r})", timer)
    import tensorflow as tf

    reason = why_no_stamps()
    if getattr(step, "_jit_compile", None):
        reason = "The step is compiled as a whole by XLA and takes no time stamps inside: use jit_compile=False for it."
    if reason is not None:
        warn_once(f"timed_step: FORWARD and BACKWARD are not timed, BATCH is. {reason}", key=f"timed_step {reason}")
    function: Callable[..., Any] = getattr(step, "python_function", step)
    is_compiled = function is not step
    is_traced = False
    regions = Regions(timer)

    @functools.wraps(function)
    def stamped(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_traced
        is_traced = is_compiled
        stamps = StepStamps(tf)
        with stamping(stamps):
            args, kwargs = stamps.data((args, kwargs))
            outputs = function(*args, **kwargs)
        return outputs, stamps.row()

    stamped_step: Any = stamped
    if is_compiled and reason is None:
        traceable: Any = step
        stamped_step = traceable._clone(stamped)

    @functools.wraps(function)
    def timed_training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_traced
        if not tf.executing_eagerly():
            raise TimingError(
                "Calling a timed step inside a tf.function: it would be timed when the graph is traced. Pass the "
                "tf.function to timed_step, not the result of timed_step to tf.function."
            )
        is_traced = False
        execution = Execution()
        execution.began_ns, execution.began_unix_ns = regions.start(BATCH, gpu), time.time_ns()
        row = None
        try:
            if reason is None:
                with WATCHED_TAPES:
                    outputs, row = stamped_step(*args, **kwargs)
            else:
                outputs = step(*args, **kwargs)
        except BaseException:
            regions.fail_all()
            raise
        try:
            execution.steady = not is_traced
            ended_ns = timer.now_ns()
            execution.took_ns = regions.end(BATCH) or 0
            if is_traced:
                timer.record(COMPILE, execution.began_ns, ended_ns)
            if row is not None:
                # A graph's is on the CPU: it was there when the function returned.
                times = row if isinstance(row, tuple) else map(float, row.numpy())
                record_phases(regions, execution, [Stamps(*times)])
        except Exception as error:
            warn_fault("timed_step", error)
        return outputs

    return timed_training_step
