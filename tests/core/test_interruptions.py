# ruff: noqa: B023, UP042 (a function of a loop is used in that round; the class is what users have)
"""Code that runs in the middle of a call of the timer: finalizers, collector callbacks, signal handlers, exceptions.

An exception at any line is a promise of the compiled form only: there, no exception comes between the lines of the hot
path.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import enum
import gc
import signal
import sys
import threading
import warnings
import weakref
from pathlib import Path
from types import MappingProxyType

import pytest
from mischief import Dying, Step

import deep500_timing
from deep500_timing import CPUGPUTimer, RegionOpenError, Timer, TimingWarning
from deep500_timing.testing import ManualClock, ManualDeviceClock

HERE = str(Path(deep500_timing.__file__).parent)
MODULES = ("timer.py", "recorder.py", "intervals.py", "decorators.py", "misuse.py", "threads.py")


def at_line(number, run, act):
    """Run, and act before the line of that number that is executed in the recording of times; say whether it came.

    Of a line that is executed again and again the first two times count.
    """
    seen, times = 0, collections.Counter()
    came = False

    def trace(frame, event, arg):
        nonlocal seen, came
        name = frame.f_code.co_filename
        if not name.startswith(HERE) or Path(name).name not in MODULES:
            return None
        if event == "line":
            place = (name, frame.f_lineno)
            times[place] += 1
            if times[place] > 2:
                return trace
            seen += 1
            if seen == number:
                came = True
                sys.settrace(None)
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return came


def interrupt():
    """What Ctrl-C does."""
    raise KeyboardInterrupt


class WithBlock:
    """Regions by ``with``; 62 or 126 intervals are there, so that a block is put away on the way."""

    keep_last = None
    settings = MappingProxyType({})

    def __init__(self):
        self.device = ManualDeviceClock()
        self.tmr = Timer(device_clock=self.device, keep_last=self.keep_last)
        self.done = 0
        for _ in range(30 if self.keep_last == 0 else 126):
            self.tmr.record("x", 0, 1)
            self.done += 1

    def one(self):
        """Once."""
        with self.tmr.region("x", **self.settings):
            self.device.launch(1e-3)
        self.done += 1
        self.device.finish()

    def run(self):
        """Three times."""
        for _ in range(3):
            self.one()


class Aggregated(WithBlock):
    """The same where nothing is kept."""

    keep_last = 0


class StartEnd(WithBlock):
    """Regions by ``start`` and ``end``."""

    def one(self):
        """Once."""
        self.tmr.start("x")
        self.tmr.end("x")
        self.done += 1


class Timed(WithBlock):
    """A decorated function."""

    def __init__(self):
        super().__init__()
        self.call = self.tmr.timed("x")(lambda: None)

    def one(self):
        """Once."""
        self.call()
        self.done += 1


class Iterated(WithBlock):
    """An iterable."""

    def run(self):
        """Three times."""
        for _ in self.tmr.iterate([1, 2, 3], "x"):
            self.done += 1

    def one(self):
        """Once."""
        self.run()


class OnDevice(WithBlock):
    """Regions on the device as well."""

    settings = MappingProxyType({"gpu": True})


CASES = (WithBlock, Aggregated, StartEnd, Timed, Iterated, OnDevice)


@pytest.mark.skipif(not deep500_timing.compiled, reason="a promise of the compiled form")
@pytest.mark.parametrize("kind", CASES)
def test_an_exception_at_any_line_leaves_all_whole(kind):
    """After Ctrl-C at any line the next uses work and are kept, and nothing finished is lost or kept twice."""
    number = 0
    while True:
        number += 1
        case = kind()
        try:
            came = at_line(number, case.run, interrupt)
        except KeyboardInterrupt:
            came = True
        if not came:
            break
        before = case.tmr.get_time_stats("x").count
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TimingWarning)
            for _ in range(2):
                try:
                    case.one()
                except RegionOpenError:
                    # Between a bare start and its end the exception was the caller's to handle, with discard().
                    assert kind is StartEnd
                    assert case.tmr.discard("x")
                    case.one()
        times = case.tmr.snapshot().get("x")
        assert before + 2 <= times.stats.count, number
        assert case.done <= times.stats.count <= case.done + 1, number
        assert 0 == times.running, number
    assert number > 2 or kind not in (Timed, Iterated)


def test_a_reader_at_any_line():
    """A snapshot that is taken in the middle counts finished intervals, once."""
    number = 0
    while True:
        number += 1
        tmr, seen = Timer(keep_last=5), []
        done = 0
        for _ in range(30):
            tmr.record("x", 0, 1)
            done += 1

        def run():
            nonlocal done
            for _ in range(4):
                tmr.record("x", 0, 1)
                done += 1

        def read():
            seen.append((done, tmr.get_time_stats("x").count, len(tmr.get_time("x"))))

        if not at_line(number, run, read):
            break
        assert all(finished <= count <= finished + 1 and kept == 5 for finished, count, kept in seen), number


COLLECTOR = """
import gc, sys, threading
from deep500_timing import Timer
from deep500_timing.testing import ManualDeviceClock

def run(operation, keep_last, times=400):
    device = ManualDeviceClock()
    tmr = Timer(device_clock=device, keep_last=keep_last)
    inside, busy, wrong = 0, False, []
    def callback(phase, info):
        nonlocal inside, busy
        if phase == "stop" and not busy:
            busy = True
            for _ in range(7):
                tmr.record("x", 0, 1)
                inside += 1
            busy = False
    call = tmr.timed("x")(lambda: None)
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    for number in range(times):
        if operation == "with":
            with tmr.region("x"): pass
        elif operation == "start/end":
            tmr.start("x"); tmr.end("x")
        elif operation == "timed":
            call()
        elif operation == "iterate":
            for _ in tmr.iterate((1,), "x"): pass
        elif operation == "new keys":
            tmr.record("x", 0, 1); tmr.record(f"k{number}", 0, 1)
        elif operation == "threads":
            thread = threading.Thread(target=tmr.record, args=("x", 0, 1)); thread.start(); thread.join()
        elif operation == "device":
            with tmr.region("x", gpu=True): pass
            device.finish()
    gc.callbacks.clear()
    gc.set_threshold(700, 10, 10)
    return tmr.get_time_stats("x").count - inside - times

print([run(operation, keep_last) for keep_last in (None, 0)
       for operation in ("with", "start/end", "timed", "iterate", "new keys", "threads", "device")])
"""


def test_a_collector_callback_in_each_operation(python):
    """A callback that records into the very region loses nothing, whichever way it is recorded."""
    assert str([0] * 14) == python(COLLECTOR).strip()


def test_a_finalizer_enters_the_region_that_is_open(clock):
    """A finalizer that times itself under the key of the code that it interrupts: both are timed."""
    tmr = Timer(clock=clock)

    class Connection:
        def __del__(self):
            with tmr.region("close"):
                clock.advance(0.25)

    with tmr.region("close"):
        clock.advance(0.5)
        Connection()
        clock.advance(0.5)
    times = tmr.snapshot().get("close")
    assert ([0.25, 1.25], 0, 0) == (tmr.get_time("close"), times.discarded, times.running)


def _by_weakref(act):
    class Connection:
        """The finalized object."""

    connection = Connection()
    weakref.finalize(connection, act)
    del connection


def _by_the_collector(act):
    def callback(phase, info):
        if phase == "stop":
            act()

    gc.callbacks.append(callback)
    try:
        gc.collect(0)
    finally:
        gc.callbacks.remove(callback)


def _by_an_object(act):
    class Callback:
        """The collector's callback."""

        def __call__(self, phase, info):
            if phase == "stop":
                act()

    gc.callbacks.append(callback := Callback())
    try:
        gc.collect(0)
    finally:
        gc.callbacks.remove(callback)


def _by_a_signal(act):
    before = signal.signal(signal.SIGINT, lambda number, frame: act())
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("interrupt", [_by_weakref, _by_the_collector, _by_an_object, _by_a_signal])
def test_whoever_interrupts_enters_the_region_that_is_open(tmr, clock, interrupt):
    """A finalizer by weak reference, a collector callback and a signal handler are timed, as is what they interrupt."""

    def act():
        with tmr.region("a"):
            clock.advance(0.25)

    with tmr.region("a"):
        clock.advance(0.5)
        interrupt(act)
        clock.advance(0.5)
    times = tmr.snapshot().get("a")
    assert ([0.25, 1.25], 0, 0) == (tmr.get_time("a"), times.discarded, times.running)


def test_a_signal_handler_that_another_thread_calls_interrupts_nothing(tmr, in_thread):
    """Signals come to the main thread; on another one it is a function like any, and its start is an error."""

    def handler(number=0, frame=None):
        tmr.start("a")

    def work():
        tmr.start("a")
        with pytest.raises(RegionOpenError):
            handler()
        tmr.end("a")

    before = signal.signal(signal.SIGINT, handler)
    try:
        in_thread(work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert 1 == tmr.snapshot().get("a").stats.count


def test_a_finalizer_enters_a_region_of_the_device(clock):
    """The same on the device."""
    device = ManualDeviceClock()
    tmr = Timer(clock=clock, device_clock=device)

    class Connection:
        def __del__(self):
            with tmr.region("close", gpu=True):
                device.launch(1)

    with tmr.region("close", gpu=True):
        device.launch(2)
        Connection()
    assert ([1.0, 3.0], 2) == (tmr.get_time("close", gpu=True), len(tmr.get_time("close")))


def test_a_second_entry_leaves_the_region_as_it_found_it(tmr, clock):
    """After it the region is open since when it was, and a second start of it is the error that it always was."""

    def enter():
        with tmr.region("a"):
            clock.advance(1)

    tmr.start("a")
    Dying(enter)
    with pytest.raises(RegionOpenError, match=r"since 1 s"):
        tmr.start("a")
    tmr.end("a")
    assert [1.0, 1.0] == tmr.get_time("a")


def test_a_second_entry_switches_the_timer_off(tmr):
    """Open regions are discarded, that of the second entry and that of the first."""

    def switch():
        tmr.start("a")
        tmr.enabled = False

    tmr.start("a")
    Dying(switch)
    times = tmr.snapshot().get("a")
    assert (2, 0) == (times.discarded, times.running)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs POSIX signals")
def test_a_signal_handler_enters_the_region_that_is_open(clock):
    """A handler that uses the interrupted code's key, and another key: all are timed, and nothing raises."""
    tmr = Timer(clock=clock)

    def handler(number, frame):
        tmr.start("x")
        clock.advance(1)
        tmr.end("x")
        with tmr.region("y"):
            pass

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        tmr.start("x")
        signal.raise_signal(signal.SIGUSR1)
        clock.advance(1)
        tmr.end("x")
        with pytest.raises(ZeroDivisionError), tmr.region("x"):
            signal.raise_signal(signal.SIGUSR1)
            raise ZeroDivisionError
    finally:
        signal.signal(signal.SIGUSR1, before)
    times = tmr.snapshot().get("x")
    assert ([1.0, 2.0, 1.0], 1, 0) == (tmr.get_time("x"), times.failed, times.running)


@pytest.mark.parametrize("method", ["stream", "record"])
def test_an_interrupt_in_the_devices_clock(method):
    """Ctrl-C in a call of the device: the host's time is kept, no event is lost, and the next region is timed."""
    device = ManualDeviceClock()
    tmr = CPUGPUTimer(device_clock=device)
    for _ in range(20):
        with tmr.region("a", gpu=True):
            device.launch(1)
        device.finish()
    tmr.complete_all()
    events = tmr.device.events
    for _ in range(100):
        tmr.start("a", gpu=True)
        device.fail(method, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            tmr.end("a", gpu=True)
        with pytest.raises(KeyboardInterrupt):
            tmr.start("a", gpu=True)
        device.fail(method, None)
    with tmr.region("a", gpu=True):
        device.launch(1)
    host, on_device = (tmr.snapshot().get("a", kind) for kind in ("CPU", "GPU"))
    assert (121, 0, 100) == (host.stats.count, host.running, on_device.failed)
    assert 21 == len(tmr.get_time("a", gpu=True))
    assert tmr.device.events <= events + 2


def test_an_interrupt_in_each_call_of_the_collecting():
    """Ctrl-C while the pairs of a device are read: each time is kept, once, and the next collecting goes on."""

    class Device(ManualDeviceClock):
        step = None

        def _called(self, method):
            super()._called(method)
            if self.step is not None:
                self.step.called()

    number, came = 0, True
    while came:
        number += 1
        device = Device()
        tmr = Timer(device_clock=device, keep_last=0)
        for _ in range(5):
            for _ in range(10):
                with tmr.region("a", gpu=True):
                    device.launch(1e-3)
            device.finish()
            device.step = step = Step(number, interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                tmr.snapshot()
            device.step = None
            came = step.acted
        tmr.complete_all()
        times = tmr.snapshot().get("a", "GPU")
        assert (50, 0, 0) == (times.stats.count, times.failed, times.pending), number
        assert tmr.device.events <= 40, number
    assert number > 5


class TestARegionLeftOpen:
    def test_an_exception_that_is_being_handled(self, tmr):
        """A start in an except block goes on: the exception has led past the end."""
        with pytest.warns(TimingWarning, match="was still open"):
            try:
                tmr.start("a")
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                tmr.start("a")
        tmr.end("a")
        assert (1, 1) == (len(tmr.get_time("a")), tmr.snapshot().get("a").discarded)

    def test_an_exception_in_a_block_inside_is_none(self, tmr, clock):
        """A block inside the open region that fails has not led past the region's end: a second start is an error."""
        tmr.start("a")
        clock.advance(1)
        with pytest.raises(ValueError), tmr.region("part"):
            raise ValueError
        with pytest.raises(RegionOpenError):
            tmr.start("a")
        tmr.end("a")
        assert [1.0] == tmr.get_time("a")

    def test_a_notebook(self, tmr, monkeypatch):
        """A start after a cell that an exception has ended goes on."""
        tmr.start("a")
        monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
        with pytest.warns(TimingWarning, match="was still open"):
            tmr.start("a")
        tmr.end("a")
        assert 1 == len(tmr.get_time("a"))

    @pytest.mark.parametrize("remedy", ["with", "fail", "discard"])
    def test_an_exception_that_was_caught_unseen(self, tmr, remedy):
        """It cannot be told from a missing end: an error that names the remedies, each of which does."""
        try:
            tmr.start("a")
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        with pytest.raises(RegionOpenError, match=r"discard\('a'\).*`with timer\.region\('a'\)`.*fail\('a'\) in the"):
            tmr.start("a")
        tmr.discard("a")
        try:
            if remedy == "with":
                with tmr.region("a"):
                    raise KeyboardInterrupt
            tmr.start("a")
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if remedy != "with":
                getattr(tmr, remedy)("a")
        tmr.start("a")
        tmr.end("a")
        times = tmr.snapshot().get("a")
        assert (1, 0, 2) == (times.stats.count, times.running, times.failed + times.discarded)

    def test_without_an_exception_it_is_an_error(self, tmr):
        """Nothing came between: an end is missing, also of a region that was ended before."""
        tmr.start("a")
        tmr.end("a")
        tmr.start("a")
        for _ in range(2):
            with pytest.raises(RegionOpenError):
                tmr.start("a")
        tmr.end("a")
        assert 2 == len(tmr.get_time("a"))

    def test_what_it_needs_for_that_is_there_before(self, python):
        """Nothing is imported by the start that finds its region open: under interrupts that might never end."""
        program = """
import sys
from deep500_timing import Timer, RegionOpenError
tmr = Timer()
tmr.start("a")
before = set(sys.modules)
try:
    tmr.start("a")
except RegionOpenError:
    print(sorted(set(sys.modules) - before))
"""
        assert "[]" == python(program).strip()


class TestAClockOfTheUsers:
    def test_that_raised_once(self):
        """A clock that raises at the end of a block: the region is closed as failed, and works again."""

        class Clock(ManualClock):
            broken = False

            def now_ns(self):
                if self.broken:
                    raise OSError("stopped")
                return super().now_ns()

        clock = Clock()
        tmr = Timer(clock=clock)
        with pytest.raises(OSError, match="stopped"), tmr.region("x"):
            clock.broken = True
        clock.broken = False
        with tmr.region("x"):
            pass
        assert ([0.0], 1) == (tmr.get_time("x"), tmr.snapshot().get("x").failed)

    def test_that_gives_floats(self):
        """It is refused at the first start, with the remedy, and nothing is open."""

        class Clock:
            def now_ns(self):
                return 1.5

        tmr = Timer(clock=Clock())
        with pytest.raises(TypeError, match=r"gave 1\.5, not an integer\. Return whole nanoseconds"):
            tmr.start("x")
        assert not tmr.region("x").is_open


class TestKeys:
    def test_a_str_enum_is_its_value(self, tmr):
        """A key that is a string is its value, for any class, and whichever came first."""

        class Kind(str, enum.Enum):
            LOAD = "load"

        class Loud(str):
            __slots__ = ()

            def __str__(self):
                return "other"

        for key in (Kind.LOAD, "load", Loud("load")):
            with tmr.region(key):
                pass
            assert "load" == tmr.region(key).name
        for key in (Kind.LOAD, "load", Loud("load")):
            assert 3 == len(tmr.get_time(key)) == tmr.get_time_stats(key).count
        assert ["load"] == [region.name for region in tmr.snapshot()]

    def test_an_unhashable_string_is_its_value_too(self, tmr):
        """A string that cannot be looked up is found by its value."""

        class Odd(str):
            __slots__ = ()
            __hash__ = None

        tmr.start(Odd("a"))
        tmr.end(Odd("a"))
        assert 1 == len(tmr.get_time("a"))

    def test_an_interrupt_in_a_keys_hash_goes_through(self, tmr):
        """An error of a key's own methods is not swallowed."""

        class Key(str):
            __slots__ = ()

            def __hash__(self):
                raise KeyboardInterrupt

        for use in (tmr.start, tmr.end, tmr.region, lambda key: tmr.record(key, 0, 1)):
            with pytest.raises(KeyboardInterrupt):
                use(Key("a"))


class TestSettings:
    @pytest.mark.parametrize("keep_last", [sys.maxsize - 1000, sys.maxsize - 127, sys.maxsize, 2**63, 2**80])
    def test_any_number_to_keep(self, keep_last):
        """A bound that is never reached keeps all, however large."""
        tmr = Timer(keep_last=keep_last)
        for _ in range(1000):
            tmr.record("a", 0, 1)
        assert (1000, 1000) == (len(tmr.get_time("a")), tmr.get_time_stats("a").count)

    def test_any_number_to_skip(self):
        """So many are never reached."""
        tmr = Timer(skip_first=2**70)
        tmr.record("a", 0, 1)
        assert tmr.snapshot().get("a").stats is None

    def test_a_number_of_numpys(self):
        """An integer of another kind is one."""
        import numpy as np

        assert (5, 2) == (Timer(keep_last=np.int64(5)).keep_last, Timer(skip_first=np.int64(2)).skip_first)

    def test_a_subclass_without_the_init(self):
        """It has the default settings, also before its own ``__init__`` calls the timer's."""

        class Own(Timer):
            def __init__(self):
                pass

        class Early(Timer):
            def __init__(self):
                self.load = self.region("a")
                super().__init__(keep_last=1)

        for tmr in (Own(), Early()):
            tmr.start("a")
            tmr.end("a")
            assert 1 == len(tmr.get_time("a"))


class TestSums:
    def test_beyond_64_bits(self):
        """Sums of aggregated times do not overflow, and a time that is longer than 64 bits hold is an error."""
        tmr = Timer(keep_last=0)
        for _ in range(300):
            tmr.record("a", 0, 2**62)
        assert (300, 300 * 2**62) == tmr._stores("a", False)[0].digest()[:2]
        with pytest.raises(OverflowError):
            tmr.record("a", -(2**62), 2**63 - 1)


class TestDecoration:
    def test_a_class_is_refused(self, tmr):
        """A class that is decorated would be none any more."""
        with pytest.raises(TypeError, match="is a class"):
            tmr.timed("a")(int)

    def test_an_object_whose_call_is_a_coroutine(self, tmr, clock):
        """It is timed from its first step to its end, as a coroutine function is."""

        class Step:
            async def __call__(self):
                await asyncio.sleep(0)
                clock.advance(1)

        asyncio.run(tmr.timed("a")(Step())())
        assert [1.0] == tmr.get_time("a")

    def test_a_coroutine_keeps_its_result(self):
        """A clock that runs backwards costs the time, and not the result."""
        clock = ManualClock()
        tmr = Timer(clock=clock)

        async def work():
            clock.advance(-5)
            return "result"

        assert "result" == asyncio.run(tmr.timed("a")(work)())
        assert 1 == tmr.get_time_stats("a").count


def test_threads_that_alternate():
    """Two threads that take turns on one timer are each found at once, and a third in their place as well."""
    tmr = Timer()
    turn = threading.Semaphore(1), threading.Semaphore(0)

    def work(own, other):
        for _ in range(200):
            own.acquire()
            with tmr.region("a"):
                pass
            other.release()

    for _ in range(3):
        threads = [threading.Thread(target=work, args=order) for order in (turn, turn[::-1])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 1200 == tmr.get_time_stats("a").count
    gc.collect()


class TestTheDoorOfALog:
    """``Intervals.since``: the share of a log that reads along."""

    @pytest.mark.parametrize("keep_last", [None, 0, 10])
    @pytest.mark.parametrize("batch", [1, 40, 500])
    def test_everything_is_taken_once_and_in_order(self, keep_last, batch):
        """For any number kept, and however often it is asked, the log gets each interval once."""
        tmr = Timer(keep_last=keep_last)
        tmr._attach_log()
        taken, found, lost = 0, [], 0
        for number in range(2000):
            tmr.record("a", number, number + 1)
            if number % batch == 0 or number == 1999:
                store = tmr._stores("a", False)[0]
                ints, taken, dropped = store.since(taken)
                store.took(taken)
                found += memoryview(ints).cast("q")[::2]
                lost += dropped
        assert (list(range(2000)), 0, 2000) == (found, lost, taken)

    @pytest.mark.parametrize("keep_last", [None, 0, 10])
    @pytest.mark.parametrize("count", [0, 1, 64, 128, 2000])
    def test_what_was_not_said_to_be_taken_is_given_again(self, keep_last, count):
        """A log that took only some of its input gets the rest once more, and nothing of it is lost."""
        tmr = Timer(keep_last=keep_last)
        tmr._attach_log()
        tmr.record("a", -2, -1)
        store = tmr._stores("a", False)[0]
        store.took(1)
        for number in range(count):
            tmr.record("a", number, number + 1)
        assert (count + 1, 0) == store.since(1)[1:]
        store.took(1 + count // 2)
        for number in range(count, count + 1000):
            tmr.record("a", number, number + 1)
        ints, recorded, dropped = store.since(1 + count // 2)
        expected = [end for number in range(count // 2, count + 1000) for end in (number, number + 1)]
        assert (expected, count + 1001, 0) == (memoryview(ints).cast("q").tolist(), recorded, dropped)

    def test_a_log_that_never_comes_does_not_cost_memory_without_end(self, monkeypatch):
        """Beyond the bound intervals are aggregated, and counted as lost to the log."""
        from deep500_timing._recording import intervals

        monkeypatch.setattr(intervals, "LOG_BOUND", 1000)
        tmr = Timer(keep_last=10)
        tmr._attach_log()
        for number in range(20_000):
            tmr.record("a", number, number + 1)
        store = tmr._stores("a", False)[0]
        kept = sum(map(len, store.kept()[0])) // 16
        assert 800 <= kept <= 1500
        ints, taken, dropped = store.since(0)
        assert (20_000, 20_000 - kept, kept) == (taken, dropped, len(ints) // 16)
        tmr._detach_log()
        for number in range(1000):
            tmr.record("a", number, number + 1)
        assert sum(map(len, store.kept()[0])) // 16 < 400
        assert 21_000 == tmr.get_time_stats("a").count


def test_a_recomputation_is_counted_and_ends_nothing(clock):
    """What runs between begin and end is counted as recomputed; nothing is left open, and no time is kept."""
    from deep500_timing._recording.recorder import begin_recomputation, end_recomputation

    device = ManualDeviceClock()
    tmr = CPUGPUTimer(clock=clock, device_clock=device)
    handle = tmr.region("block")
    with handle:
        clock.advance(1)
    tmr.start("outer")
    begin_recomputation()
    try:
        with handle:
            clock.advance(1)
        with pytest.raises(ValueError), tmr.region("block", gpu=True):
            raise ValueError
        tmr.start("block")
        tmr.start("new")
        tmr.end("new")
        assert [1.0] == tmr.get_time("block")
    finally:
        end_recomputation()
    tmr.end("outer")
    with handle:
        clock.advance(2)
    block, new = (tmr._stores(key, False)[0] for key in ("block", "new"))
    assert ([1.0, 2.0], 3, 0) == (tmr.get_time("block"), block.recomputed, block.failed)
    assert ([], 1, [1.0]) == (tmr.get_time("new"), new.recomputed, tmr.get_time("outer"))
