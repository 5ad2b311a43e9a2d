"""Where Keras calls its callbacks: the first and the last place in the list of a fit.

A callback's own place in the list is its user's choice, so what the others do before and after it in a hook would be in
its times. And a model's train function begins when the last hook has returned, whoever's it was. So when a list of
callbacks is given its model, two callbacks that do nothing but take times are put into it, one in front and one at the
end. The list is made by ``fit`` and goes with it. Nothing is put on the model, and none of its methods is replaced.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from deep500_timing_tensorflow._faults import warn_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_tensorflow._fit import FitTiming

    F = TypeVar("F", bound=Callable[..., Any])


def guarded(hook: F) -> F:
    """A hook that costs one warning if it fails, never the fit."""

    @functools.wraps(hook)
    def guarded_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            warn_fault(hook.__name__, error)

    return guarded_hook  # type: ignore[return-value]


class _Silent:
    """A callback of either Keras in which no hook does anything."""

    _supports_tf_logs = True
    _chief_worker_only = None

    def __init__(self, timing: FitTiming) -> None:
        self.timing = timing

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    set_model = set_params = _nothing
    on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = _nothing
    on_batch_begin = on_batch_end = on_train_batch_begin = on_train_batch_end = _nothing
    on_test_begin = on_test_end = on_test_batch_begin = on_test_batch_end = _nothing
    on_predict_begin = on_predict_end = on_predict_batch_begin = on_predict_batch_end = _nothing

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class FirstCallback(_Silent):
    """Stands in front of all others: what Keras did ends, and their hooks begin."""

    def set_params(self, params: dict[str, Any] | None) -> None:
        """How long the fit is, if Keras knows."""
        self.timing.steps_known = (params or {}).get("steps")

    @guarded
    def on_train_begin(self, logs: Any = None) -> None:
        """A fit begins."""
        self.timing.fit_begins()

    @guarded
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins."""
        self.timing.epoch_begins()

    # The hooks of a batch are not `guarded`: what that costs is beside a short step not nothing.

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """The hooks before an execution begin."""
        try:
            self.timing.batch_is_next(batch)
        except Exception as error:
            warn_fault("on_train_batch_begin", error)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The train function returned, and its logs are there."""
        try:
            self.timing.batch_ends()
        except Exception as error:
            warn_fault("on_train_batch_end", error)

    @guarded
    def on_test_begin(self, logs: Any = None) -> None:
        """An evaluation is about to begin."""
        self.timing.test_is_next()

    @guarded
    def on_test_end(self, logs: Any = None) -> None:
        """An evaluation is over."""
        self.timing.test_ends()

    @guarded
    def on_predict_begin(self, logs: Any = None) -> None:
        """A prediction begins."""
        self.timing.predict_begins()

    @guarded
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keras is done with an epoch."""
        self.timing.epoch_is_done(logs)

    @guarded
    def on_train_end(self, logs: Any = None) -> None:
        """Keras is done with a fit."""
        self.timing.fit_is_done()


class LastCallback(_Silent):
    """Stands behind all others: their hooks are over, and what Keras does begins."""

    @guarded
    def on_train_begin(self, logs: Any = None) -> None:
        """The hooks at the begin of a fit are over."""
        self.timing.fit_hooks_end()

    @guarded
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras makes ready for the first batch."""
        self.timing.hooks_end()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """The train function is next."""
        try:
            self.timing.batch_begins()
        except Exception as error:
            warn_fault("on_train_batch_begin", error)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The hooks after an execution are over."""
        try:
            self.timing.hooks_end()
        except Exception as error:
            warn_fault("on_train_batch_end", error)

    @guarded
    def on_test_begin(self, logs: Any = None) -> None:
        """The evaluation is next."""
        self.timing.test_begins()

    @guarded
    def on_test_end(self, logs: Any = None) -> None:
        """The hooks after an evaluation are over."""
        self.timing.validation_is_over()

    @guarded
    def on_predict_end(self, logs: Any = None) -> None:
        """A prediction is over."""
        self.timing.predict_ends()

    @guarded
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """An epoch is over."""
        self.timing.epoch_ends()

    @guarded
    def on_train_end(self, logs: Any = None) -> None:
        """A fit is over."""
        self.timing.fit_ends()
