"""Regions inside functions that ``torch.compile`` compiles: nothing recorded, and no graph broken."""

# ruff: noqa: D103 (the functions that are compiled are named for how they use a timer)

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

import deep500_timing_torch as timer
from deep500_timing.memory import MemoryUsage
from deep500_timing_torch.memory import MemoryTimer

BATCH = timer.TimeType.BATCH
X = torch.ones(3)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Compile again in each test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["Timer", "CPUGPUTimer"])
def tmr(request):
    """Either timer."""
    return timer.Timer() if request.param == "Timer" else timer.CPUGPUTimer("cpu")


@pytest.fixture
def both():
    """A timer with methods that take ``gpu``."""
    return timer.CPUGPUTimer("cpu")


def start_and_end(tmr):
    def function(x):
        tmr.start(BATCH)
        tmr.start("own")
        y = x + 1
        tmr.end("own")
        tmr.end(key=BATCH)
        return y * 2

    return function


def context_manager(tmr):
    def function(x):
        with tmr.region(BATCH):
            y = x + 1
            with tmr.region("own"):
                y = y * 2
            tmr.fail("own")
        return y

    return function


def bound_method(tmr):
    def function(x):
        start, end = tmr.start, tmr.end
        start("own")
        y = x + 1
        end("own")
        return y * 2

    return function


def handle(tmr):
    region = tmr.region("own")

    def function(x):
        region.start()
        y = x + 1
        region.end()
        return y * 2

    return function


def handle_made_inside(tmr):
    def function(x):
        region = tmr.region("own")
        region.start()
        y = x + 1
        region.end()
        return y * 2

    return function


def decorated(tmr):
    @tmr.timed("own")
    def inner(x):
        return x + 1

    def function(x):
        return inner(x) * 2

    return function


def decorated_outside(tmr):
    @tmr.timed("own")
    def function(x):
        return (x + 1) * 2

    return function


def decorated_inside(tmr):
    def function(x):
        return tmr.timed("own")(lambda x: x + 1)(x) * 2

    return function


def generator(tmr):
    @tmr.timed("own")
    def steps():
        yield 1
        yield 2

    def function(x):
        first, second = steps()
        return (x + first) * second

    return function


def iteration(tmr):
    def function(x):
        for step in tmr.iterate([1, 0]):
            x = x + step
        return x * 2

    return function


def others(tmr):
    def function(x):
        tmr.start("own")
        if tmr.discard("own"):
            x = x + 7
        tmr.record("own", 1, 2)
        return (x + 1) * 2

    return function


EVERY_USE = [
    start_and_end,
    context_manager,
    bound_method,
    handle,
    handle_made_inside,
    decorated,
    decorated_outside,
    decorated_inside,
    generator,
    iteration,
    others,
]


def used(tmr):
    """Whether anything was recorded."""
    return [region.name for region in tmr.snapshot() if region.stats is not None or region.running]


class TestCompiled:
    @pytest.mark.parametrize("use", EVERY_USE, ids=lambda use: use.__name__)
    def test_one_graph_and_nothing_recorded(self, tmr, use):
        """A compiled function is one graph of the same operations, computes the same and records nothing."""
        counter = CompileCounter()
        compiled = torch.compile(use(tmr), backend=counter, fullgraph=True)
        for _ in range(3):
            assert torch.equal((X + 1) * 2, compiled(X))
        assert 1 == counter.frame_count
        assert [] == used(tmr)

    def test_with_gpu(self, both):
        """The same holds for gpu=True, in every place that takes it."""
        tmr = both

        @tmr.timed("decorated", gpu=True)
        def inner(x):
            return x + 1

        def function(x):
            tmr.start(BATCH, gpu=True)
            with tmr.region("own", gpu=True):
                y = inner(x)
            for step in tmr.iterate([2], gpu=True):
                y = y * step
            tmr.end(BATCH, True)
            return y

        counter = CompileCounter()
        assert torch.equal((X + 1) * 2, torch.compile(function, backend=counter, fullgraph=True)(X))
        assert 1 == counter.frame_count
        assert [] == used(tmr)

    def test_in_a_module_that_is_trained(self, both):
        """A module with its own timer compiles whole, forward and backward, through AOTAutograd."""

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.tmr = both
                self.layer = torch.nn.Linear(3, 2)

            def forward(self, x):
                with self.tmr.region(timer.TimeType.FORWARD, gpu=True):
                    return self.layer(x).relu()

        net = Net()
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        compiled(X).sum().backward()
        assert net.layer.weight.grad is not None
        assert [] == used(both)

    def test_no_break_is_counted(self, tmr):
        """Dynamo's own account knows of one graph and no break."""
        explained = torch._dynamo.explain(start_and_end(tmr))(X)
        assert (1, 0) == (explained.graph_count, explained.graph_break_count)

    def test_a_timer_of_memory(self):
        """Memory is read at the ends of regions outside, and breaks no graph."""

        class Reader:
            def read(self):
                return MemoryUsage()

        tmr = MemoryTimer("cpu", memory=Reader())
        compiled = torch.compile(context_manager(tmr), backend="eager", fullgraph=True)
        with tmr.region("outside"):
            compiled(X)
        regions = tmr.snapshot()
        assert (1, None) == (regions.get("outside").memory.samples, regions.get(BATCH))

    def test_a_handle_shows_what_any_handle_does(self, both):
        """In a compiled function too a region has its key and its name, on the device as well."""

        def function(x):
            for key in (BATCH, "own"):
                for gpu in (False, True):
                    region = both.region(key, gpu=gpu)
                    found.append((region.key, region.name, region.is_open))
            return x + 1

        found = []
        torch.compile(function, backend="eager", fullgraph=True)(X)
        assert [(BATCH, "BATCH", True)] * 2 + [("own", "own", True)] * 2 == found

    def test_no_recompilation(self, tmr):
        """Times recorded elsewhere make no compiled function compile again."""
        counter = CompileCounter()
        compiled = torch.compile(context_manager(tmr), backend=counter, fullgraph=True)
        for _ in range(20):
            compiled(X)
            with tmr.region("outside"):
                pass
        assert 1 == counter.frame_count
        assert 20 == len(tmr.get_time("outside"))

    def test_break_of_the_users_own(self, tmr):
        """Where the user's code breaks the graph between start and end, both halves compile and record nothing."""

        def function(x):
            tmr.start("own")
            y = x + 1
            torch._dynamo.graph_break()
            y = y * 2
            tmr.end("own")
            return y

        counter = CompileCounter()
        compiled = torch.compile(function, backend=counter)
        for _ in range(2):
            assert torch.equal((X + 1) * 2, compiled(X))
        assert 2 == counter.frame_count
        assert [] == used(tmr)

    def test_break_of_the_users_own_in_a_block(self, tmr):
        """With a break inside a block the function runs as it does uncompiled, and is timed."""

        def function(x):
            with tmr.region("own"):
                y = x + 1
                torch._dynamo.graph_break()
                return y * 2

        compiled = torch.compile(function, backend="eager")
        for _ in range(2):
            assert torch.equal((X + 1) * 2, compiled(X))
        assert 2 == len(tmr.get_time("own"))

    def test_around_a_compiled_function(self, tmr):
        """The call of a compiled function is timed from outside."""
        compiled = torch.compile(start_and_end(tmr), backend="eager")
        with tmr.region("call"):
            compiled(X)
        assert ["call"] == used(tmr)

    @pytest.mark.parametrize("use", EVERY_USE[:-1], ids=lambda use: use.__name__)
    def test_uncompiled_is_timed(self, tmr, use):
        """The same functions, when they are not compiled, record their regions."""
        use(tmr)(X)
        assert used(tmr)


@pytest.mark.slow
class TestPreparation:
    PROGRAM = """
import sys
import torch
import deep500_timing_torch as timer
watches = [finder for finder in sys.meta_path if type(finder).__module__.startswith("deep500")]
print("torch._dynamo" in sys.modules, len(watches))
tmr = timer.CPUGPUTimer()
def function(x):
    with tmr.region("own", gpu=True):
        return x + 1
print(torch.compile(function, backend="eager", fullgraph=True)(torch.ones(1)).item())
watches = [finder for finder in sys.meta_path if type(finder).__module__.startswith("deep500")]
print(tmr.get_time("own"), len(watches))
"""

    def test_before_dynamo(self, run_alone):
        """The adapter imports no compiler, and is ready for it when it is imported."""
        assert ["False 1", "2.0", "[] 0"] == run_alone(self.PROGRAM).stdout.splitlines()

    def test_after_dynamo(self, run_forked):
        """It is ready as well where the compiler is imported already, and watches for nothing."""
        assert ["True 0", "2.0", "[] 0"] == run_forked(self.PROGRAM).splitlines()

    def test_a_compiler_that_changed(self, run_forked):
        """Where PyTorch's compiler takes no substitutes, that is one warning, and uncompiled code is timed."""
        program = """
import warnings
import torch
import torch._dynamo
def refuse(*args, **kwargs):
    raise TypeError("not any more")
torch.compiler.substitute_in_graph = refuse
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import deep500_timing_torch as timer
print(timer.compiled, [str(w.message) for w in caught if issubclass(w.category, timer.TimingWarning)])
tmr = timer.Timer()
with tmr.region("own"):
    pass
print(len(tmr.get_time("own")))
"""
        first, second = run_forked(program).splitlines()
        assert first.startswith("False []" if first.startswith("False") else "True ['Preparing PyTorch")
        assert "1" == second
