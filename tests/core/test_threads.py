"""Several threads on one timer: each has its own open regions, and the times are merged."""

from __future__ import annotations

import _thread
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import pytest

from deep500_timing import CPUGPUTimer, RegionNotOpenError, RegionOpenError, Timer
from deep500_timing._recording import threads
from deep500_timing.testing import ManualDeviceClock

S = 1_000_000_000


def lanes(tmr):
    """How many threads' places the timer holds."""
    return len(tmr._all_threads)


@pytest.fixture(params=[Timer, CPUGPUTimer])
def tmr(request, clock):
    """Both timers."""
    return request.param(clock=clock)


def test_one_key_open_on_two_threads(tmr, clock, in_thread):
    """Each thread opens and closes its own region of a key."""
    tmr.start("a")
    clock.advance(1)

    def worker():
        tmr.start("a")
        clock.advance(2)
        running = tmr.snapshot().get("a").running
        tmr.end("a")
        return running

    assert 2 == in_thread(worker)
    clock.advance(4)
    tmr.end("a")
    assert [2.0, 7.0] == tmr.get_time("a")


def test_times_are_merged_in_the_order_of_their_ends(tmr, in_thread):
    """Whichever thread recorded an interval, it stands where it ended."""
    tmr.record("a", 0, 10)
    in_thread(tmr.record, "a", 3, 20)
    tmr.record("a", 25, 30)
    in_thread(tmr.record, "a", 1, 15)
    in_thread(tmr.record, "b", 1, 15)
    assert [[0, 10], [1, 15], [3, 20], [25, 30]] == tmr.intervals("a").tolist()


def test_two_live_threads_are_merged_in_the_order_of_their_ends(tmr):
    """The same while both threads live, for intervals that alternate between them."""
    barrier = threading.Barrier(2)

    def worker(offset):
        for i in range(offset, 100, 2):
            tmr.record("a", 0, i)
        barrier.wait()

    threads = [threading.Thread(target=worker, args=(offset,)) for offset in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[0, i] for i in range(100)] == tmr.intervals("a").tolist()


def test_a_handle_on_another_thread_serves_that_thread(tmr, clock, in_thread):
    """A handle that travels opens the region of the thread that uses it."""
    region = tmr.region("a")
    region.start()

    def worker():
        with region:
            clock.advance(1)
        with pytest.raises(RegionNotOpenError):
            region.end()
        region.start()
        with pytest.raises(RegionOpenError):
            region.start()
        tmr.fail("a")

    in_thread(worker)
    clock.advance(2)
    region.end()
    times = tmr.snapshot().get("a")
    assert ([1.0, 3.0], 1, 0) == (tmr.get_time("a"), times.failed, times.running)


def test_a_handle_on_another_thread_closes_only_what_that_thread_opened(in_thread):
    """On the system's clock, where a block goes its shortest way, the first thread's stretch stays open as well."""
    tmr = Timer()
    region = tmr.region("a")
    region.start()

    def worker():
        with region:
            pass

    in_thread(worker)
    times = tmr.snapshot().get("a")
    assert (1, 1, True) == (times.running, times.stats.count, region.is_open)
    region.end()
    times = tmr.snapshot().get("a")
    assert (0, 2) == (times.running, times.stats.count)


def test_an_error_names_the_thread(tmr, in_thread):
    """The texts of errors name the thread on which they happen."""

    def worker():
        tmr.start("a")
        with pytest.raises(RegionOpenError) as caught:
            tmr.start("a")
        tmr.discard("a")
        return str(caught.value)

    assert "it is open already on thread 'loader-7'" in in_thread(worker, name="loader-7")


def test_discard_is_for_the_calling_thread(tmr, in_thread):
    """A thread cannot forget another's region."""
    tmr.start("a")
    assert in_thread(tmr.discard, "a") is False
    assert tmr.discard("a") is True


def test_short_threads_leave_their_places_to_the_next(tmr):
    """A thousand threads, one after the other, take one place and lose no interval."""

    def worker(i):
        with tmr.region("a"):
            pass
        tmr.record("b", 0, i)

    worker(0)
    for i in range(1, 1001):
        thread = threading.Thread(target=worker, args=(i,))
        thread.start()
        thread.join()
    assert (2, 1001) == (lanes(tmr), len(tmr.get_time("a")))
    assert set(range(1001)) == set(tmr.intervals("b")[:, 1].tolist())


def test_threads_that_live_at_once_have_places_of_their_own(tmr):
    """As many places as threads lived at the same time."""
    for _ in range(5):
        barrier = threading.Barrier(4)

        def worker(barrier=barrier):
            tmr.start("a")
            barrier.wait()
            tmr.end("a")

        threads = [threading.Thread(target=worker) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (4, 20) == (lanes(tmr), len(tmr.get_time("a")))


def test_a_thread_that_ends_inside_a_region(tmr, clock, in_thread):
    """Its region is discarded and counted at once, and the next thread starts afresh."""
    in_thread(tmr.start, "a")
    times = tmr.snapshot().get("a")
    assert (0, 1, None) == (times.running, times.discarded, times.stats)

    def worker():
        tmr.start("a")
        clock.advance(1)
        tmr.end("a")

    in_thread(worker)
    times = tmr.snapshot().get("a")
    assert (0, 1, [1.0]) == (times.running, times.discarded, tmr.get_time("a"))


def test_a_region_on_a_device_that_its_thread_left_open(clock, in_thread):
    """Its start event serves again."""
    device = ManualDeviceClock()
    tmr = CPUGPUTimer(clock=clock, device_clock=device)
    for _ in range(50):
        in_thread(tmr.start, "a", True)
    times = tmr.snapshot().get("a", "GPU")
    assert (50, 0) == (times.discarded, times.pending)
    assert 4 >= tmr.device.events


def test_an_identity_that_is_used_again_is_another_thread(tmr):
    """A thread that got a dead one's identity keeps its open region when a third comes along."""
    idents = []
    for _ in range(200):
        opened, third_was_here = threading.Event(), threading.Event()

        def first():
            idents.append(threading.get_ident())
            tmr.start("a")
            tmr.end("a")

        def second(opened=opened, third_was_here=third_was_here):
            idents.append(threading.get_ident())
            tmr.start("a")
            opened.set()
            third_was_here.wait()
            tmr.end("a")

        def third():
            tmr.start("b")
            tmr.end("b")

        one = threading.Thread(target=first)
        one.start()
        one.join()
        two = threading.Thread(target=second)
        two.start()
        opened.wait()
        three = threading.Thread(target=third)
        three.start()
        three.join()
        third_was_here.set()
        two.join()
        if idents[-2] == idents[-1]:
            break
    else:
        pytest.skip("the system never used an identity again")
    times = tmr.snapshot().get("a")
    assert (0, 0) == (times.discarded, times.running)
    assert 2 * (len(idents) // 2) == times.stats.count


def test_a_thread_that_python_did_not_start_keeps_its_place(tmr, clock):
    """Such a thread may leave and enter Python between start and end, so its place is never given away."""
    opened, go_on, done = _thread.allocate_lock(), _thread.allocate_lock(), _thread.allocate_lock()
    for lock in (opened, go_on, done):
        lock.acquire()

    def worker():
        tmr.start("a")
        opened.release()
        go_on.acquire()
        tmr.end("a")
        done.release()

    _thread.start_new_thread(worker, ())
    opened.acquire()
    thread = threading.Thread(target=tmr.start, args=("b",))
    thread.start()
    thread.join()
    clock.advance(1)
    go_on.release()
    done.acquire()
    assert [1.0] == tmr.get_time("a")
    assert 1 == tmr.snapshot().get("b").discarded


def test_timers_do_not_share_places(clock, in_thread):
    """One thread on several timers is watched by each of them."""
    first, second = Timer(clock=clock), Timer(clock=clock)

    def worker():
        first.start("a")
        second.start("a")

    in_thread(worker)
    assert (1, 1) == (first.snapshot().get("a").discarded, second.snapshot().get("a").discarded)


def test_only_threads_that_end_before_the_process_are_watched(in_thread):
    """The main thread is not, nor one that Python did not start, whether or not it has made an entry for it."""

    class Regions:
        def release(self):
            released.append(threading.get_ident())

    released, kept, seen, done = [], Regions(), [], threading.Event()
    assert None is threads.watch_thread(kept)
    assert [] == released

    def work():
        seen.append(threads.watch_thread(kept))
        return threading.get_ident()

    ident = in_thread(work)
    assert ([ident], True) == (released, seen.pop() is not None)

    def foreign():
        seen.append(threads.watch_thread(kept))
        threading.current_thread()  # makes the entry, which Python 3.11 never removes
        seen.append(threads.watch_thread(kept))
        threading._active.pop(threading.get_ident())
        done.set()

    _thread.start_new_thread(foreign, ())
    done.wait()
    assert ([None, None], [ident]) == (seen, released)


def test_what_a_thread_recorded_may_be_gone_before_it(in_thread, monkeypatch):
    """A watch that is still held makes no trouble at the thread's end."""

    class Regions:
        def release(self):
            raise AssertionError("it is gone")

    trouble = []
    monkeypatch.setattr(sys, "unraisablehook", trouble.append)
    watch = in_thread(lambda: threads.watch_thread(Regions()))
    assert (None, []) == (watch(), trouble)


def test_what_comes_first_amid_a_threads_first_start(tmr, monkeypatch):
    """A region that a finalizer opens while its thread takes a place stays open, and the place is the same."""

    class Interrupted:
        def __enter__(self):
            if not opened:
                opened.append(True)
                tmr.start("finalizer")

        def __exit__(self, *error):
            pass

    opened = []
    monkeypatch.setattr(threads, "claim_lock", Interrupted())
    with tmr.region("a"):
        pass
    times = tmr.snapshot().get("finalizer")
    assert (1, 0, 1) == (times.running, times.discarded, lanes(tmr))


def test_a_second_timer_on_a_thread_does_not_end_it_for_the_first(clock, in_thread):
    """Each of a thread's timers is released as the thread ends, and none before."""
    one, two = Timer(clock=clock), Timer(clock=clock)

    def work():
        one.start("a")
        two.record("b", 0, S)
        open_still = one.snapshot().get("a").running
        clock.advance(1)
        one.end("a")
        return open_still, lanes(one), lanes(two)

    assert (1, 1, 1) == in_thread(work)
    assert ([1.0], [1.0]) == (one.get_time("a"), two.get_time("b"))


def test_a_thread_that_is_gone_has_a_number_for_a_name():
    """An error names a living thread by its name, and any other by the number that it had."""
    assert "thread 'MainThread'" == threads.thread_name(threading.main_thread().ident)
    assert "thread 12" == threads.thread_name(12)


def test_a_timer_that_is_gone_when_its_thread_ends(in_thread):
    """The end of a thread is no matter for a timer that does not exist any more, nor does the thread keep it."""
    import gc

    def worker():
        tmr = Timer()
        tmr.start("a")
        timers.append(ref(tmr))
        del tmr
        gc.collect()
        timers.append(timers[0]())

    timers = []
    in_thread(worker)
    assert [None, None] == [timers[0](), timers[1]]


def test_a_thread_that_ends_with_the_interpreter_is_left_alone(tmr, in_thread, monkeypatch):
    """A daemon thread outlives a module's objects: its open region then stays as it is."""
    finalizing = []
    monkeypatch.setattr(sys, "is_finalizing", lambda: bool(finalizing))

    def worker():
        tmr.start("a")
        finalizing.append(True)

    in_thread(worker)
    times = tmr.snapshot().get("a")
    assert (1, 0) == (times.running, times.discarded)


def test_a_region_as_the_interpreter_ends(python):
    """A timer's first one too, in the finalizer of an object in a cycle, where nothing can be imported."""
    program = """
from deep500_timing import Timer
class Held:
    def __init__(self): self.tmr, self.me = Timer(), self
    def __del__(self):
        with self.tmr.region("a"): pass
        print("timed")
held = Held()
"""
    assert "timed\n" == python(program)


def test_what_a_finalizer_of_an_ending_thread_leaves(tmr, in_thread, monkeypatch):
    """It is recorded; its open region is discarded, and the next thread of the same id is watched as any other."""

    def end_as_the_interpreter_does():
        tmr.start("open")
        del threads._of_thread.token
        with monkeypatch.context() as patched:
            patched.setattr(threading, "enumerate", list)
            with tmr.region("late"):
                pass
            tmr.start("left")

    for _ in range(4):
        in_thread(end_as_the_interpreter_does)
        in_thread(lambda: (tmr.start("open"), tmr.start("left")))
    snapshot = tmr.snapshot()
    assert 4 == snapshot.get("late").stats.count
    assert (0, 8) == (snapshot.get("open").running, snapshot.get("open").discarded)
    assert 8 == snapshot.get("left").running + snapshot.get("left").discarded


def test_the_place_of_a_finalizer_of_an_ending_thread_is_free(tmr, clock, in_thread, monkeypatch):
    """No one else will release it, so any thread may have it next."""
    other = Timer(clock=clock)

    def end_as_the_interpreter_does():
        other.start("a")
        del threads._of_thread.token
        with monkeypatch.context() as patched:
            patched.setattr(threading, "enumerate", list)
            with tmr.region("late"):
                pass

    in_thread(end_as_the_interpreter_does)
    with tmr.region("a"):
        pass
    assert (1, 1) == (lanes(tmr), tmr.snapshot().get("late").stats.count)


def test_many_threads_at_once_lose_nothing():
    """Every interval of every thread is counted once, with readers at work meanwhile."""
    tmr = Timer(keep_last=100)
    barrier = threading.Barrier(6)
    rounds = 3000
    stop = threading.Event()
    seen = []

    def worker():
        barrier.wait()
        for _ in range(rounds):
            with tmr.region("a"):
                pass
            tmr.record("b", 0, 7)

    def reader():
        barrier.wait()
        while not stop.is_set():
            times = tmr.snapshot().get("b")
            if times is not None and times.stats is not None:
                seen.append((times.stats.count, times.stats.total, times.stats.min, times.stats.max))

    with ThreadPoolExecutor(6) as pool:
        reading = pool.submit(reader)
        workers = [pool.submit(worker) for _ in range(5)]
        for future in workers:
            future.result()
        stop.set()
        reading.result()
    assert (5 * rounds, 5 * rounds) == (tmr.get_time_stats("a").count, tmr.get_time_stats("b").count)
    counts = [count for count, *_ in seen]
    assert sorted(counts) == counts
    for count, total, shortest, longest in seen:
        assert (pytest.approx(count * 7e-9), 7e-9, 7e-9) == (total, shortest, longest)


def test_each_thread_has_its_own_warm_up(in_thread):
    """Threads that follow one another each skip their own first intervals."""
    tmr = Timer(skip_first=3)
    for _ in range(8):
        in_thread(lambda: [tmr.record("x", 0, 1) for _ in range(10)])
    stats = tmr.get_time_stats("x")
    assert (56, 24) == (stats.count, stats.skipped)
