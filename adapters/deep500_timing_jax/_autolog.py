"""The plug-in of ``deep500-timing run`` for plain JAX: calls of jitted functions, and compilations."""

from __future__ import annotations

import functools
import threading
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import ref

from deep500_timing import TimeType
from deep500_timing.adapters import Replaced
from deep500_timing_jax._compilations import Compilations
from deep500_timing_jax._timer import CPUGPUTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Autolog

BATCH = TimeType.BATCH.name
_LOOKED_AT = 8
"""Calls after which a function that has not fed back its output is taken to be no training step."""


class _Steps:
    # The state that all jitted functions of a process share.
    def __init__(self, log: Autolog) -> None:
        self.log = log
        self.timer = log.timer(CPUGPUTimer)
        self.inside = threading.local()
        self.ended_ns = 0
        self.done = False

    def step(self, end_ns: int) -> None:
        # A BATCH lasts from the end of a step's call to the end of the next.
        if self.ended_ns and BATCH not in self.log.taken | self.log.claimed:
            self.timer.record(BATCH, self.ended_ns, end_ns)
        is_first, self.ended_ns = not self.log.begun, end_ns
        self.log.begin()
        if is_first:
            self.ended_ns = self.timer.now_ns()  # without the time to begin the log


class _TimedFunction:
    """A jitted function with timed outermost calls. All other attributes are those of the function."""

    def __init__(self, function: Any, steps: _Steps) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._steps = steps
        self._region = f"jit({getattr(function, '__name__', 'unnamed')})"
        self._calls = 0
        self._is_step = False
        self._results: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        steps = self._steps
        if steps.done or getattr(steps.inside, "call", False):
            return self._function(*args, **kwargs)
        steps.inside.call = True
        start_ns = steps.timer.now_ns()
        try:
            result = self._function(*args, **kwargs)
        finally:
            steps.inside.call = False
        end_ns = steps.timer.now_ns()
        steps.timer.record(self._region, start_ns, end_ns)
        if not self._is_step and self._calls < _LOOKED_AT:
            self._look(args, kwargs, result)
        if self._is_step:
            steps.step(end_ns)
        return result

    def _look(self, args: Any, kwargs: Any, result: Any) -> None:
        # A training step takes the parameters that it returned.
        import jax

        self._calls += 1
        returned = {id(leaf) for one in self._results if (leaf := one()) is not None}
        leaves = jax.tree_util.tree_leaves
        self._is_step = bool(returned) and any(id(leaf) in returned for leaf in leaves((args, kwargs)))
        arrays = [] if self._is_step else [leaf for leaf in leaves(result) if isinstance(leaf, jax.Array)]
        self._results = [ref(leaf) for leaf in arrays]


def install(log: Autolog) -> Callable[[], None]:
    """Time the functions that ``jax.jit`` and ``jax.pmap`` make from now on, and compilations."""
    import jax

    steps = _Steps(log)
    compilations = Compilations(steps.timer)
    compilations.start()
    replaced = Replaced()

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            log.prepare()
            made = original(*args, **kwargs)
            # Without a function, `jit` returns a decorator.
            if not args and "fun" not in kwargs:
                return lambda function: _TimedFunction(made(function), steps)
            return _TimedFunction(made, steps)

        return make

    for name in ("jit", "pmap"):
        if hasattr(jax, name):
            replaced.put(jax, name, timed(getattr(jax, name)))

    def note() -> None:
        again = compilations.recompiled()
        if again:
            most = ", ".join(f"{name} {count} times" for name, count in list(again.items())[:3])
            log.note(f"compile: {sum(compilations.counts.values())} compilations; most often of {most}")

    log.before_report(note)

    def undo() -> None:
        steps.done = True
        compilations.stop()
        replaced.undo()

    return undo
