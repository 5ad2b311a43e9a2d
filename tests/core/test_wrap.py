"""Timing by decoration and by iteration: functions, generators, coroutines, methods, and waits for items."""

from __future__ import annotations

import asyncio
import functools
import inspect

import pytest

from deep500_timing import CPUGPUTimer, RegionOpenError, Timer, TimeType
from deep500_timing.testing import ManualClock, ManualDeviceClock


class TestFunctions:
    def test_each_call_is_timed(self, tmr, clock):
        """Arguments and result pass through; each call is one interval."""

        @tmr.timed("f")
        def f(a, *, b):
            """Say something."""
            clock.advance(a)
            return b

        assert ["x", "y"] == [f(1, b="x"), f(2, b="y")]
        assert [1.0, 2.0] == tmr.get_time("f")
        assert ("f", "Say something.") == (f.__name__, f.__doc__)

    def test_an_exception_goes_through_and_counts_as_failed(self, tmr, clock):
        """The region is closed, so that the next call is timed."""

        @tmr.timed(TimeType.FORWARD)
        def f(fail):
            clock.advance(1)
            if fail:
                raise KeyboardInterrupt
            return 1

        with pytest.raises(KeyboardInterrupt):
            f(fail=True)
        f(fail=False)
        assert ([1.0], 1) == (tmr.get_time("FORWARD"), tmr.snapshot().get("FORWARD").failed)

    def test_recursion_is_timed_from_the_outermost_call(self, tmr, clock):
        """A function that calls itself is one interval."""

        @tmr.timed("f")
        def factorial(n):
            clock.advance(1)
            return n * factorial(n - 1) if n else 1

        assert 120 == factorial(5)
        assert [6.0] == tmr.get_time("f")

    def test_arguments_by_name_reach_an_inner_call(self, tmr, clock):
        """Recursion hands on its arguments, however it is given."""

        @tmr.timed("f")
        def down(n, *, by=1):
            clock.advance(by)
            return down(n - by, by=by) if n > 0 else n

        assert (-1, 0) == (down(5, by=3), down(2))
        assert [9.0, 3.0] == tmr.get_time("f")

    @pytest.mark.parametrize("opened", ["with", "start"])
    def test_a_call_inside_an_open_region_is_part_of_it(self, tmr, clock, opened):
        """Two people instrument one key: the outer stretch is kept, nothing is discarded, and nothing warns."""
        call = tmr.timed("f")(lambda: clock.advance(1))

        @tmr.timed("f")
        def items():
            clock.advance(1)
            yield

        def work():
            clock.advance(1)
            call()
            list(items())
            list(tmr.iterate(Loader(clock, 1), "f"))

        if opened == "with":
            with tmr.region("f"):
                work()
        else:
            tmr.start("f")
            work()
            tmr.end("f")
        times = tmr.snapshot().get("f")
        assert ([57.0], 0, 0) == (tmr.get_time("f"), times.discarded, times.failed)

    def test_a_call_inside_of_one_that_was_discarded_is_timed(self, tmr, clock):
        """The outer call gave its own stretch up; its next call by the same name stands for itself."""

        @tmr.timed("f")
        def f(inner):
            clock.advance(1)
            if inner:
                tmr.discard("f")
                f(inner=False)

        f(inner=True)
        assert ([1.0], 1) == (tmr.get_time("f"), tmr.snapshot().get("f").discarded)

    def test_a_partial_of_an_object_whose_call_is_a_coroutine(self, tmr, clock):
        """It is timed from its first step to its end, however deep the coroutine lies."""

        class Step:
            async def __call__(self, seconds, *, result):
                await asyncio.sleep(0)
                clock.advance(seconds)
                return result

        step = tmr.timed("f")(functools.partial(functools.partial(Step(), 2), result="done"))
        assert "done" == asyncio.run(step())
        assert [2.0] == tmr.get_time("f")

    def test_a_partial_of_a_coroutine_function(self, tmr, clock):
        """The function of a partial decides how it is timed: here from the first step to the end."""

        async def step(seconds):
            await asyncio.sleep(0)
            clock.advance(seconds)

        asyncio.run(tmr.timed("f")(functools.partial(step, 2))())
        assert [2.0] == tmr.get_time("f")

    def test_several_timers_and_keys_on_one_function(self, tmr, clock):
        """Decorators stack."""

        @tmr.timed("outer")
        @tmr.timed("inner")
        def f():
            clock.advance(1)

        f()
        assert ([1.0], [1.0]) == (tmr.get_time("outer"), tmr.get_time("inner"))

    def test_methods(self, tmr, clock):
        """Plain, class and static methods are timed, whichever decorator is the outer one."""

        class Model:
            @tmr.timed("m")
            def plain(self, x):
                clock.advance(1)
                return self, x

            @classmethod
            @tmr.timed("m")
            def inner_class(cls, x):
                clock.advance(2)
                return cls, x

            @tmr.timed("m")
            @classmethod
            def outer_class(cls, x):
                clock.advance(3)
                return cls, x

            @staticmethod
            @tmr.timed("m")
            def inner_static(x):
                clock.advance(4)
                return x

            @tmr.timed("m")
            @staticmethod
            def outer_static(x):
                clock.advance(5)
                return x

        model = Model()
        assert (model, 1) == model.plain(1)
        assert (Model, 2) == model.inner_class(2)
        assert (Model, 3) == Model.outer_class(3)
        assert 4 == model.inner_static(4)
        assert 5 == model.outer_static(5)
        assert [1.0, 2.0, 3.0, 4.0, 5.0] == tmr.get_time("m")

    def test_a_callable_object(self, tmr, clock):
        """Anything that can be called can be timed."""

        class Step:
            def __call__(self):
                clock.advance(1)

        tmr.timed("step")(Step())()
        assert [1.0] == tmr.get_time("step")

    def test_what_cannot_be_called_is_refused(self, tmr):
        """The error says what to use instead."""
        with pytest.raises(TypeError) as caught:
            tmr.timed("f")(5)
        assert "timed(f) decorates a function, not 5; for a block use `with timer.region(...)`." == str(caught.value)

    def test_disabled_calls_still_run(self, clock):
        """A disabled timer's decorator changes nothing but to record nothing."""
        tmr = Timer(clock=clock, enabled=False)
        assert 3 == tmr.timed("f")(lambda: 3)()
        assert [] == tmr.get_time("f")

    def test_gpu(self, clock):
        """``gpu=True`` times calls and resumptions on the device as well."""
        device = ManualDeviceClock()
        tmr = CPUGPUTimer(clock=clock, device_clock=device)

        @tmr.timed("f", gpu=True)
        def f():
            device.launch(2)

        @tmr.timed("g", gpu=True)
        def g():
            device.launch(3)
            yield

        f()
        list(g())
        assert [2.0] == tmr.get_time("f", gpu=True)
        assert [3.0, 0.0] == tmr.get_time("g", gpu=True)


class TestGenerators:
    @pytest.fixture
    def walk(self, tmr, clock):
        """A generator that works before, between and after its items, and answers sent values."""

        @tmr.timed("g")
        def walk():
            clock.advance(1)
            received = yield "first"
            clock.advance(2)
            try:
                received = yield received
            except KeyError as error:
                clock.advance(8)
                received = yield error
            clock.advance(4)
            return received

        assert inspect.isgeneratorfunction(walk)
        return walk

    def test_each_resumption_is_timed_and_no_pause(self, walk, tmr, clock):
        """The time between a ``yield`` and the next request belongs to the consumer."""
        for _ in walk():
            clock.advance(100)
        assert [1.0, 2.0, 4.0] == tmr.get_time("g")

    def test_arguments_by_name_reach_a_generator(self, tmr, clock):
        """As well as those by position."""

        @tmr.timed("g")
        def count(start, *, step):
            clock.advance(step)
            yield start + step

        assert [7] == list(count(5, step=2))
        assert [2.0, 0.0] == tmr.get_time("g")

    def test_send_and_return_value(self, walk, tmr):
        """Sent values arrive, and the result comes back."""
        generator = walk()
        assert "first" == next(generator)
        assert "ping" == generator.send("ping")
        with pytest.raises(StopIteration) as stop:
            generator.send("pong")
        assert "pong" == stop.value.value
        assert [1.0, 2.0, 4.0] == tmr.get_time("g")

    def test_throw(self, walk, tmr):
        """A thrown exception arrives, and the work that it causes is timed."""
        generator = walk()
        next(generator)
        next(generator)
        error = KeyError("k")
        assert error is generator.throw(error)
        assert [1.0, 2.0, 8.0] == tmr.get_time("g")
        generator.close()

    def test_an_exception_inside_counts_as_failed(self, walk, tmr):
        """An exception that the generator does not catch goes through and closes the region."""
        generator = walk()
        next(generator)
        with pytest.raises(ZeroDivisionError):
            generator.throw(ZeroDivisionError())
        times = tmr.snapshot().get("g")
        assert (1, 1, 0) == (times.stats.count, times.failed, times.running)

    def test_close_runs_the_finally_blocks(self, tmr):
        """Closing reaches the generator itself, and is no failure."""
        closed = []

        @tmr.timed("g")
        def generator():
            try:
                yield 1
            finally:
                closed.append(True)

        running = generator()
        next(running)
        running.close()
        unstarted = generator()
        unstarted.close()
        times = tmr.snapshot().get("g")
        assert ([True], 1, 0) == (closed, times.stats.count, times.failed)

    def test_yield_from(self, tmr, clock):
        """A timed generator can be delegated to, with its return value."""

        @tmr.timed("g")
        def inner():
            clock.advance(1)
            yield 1
            return "end"

        def outer():
            return (yield from inner())

        generator = outer()
        next(generator)
        with pytest.raises(StopIteration) as stop:
            next(generator)
        assert "end" == stop.value.value

    def test_recursion(self, tmr, clock):
        """In a recursive walk the outermost stretch holds the inner ones."""

        @tmr.timed("walk")
        def walk(tree):
            clock.advance(1)
            for branch in tree:
                if isinstance(branch, list):
                    yield from walk(branch)
                else:
                    yield branch

        assert [1, 2, 3, 4] == list(walk([1, [2, [3]], 4]))
        assert [1.0, 1.0, 1.0, 0.0, 0.0] == tmr.get_time("walk")

    def test_an_exception_from_a_recursion(self, tmr):
        """It counts once, for the outermost stretch."""

        @tmr.timed("walk")
        def walk(depth):
            if depth == 0:
                raise ValueError
            yield from walk(depth - 1)

        with pytest.raises(ValueError):
            list(walk(3))
        times = tmr.snapshot().get("walk")
        assert (1, 0) == (times.failed, times.running)

    def test_two_at_once(self, walk, tmr):
        """Generators of the same key may be interleaved, for none is open while it waits."""
        assert [("first", "first"), (None, None)] == list(zip(walk(), walk(), strict=True))
        assert 6 == len(tmr.get_time("g"))


class TestCoroutines:
    def test_any_number_may_run_at_once(self, tmr, clock):
        """Each is timed from its first step to its end, waits included, though all share the thread."""

        async def main():
            gates = [asyncio.Event() for _ in range(3)]

            @tmr.timed("c")
            async def work(i):
                await gates[i].wait()
                return i

            assert inspect.iscoroutinefunction(work)
            tasks = [asyncio.create_task(work(i)) for i in range(3)]
            await asyncio.sleep(0)
            for gate in gates:
                clock.advance(1)
                gate.set()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            return await asyncio.gather(*tasks)

        assert [0, 1, 2] == asyncio.run(main())
        assert [1.0, 2.0, 3.0] == tmr.get_time("c")

    @pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
    def test_a_failure_counts(self, tmr, error):
        """An exception or a cancellation goes through, and nothing is kept."""

        @tmr.timed("c")
        async def work():
            raise error

        with pytest.raises(error):
            asyncio.run(work())
        times = tmr.snapshot().get("c")
        assert (None, 1) == (times.stats, times.failed)

    def test_a_failure_while_disabled_does_not_count(self, clock):
        """A disabled timer counts nothing."""
        tmr = Timer(clock=clock, enabled=False)

        @tmr.timed("c")
        async def work():
            raise ValueError

        with pytest.raises(ValueError):
            asyncio.run(work())
        assert () == tmr.snapshot().regions

    def test_on_a_device_it_is_refused(self):
        """What other coroutines put on the stream cannot be told from its own work."""

        async def work():
            """Do nothing."""

        with pytest.raises(TypeError, match=r"timed\(c, gpu=True\) cannot decorate the coroutine function '.*work'"):
            CPUGPUTimer().timed("c", gpu=True)(work)

    def test_an_asynchronous_generator_is_refused(self, tmr):
        """The error says what to do instead."""

        async def items():
            yield 1

        with pytest.raises(TypeError) as caught:
            tmr.timed("c")(items)
        assert "cannot decorate the asynchronous generator function" in str(caught.value)
        assert "Put `with timer.region(...)` around the parts of it that do the work." in str(caught.value)


class Loader:
    """Waits a second for each item, and three before the first."""

    def __init__(self, clock, items=3, error=None):
        self.clock, self.items, self.error = clock, items, error

    def __len__(self):
        return self.items

    def __iter__(self):
        self.clock.advance(3)
        for i in range(self.items):
            self.clock.advance(1)
            yield i
        self.clock.advance(50)
        if self.error:
            raise self.error


class TestIterate:
    def test_each_wait_is_timed_and_no_work(self, tmr, clock):
        """Waits count, the loop's body does not, nor does the wait for an end."""
        for _ in tmr.iterate(Loader(clock)):
            clock.advance(100)
        assert [4.0, 1.0, 1.0] == tmr.get_time(TimeType.IO)
        times = tmr.snapshot().get(TimeType.IO)
        assert (0, 0, 0) == (times.discarded, times.failed, times.running)

    def test_it_keeps_len_and_can_be_gone_through_again(self, tmr, clock):
        """What wraps a data loader serves wherever the loader did."""
        batches = tmr.iterate(Loader(clock), "load")
        assert (3, [0, 1, 2], [0, 1, 2]) == (len(batches), list(batches), list(batches))
        assert [4.0, 1.0, 1.0] * 2 == tmr.get_time("load")

    def test_a_loader_with_a_timing_error_of_its_own(self, tmr, clock):
        """A wait that began here is closed here, with any error."""
        with pytest.raises(RegionOpenError, match="theirs"):
            list(tmr.iterate(Loader(clock, 1, RegionOpenError("theirs"))))
        times = tmr.snapshot().get("IO")
        assert (1, 1, 0) == (times.stats.count, times.failed, times.running)

    def test_switched_off_from_the_start(self, tmr, clock):
        """Every item comes, nothing is timed, and switching it on serves the rest of the loop."""
        tmr.enabled = False
        assert [0, 1, 2] == list(tmr.iterate(Loader(clock)))
        assert [] == tmr.get_time("IO")
        for i in tmr.iterate(Loader(clock)):
            tmr.enabled = i == 0
        assert 1 == tmr.get_time_stats("IO").count

    def test_what_has_no_length_gets_none(self, tmr):
        """A generator has no ``len`` before, and none after."""
        assert not hasattr(tmr.iterate(x for x in ()), "__len__")
        assert hasattr(tmr.iterate([]), "__len__")

    def test_nothing_to_iterate(self, tmr):
        """An empty iterable leaves no trace."""
        assert [] == list(tmr.iterate([]))
        assert () == tmr.snapshot().regions

    def test_the_old_protocol(self, tmr):
        """Something with ``__getitem__`` alone can be gone through."""

        class Old:
            def __getitem__(self, index):
                if index == 2:
                    raise IndexError
                return index

        assert [0, 1] == list(tmr.iterate(Old()))

    def test_nested_loops(self, tmr, clock):
        """A loop within a loop waits under the same key, one at a time."""
        pairs = [(a, b) for a in tmr.iterate(Loader(clock, 2)) for b in tmr.iterate(Loader(clock, 2))]
        assert [(0, 0), (0, 1), (1, 0), (1, 1)] == pairs
        assert [4.0, 4.0, 1.0, 1.0, 4.0, 1.0] == tmr.get_time(TimeType.IO)

    def test_a_loader_that_waits_under_the_same_key(self, tmr, clock):
        """The inner wait is part of the outer one."""
        assert [0, 1, 2] == list(tmr.iterate(tmr.iterate(Loader(clock))))
        assert [4.0, 1.0, 1.0] == tmr.get_time("IO")

    def test_an_interrupt_at_the_end_closes_the_region(self, tmr, clock):
        """Ctrl-C in the last wait: nothing stays open, and the next loop is timed."""

        class Interrupted(Loader):
            def __iter__(self):
                yield from super().__iter__()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(tmr.iterate(Interrupted(clock, 1)))
        with tmr.region("IO"):
            clock.advance(1)
        times = tmr.snapshot().get("IO")
        assert ([4.0, 1.0], 1, 0) == (tmr.get_time("IO"), times.failed, times.running)

    @pytest.mark.parametrize("error", [ValueError("bad file"), KeyboardInterrupt()])
    def test_an_exception_while_waiting(self, tmr, clock, error):
        """It goes through, counts as failed, and leaves nothing open."""
        with pytest.raises(type(error)):
            list(tmr.iterate(Loader(clock, 1, error)))
        times = tmr.snapshot().get("IO")
        assert (1, 1, 0) == (times.stats.count, times.failed, times.running)

    def test_an_exception_before_the_first_item(self, tmr, clock):
        """The same for the first wait."""

        def broken():
            raise ValueError
            yield

        with pytest.raises(ValueError):
            list(tmr.iterate(broken()))
        assert (1, 0) == (tmr.snapshot().get("IO").failed, tmr.snapshot().get("IO").running)

    def test_an_exception_in_the_body(self, tmr, clock):
        """The loop's body is none of the region's business."""
        with pytest.raises(ValueError):
            for _ in tmr.iterate(Loader(clock)):
                raise ValueError
        times = tmr.snapshot().get("IO")
        assert (1, 0, 0) == (times.stats.count, times.failed, times.running)

    def test_an_early_break(self, tmr, clock):
        """Breaking leaves nothing open, and the next loop is timed."""
        for i in tmr.iterate(Loader(clock)):
            if i == 1:
                break
        list(tmr.iterate(Loader(clock, 1)))
        assert [4.0, 1.0, 4.0] == tmr.get_time("IO")

    def test_switched_off_in_the_middle(self, tmr, clock):
        """The loop goes on with any fault of the timer."""
        seen = []
        for i in tmr.iterate(Loader(clock)):
            tmr.enabled = i == 1
            seen.append(i)
        assert [0, 1, 2] == seen
        assert [4.0, 1.0] == tmr.get_time("IO")

    @pytest.mark.parametrize("what", [5, None, object()])
    def test_what_cannot_be_iterated(self, tmr, what):
        """The error comes at the call, not at the loop."""
        with pytest.raises(TypeError) as caught:
            tmr.iterate(what)
        assert f"iterate({what!r}): it cannot be iterated; pass a data loader, a generator or a list." == str(
            caught.value
        )

    def test_gpu(self):
        """``gpu=True`` times the waits on the device as well."""
        device = ManualDeviceClock()
        tmr = CPUGPUTimer(clock=ManualClock(), device_clock=device)

        def load():
            device.launch(2)
            yield 1
            device.launch(3)
            yield 2

        assert [1, 2] == list(tmr.iterate(load(), gpu=True))
        assert ([2.0, 3.0], 0) == (tmr.get_time("IO", gpu=True), tmr.snapshot().get("IO", "GPU").discarded)
