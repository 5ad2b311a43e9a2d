"""What JAX compiles, from the public listeners of ``jax.monitoring``: a region, and counts by function."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from time import time_ns
from typing import TYPE_CHECKING, Any, Self

from deep500_timing.adapters import warn_once

if TYPE_CHECKING:
    from deep500_timing import Timer

REGION = "compile"
TABLE = "compilations"
_EVENTS = "/jax/core/compile/"
_BACKEND = _EVENTS + "backend_compile_duration"


class _Spans(threading.local):
    def __init__(self) -> None:
        self.open: list[tuple[int, int]] = []
        """Begin and end of what this thread has traced and lowered since its last compilation."""


class Compilations:
    """Records compilations in a timer's region ``compile``, from ``start`` to ``stop``; a context manager.

    An interval is the tracing of a function, its lowering, or its compilation by XLA, as JAX measures it.
    The tracing of an inner function is part of the outer one's interval.
    """

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._spans = _Spans()
        self.counts: Counter[str] = Counter()
        """Compilations by XLA, by function."""

    def start(self) -> None:
        from jax import monitoring

        monitoring.register_event_duration_secs_listener(self._took)

    def stop(self) -> None:
        """Unregister them. Other listeners stay."""
        from jax import monitoring

        with suppress(AssertionError, ValueError):  # The program has cleared all listeners.
            monitoring.unregister_event_duration_listener(self._took)
        self._record()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def recompiled(self) -> dict[str, int]:
        """The functions that were compiled more than once, with the number of compilations, the most first."""
        return {name: count for name, count in self.counts.most_common() if count > 1}

    def _took(self, event: str, duration_secs: float, **about: Any) -> None:
        if not event.startswith(_EVENTS):
            return
        try:
            end_ns = self._timer.now_ns()
            start_ns = end_ns - int(duration_secs * 1e9)
            spans = self._spans.open
            # An inner function's tracing ends before that of the outer one, which holds it.
            while spans and spans[-1][0] >= start_ns:
                spans.pop()
            spans.append((start_ns, end_ns))
            if event == _BACKEND:
                self._record()
                self._compiled(str(about.get("fun_name", "unnamed")), duration_secs)
        except Exception as error:
            warn_once(f"Timing a compilation failed: {type(error).__name__}: {error}. It has no region.")

    def _record(self) -> None:
        for start_ns, end_ns in self._spans.open:
            self._timer.record(REGION, start_ns, end_ns)
        self._spans.open.clear()

    def _compiled(self, name: str, seconds: float) -> None:
        name = name.partition("(")[2].removesuffix(")") or name
        self.counts[name] += 1
        if (run := self._timer.run) is None:
            return
        run.declare(TABLE, unix_us="int", dur_us="int", compile_id="name", frame="name", reason="name")
        from jax import lax, numpy, random

        number, took_us, own = self.counts[name], int(seconds * 1e6), name.strip("_")
        is_jax = any(hasattr(of, one) for of in (lax, numpy, random) for one in (own, f"{own}_p"))
        reason = "called outside of jit" if is_jax else "for other shapes, types or static arguments"
        run.add(TABLE, (time_ns() // 1000 - took_us, took_us, str(number), name, reason if number > 1 else ""))
