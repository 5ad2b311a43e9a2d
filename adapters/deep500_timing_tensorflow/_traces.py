"""Whether an execution traced or compiled, read off the functions that it calls.

A train function of Keras is a Python function around compiled ones, which it holds in its closure. TensorFlow's count
their traces, JAX's their cached compilations; ``torch.compile`` counts for the process. XLA under TensorFlow has no
count: it compiles for each new size of a batch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

_sizes_had: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


class TraceCounts:
    """The traces and compilations of one train function until now."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._counters: list[Callable[[], int]] = []
        self._compiled_by_xla: list[Any] = []
        found_ones = _functions_in(function)
        # A function that a compiled one calls is traced as a part of it, so it is not counted.
        inner = {id(part) for found in found_ones for part in _functions_in(found) if part is not found}
        if inner.issuperset(map(id, found_ones)):  # They refer to one another in a circle.
            inner.clear()
        for found in found_ones:
            counter = getattr(found, "experimental_get_tracing_count", None) or getattr(found, "_cache_size", None)
            if counter is not None:
                if id(found) not in inner:
                    self._counters.append(counter)
                if getattr(found, "_jit_compile", None):
                    self._compiled_by_xla.append(found)
            elif hasattr(found, "_torchdynamo_orig_callable"):
                self._counters.append(_dynamo_compilations)
        self._before = [counter() for counter in self._counters]
        self.needs_sizes = bool(self._compiled_by_xla)
        """Whether XLA compiles parts of it, for each size of a batch."""
        # A guess about its first execution; ``grew`` knows afterwards.
        self.is_new = 0 in self._before and _dynamo_compilations not in self._counters

    def grew(self, size: Any = None) -> bool:
        """Whether it was traced or compiled since the last time that this was asked."""
        self.is_new = traced = False
        for place, counter in enumerate(self._counters):
            count = counter()
            if count != self._before[place]:
                self._before[place] = count
                traced = True
        for compiled in self._compiled_by_xla:
            had = _sizes_had.setdefault(compiled, set())
            traced |= size is not None and size not in had
            had.add(size)
        return traced


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
        if any(
            hasattr(value, name)
            for name in ("experimental_get_tracing_count", "_cache_size", "_torchdynamo_orig_callable")
        ):
            found.append(value)
        inner = getattr(value, "python_function", None)
        for cell in getattr(inner or value, "__closure__", None) or ():
            try:
                todo.append(cell.cell_contents)
            except ValueError:  # Empty.
                continue
        todo.append(getattr(value, "__wrapped__", None))
    return found


def _dynamo_compilations() -> int:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return (
        0 if utils is None else int(utils.counters["stats"]["unique_graphs"]) + int(utils.counters["frames"]["total"])
    )
