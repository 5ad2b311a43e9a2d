"""``TimerCallback``: its arguments, its counters, and how it joins a list of callbacks."""

from __future__ import annotations

import copy
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import check_timer, missing_package
from deep500_timing_tensorflow import _keras
from deep500_timing_tensorflow._fit import CallbackOptions, FitTimer, end_aborted_fits
from deep500_timing_tensorflow._keras import guarded

if TYPE_CHECKING:
    from deep500_timing import Timer
    from deep500_timing_tensorflow._regions import Throughput

_HOOKS = tuple(
    f"{part}_{end}" for part in ("train", "epoch", "train_batch", "test", "predict") for end in ("begin", "end")
)


class _OfEitherKeras:
    """What tf_keras asks of a callback, and Keras 3 does not."""

    _supports_tf_logs = True  # The logs are not looked at, so nothing need wait for them.
    _chief_worker_only = None

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class Sentinel(_OfEitherKeras):
    """A callback that stands in front of all others, or behind them, and takes times.

    The timer's callback may stand anywhere in its user's list, so the hooks of others would be in its times. When it is
    given a model, one of these is put at each end of that fit's list.
    """

    def __init__(self, fit: FitTimer, side: str) -> None:
        """``side`` is ``"before"`` or ``"after"`` the hooks of all others."""
        self.fit = fit
        for name in _HOOKS:
            setattr(self, f"on_{name}", getattr(fit, f"{side}_{name}", self._nothing))

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Note the length of the fit, if Keras knows it."""
        self.fit.steps_known = (params or {}).get("steps")

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    set_model = on_batch_begin = on_batch_end = _nothing
    on_test_batch_begin = on_test_batch_end = on_predict_batch_begin = on_predict_batch_end = _nothing


class TimerHooks(_OfEitherKeras):
    """Times ``fit``, ``evaluate`` and ``predict`` of a Keras model, on any backend, and leaves the model alone.

    ::

        tmr = timer.CPUGPUTimer()
        model.fit(x, y, callbacks=[timer.TimerCallback(tmr)])
        tmr.print_all_time_stats()

    The regions are FIT, EPOCH, EPOCH (start), BATCH, in it IO and for calls that traced or compiled ``compile``,
    CALLBACKS, VALIDATION, EPOCH (end), TEST and PREDICT, and with ``phases=True`` FORWARD and BACKWARD;
    ``docs/keras.md`` defines each. With ``steps_per_execution=N`` a BATCH trains on N batches; ``batches`` counts the
    batches.

    The place in the list of callbacks does not matter, and a callback serves any number of fits and models. For a loop
    of your own put it into a ``CallbackList`` of Keras, whose hooks the loop calls. The regions
    of a fit that an exception ends count as running until a callback is next used, and as failed from then on.

    A callback that sees the end of each batch makes Keras 3 wait for the batch's logs, on every backend. That makes the
    end of BATCH true on a GPU. tf_keras does not wait.

    Args:
        timer: Where the times go.
        gpu: Whether BATCH is timed on the GPU as well. On TensorFlow that waits for its GPUs before and after each
            batch, see ``CPUGPUTimer``; on the torch backend pass a timer of ``deep500_timing_torch``, which does not.
        io: ``"auto"`` times the wait for data where it can be measured; False does not. On TensorFlow with
            ``steps_per_execution`` above 1 a batch may be fetched while the one before is trained on: True takes the
            whole of each fetch for a wait, and ``"auto"`` leaves IO out.
        phases: Whether to time FORWARD and BACKWARD. On TensorFlow a model that is traced meanwhile keeps the stamps in
            its graph until it is compiled again, and one that was traced before has none.
        log_prefix: Put the means of each epoch, in seconds, into Keras's ``logs`` under this prefix, with the rates of
            :attr:`throughput`: ``"time/"`` gives ``time/BATCH``. None leaves the logs alone.

    Raises:
        TypeError: ``timer`` is not a timer.
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
        check_timer(f"TimerCallback({timer!r})", timer)
        if io not in ("auto", True, False):
            raise ValueError(f"TimerCallback(io={io!r}): pass 'auto', True or False.")
        super().__init__()
        self.timer = timer
        self._settings: dict[str, Any] = {"gpu": bool(gpu), "io": io, "phases": bool(phases), "log_prefix": log_prefix}
        self._options = CallbackOptions(timer, **self._settings)

    @property
    def throughput(self) -> Throughput | None:
        """The rates of the newest epoch, in its steady state and as a whole; None before the first."""
        return self._options.throughput()

    @property
    def batches(self) -> int:
        """Batches that were trained on, in all fits."""
        return self._options.batches

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A callback for other fits that shares this one's timer: KerasTuner copies callbacks for each trial."""
        copied = memo[id(self)] = _rebuild(type(self), self.timer, self._settings)
        vars(copied).update(copy.deepcopy(self._attributes_of_a_subclass(), memo))
        return copied

    def __reduce__(self) -> Any:
        """Pickle the settings, the timer's, see ``Timer``, and the attributes of a subclass."""
        return _rebuild, (type(self), self.timer, self._settings), self._attributes_of_a_subclass()

    def _attributes_of_a_subclass(self) -> dict[str, Any]:
        ours = vars(_rebuild(type(self), self.timer, self._settings))
        return {name: value for name, value in vars(self).items() if name not in ours}

    # --- Keras's hooks ------------------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        """A model is about to call the hooks: close the regions of aborted fits, and join the list."""
        super().set_model(model)  # type: ignore[misc]
        self._attach(model)

    @guarded
    def _attach(self, model: Any) -> None:
        end_aborted_fits()
        callbacks = _keras.calling_list()
        present = [] if callbacks is None else callbacks.callbacks
        is_there = any(isinstance(found, Sentinel) and found.fit.options is self._options for found in present)
        if callbacks is not None and not is_there:
            fit = FitTimer(self._options, model, callbacks)
            # A new list: Keras may be going through the present one.
            callbacks.callbacks = [Sentinel(fit, "before"), *present, Sentinel(fit, "after")]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Makes Keras 3 wait for the logs of a batch, on every backend, because it is there."""


def _rebuild(kind: Any, timer: Timer, settings: dict[str, Any]) -> Any:
    # The arguments of a subclass may be others.
    made = kind.__new__(kind)
    TimerHooks.__init__(made, timer, **settings)
    return made


if TYPE_CHECKING:

    class TimerCallback(TimerHooks):
        """See :class:`TimerHooks`; a subclass of the installed Keras's callback when the program runs."""


def callback_class() -> type[Any]:
    """Make ``TimerCallback``, a callback of the Keras that is imported, or else of the one that is installed.

    One class serves the models of both Kerases.
    """
    # Keras puts callbacks into messages by the name of their class.
    namespace = {"__doc__": TimerHooks.__doc__, "__module__": "deep500_timing_tensorflow"}
    return type("TimerCallback", (TimerHooks, _base()), namespace)


def _base() -> type[Any]:
    names = ["keras", "tf_keras"]
    names.sort(key=lambda name: name not in sys.modules)
    for name in names:
        try:
            found: type[Any] = import_module(f"{name}.callbacks").Callback
        except ImportError as error:
            if error.name != name:
                raise
        else:
            return found
    raise missing_package("Keras", extra="tensorflow", caller="TimerCallback")
