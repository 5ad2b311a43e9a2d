# ruff: noqa: B023 (a function of a loop is used in that round)
"""Random programs against an exact model, interrupted by finalizers, collector callbacks, signal handlers and readers.

``--fuzz-seeds N`` tries N programs instead of a few.
"""

from __future__ import annotations

import gc
import math
import queue
import random
import signal
import statistics
import threading
from contextlib import contextmanager

import pytest
from mischief import Dying, Step, collector_acts

from deep500_timing import RegionNotOpenError, RegionOpenError, Timer, TimeType
from deep500_timing.devices import _pool
from deep500_timing.testing import ManualClock, ManualDeviceClock

KEYS = (TimeType.BATCH, "BATCH", TimeType.IO, "a", "b")
ON_DEVICE = ("device a", "device b")


def name_of(key):
    """A key's name in a report."""
    return key.name if isinstance(key, TimeType) else key


class Clock(ManualClock):
    """A clock in the user's Python, where anything may run."""

    step = None

    def now_ns(self):
        """The time."""
        if self.step is not None:
            self.step.called()
        return super().now_ns()


class DeviceClock(ManualDeviceClock):
    """The same of a device."""

    step = None

    def _called(self, method):
        super()._called(method)
        if self.step is not None:
            self.step.called()


class Lane:
    """A region's state on one thread."""

    def __init__(self):
        self.done, self.failed, self.discarded = [], 0, 0
        self.open_ns = None
        self.forgiven = 0


class Workers:
    """Threads that do one thing after another; number 0 is the main thread, where signals are handled."""

    def __init__(self, count):
        self.queues = [queue.SimpleQueue() for _ in range(count - 1)]
        self.answers = queue.SimpleQueue()
        self.threads = [threading.Thread(target=self._serve, args=(tasks,)) for tasks in self.queues]
        for thread in self.threads:
            thread.start()

    def _serve(self, tasks):
        while (task := tasks.get()) is not None:
            try:
                self.answers.put((True, task()))
            except BaseException as error:
                self.answers.put((False, error))

    def do(self, number, task):
        """The task's result there."""
        if number == 0:
            return task()
        self.queues[number - 1].put(task)
        good, answer = self.answers.get()
        if not good:
            raise answer
        return answer

    def end(self):
        """Let the threads end."""
        for tasks in self.queues:
            tasks.put(None)
        for thread in self.threads:
            thread.join()


class Program:
    """One program at random, and what its timer ought to know after each of its steps."""

    def __init__(self, seed):
        self.random = choose = random.Random(seed)
        self.seed = seed
        self.keep_last = choose.choice([None, None, 0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 300])
        self.skip_first = choose.choice([0, 0, 1, 5, 20, 200])
        self.clock, self.device = Clock(), DeviceClock()
        self.tmr = Timer(
            clock=self.clock, device_clock=self.device, keep_last=self.keep_last, skip_first=self.skip_first
        )
        self.threads = choose.choice([1, 1, 2, 3])
        self.lanes, self.order_is_known = {}, True
        self.enabled, self.generation = True, 0
        self.on_device = dict.fromkeys(ON_DEVICE, 0)
        self.errors = []

    def lane(self, thread, key):
        """The lane of a key on a thread."""
        return self.lanes.setdefault((thread, name_of(key)), Lane())

    def let_time_pass(self):
        """Little or much. On a clock that stands still two starts could not be told apart."""
        upto = self.random.choice([1, 200, 200, 200, 10**6, 10**6, 10**12])
        self.clock.advance_ns(1 + self.random.randrange(upto))

    # --- what comes in between ------------------------------------------------------------------------------------

    def enter(self, thread):
        """Use a region in between; the model knows."""
        key = self.random.choice(KEYS + ON_DEVICE) if self.enabled else "a"
        try:
            with self.tmr.region(key, gpu=key in ON_DEVICE):
                pass
        except BaseException as error:
            self.errors.append(error)
            return
        if self.enabled:
            lane = self.lane(thread, key)
            lane.done.append((self.clock._now_ns,) * 2)
            self.order_is_known = False
            if key in ON_DEVICE:
                self.on_device[key] += 1

    def read(self):
        """Take a snapshot in between, and look that no time is lost in it or there twice."""
        key = self.random.choice(KEYS)
        done = sum(len(lane.done) for (_, name), lane in self.lanes.items() if name == name_of(key))
        try:
            found = self.tmr._stores(key, False)
            seen = sum(store.count for store in found)
            self.tmr.snapshot()
            assert done <= seen <= done + self.most_unknown, (done, seen)
        except BaseException as error:
            self.errors.append(error)

    def come_in(self, thread):
        """One of those, by one of the ways."""
        act = self.read if self.random.random() < 0.15 else lambda: self.enter(thread)
        way = self.random.choice(["finalizer", "collector", "signal"])
        if way == "signal" and thread == 0 and hasattr(signal, "SIGUSR1"):
            before = signal.signal(signal.SIGUSR1, lambda number, frame: act())
            try:
                signal.raise_signal(signal.SIGUSR1)
            finally:
                signal.signal(signal.SIGUSR1, before)
        elif way == "collector":
            with collector_acts(act):
                gc.collect(0)
        else:
            Dying(act)

    @contextmanager
    def watched(self, step):
        """Count the steps of the callee."""
        self.clock.step = self.device.step = step
        try:
            yield
        finally:
            self.clock.step = self.device.step = None

    # --- the program's calls ------------------------------------------------------------------------------------

    def run(self):
        """All of it."""
        workers = Workers(self.threads)
        try:
            for number in range(self.random.choice([40, 150, 400])):
                thread, key = self.random.randrange(self.threads), self.random.choice(KEYS)
                self.let_time_pass()
                kind = self.random.choices([self.call, self.call_with_entries, self.rare], [70, 27, 3])[0]
                self.what = (self.seed, number, kind.__name__, thread, key)
                self.most_unknown = 0
                workers.do(thread, lambda: kind(thread, key))
                assert [] == self.errors, self.what
                if number % 25 == 0:
                    self.check()
            self.check()
            workers.do(0, self.close)
        finally:
            workers.end()

    def expect(self, error, call):
        """Make the call and see that it raises the expected error, and nothing else."""
        if error is None:
            return call()
        with pytest.raises(error):
            call()
        return None

    def call(self, thread, key):
        """An ordinary use, or a misuse."""
        use = self.random.choice(
            [
                *(self.start, self.end, self.block, self.discard, self.fail, self.record, self.timed, self.iterate),
                *(self.start, self.end, self.block, self.burst, self.on_the_device),
            ]
        )
        use(thread, key)

    def call_with_entries(self, thread, key):
        """The same with something that comes in at one of its steps, or whenever the collector can run."""
        self.most_unknown = 800
        if self.random.random() < 0.2:
            with collector_acts(lambda: self.enter(thread)):
                self.block(thread, key)
            return
        step = Step(self.random.randrange(1, 4), lambda: self.come_in(thread))
        with self.watched(step):
            self.call(thread, key)

    def start(self, thread, key):
        """Start it, open or not."""
        lane = self.lane(thread, key)
        handle = self.tmr.region(key).start
        start = self.random.choice([handle, lambda: self.tmr.start(key)])
        if not self.enabled:
            start()
        elif lane.open_ns is not None:
            self.expect(RegionOpenError, start)
        else:
            now = self.clock._now_ns
            start()
            lane.open_ns = now

    def end(self, thread, key):
        """End it, open or not."""
        lane = self.lane(thread, key)
        end = self.random.choice([self.tmr.region(key).end, lambda: self.tmr.end(key)])
        if not self.enabled:
            end()
        elif lane.open_ns is not None:
            now = self.clock._now_ns
            end()
            lane.done.append((lane.open_ns, now))
            lane.open_ns = None
        elif lane.forgiven != self.generation:
            lane.forgiven = self.generation
            end()
        else:
            self.expect(RegionNotOpenError, end)

    def block(self, thread, key):
        """A ``with`` block, with an exception in it now and then."""
        lane = self.lane(thread, key)
        if lane.open_ns is not None and self.enabled:
            with pytest.raises(RegionOpenError), self.tmr.region(key):
                raise ValueError
            return
        fails, length = self.random.random() < 0.3, self.random.randrange(10**5)
        begin = self.clock._now_ns
        try:
            with self.tmr.region(key):
                self.clock.advance_ns(length)
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        if self.enabled and fails:
            lane.failed += 1
        elif self.enabled:
            lane.done.append((begin, self.clock._now_ns))

    def discard(self, thread, key):
        """Forget it, open or not."""
        lane = self.lane(thread, key)
        was_open = lane.open_ns is not None
        assert was_open == self.tmr.discard(key), self.what
        if was_open:
            lane.open_ns, lane.forgiven = None, None
            lane.discarded += 1

    def fail(self, thread, key):
        """Close it as failed, open or not."""
        lane = self.lane(thread, key)
        was_open = lane.open_ns is not None
        assert was_open == self.tmr.fail(key), self.what
        lane.open_ns = None
        lane.failed += was_open

    def record(self, thread, key):
        """Keep an interval that was measured elsewhere."""
        end = self.clock._now_ns
        begin = end - self.random.randrange(10**7)
        self.tmr.record(key, begin, end)
        if self.enabled:
            self.lane(thread, key).done.append((begin, end))

    def timed(self, thread, key):
        """A decorated function that may call itself and may fail. Inside an open region it is part of that."""
        lane = self.lane(thread, key)
        depth, fails, length = self.random.randrange(3), self.random.random() < 0.2, self.random.randrange(10**5)

        @self.tmr.timed(key)
        def function(depth):
            self.clock.advance_ns(length)
            if depth:
                function(depth - 1)
            elif fails:
                raise KeyError

        begin = self.clock._now_ns
        self.expect(KeyError if fails else None, lambda: function(depth))
        if not self.enabled or lane.open_ns is not None:
            return
        if fails:
            lane.failed += 1
        else:
            lane.done.append((begin, self.clock._now_ns))

    def iterate(self, thread, key):
        """Iterate, to the end or not, over items that may fail. Inside an open region the waits are part of that."""
        lane = self.lane(thread, key)
        items, stop, fails = self.random.randrange(5), self.random.randrange(6), self.random.random() < 0.2
        length = self.random.randrange(1000)

        def source():
            for item in range(items):
                self.clock.advance_ns(length)
                yield item
            if fails:
                raise KeyError

        iterator = iter(self.tmr.iterate(source(), key))
        is_timed = self.enabled and lane.open_ns is None
        for number in range(stop):
            begin = self.clock._now_ns
            if number == items:
                self.expect(KeyError if fails else StopIteration, lambda: next(iterator))
                if is_timed and fails:
                    lane.failed += 1
                elif is_timed:
                    lane.forgiven = self.generation
                break
            next(iterator)
            if is_timed:
                lane.done.append((begin, self.clock._now_ns))
        iterator.close()

    def burst(self, thread, key):
        """Many at once, so that blocks are full."""
        lane, length = self.lane(thread, key), self.random.randrange(3000)
        if lane.open_ns is not None:
            return
        for _ in range(self.random.choice([3, 40, 130, 700])):
            begin = self.clock._now_ns
            self.tmr.start(key)
            self.clock.advance_ns(length)
            self.tmr.end(key)
            if self.enabled:
                lane.done.append((begin, self.clock._now_ns))

    def on_the_device(self, thread, _key):
        """Regions on the device as well; the device gets along sooner or later."""
        key = self.random.choice(ON_DEVICE)
        lane = self.lane(thread, key)
        for _ in range(self.random.choice([1, 3, 40])):
            begin = self.clock._now_ns
            with self.tmr.region(key, gpu=True):
                self.device.launch(1e-6)
            if self.enabled:
                lane.done.append((begin, self.clock._now_ns))
                self.on_device[key] += 1
            if self.random.random() < 0.5:
                self.device.finish()

    def rare(self, thread, key):
        """Switch it, forget all, or use the handle of another thread."""
        what = self.random.choice(["switch", "reset", "handle"])
        if what == "reset" and all(lane.open_ns is None for lane in self.lanes.values()):
            self.tmr.complete_all()
            self.tmr.reset()
            for lane in self.lanes.values():
                lane.done, lane.failed, lane.discarded = [], 0, 0
            self.on_device = dict.fromkeys(ON_DEVICE, 0)
        elif what == "switch":
            enabled = not self.enabled or self.random.random() < 0.3
            if enabled != self.enabled:
                self.tmr.enabled = self.enabled = enabled
                self.generation += 1
                for lane in self.lanes.values():
                    if lane.open_ns is not None:
                        lane.open_ns = None
                        lane.discarded += 1
        elif self.enabled and self.lane(thread, key).open_ns is None:
            begin = self.clock._now_ns
            with self.handles[key]:
                self.clock.advance_ns(5)
            self.lane(thread, key).done.append((begin, self.clock._now_ns))

    # --- the expected content -----------------------------------------------------------------------------

    def check(self):
        """Compare everything."""
        snapshot = self.tmr.snapshot()
        names = {}
        for (_, name), lane in self.lanes.items():
            names.setdefault(name, []).append(lane)
        for name, lanes in names.items():
            what = (*self.what, name)
            times = snapshot.get(name)
            done = [end - begin for lane in lanes for begin, end in lane.done]
            counted = [end - begin for lane in lanes for begin, end in lane.done[self.skip_first :]]
            counters = (
                sum(lane.failed for lane in lanes),
                sum(lane.discarded for lane in lanes),
                sum(lane.open_ns is not None for lane in lanes),
            )
            if times is None:
                assert ([], (0, 0, 0)) == (done, counters), what
                continue
            assert counters == (times.failed, times.discarded, times.running), what
            if not counted:
                assert times.stats is None, what
                continue
            stats = times.stats
            assert (len(counted), len(done) - len(counted)) == (stats.count, stats.skipped), what
            kept = [tuple(pair) for pair in self.tmr.intervals(name).tolist()]
            wanted = []
            for lane in lanes:
                wanted += lane.done if self.keep_last is None else lane.done[max(len(lane.done) - self.keep_last, 0) :]
            assert len(wanted) == len(kept), what
            if self.order_is_known or self.keep_last is None:
                assert sorted(wanted) == sorted(kept), what
            if not self.order_is_known and self.skip_first:
                continue  # Which of the ones that ended at once are warm-up is not known.
            assert (sum(counted) / 1e9, min(counted) / 1e9, max(counted) / 1e9) == (
                stats.total,
                stats.min,
                stats.max,
            ), what
            assert sum(counted) / len(counted) / 1e9 == stats.mean, what
            deviation = statistics.stdev([float(value) for value in counted]) / 1e9 if len(counted) > 1 else 0.0
            assert math.isclose(stats.stdev, deviation, rel_tol=1e-6, abs_tol=1e-15 + 1e-7 * stats.max), what
        assert {times.name for times in snapshot if times.device == "CPU"} <= set(names)

    def close(self):
        """End open regions; pending device times has all arrived or is counted, by no more events than were in use."""
        self.device.finish()
        self.tmr.complete_all()
        for key in ON_DEVICE:
            times = self.tmr.snapshot().get(key, "GPU")
            stores = self.tmr._stores(key, True)
            found = sum(store.count + store.failed + store.discarded for store in stores)
            assert self.on_device[key] == found, (self.what, key)
            assert times is None or 0 == times.pending == times.running, (self.what, key)
        assert self.tmr.device.events <= 400, self.what


def test_a_program_at_random(seed):
    """For any sequence of calls the timer knows exactly the timed code."""
    gc.collect()
    program = Program(seed)
    program.handles = {key: program.tmr.region(key) for key in KEYS}
    try:
        program.run()
    finally:
        _pool._pools.pop(program.device, None)
