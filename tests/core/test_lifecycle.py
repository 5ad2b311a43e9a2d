"""What happens to a timer besides timing: switching, copies, forks, signals, garbage, the end of a process."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import signal
import sys
import threading
import tracemalloc
import weakref

import pytest

from deep500_timing import CPUGPUTimer, RegionNotOpenError, Timer, TimeType
from deep500_timing.testing import ManualClock, ManualDeviceClock

S = 1_000_000_000


class NamedForTheTest(CPUGPUTimer):
    """A user's subclass with its own arguments."""

    def __init__(self, name):
        super().__init__(keep_last=5)
        self.name = name


class Loud(Timer):
    """A subclass in Python: an attribute, and overridden methods."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.said = []

    def start(self, key):
        """Note the call."""
        self.said.append(("start", key))
        super().start(key)

    def end(self, key):
        """Note the call."""
        super().end(key)
        self.said.append(("end", key))


class TestEnabled:
    def test_off_from_the_start(self, clock):
        """A disabled timer accepts every call and records nothing."""
        tmr = Timer(clock=clock, enabled=False)
        tmr.end("never started")
        tmr.start("a")
        tmr.start("a")
        tmr.end("a")
        with tmr.region("b"):
            pass
        assert [1] == list(tmr.iterate([1]))
        assert (False, False, ()) == (tmr.enabled, tmr.discard("a"), tmr.snapshot().regions)

    @pytest.mark.parametrize("kind", [Timer, CPUGPUTimer])
    def test_switched_off_inside_a_region(self, clock, kind):
        """The region is discarded and its end ignored, also after switching on again; later ones are timed."""
        tmr = kind(clock=clock)
        for use in (
            lambda: (tmr.start("a"), lambda: tmr.end("a")),
            lambda: (tmr.region("a").start(), tmr.region("a").end),
        ):
            _, end = use()
            tmr.enabled = False
            tmr.enabled = False
            tmr.enabled = True
            end()
            with pytest.raises(RegionNotOpenError):
                end()
        tmr.start("a")
        clock.advance(1)
        tmr.end("a")
        times = tmr.snapshot().get("a")
        assert ([1.0], 2, 0) == (tmr.get_time("a"), times.discarded, times.running)

    @pytest.mark.parametrize("kind", [Timer, CPUGPUTimer])
    def test_switched_on_inside_a_region(self, clock, kind):
        """An end without a start is ignored once, also for a region that is new to the timer."""
        tmr = kind(clock=clock, enabled=False)
        with tmr.region("a"):
            tmr.start("b")
            tmr.enabled = True
        tmr.end("b")
        assert () == tmr.snapshot().regions
        with pytest.raises(RegionNotOpenError):
            tmr.end("b")

    def test_switched_off_within_with(self, tmr):
        """The block goes on and its end is silent."""
        with tmr.region("a"):
            tmr.enabled = False
        with pytest.raises(ValueError), tmr.region("a"):
            raise ValueError
        assert (1, 0) == (tmr.snapshot().get("a").discarded, tmr.snapshot().get("a").failed)

    def test_another_threads_region(self, tmr, in_thread):
        """Switching closes the open regions of every thread."""
        tmr.start("a")

        def switch():
            tmr.enabled = False

        in_thread(switch)
        assert (0, 1) == (tmr.snapshot().get("a").running, tmr.snapshot().get("a").discarded)


class TestCopies:
    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda tmr: pickle.loads(pickle.dumps(tmr))])
    @pytest.mark.parametrize("kind", [Timer, CPUGPUTimer])
    def test_a_copy_has_the_settings_and_no_times(self, kind, copied):
        """A copy is its own timer that has recorded nothing, also with open regions."""
        tmr = kind(clock=ManualClock(5), enabled=False, keep_last=7, skip_first=3)
        tmr.enabled = True
        tmr.start("a")
        tmr.record("b", 0, 1)
        other = copied(tmr)
        assert (kind, 7, 3, True, 5, ()) == (
            type(other),
            other.keep_last,
            other.skip_first,
            other.enabled,
            other.now_ns(),
            other.snapshot().regions,
        )
        other.start("a")
        other.end("a")
        tmr.end("a")
        other.enabled = False
        assert (1, 1, []) == (len(tmr.get_time("b")), len(tmr.get_time("a")), other.get_time("b"))

    def test_no_settings(self):
        """The defaults come back as defaults."""
        other = copy.copy(Timer())
        assert (None, 0, True) == (other.keep_last, other.skip_first, other.enabled)

    def test_a_subclass_keeps_its_kind_and_attributes(self):
        """A subclass's own attributes are copied along."""
        tmr = Loud(keep_last=2)
        tmr.start("a")
        other = copy.deepcopy(tmr)
        assert (Loud, 2, [("start", "a")]) == (type(other), other.keep_last, other.said)
        assert other.said is not tmr.said

    def test_a_device_clock_is_copied_along(self):
        """A copy times the same device."""
        device = ManualDeviceClock()
        other = copy.copy(CPUGPUTimer(device_clock=device))
        with other.region("a", gpu=True):
            device.launch(1)
        assert [1.0] == other.get_time("a", gpu=True)

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda tmr: pickle.loads(pickle.dumps(tmr))])
    def test_a_subclass_made_in_its_own_way_can_be_copied(self, copied):
        """Settings go to the class that declares them, and a subclass has its attributes from the original."""
        tmr = NamedForTheTest("trainer")
        again = copied(tmr)
        assert (NamedForTheTest, "trainer", 5) == (type(again), again.name, again.keep_last)
        with again.region("a"):
            pass
        assert (1, None) == (again.snapshot().get("a").stats.count, tmr.snapshot().get("a"))

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_a_handle_refuses(self, copied):
        """A region belongs to a thread of a timer."""
        for region in (Timer().region("a"), CPUGPUTimer().region("a", gpu=True)):
            with pytest.raises(TypeError, match=r"A region handle .*a.* cannot be copied or pickled; ask a timer for"):
                copied(region)

    def test_a_snapshot_travels(self, tmr):
        """What leaves a timer is plain data."""
        tmr.record("a", 0, S)
        snapshot = tmr.snapshot()
        assert snapshot == pickle.loads(pickle.dumps(snapshot)) == copy.deepcopy(snapshot)


def test_overridden_methods_are_called(clock):
    """A subclass's start and end serve its own callers."""
    tmr = Loud(clock=clock)
    tmr.start("a")
    clock.advance(1)
    tmr.end("a")
    assert ([("start", "a"), ("end", "a")], [1.0]) == (tmr.said, tmr.get_time("a"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
class TestFork:
    PROGRAM = """
import os, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from deep500_timing import Timer, CPUGPUTimer, TimeType
from deep500_timing.testing import ManualClock, ManualDeviceClock

clock, device = ManualClock(), ManualDeviceClock()
tmr = CPUGPUTimer(clock=clock, device_clock=device)
entered, leave = threading.Event(), threading.Event()
def worker():
    tmr.start("other")
    entered.set()
    leave.wait()
    tmr.end("other")
thread = threading.Thread(target=worker)
thread.start()
entered.wait()
for _ in range(20):
    with tmr.region("done", gpu=True):
        device.launch(1)
        clock.advance(1)
tmr.start("open")
tmr.start("open on device", gpu=True)
pid = os.fork()
if pid == 0:
    code = 1
    try:
        assert tmr.snapshot().regions == (), tmr.snapshot()
        assert tmr.get_time("done") == [] == tmr.get_time("done", gpu=True)
        tmr.end("open")
        tmr.end("open on device", gpu=True)
        def time(key):
            with tmr.region(key, gpu=True):
                device.launch(2)
                clock.advance(3)
        time("new")
        for _ in range(50):
            child = threading.Thread(target=time, args=("new",))
            child.start()
            child.join()
        assert tmr.get_time("new") == [3.0] * 51, tmr.get_time("new")
        assert tmr.get_time("new", gpu=True) == [2.0] * 51
        assert [region.name for region in tmr.snapshot()] == ["new", "new"], tmr.snapshot()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
leave.set()
thread.join()
clock.advance(5)
tmr.end("open")
tmr.end("open on device", gpu=True)
assert tmr.get_time("open") == [5.0]
assert tmr.get_time("done") == [1.0] * 20 == tmr.get_time("done", gpu=True)
assert len(tmr.get_time("other")) == 1 == len(tmr.get_time("open on device", gpu=True))
print("parent intact")
"""

    def test_the_child_starts_empty_and_the_parent_keeps_all(self, python):
        """A forked child reports nothing of the parent's, may end open regions, and can time at once."""
        assert "parent intact\n" == python(self.PROGRAM)

    def test_what_a_child_does_first(self, clock):
        """Open and finished regions are forgotten, without being counted, and ends of the parent's starts ignored."""
        device = ManualDeviceClock()
        tmr = CPUGPUTimer(clock=clock, device_clock=device)
        tmr.start("a", gpu=True)
        tmr.record("b", 0, S)
        tmr._after_fork()
        tmr.end("a", gpu=True)
        assert () == tmr.snapshot().regions

    def test_a_child_waits_for_no_log_of_the_parent(self):
        """It keeps ``keep_last`` intervals, and aggregates the others at once."""
        tmr = Timer(keep_last=10)
        tmr._attach_log()
        tmr._after_fork()
        for _ in range(2000):
            tmr.record("a", 0, S)
        assert tmr.region("a")._intervals.kept()[1] > 1700

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_every_timer_begins_anew_in_a_child(self, clock):
        """Not one of them has anything to report there, and in the parent each has all."""
        timers = [Timer(clock=clock) for _ in range(3)]
        for tmr in timers:
            tmr.record("a", 0, S)
        child = os.fork()
        if child == 0:
            os._exit(sum(len(tmr.snapshot().regions) for tmr in timers))
        left = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert (0, [[1.0]] * 3) == (left, [tmr.get_time("a") for tmr in timers])

    def test_fork_from_a_thread(self, python):
        """The thread that forks goes on in the child as the only one."""
        program = """
import os, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from deep500_timing import Timer
tmr = Timer()
tmr.start("main")
def worker():
    tmr.start("a")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            tmr.end("a")
            with tmr.region("b"):
                pass
            assert [(r.name, r.stats.count) for r in tmr.snapshot()] == [("b", 1)], tmr.snapshot()
            code = 0
        finally:
            os._exit(code)
    global status
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    tmr.end("a")
thread = threading.Thread(target=worker)
thread.start()
thread.join()
tmr.end("main")
print(status, len(tmr.get_time("a")), len(tmr.get_time("main")))
"""
        assert "0 1 1\n" == python(program)

    def test_a_region_imports_nothing(self, python):
        """A thread's first regions find all they need imported: a child forked meanwhile would wait for an import."""
        program = """
import sys, threading
from deep500_timing import Timer
from deep500_timing.testing import ManualDeviceClock

tmr = Timer(device_clock=ManualDeviceClock())
before = set(sys.modules)
def record():
    for gpu in (False, True):
        with tmr.region("a", gpu=gpu):
            pass
    tmr.start("b"), tmr.end("b"), tmr.record("c", 0, 1), tmr.complete_all()
record()
thread = threading.Thread(target=record)
thread.start()
thread.join()
print(sorted(set(sys.modules) - before))
"""
        assert "[]\n" == python(program)

    def test_forks_amid_everything(self, python):
        """Each of many children is right and ends, at any moment of the parent's other threads."""
        program = """
import os, signal, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import numpy
from deep500_timing import Timer
from deep500_timing.testing import ManualDeviceClock

host, both = Timer(), Timer(device_clock=ManualDeviceClock())
host.snapshot(), both.snapshot()
stop, failed = threading.Event(), []
def until_stopped(act):
    def run():
        while not stop.is_set():
            try:
                act()
            except Exception as error:
                failed.append(error)
    return threading.Thread(target=run)
def record():
    with host.region("parent"), both.region("parent", gpu=True):
        pass
    both.complete_all()
def enter_anew():
    thread = threading.Thread(target=host.record, args=("short", 0, 1))
    thread.start()
    thread.join()
def read():
    host.snapshot(), both.snapshot()
threads = [until_stopped(act) for act in (record, record, enter_anew, read)]
for thread in threads:
    thread.start()
ended = []
for _ in range(25):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        code = 1
        try:
            with host.region("child"), both.region("child", gpu=True):
                pass
            enter_anew()
            found = [(region.name, region.stats.count) for region in host.snapshot()]
            if found == [("child", 1), ("short", 1)] and len(both.get_time("child", gpu=True)) == 1:
                code = 0
        finally:
            os._exit(code)
    ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stop.set()
for thread in threads:
    thread.join()
print(set(ended), failed)
"""
        assert "{0} []\n" == python(program)


class TestSignals:
    @pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signal.setitimer")
    @pytest.mark.parametrize("settings", [{}, {"keep_last": 10}])
    def test_a_handler_takes_snapshots_while_regions_are_recorded(self, settings):
        """At any interruption, and although it times itself, nothing hangs and nothing is lost."""
        device = ManualDeviceClock()
        tmr = CPUGPUTimer(device_clock=device, **settings)
        counts = []

        def handler(number, frame):
            times = tmr.snapshot().get("a")
            if times is not None and times.stats is not None:
                counts.append(times.stats.count)
            with tmr.region("in the handler", gpu=True):
                pass
            tmr.complete_all()
            signal.setitimer(signal.ITIMER_REAL, 0.0005)

        before = signal.signal(signal.SIGALRM, handler)
        recorded = 0
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            while len(counts) < 100:
                with tmr.region("a", gpu=True):
                    device.launch(1e-9)
                recorded += 1
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        stats = tmr.get_time_stats("a")
        assert recorded == stats.count
        device.finish()
        on_device = tmr.snapshot().get("a", "GPU")
        assert recorded == on_device.stats.count + on_device.failed
        assert 0 == on_device.failed

    def test_a_handler_raises_inside_a_region(self, tmr):
        """A Ctrl-C in a block closes the region and goes on."""
        before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt), tmr.region("a"):
                signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        times = tmr.snapshot().get("a")
        assert (1, 0) == (times.failed, times.running)


class TestGarbage:
    @pytest.mark.parametrize("kind", [Timer, CPUGPUTimer, Loud])
    def test_a_used_timer_goes(self, kind, in_thread):
        """Timer, regions and handles refer to each other, and are collected together."""
        tmr = kind()
        for key in TimeType:
            tmr.start(key)
        tmr.end("BATCH")
        in_thread(tmr.start, "a")
        handle, gone = tmr.region("a"), weakref.ref(tmr)
        del tmr, key
        gc.collect()
        assert gone() is not None
        del handle
        gc.collect()
        assert gone() is None

    def test_a_timer_that_its_own_clock_refers_to_goes(self):
        """A cycle through a clock of the user's own is collected."""
        clock = ManualClock()
        tmr = Timer(clock=clock)
        clock.timer = tmr
        with tmr.region("a"):
            pass
        gone = weakref.ref(clock)
        del tmr, clock
        gc.collect()
        assert gone() is None

    def test_a_decorated_function_keeps_its_timer(self, clock):
        """A decorated function works for as long as it lives."""
        f = Timer(clock=clock).timed("a")(lambda: 5)
        gc.collect()
        assert 5 == f()

    def test_collections_during_recording(self):
        """A callback of the garbage collector may use the timer that it interrupts."""
        tmr = Timer()
        calls = []

        def callback(phase, info):
            if phase == "start":
                with tmr.region("collection"):
                    calls.append(info["generation"])

        gc.callbacks.append(callback)
        thresholds = gc.get_threshold()
        gc.set_threshold(5)
        try:
            for i in range(3000):
                with tmr.region(f"region {i % 100}"):
                    [[] for _ in range(10)]
            tmr.snapshot()
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(callback)
        assert len(calls) == len(tmr.get_time("collection")) > 0
        assert [30] * 100 == [len(tmr.get_time(f"region {i}")) for i in range(100)]

    def test_a_collection_while_a_thread_enters(self):
        """A callback's record under the very key that is being made is not lost with it."""
        thresholds = gc.get_threshold()
        collections = 0
        # Else each collection goes through all that the process holds: seconds where a framework is loaded.
        gc.freeze()
        try:
            for threshold in range(1, 60):
                tmr = Timer()
                calls = []

                def callback(phase, info, tmr=tmr, calls=calls):
                    if phase == "start":
                        tmr.record("a", 0, 5)
                        calls.append(info)

                gc.collect()
                gc.callbacks.append(callback)
                gc.set_threshold(threshold)
                try:
                    for _ in range(3):
                        tmr.record("a", 0, 7)
                finally:
                    gc.set_threshold(*thresholds)
                    gc.callbacks.remove(callback)
                assert [5] * len(calls) + [7] * 3 == sorted(tmr.intervals("a")[:, 1].tolist())
                collections += len(calls)
        finally:
            gc.unfreeze()
        assert collections > 0

    def test_a_finalizer_uses_the_timer_in_its_own_cycle(self):
        """An object that times its own end can go together with the timer."""
        seen = []

        class Worker:
            def __init__(self):
                self.tmr = Timer(clock=self)
                self.tmr.start("life")

            def now_ns(self):
                return 5

            def __del__(self):
                self.tmr.end("life")
                seen.append(len(self.tmr.get_time("life")))

        Worker()
        gc.collect()
        assert [1] == seen

    def test_a_finalizer_of_what_a_thread_keeps_for_itself(self, tmr, in_thread):
        """Objects of a thread's local storage may use the timer as the thread ends; open regions are discarded."""
        local = threading.local()

        class Held:
            def __del__(self):
                with tmr.region("late"):
                    pass

        def work():
            local.held = Held()
            tmr.start("open")

        for _ in range(50):
            in_thread(work)
        gc.collect()
        late, left = tmr.snapshot().get("late"), tmr.snapshot().get("open")
        assert (50, 0) == (late.stats.count, late.running)
        assert (0, 50) == (left.running, left.discarded)

    @pytest.mark.parametrize("kind", [Timer, CPUGPUTimer])
    def test_reference_counts_do_not_drift(self, kind):
        """10^5 pairs leave the counts of keys, timer and None as they were."""
        tmr = kind(keep_last=10)
        key = "a region of its own"
        region = tmr.region(key)

        def pairs(n):
            for _ in range(n):
                tmr.start(key)
                tmr.end(key)
                with region:
                    pass
                with tmr.region(TimeType.BATCH):
                    pass
                with contextlib.suppress(RegionNotOpenError):
                    tmr.end(key)
                with contextlib.suppress(TypeError):
                    tmr.start(["no key"])
                tmr.record(key, 1, 2)

        def counts():
            return [sys.getrefcount(thing) for thing in (key, TimeType.BATCH, tmr, region)]

        pairs(1)
        gc.collect()
        before = counts()
        pairs(20_000)
        gc.collect()
        assert before == counts()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"keep_last": 10}, {"keep_last": 0}, {"enabled": False}])
def test_memory_is_flat(settings):
    """A bounded or disabled timer keeps no memory, however many regions there are."""
    tmr = Timer(**settings)

    def pairs(n):
        for _ in range(n):
            tmr.start("a")
            tmr.end("a")

    for longest_ns in (0, 2**62):  # A histogram has bins for what there was.
        tmr.record("a", 0, longest_ns)
    pairs(5000)
    tracemalloc.start()
    try:
        pairs(1000)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        pairs(50_000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 4096


class TestTheEndOfTheProcess:
    def test_open_regions_threads_and_atexit(self, python):
        """A process may end with regions open, daemon threads inside them, and a timer in use until the last."""
        program = """
import atexit, threading
from deep500_timing import CPUGPUTimer, TimeType
from deep500_timing.testing import ManualDeviceClock

tmr = CPUGPUTimer(device_clock=ManualDeviceClock())
ready = threading.Barrier(4)
def worker():
    tmr.start("daemon", gpu=True)
    ready.wait()
    threading.Event().wait()
for _ in range(3):
    threading.Thread(target=worker, daemon=True).start()
ready.wait()
def joined():
    tmr.start("joined")
    ended.wait()
ended = threading.Event()
threading.Thread(target=joined).start()
tmr.start(TimeType.EPOCH, gpu=True)
class Late:
    def __init__(self):
        self.tmr = tmr
    def __del__(self):
        self.tmr.start("late")
        self.tmr.end("late")
late = Late()
late.itself = late
kept = tmr.region("kept")
@atexit.register
def report():
    with tmr.region("at exit"):
        pass
    snapshot = tmr.snapshot()
    print(snapshot.get("EPOCH").running, snapshot.get("daemon").running, snapshot.get("at exit").stats.count)
ended.set()
"""
        assert "1 3 1\n" == python(program)

    def test_a_daemon_thread_that_records_until_the_end(self, python):
        """A daemon thread in the middle of recording neither hangs nor spoils the end."""
        program = """
import threading
from deep500_timing import Timer
tmr = Timer(keep_last=5)
started = threading.Event()
def worker():
    while True:
        with tmr.region("a"):
            started.set()
threading.Thread(target=worker, daemon=True).start()
started.wait()
print("done")
"""
        assert "done\n" == python(program)
