"""One execution of a model's train function, seen from inside ``fit``.

The train function is replaced in the hook that comes before it is called, and put back as the first thing that the
replacement does. So the model is as it was whatever happens next: an exception, Ctrl-C, or a fit that never ends.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, Protocol

from deep500_timing._ground.warn import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class StepListener(Protocol):
    """What is told about an execution."""

    def fetch_begins(self) -> None:
        """The train function waits for its next batch."""
        ...

    def fetch_ends(self, samples: int | None) -> None:
        """The batch is there; it holds that many samples if that is known."""
        ...

    def fetch_finds_none(self) -> None:
        """There is no further batch."""
        ...

    def given(self, samples: int | None) -> None:
        """The train function was called with a batch of that many samples, if that is known."""
        ...

    def data_ends(self) -> None:
        """The execution had no batch at all: what was begun for it never was."""
        ...

    def step_traced(self) -> None:
        """The execution traced or compiled."""
        ...

    def step_fails(self) -> None:
        """The execution raises."""
        ...


class Phases(Protocol):
    """What measures inside an execution."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], listeners: list[Any]) -> Any:
        """Execute the train function, or one that does the same and takes times."""
        ...

    def drain(self) -> None:
        """Hand over the times that were taken."""
        ...

    def leave(self, reader: Any) -> None:
        """Hand a reader nothing any more."""
        ...


def tell(listeners: list[Any], method: str, *args: Any) -> None:
    """Call a method of each listener; a fault in one costs a warning."""
    for listener in list(listeners):
        try:
            getattr(listener, method)(*args)
        except Exception as error:
            warn_fault(method, error)


def warn_fault(where: str, error: Exception) -> None:
    """Say once that timing failed; the fit goes on."""
    warn_once(
        f"TimerCallback failed in {where} and goes on with what it can time; the fit is not affected: "
        f"{type(error).__name__}: {error}",
        about=f"callback {where} {type(error).__name__}",
    )


def is_end_of_data(error: BaseException) -> bool:
    """Whether an exception only says that the data ended, in Python's way or in TensorFlow's."""
    return isinstance(error, StopIteration) or type(error).__name__ == "OutOfRangeError"


class ArmedStep:
    """Stands in for a model's train function until it is called once.

    Args:
        model: The model.
        function: Its train function.
        backend: What it runs on, see ``backend_of``.
        fetch: Whether to take the batches from the iterator here, and time each wait.
        phases: What measures inside the execution, if anything.
        watch: What notices that the execution traces, if it can.
    """

    def __init__(
        self,
        model: Any,
        function: Callable[..., Any],
        *,
        backend: str,
        fetch: bool,
        phases: Phases | None,
        watch: TraceWatch | None,
    ) -> None:
        """See the class; :meth:`arm` puts it in place."""
        self.function = function
        self.fetch = fetch
        self.phases = phases
        self.watch = watch
        self.listeners: list[Any] = []
        self._attributes: dict[str, Any] = vars(model)
        self._backend = backend
        self.__wrapped__ = function

    @classmethod
    def arm(
        cls,
        model: Any,
        listener: StepListener,
        *,
        backend: str,
        fetch: bool = False,
        phases: Phases | None = None,
        watch: TraceWatch | None = None,
    ) -> ArmedStep | None:
        """Have the next execution of a model's train function tell a listener; several callbacks share one."""
        attributes = vars(model)
        armed = attributes.get("train_function")
        if armed is None:
            return None
        if isinstance(armed, ArmedStep):  # Another callback of the same fit was first.
            armed.fetch = armed.fetch or fetch
            armed.phases = armed.phases or phases
            armed.watch = armed.watch or watch
        else:
            armed = cls(model, armed, backend=backend, fetch=fetch, phases=phases, watch=watch)
            attributes["train_function"] = armed
        if listener not in armed.listeners:
            armed.listeners.append(listener)
        return armed

    def forget(self, listener: StepListener) -> None:
        """Tell a listener nothing any more; its fit was broken off before the execution."""
        if listener in self.listeners:
            self.listeners.remove(listener)
        if not self.listeners:
            self.disarm()

    def disarm(self) -> None:
        """Put the model's own train function back."""
        if self._attributes.get("train_function") is self:
            self._attributes["train_function"] = self.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute once."""
        self.disarm()
        try:
            if self.fetch and not kwargs:
                args = self._feed(args)
            elif self._backend == "torch":
                tell(self.listeners, "given", samples_in(args))
            if self.watch is None:
                return self._execute(args, kwargs)
            with self.watch as watch:
                result = self._execute(args, kwargs)
            if watch.traced:
                tell(self.listeners, "step_traced")
            return result
        except BaseException as error:
            tell(self.listeners, "data_ends" if is_end_of_data(error) else "step_fails")
            raise

    def _execute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.phases is not None and not kwargs:
            return self.phases.run(self.function, args, self.listeners)
        return self.function(*args, **kwargs)

    def _feed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # JAX: (state, iterator); TensorFlow: (iterator,), which must hold a batch, or its train function fails.
        *others, iterator = args
        fed = _TimedFetches(iter(iterator), self.listeners)
        if self._backend == "tensorflow":
            return (*others, itertools.chain([next(fed)], fed))
        return (*others, fed)


class _TimedFetches:
    """An iterator over batches that tells of each wait."""

    def __init__(self, iterator: Iterator[Any], listeners: list[Any]) -> None:
        self._iterator = iterator
        self._listeners = listeners

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        tell(self._listeners, "fetch_begins")
        try:
            batch = next(self._iterator)
        except BaseException as error:
            if is_end_of_data(error):
                tell(self._listeners, "fetch_finds_none")
            raise
        tell(self._listeners, "fetch_ends", samples_in(batch))
        return batch


def samples_in(batch: Any) -> int | None:
    """How many samples a batch holds: the first dimension of its first array, over all replicas; None if unknown."""
    while isinstance(batch, (tuple, list, dict)):
        parts = list(batch.values()) if isinstance(batch, dict) else list(batch)
        if not parts:
            return None
        batch = parts[0]
    values = getattr(batch, "values", None)
    if isinstance(values, tuple):  # One array for each replica.
        counts = [samples_in(value) for value in values]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None
    shape = getattr(batch, "shape", None)
    try:
        return int(shape[0]) if shape is not None and len(shape) else None
    except (TypeError, ValueError):
        return None


class TraceWatch:
    """Notices that a train function traces: only then does Python run ``compute_loss`` of a compiled step."""

    def __init__(self, model: Any) -> None:
        """Watch nothing yet."""
        self._attributes: dict[str, Any] = vars(model)
        self._before: Any = None
        self.traced = False
        original = model.compute_loss

        @functools.wraps(original)
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            self.traced = True
            return original(*args, **kwargs)

        self._watching = compute_loss

    def __enter__(self) -> TraceWatch:
        """Watch the calls of ``compute_loss``."""
        self.traced = False
        self._before = self._attributes.get("compute_loss")
        self._attributes["compute_loss"] = self._watching
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the model as it was."""
        if self._before is None:
            self._attributes.pop("compute_loss", None)
        else:
            self._attributes["compute_loss"] = self._before
