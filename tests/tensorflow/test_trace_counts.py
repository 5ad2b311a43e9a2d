"""Which functions are asked whether they were traced; with functions that count their calls."""

from __future__ import annotations

import weakref

from deep500_timing_tensorflow._keras import TraceCounts


class Compiled:
    """A function that says how often it was traced, and calls others."""

    def __init__(self, *calls):
        self.traces = self.asked = 0
        self.python_function = _calling(calls)

    def __call__(self):
        """Run."""

    def experimental_get_tracing_count(self):
        """As that of TensorFlow's."""
        self.asked += 1
        return self.traces


def _calling(calls):
    """A Python function that has others in its closure."""
    one, other, *_ = [*calls, None, None]
    return lambda: (one, other)


def test_what_a_compiled_function_calls_is_not_asked():
    """It is traced as a part of the one around it; a trace that someone else made of it alone is none of the fit's."""
    inner = Compiled()
    outer = Compiled(inner)
    train_function = _calling([inner, outer])
    counts = TraceCounts(train_function)
    inner.traces = 1
    assert not counts.grew()
    outer.traces = inner.traces = 2
    assert counts.grew()
    assert not counts.grew()
    assert 0 == inner.asked


def test_functions_side_by_side_are_all_asked():
    """A step of two compiled functions, as of a GAN, is traced when either is."""
    functions = [Compiled(), Compiled()]
    train_function = _calling(functions)
    counts = TraceCounts(train_function)
    for function in functions:
        function.traces += 1
        assert counts.grew()


def test_functions_that_call_one_another_are_all_asked():
    """Of two that refer to each other neither is the outer one."""
    first, second = Compiled(), Compiled()
    first.python_function, second.python_function = _calling([second]), _calling([first])
    counts = TraceCounts(first)
    for function in (first, second):
        function.traces += 1
        assert counts.grew()


def test_counts_do_not_hold_the_function():
    """An aborted fit keeps its counts until a callback is next used, and the model is not kept with them."""
    function = Compiled()
    counts, alive = TraceCounts(function), weakref.ref(function)
    del function
    assert alive() is None
    assert counts.function() is None
