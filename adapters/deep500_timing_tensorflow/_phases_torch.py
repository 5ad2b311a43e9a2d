"""FORWARD and BACKWARD on Keras's torch backend, where each step runs as Python.

The passes run one after the other on the calling thread and the current stream, so the timer's own regions serve, on
the GPU as well if the timer has a clock of the torch adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing import TimeType
from deep500_timing_tensorflow._step import tell

if TYPE_CHECKING:
    from collections.abc import Callable

FORWARD, BACKWARD = TimeType.FORWARD, TimeType.BACKWARD

_MISSING: Any = object()


class TorchPhases:
    """Times the steps of one model on torch.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        """Nothing runs yet."""
        self._model = model

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], listeners: list[Any]) -> Any:
        """Execute the train function and time its passes."""
        model = self._model
        step = _Step(listeners)
        optimizer = model.optimizer
        replaced: list[tuple[dict[str, Any], str, Any]] = []

        def replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
            # Into the instance's dict: torch's and Keras's __setattr__ would track what is set.
            attributes = vars(owner)
            wrapped = wrap(getattr(owner, name))
            replaced.append((attributes, name, attributes.get(name, _MISSING)))
            attributes[name] = wrapped

        try:
            replace(model, "train_step", step.around_train_step)
            replace(model, "compute_loss", step.around_loss)
            if optimizer is not None:
                replace(optimizer, "apply", step.around_update)
            result = function(*args)
        except BaseException:
            step.fails()
            raise
        finally:
            for attributes, name, before in reversed(replaced):
                if before is _MISSING:
                    attributes.pop(name, None)
                else:
                    attributes[name] = before
        step.ends()
        return result

    def drain(self) -> None:
        """Nothing waits: the regions are the timer's own."""

    def leave(self, reader: Any) -> None:
        """Nobody reads."""


class _Step:
    # One step: which pass it is in.

    def __init__(self, listeners: list[Any]) -> None:
        self._listeners = [listener for listener in listeners if listener.wants_phases]
        self._inside: TimeType | None = None

    def around_train_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def timed_train_step(*args: Any, **kwargs: Any) -> Any:
            self._go_to(FORWARD)
            return train_step(*args, **kwargs)

        return timed_train_step

    def around_loss(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        def timed_loss(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            if self._inside is FORWARD:
                self._go_to(BACKWARD)
            return loss

        return timed_loss

    def around_update(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def timed_update(*args: Any, **kwargs: Any) -> Any:
            if self._inside is BACKWARD:
                self._go_to(None)
            return apply(*args, **kwargs)

        return timed_update

    def _go_to(self, key: TimeType | None) -> None:
        tell(self._listeners, "pass_changes", self._inside, key)
        self._inside = key

    def ends(self) -> None:
        # A step that did not come by all the anchors has no passes that could be told apart.
        if self._inside is not None:
            tell(self._listeners, "pass_not_found", self._inside)

    def fails(self) -> None:
        self._inside = None
