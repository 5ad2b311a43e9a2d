"""The first and the last callback in the list of a fit.

A callback's own place in the list is its user's choice, so the hooks of others would be in its times. When the timer's
callback is given a model, two callbacks that only take times are put into the list: one in front, one at the end. The
list is made by ``fit`` and goes with it. Nothing is put on the model, and none of its methods is replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deep500_timing_tensorflow._fit import FitTimer

HOOKS = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_end",
    "on_predict_begin",
    "on_predict_end",
)


class _Silent:
    """A callback of either Keras in which no hook does anything."""

    _supports_tf_logs = True
    _chief_worker_only = None

    def __init__(self, fit: FitTimer) -> None:
        self.fit = fit

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
    """Stands in front of all others: Keras's work ends, and the hooks begin."""

    def __init__(self, fit: FitTimer) -> None:
        super().__init__(fit)
        vars(self).update(
            on_train_begin=fit.fit_begins,
            on_train_end=fit.fit_is_done,
            on_epoch_begin=fit.epoch_begins,
            on_epoch_end=fit.epoch_is_done,
            on_train_batch_begin=fit.batch_hooks_begin,
            on_train_batch_end=fit.batch_ends,
            on_test_begin=fit.test_hooks_begin,
            on_test_end=fit.test_ends,
            on_predict_begin=fit.predict_begins,
        )

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Note the length of the fit, if Keras knows it."""
        self.fit.steps_known = (params or {}).get("steps")


class LastCallback(_Silent):
    """Stands behind all others: the hooks are over, and Keras's work begins."""

    def __init__(self, fit: FitTimer) -> None:
        super().__init__(fit)
        vars(self).update(
            on_train_begin=fit.fit_hooks_end,
            on_train_end=fit.fit_ends,
            on_epoch_begin=fit.hooks_end,
            on_epoch_end=fit.epoch_ends,
            on_train_batch_begin=fit.batch_begins,
            on_train_batch_end=fit.hooks_end,
            on_test_begin=fit.test_begins,
            on_test_end=fit.test_hooks_end,
            on_predict_end=fit.predict_ends,
        )
