"""The loops in which contenders run: fixed source, compiled once for each, with every name a local variable."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from benchmarks._contenders import Contender

_WARM = """
def loop(n, {names}):
    start = _clock()
    for _ in {over}:
        {statement}
    return _clock() - start
"""

_COLD = """
def loop(n, out, _evict, {names}):
    for _ in range(n):
        _evict()
        _tick(); _tick()
        before = _tick()
        {statement}
        after = _tick()
        out.append(after - before)
"""

_TAIL = """
def loop(first, last, out, {names}):
    for i in range(first, last):
        before = _clock()
        {statement}
        after = _clock()
        out[i] = after - before
"""


def _build(template: str, statement: str, names: dict[str, Any], over: str = "range(n)") -> Callable[..., Any]:
    source = template.format(names=", ".join(f"{name}={name}" for name in names), over=over, statement=statement)
    space = dict(names)
    exec(compile(source, f"<benchmark: {statement}>", "exec"), space)  # the point is that nothing is called in between
    loop: Callable[..., Any] = space["loop"]
    return loop


def warm_loop(contender: Contender) -> Callable[[int], int]:
    """A function of the number of pairs that returns the ns that they took, the loop included."""
    statement = "pass" if contender.over != "range(n)" else contender.statement
    return _build(_WARM, statement, {**contender.names, "_clock": perf_counter_ns}, contender.over)


def same_without_timing(contender: Contender) -> Callable[[int], int]:
    """The same loop without the timing: around nothing, or the call that is decorated."""
    return _build(_WARM, contender.plain_call, {**contender.names, "_clock": perf_counter_ns})


def cold_loop(contender: Contender | None, tick: Callable[[], int]) -> Callable[..., None]:
    """A function ``(n, out, evict)`` that appends the ticks of each pair; of nothing, without a contender."""
    if contender is None:
        return _build(_COLD, "pass", {"_tick": tick})
    return _build(_COLD, contender.statement, {**contender.names, "_tick": tick})


def tail_loop(contender: Contender) -> Callable[..., None]:
    """A function ``(first, last, out)`` that puts the ns of each pair into ``out``, a clock reading included."""
    return _build(_TAIL, contender.statement, {**contender.names, "_clock": perf_counter_ns})
