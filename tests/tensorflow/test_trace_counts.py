"""Which functions are asked whether they were traced; with functions that count what they are told."""

from __future__ import annotations

from deep500_timing_tensorflow._traces import TraceCounts


def compiled(calls=None):
    """A function that says how often it was traced, and calls another."""

    def function():
        return calls

    function.traces = function.asked = 0

    def count():
        function.asked += 1
        return function.traces

    function.experimental_get_tracing_count = count
    return function


def test_what_a_compiled_function_calls_is_not_asked():
    """It is traced as a part of the one around it; a trace that somebody else made of it alone is none of the fit's."""
    inner = compiled()
    outer = compiled(inner)

    def train_function():
        return inner, outer

    counts = TraceCounts(train_function)
    assert counts.is_new
    inner.traces = 1
    assert not counts.grew()
    outer.traces = inner.traces = 2
    assert counts.grew()
    assert not counts.grew()
    assert 0 == inner.asked


def test_functions_side_by_side_are_all_asked():
    """A step of two compiled functions, as of a GAN, is traced when either is."""
    functions = [compiled(), compiled()]
    one, other = functions

    def train_function():
        return one, other

    counts = TraceCounts(train_function)
    for function in functions:
        function.traces += 1
        assert counts.grew()


def test_functions_that_call_one_another_are_all_asked():
    """Of two that refer to each other neither is the outer one."""
    known = {}

    def first():
        return second

    def second():
        return first

    for function in (first, second):
        known[function] = 0
        function.experimental_get_tracing_count = lambda function=function: known[function]
    counts = TraceCounts(first)
    for function in known:
        known[function] += 1
        assert counts.grew()
