"""What TensorFlow traces again: a region, and a row in the run for each, with the argument that is to blame."""

from __future__ import annotations

import inspect
from numbers import Number
from time import time_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from deep500_timing.adapters import warn_once
from deep500_timing_tensorflow._regions import COMPILE

if TYPE_CHECKING:
    from deep500_timing import Timer

TABLE = "compilations"
NEW_SHAPES = "inputs of another shape or type"


class Traces:
    """Records the calls of compiled functions that traced them."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._numbers: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

    def call(self, compiled: Any, call: Any) -> Any:
        """Call a ``tf.function``; ``call`` is the partial function that does so."""
        start_ns = self._timer.now_ns()
        result = call()
        try:
            count = compiled.experimental_get_tracing_count()
            if count != self._counts.get(compiled, 0):
                self._counts[compiled] = count
                self._traced(compiled, call, count, start_ns)
        except Exception as error:
            warn_once(f"Counting the traces of a tf.function failed: {type(error).__name__}: {error}.")
        return result

    def _traced(self, compiled: Any, call: Any, count: int, start_ns: int) -> None:
        end_ns = self._timer.now_ns()
        self._timer.record(COMPILE, start_ns, end_ns)
        function = compiled.python_function
        given = inspect.signature(function).bind(*call.args[1:], **call.keywords).arguments
        numbers = {name: value for name, value in given.items() if isinstance(value, Number)}
        before, self._numbers[compiled] = self._numbers.get(compiled, {}), numbers
        changed = [name for name, value in numbers.items() if before.get(name, value) != value]
        reason = f"{', '.join(changed)}, a Python number that changes" if changed else NEW_SHAPES
        note_trace(self._timer, getattr(function, "__name__", "tf.function"), count, end_ns - start_ns, reason)


def note_trace(timer: Timer, name: str, count: int, took_ns: int, reason: str) -> None:
    """Note in the run that a function was traced, or compiled, and why if this is not the first time."""
    run = timer.run
    if run is not None:
        run.declare(TABLE, unix_us="int", dur_us="int", compile_id="name", frame="name", reason="name")
        row = time_ns() // 1000 - took_ns // 1000, took_ns // 1000, str(count), name, reason if count > 1 else ""
        run.add(TABLE, row)
