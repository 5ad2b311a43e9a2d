"""The public callback: its arguments, what it tells, and how it gets to the first and the last place of a list."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from deep500_timing import Timer
from deep500_timing_tensorflow import _frames
from deep500_timing_tensorflow._edges import FirstCallback, LastCallback, guarded
from deep500_timing_tensorflow._fit import FitTiming
from deep500_timing_tensorflow._left_behind import leave_what_is_gone
from deep500_timing_tensorflow._wishes import Wishes

if TYPE_CHECKING:
    from deep500_timing_tensorflow._epoch_totals import Throughput


class TimerHooks:
    """Times ``fit``, ``evaluate`` and ``predict`` of a Keras model, on any backend, and leaves the model alone.

    ::

        tmr = timer.CPUGPUTimer()
        model.fit(x, y, callbacks=[timer.TimerCallback(tmr)])
        tmr.print_all_time_stats()

    The regions are:

    - FIT: a call of ``fit``. EPOCH: an epoch, its validation and all hooks at its ends included.
    - BATCH: a call of the train function, from its entry to its return with its logs. On TensorFlow and JAX it takes
      its data itself, so IO lies inside. With ``steps_per_execution=N`` it trains on N batches, and BATCH is one
      interval for all of them: ``batches`` counts the batches, and means in ``logs`` are of a single one.
    - BATCH (first): calls in which something was traced or compiled, the first and any later one, such as that of a
      smaller last batch. They are kept out of BATCH.
    - IO: the wait for the next batch, those of first batches included. On torch Keras waits before it calls the hooks,
      so IO lies before BATCH. On TensorFlow only its length is known, and it is put where BATCH begins; where steps
      are far below 50 ms and wait for no data, several are read as one sum, and each has an equal share.
    - CALLBACKS: the hooks of all callbacks inside an epoch. CALLBACKS (fit): those at the begin and the end of a fit.
    - EPOCH (start) and EPOCH (end): what Keras does before the first and after the last batch of an epoch.
    - VALIDATION: the evaluation inside an epoch. TEST and PREDICT: a call of ``evaluate`` or ``predict``.
    - FORWARD and BACKWARD, with ``phases=True``: from the moment that the batch is there to its loss, and from there
      to the gradients. The optimizer's update is the rest of BATCH.

    An epoch is the sum of EPOCH (start), BATCH, BATCH (first), CALLBACKS, VALIDATION and EPOCH (end), and on torch IO.

    The place in the list of callbacks does not matter. A fit inside a fit, on another callback or this one, has its own
    times. A region that an exception or Ctrl-C breaks off is counted as failed, and whoever looks at the times on the
    fit's thread finds nothing of it running. The callback may be used for any number of fits and models.

    A callback that sees the end of each batch makes Keras 3 wait for the batch's logs, on every backend. That is
    Keras's doing, and it is what makes the end of BATCH true on a GPU. tf_keras does not wait.

    Args:
        timer: Where the times go.
        gpu: Whether BATCH is timed on the GPU as well. On TensorFlow that waits for its GPUs before and after each
            batch, see ``CPUGPUTimer``; on the torch backend pass a timer of ``deep500_timing_torch``, which does not.
        io: ``"auto"`` times the wait for data where it can be told; False does not. On TensorFlow with
            ``steps_per_execution`` above 1 a batch may be fetched while the one before is trained on: True takes the
            whole of each fetch for a wait, and ``phases=True`` knows.
        phases: Whether to time FORWARD and BACKWARD. On TensorFlow a model that is traced meanwhile keeps the stamps in
            its graph until it is compiled anew, and one that was traced before has none.
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
        if not isinstance(timer, Timer):
            raise TypeError(
                f"TimerCallback({timer!r}): the first argument is the timer that keeps the times, such as "
                f"CPUGPUTimer(), not {type(timer).__name__}."
            )
        if io not in ("auto", True, False):
            raise ValueError(f"TimerCallback(io={io!r}): pass 'auto', True or False.")
        super().__init__()
        self.timer = timer
        self._settings: dict[str, Any] = {"gpu": bool(gpu), "io": io, "phases": bool(phases), "log_prefix": log_prefix}
        self._wishes = Wishes(timer, gpu=bool(gpu), io=io, phases=bool(phases), log_prefix=log_prefix)
        self._timings: list[FitTiming] = []
        # For a loop that has no list of callbacks and calls the hooks itself.
        self._own_place: tuple[FirstCallback, LastCallback] | None = None

    @property
    def throughput(self) -> Throughput | None:
        """How fast the newest epoch went, in its steady state and as a whole; None before the first."""
        for timing in self._timings:
            timing.end_what_is_over()
        totals = self._wishes.totals
        return None if totals is None else totals.throughput()

    @property
    def batches(self) -> int:
        """Batches that were trained on, in all fits."""
        return self._wishes.batches

    @property
    def withheld(self) -> int:
        """Batches whose phases were lost or contradicted the batch; they count as failed, and are not reported."""
        return self._wishes.withheld

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A callback for other fits that shares this one's timer: KerasTuner copies callbacks for each trial."""
        copied = memo[id(self)] = _rebuild(type(self), self.timer, self._settings)
        vars(copied).update(copy.deepcopy(self._attributes_of_a_subclass(), memo))
        return copied

    def __reduce__(self) -> Any:
        """Pickle the settings and the timer's, see ``Timer``, and what a subclass has put beside them."""
        return _rebuild, (type(self), self.timer, self._settings), self._attributes_of_a_subclass()

    def _attributes_of_a_subclass(self) -> dict[str, Any]:
        ours = vars(_rebuild(type(self), self.timer, self._settings))
        return {name: value for name, value in vars(self).items() if name not in ours}

    # --- Keras's hooks ------------------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        """A model is about to call the hooks."""
        super().set_model(model)  # type: ignore[misc]
        self._attach(model)

    @guarded
    def _attach(self, model: Any) -> None:
        leave_what_is_gone()
        for timing in self._timings:
            timing.end_what_is_over()
        callbacks = _frames.calling_list()
        if self._own_place is not None:
            self._own_place[0].timing.break_off()
        self._timings = [timing for timing in self._timings if timing.is_running()]
        if callbacks is not None and any(
            isinstance(found, FirstCallback) and found.timing.wishes is self._wishes for found in callbacks.callbacks
        ):
            return
        timing = FitTiming(self._wishes, model, callbacks)
        edges = FirstCallback(timing), LastCallback(timing)
        self._own_place = edges if callbacks is None else None
        if callbacks is not None:
            self._timings.append(timing)
            # A new list: the one that there is may be the one that is being gone through.
            callbacks.callbacks = [edges[0], *callbacks.callbacks, edges[1]]

    def on_train_begin(self, logs: Any = None) -> None:
        """A fit begins."""
        for place in self._own_place or ():
            place.on_train_begin(logs)

    def on_train_end(self, logs: Any = None) -> None:
        """A fit came to its end."""
        for place in self._own_place or ():
            place.on_train_end(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins."""
        for place in self._own_place or ():
            place.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """An epoch came to its end."""
        for place in self._own_place or ():
            place.on_epoch_end(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """An execution of the train function begins."""
        for place in self._own_place or ():
            place.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """An execution of the train function came to its end."""
        for place in self._own_place or ():
            place.on_train_batch_end(batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """An evaluation begins."""
        for place in self._own_place or ():
            place.on_test_begin(logs)

    def on_test_end(self, logs: Any = None) -> None:
        """An evaluation came to its end."""
        for place in self._own_place or ():
            place.on_test_end(logs)

    def on_predict_begin(self, logs: Any = None) -> None:
        """A prediction begins."""
        for place in self._own_place or ():
            place.on_predict_begin(logs)

    def on_predict_end(self, logs: Any = None) -> None:
        """A prediction came to its end."""
        for place in self._own_place or ():
            place.on_predict_end(logs)

    # --- what tf_keras asks of a callback, and Keras 3 does not -----------------------------------------------------

    _supports_tf_logs = True  # The logs are not looked at, so nothing need wait for them.
    _chief_worker_only = None

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


def _rebuild(kind: Any, timer: Timer, settings: dict[str, Any]) -> Any:
    # The arguments of a subclass may be others.
    made = kind.__new__(kind)
    TimerHooks.__init__(made, timer, **settings)
    return made
