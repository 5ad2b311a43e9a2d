"""What Keras does not hand to a callback: its backend, its list of callbacks, and the data of a fit."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from deep500_timing.adapters import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from deep500_timing import Timer

    F = TypeVar("F", bound=Callable[..., Any])


ON_TENSORFLOW = ("tensorflow", "tf_keras")

_LOOPS = frozenset({"fit", "evaluate", "predict"})


def backend_of(model: object) -> str:
    """What runs a model: ``"tensorflow"``, ``"jax"``, ``"torch"`` or another of Keras 3, or ``"tf_keras"``."""
    for kind in type(model).__mro__:
        if kind.__module__.partition(".")[0] == "tf_keras":
            return "tf_keras"
    keras: Any = sys.modules.get("keras")
    return "unknown" if keras is None else str(keras.backend.backend())


def steps_per_execution(model: Any) -> int:
    """How many batches a model trains on between two calls of the batch hooks."""
    steps = getattr(model, "steps_per_execution", None)
    if steps is None:
        steps = getattr(model, "_steps_per_execution", None)
    if steps is None:
        return 1
    return int(steps.numpy()) if hasattr(steps, "numpy") else int(steps)


def calling_list() -> Any:
    """The ``CallbackList`` that is calling a hook on this thread, of either Keras; None if there is none."""
    for frame in _frames(2):
        owner = frame.f_locals.get("self")
        if any(kind.__name__ == "CallbackList" for kind in type(owner).__mro__):
            return owner
    return None


def data_of_loop(callbacks: Any) -> Any:
    """The ``EpochIterator`` or ``DataHandler`` of the ``fit`` that a list belongs to; None if it is not found."""
    frame = _loop_of(callbacks)
    if frame is None:
        return None
    found = frame.f_locals
    return found.get("epoch_iterator", found.get("data_handler"))  # Keras 3, tf_keras


def is_running(callbacks: Any) -> bool:
    """Whether this thread is inside the ``fit``, ``evaluate`` or ``predict`` that a list of callbacks belongs to."""
    return _loop_of(callbacks) is not None


def _loop_of(callbacks: Any) -> FrameType | None:
    for frame in _frames(3):
        if frame.f_code.co_name in _LOOPS and frame.f_locals.get("callbacks") is callbacks:
            return frame
    return None


def _frames(depth: int) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        yield frame
        frame = frame.f_back


def warn_fault(where: str, error: Exception) -> None:
    """Warn once that timing itself failed; the fit goes on."""
    warn_once(
        f"TimerCallback failed in {where} and goes on with the other times; the fit is not affected: "
        f"{type(error).__name__}: {error}",
        key=f"callback {where} {type(error).__name__}",
    )


def guarded(hook: F) -> F:
    """A hook that costs one warning if it fails, never the fit."""

    @functools.wraps(hook)
    def guarded_hook(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception as error:
            warn_fault(hook.__name__, error)

    return guarded_hook  # type: ignore[return-value]


def can_time_gpu(backend: str, timer: Timer) -> bool:
    """Whether the timer's device clock gives true times of what this backend launches."""
    if timer.device.is_lazy:
        clock: Any = timer.device.find_for_regions().clock  # Warns if there is none.
    else:
        clock = timer.device.clock
        if clock is None:
            warn_once("TimerCallback(gpu=True): No GPU times, CPU times go on. The timer has no device to time.")
    if clock is None:
        return False
    clocks: Any = sys.modules.get("deep500_timing_tensorflow._clock")
    if backend in ON_TENSORFLOW or clocks is None or not isinstance(clock, clocks.CupyEventClock):
        return True
    remedy = (
        "Pass a timer of the torch adapter: TimerCallback(deep500_timing_torch.CPUGPUTimer(), gpu=True)."
        if backend == "torch"
        else "Use gpu=False: each batch ends when its logs have reached the host, so its CPU time holds its GPU work."
    )
    warn_once(
        f"TimerCallback(gpu=True): CuPy's events are not ordered with the kernels that Keras launches through "
        f"{backend}, so no GPU times are taken; CPU times go on. {remedy}",
        key=f"callback gpu {backend}",
    )
    return False


def can_time_io(wanted: bool | str, backend: str, several: int, seen: bool) -> bool:
    """Whether the data itself gives the wait for each batch."""
    if wanted is False:
        return False
    if seen and (wanted is True or several == 1 or backend not in ON_TENSORFLOW):
        return True
    if seen:
        reason = (
            f"with steps_per_execution={several} a batch is fetched inside the compiled loop, where the one before it "
            "may still be trained on"
        )
        remedy = "io=True takes the whole of each fetch for a wait"
    else:
        reason = "the iterator of fit was not found"
        remedy = "time your own iterator with timer.iterate, or say io=False"
    warn_once(
        f"TimerCallback: the wait for data (IO) is not timed: {reason}. Remedy: {remedy}.",
        key=f"callback io {backend} {several > 1} {seen}",
    )
    return False


def warn_no_phases() -> None:
    warn_once(
        "TimerCallback(phases=True): the model's train_step does not take exactly one gradient, with a tf.GradientTape "
        "or by backward(), so FORWARD and BACKWARD cannot be told apart and are left out; the rest is timed. Let the "
        "step do so, or time its parts yourself with timer.region.",
        key="callback no passes",
    )


def warn_traced_before() -> None:
    warn_once(
        "TimerCallback(phases=True): the model was traced before without phases, so FORWARD and BACKWARD are left out "
        "where that graph runs; the rest is timed. Tracing it again "
        "would cost as much as its first batch did: compile the model again, or train with phases from its first fit.",
        key="callback traced before",
    )


def why_no_phases(model: Any, backend: str) -> str | None:
    """Why the passes of a model cannot be timed, with the remedy; None if they can."""
    if backend == "jax":
        return (
            "On JAX both passes are one compiled computation, which XLA reorders freely: a call to the host inside it "
            "would change it, and pieces compiled one by one would not be what fit runs. jax.profiler.trace shows its "
            "parts."
        )
    if backend not in (*ON_TENSORFLOW, "torch"):
        return f"The backend {backend!r} is not known."
    if getattr(model, "jit_compile", False):
        return (
            "The step is compiled as a whole and takes no time stamps inside. Compile the model with "
            "jit_compile=False; on TensorFlow, tf.function(model.call, jit_compile=True) keeps XLA for the model."
        )
    return None if backend == "torch" else why_no_stamps()


def why_no_stamps() -> str | None:
    """Why a step on TensorFlow cannot be stamped in this process, with the remedy; None if it can."""
    tf: Any = sys.modules["tensorflow"]
    try:
        from tensorflow.python.framework.config import is_op_determinism_enabled

        deterministic = bool(is_op_determinism_enabled())
    except ImportError:
        deterministic = False
    if deterministic:
        return (
            "tf.config.experimental.enable_op_determinism() forbids reading the clock in a graph. "
            "Seed with keras.utils.set_random_seed alone while timing."
        )
    if tf.config.list_physical_devices("GPU"):
        return (
            "On a GPU a stamp in the graph says when the kernels were queued, not when they ran. "
            "Use gpu=True for the batch, and tf.profiler.experimental for its parts."
        )
    return None
