"""What Keras does not hand to a callback: its backend, its list, the data of a fit, traces, checkpoints."""

from __future__ import annotations

import functools
import sys
from time import time_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from deep500_timing.adapters import Replaced, warn_once
from deep500_timing_tensorflow._clock import CupyEventClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from deep500_timing import Timer

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
    found = (getattr(model, name, None) for name in ("steps_per_execution", "_steps_per_execution"))
    return int(next((steps for steps in found if steps is not None), 1))


def calling_list() -> Any:
    """The ``CallbackList`` that is calling a hook on this thread, of either Keras; None if there is none."""
    for frame in _frames(2):
        owner = frame.f_locals.get("self")
        if any(kind.__name__ == "CallbackList" for kind in type(owner).__mro__):
            return owner
    return None


def data_of_loop(callbacks: Any) -> Any:
    """The ``EpochIterator`` or ``DataHandler`` of the ``fit`` that a list belongs to; None if it is not found."""
    frame = loop_of(callbacks)
    if frame is None:
        return None
    found = frame.f_locals
    return found.get("epoch_iterator", found.get("data_handler"))  # Keras 3, tf_keras


_SOURCES = {
    "Grain": "grain",
    "PyDataset": "PyDataset",
    "Sequence": "PyDataset",
    "Generator": "generator",
    "Loader": "DataLoader",
    "Dataset": "tf.data",
    "Array": "arrays",
    "Tensor": "arrays",
}
"""What a fit is fed with, by a part of the name of Keras's adapter for it."""
_trainings: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()
"""The newest fit of a run: its model, optimizer and batches. A loop of fits with the same ones is one training."""


def note_fit(timer: Timer, model: Any, backend: str, data: Any) -> None:
    """Note in the run what a fit runs on and is fed with: findings name it, and what helps there."""
    if timer.run is None:
        return
    adapter = getattr(data, "data_adapter", getattr(data, "_adapter", None))
    source = next((source for part, source in _SOURCES.items() if part in type(adapter).__name__), "")
    parts = [ref(one) for one in (model, getattr(model, "optimizer", None)) if one is not None]
    training = *parts, source, getattr(adapter, "batch_size", None)
    if _trainings.setdefault(timer.run, training) != training:
        timer.run.event("training")  # its steps are not compared with those before
    _trainings[timer.run] = training
    eager = getattr(model, "run_eagerly", False)
    if backend in ON_TENSORFLOW:
        eager = eager or sys.modules["tensorflow"].config.functions_run_eagerly()
    # Whether the program asked for it to be off: Keras itself uses no XLA without a GPU.
    choose = getattr(model, "_resolve_auto_jit_compile", bool)
    could_jit = backend == "tensorflow" and not (eager or model.jit_compile) and choose()
    timer.run.declare("fits", unix_us="int", backend="name", data="name", eager="int", could_jit="int")
    row = time_ns() // 1000, backend, source, int(bool(eager) and backend != "torch"), int(could_jit)
    timer.run.add("fits", row)


def loop_of(callbacks: Any) -> FrameType | None:
    """The frame of the ``fit``, ``evaluate`` or ``predict`` of a list of callbacks; None outside of it."""
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


def guarded(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that costs one warning if it fails, never the fit."""

    @functools.wraps(hook)
    def guarded_hook(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception as error:
            warn_fault(hook.__name__, error)

    return guarded_hook


def can_time_gpu(backend: str, timer: Timer) -> bool:
    """Whether the timer's device clock gives true times of what this backend launches."""
    clock: Any = timer.device.find_for_regions().clock
    if clock is None:
        if not timer.device.is_lazy:  # Which warns itself.
            warn_once("TimerCallback(gpu=True): No GPU times, CPU times go on. The timer has no device to time.")
        return False
    if backend in ON_TENSORFLOW or not isinstance(clock, CupyEventClock):
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
    from tensorflow.python.framework.config import is_op_determinism_enabled

    tf: Any = sys.modules["tensorflow"]
    if is_op_determinism_enabled():
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


# --- traces -----------------------------------------------------------------------------------------------------------

_COUNTERS = ("experimental_get_tracing_count", "_cache_size")
"""How compiled functions count: those of TensorFlow their traces, those of JAX their compilations."""
_DYNAMO = "_torchdynamo_orig_callable"

# XLA under TensorFlow has no count: it compiles for each new size of a batch.
_sizes_had: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


class TraceCounts:
    """The traces and compilations of one train function until now; it does not hold the function.

    A train function of Keras is a Python function around compiled ones, which it holds in its closure.
    """

    def __init__(self, function: Any) -> None:
        self.function: Callable[[], Any] = _no_function if function is None else ref(function)
        self._counters: list[tuple[Callable[[Any], int], Callable[[], Any]]] = []
        self._compiled_by_xla: list[Callable[[], Any]] = []
        found_ones = _functions_in(function)
        # A function that a compiled one calls is traced as a part of it, so it is not counted.
        inner = {id(part) for found in found_ones for part in _functions_in(found) if part is not found}
        if inner.issuperset(map(id, found_ones)):  # They refer to one another in a circle.
            inner.clear()
        for found in found_ones:
            if hasattr(found, _DYNAMO):
                self._counters.append((_dynamo_compilations, ref(found)))
            elif id(found) not in inner:
                name = next(name for name in _COUNTERS if hasattr(found, name))
                self._counters.append((getattr(type(found), name), ref(found)))
            if getattr(found, "_jit_compile", None):
                self._compiled_by_xla.append(ref(found))
        self._before = [count(compiled()) for count, compiled in self._counters]
        self.needs_sizes = bool(self._compiled_by_xla)
        """Whether XLA compiles parts of it, for each size of a batch."""

    def grew(self, size: Any = None) -> bool:
        """Whether it was traced or compiled since the last time that this was asked."""
        traced = False
        for place, (count, compiled) in enumerate(self._counters):
            now = count(compiled())
            if now != self._before[place]:
                self._before[place] = now
                traced = True
        for compiled in self._compiled_by_xla:
            had = _sizes_had.setdefault(compiled(), set())
            traced |= size is not None and size not in had
            had.add(size)
        return traced


def _no_function() -> None:
    pass


def _functions_in(function: Any) -> list[Any]:
    # Through closures and wrappers, but not into objects: a model refers to everything.
    found: list[Any] = []
    todo: list[Any] = [function]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in seen or not callable(value) or len(seen) > 100:
            continue
        seen.add(id(value))
        if any(hasattr(value, name) for name in (*_COUNTERS, _DYNAMO)):
            found.append(value)
        inner = getattr(value, "python_function", None)
        for cell in getattr(inner or value, "__closure__", None) or ():
            try:
                todo.append(cell.cell_contents)
            except ValueError:  # Empty.
                continue
        todo.append(getattr(value, "__wrapped__", None))
    return found


def _dynamo_compilations(_function: Any) -> int:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    return int(utils.counters["stats"]["unique_graphs"]) + int(utils.counters["frames"]["total"])


# --- checkpoints ------------------------------------------------------------------------------------------------------

_CHECKPOINTS = {"ModelCheckpoint", "BackupAndRestore"}
_METHODS = {"_save_model": "CHECKPOINT", "_backup": "CHECKPOINT", "_load_model": "load checkpoint"}
"""The methods of Keras 3 and tf_keras that save and restore, and their regions."""


def time_checkpoints(timer: Timer, callbacks: Any) -> Callable[[], object]:
    """Time the saves and restores of a list's callbacks, and mark them in the run, until what it returns is called."""
    replaced = Replaced()
    for callback in () if callbacks is None else callbacks.callbacks:
        if _CHECKPOINTS.isdisjoint(kind.__name__ for kind in type(callback).__mro__):
            continue
        for name, region in _METHODS.items():
            if callable(getattr(callback, name, None)) and name not in vars(callback):
                replaced.put(callback, name, _timed(timer, callback, getattr(callback, name), region))
    return replaced.undo


def _timed(timer: Timer, callback: Any, original: Callable[..., Any], region: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        best, begun_ns = getattr(callback, "best", None), timer.now_ns()
        with timer.region(region):
            result = original(*args, **kwargs)
        is_saved = not getattr(callback, "save_best_only", False) or callback.best != best
        if timer.run is not None and is_saved:
            what = "checkpoint_saved" if region == "CHECKPOINT" else "checkpoint_restored"
            timer.run.mark(what, step=_last_step(callback), dur_s=(timer.now_ns() - begun_ns) / 1e9)
        return result

    return call


def _last_step(callback: Any) -> int | None:
    # Of the optimizer's count, which a restored checkpoint sets; -1 before the first step.
    try:
        model = callback.model  # On JAX this brings the model's variables up to date.
        return int(model.optimizer.iterations) // steps_per_execution(model) - 1
    except Exception:
        return None
