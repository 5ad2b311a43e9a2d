"""The hooks of ``TimerCallback``: each hands over to :class:`FitTiming`, and none ever raises."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from deep500_timing import CPUGPUTimer, Timer
from deep500_timing_tensorflow._fit import FitTiming
from deep500_timing_tensorflow._step import warn_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_tensorflow._tally import Throughput

    F = TypeVar("F", bound=Callable[..., Any])


def _guarded(hook: F) -> F:
    # A fault in timing costs one warning, never the fit.
    @functools.wraps(hook)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            warn_fault(hook.__name__, error)

    return guarded  # type: ignore[return-value]


class TimerHooks:
    """Times ``fit``, ``evaluate`` and ``predict`` of a Keras model, on any backend, and leaves the model alone.

    ::

        tmr = timer.CPUGPUTimer()
        model.fit(x, y, callbacks=[timer.TimerCallback(tmr)])
        tmr.print_all_time_stats()

    The regions are:

    - FIT: a call of ``fit``. EPOCH: an epoch, its validation included.
    - BATCH: a batch, the wait for it included. With ``steps_per_execution=N`` the N batches of an execution count one
      each, with an equal share of its time.
    - BATCH (first): batches of executions in which Keras traced or compiled, the first and any later ones, such as
      that of a smaller last batch. They are kept out of BATCH.
    - IO: the visible wait for the next batch, those of first batches included.
    - EXECUTION: with ``gpu=True`` and ``steps_per_execution=N``, an execution of N batches, on the GPU as well; a share
      of its GPU time for each batch is not made up.
    - VALIDATION: the evaluation inside an epoch. TEST and PREDICT: a call of ``evaluate`` or ``predict``.
    - FORWARD and BACKWARD, with ``phases=True``: from the moment that the batch is there to its loss, and from there
      to the gradients. The optimizer's update is the rest of BATCH.

    A region that an exception or Ctrl-C breaks off is counted as failed: at once if it comes from inside a batch; as
    Keras calls no hook after one from elsewhere, such a region reads as running until the callback is used again. The
    callback may be used for any number of fits and models, first or last in the list; with ``log_prefix`` put it before
    those that write the logs.

    A callback that sees the end of each batch makes Keras 3 wait for the batch's logs, on every backend. That is
    Keras's doing, and it is what makes the end of BATCH true on a GPU. tf_keras does not wait.

    Args:
        timer: Where the times go.
        gpu: Whether BATCH is timed on the GPU as well. On TensorFlow that waits for its GPUs before and after each
            batch, see ``CPUGPUTimer``; on the torch backend pass a timer of ``deep500_timing_torch``, which does not.
        io: ``"auto"`` times the wait for data where that leaves Keras's way of fetching it as fast as it is; True
            also where the batches must be fetched one by one for it (TensorFlow with ``steps_per_execution`` above 1);
            False never. On TensorFlow the train function is then given batches instead of their iterator, so that a
            smaller last batch has it traced once more; that execution is in BATCH (first).
        phases: Whether to time FORWARD and BACKWARD.
        log_prefix: Put the means of each epoch, in seconds, into Keras's ``logs`` under this prefix, with
            ``steps_per_s`` and ``samples_per_s``: ``"time/"`` gives ``time/BATCH``. None leaves the logs alone.

    Raises:
        TypeError: ``timer`` is not a timer, or not a ``CPUGPUTimer`` though ``gpu`` is true.
        ValueError: ``io`` is something else.
    """

    def __init__(
        self,
        timer: Timer,
        gpu: bool = False,
        io: bool | str = "auto",
        phases: bool = False,
        log_prefix: str | None = None,
    ) -> None:
        """See the class."""
        if not isinstance(timer, Timer):
            raise TypeError(
                f"TimerCallback({timer!r}): the first argument is the timer that keeps the times, such as "
                f"CPUGPUTimer(), not {type(timer).__name__}."
            )
        if gpu and not isinstance(timer, CPUGPUTimer):
            raise TypeError("TimerCallback(gpu=True) needs a CPUGPUTimer; a Timer has CPU times only.")
        if io not in ("auto", True, False):
            raise ValueError(f"TimerCallback(io={io!r}): pass 'auto', True or False.")
        super().__init__()
        self.timer = timer
        self._settings: dict[str, Any] = {"gpu": bool(gpu), "io": io, "phases": bool(phases), "log_prefix": log_prefix}
        self._log_prefix = log_prefix
        self._timing = FitTiming(timer, gpu=bool(gpu), io=io, phases=bool(phases))

    @property
    def throughput(self) -> Throughput | None:
        """How fast the newest epoch went, its steady state only; None before the first."""
        tally = self._timing.tally
        return None if tally is None else tally.throughput()

    @property
    def withheld(self) -> int:
        """Batches whose phases contradicted the batch, and were counted as failed instead of being reported."""
        return self._timing.withheld

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A callback for other fits that shares this one's timer: KerasTuner copies callbacks for each trial."""
        copied = type(self)(self.timer, **self._settings)
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> Any:
        """Pickle the settings and the timer's, see ``Timer``."""
        return _rebuild, (type(self), self.timer, self._settings)

    # --- Keras's hooks ------------------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        """A model is about to call the hooks."""
        super().set_model(model)  # type: ignore[misc]
        self._attach(model)

    @_guarded
    def _attach(self, model: Any) -> None:
        self._timing.attach(model)

    @_guarded
    def on_train_begin(self, logs: Any = None) -> None:
        """A fit begins."""
        self._timing.fit_begins((getattr(self, "params", None) or {}).get("steps"))

    @_guarded
    def on_train_end(self, logs: Any = None) -> None:
        """A fit came to its end."""
        self._timing.fit_ends()

    @_guarded
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins."""
        self._timing.epoch_begins()

    @_guarded
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """An epoch came to its end."""
        self._timing.epoch_ends(logs, self._log_prefix)

    @_guarded
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """An execution of the train function begins."""
        self._timing.batch_begins(batch)

    @_guarded
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """An execution of the train function came to its end."""
        self._timing.batch_ends()

    @_guarded
    def on_test_begin(self, logs: Any = None) -> None:
        """An evaluation begins."""
        self._timing.test_begins()

    @_guarded
    def on_test_end(self, logs: Any = None) -> None:
        """An evaluation came to its end."""
        self._timing.test_ends()

    @_guarded
    def on_predict_begin(self, logs: Any = None) -> None:
        """A prediction begins."""
        self._timing.predict_begins()

    @_guarded
    def on_predict_end(self, logs: Any = None) -> None:
        """A prediction came to its end."""
        self._timing.predict_ends()

    # --- what tf_keras asks of a callback, and Keras 3 does not -----------------------------------------------------

    _supports_tf_logs = True  # The logs are not looked at, so nothing need wait for them.
    _chief_worker_only = None

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


def _rebuild(kind: type[Any], timer: Timer, settings: dict[str, Any]) -> Any:
    return kind(timer, **settings)
