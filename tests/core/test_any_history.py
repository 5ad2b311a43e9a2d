"""Any history of calls: against a simple model, and the compiled form against the plain one."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import deep500_timing
from deep500_timing import NoTimesError, RegionNotOpenError, RegionOpenError, Timer, TimeType
from deep500_timing.testing import ManualClock

KEYS = st.sampled_from([TimeType.BATCH, "BATCH", TimeType.IO, "load", "a name of its own"])


def name_of(key):
    """A key's name in a report."""
    return key.name if isinstance(key, TimeType) else key


class AnyHistory(RuleBasedStateMachine):
    """A timer and its expected content: for each name a start or None, the kept durations, and the counts."""

    @initialize(keep_last=st.sampled_from([None, 0, 1, 3, 200]), skip_first=st.sampled_from([0, 0, 1, 2]))
    def begin(self, keep_last, skip_first):
        """Make a timer."""
        self.clock = ManualClock()
        self.tmr = Timer(clock=self.clock, keep_last=keep_last, skip_first=skip_first)
        self.keep_last, self.skip_first = keep_last, skip_first
        self.enabled = True
        self.open, self.done, self.failed, self.discarded, self.forgiven = {}, {}, {}, {}, {}
        self.generation = 0

    def ended(self, name):
        """The model of an end."""
        if name in self.open:
            self.done.setdefault(name, []).append(self.clock.now_ns() - self.open.pop(name))
            return None
        if self.forgiven.get(name, 0) != self.generation:
            self.forgiven[name] = self.generation
            return None
        return RegionNotOpenError

    def expect(self, error, call, *arguments):
        """Make the call and see whether it raises the model's error."""
        if error is None:
            call(*arguments)
        else:
            with pytest.raises(error):
                call(*arguments)

    @rule(nanoseconds=st.one_of(st.integers(0, 1000), st.integers(0, 10**12)))
    def time_passes(self, nanoseconds):
        """Move the clock."""
        self.clock.advance_ns(nanoseconds)

    @rule(key=KEYS, by_handle=st.booleans())
    def start(self, key, by_handle):
        """Start a region, open or not."""
        name = name_of(key)
        error = RegionOpenError if self.enabled and name in self.open else None
        if self.enabled and error is None:
            self.open[name] = self.clock.now_ns()
        if by_handle:
            self.expect(error, self.tmr.region(key).start)
        else:
            self.expect(error, self.tmr.start, key)

    @rule(key=KEYS, by_handle=st.booleans())
    def end(self, key, by_handle):
        """End a region, open or not."""
        error = self.ended(name_of(key)) if self.enabled else None
        if by_handle:
            self.expect(error, self.tmr.region(key).end)
        else:
            self.expect(error, self.tmr.end, key)

    @rule(key=KEYS)
    def discard(self, key):
        """Forget a region, open or not."""
        name = name_of(key)
        was_open = self.open.pop(name, None) is not None
        assert was_open == self.tmr.discard(key)
        self.discarded[name] = self.discarded.get(name, 0) + was_open
        if was_open:
            self.forgiven[name] = None  # of no generation: the end that belongs to it is still to come

    @rule(key=KEYS)
    def fail(self, key):
        """Close a region as failed, open or not."""
        name = name_of(key)
        self.failed[name] = self.failed.get(name, 0) + (self.open.pop(name, None) is not None)
        self.tmr.fail(key)

    @rule(key=KEYS, nanoseconds=st.integers(0, 10**9), times=st.sampled_from([1, 2, 70, 300]))
    def record(self, key, nanoseconds, times):
        """Keep intervals measured elsewhere."""
        now = self.clock.now_ns()
        for _ in range(times):
            self.tmr.record(key, now - nanoseconds, now)
        if self.enabled:
            self.done.setdefault(name_of(key), []).extend([nanoseconds] * times)

    @rule(enabled=st.booleans())
    def switch(self, enabled):
        """Switch on or off."""
        self.tmr.enabled = enabled
        if enabled != self.enabled:
            self.enabled = enabled
            self.generation += 1
            for name in self.open:
                self.discarded[name] = self.discarded.get(name, 0) + 1
            self.open.clear()

    @rule()
    def reset(self):
        """Forget finished intervals."""
        self.tmr.reset()
        self.done, self.failed, self.discarded = {}, {}, {}

    @invariant()
    def knows_the_same(self):
        """Reports, lists and statistics are those of the model."""
        if not hasattr(self, "tmr"):
            return
        snapshot = self.tmr.snapshot()
        names = {
            name
            for counts in (self.open, self.done, self.failed, self.discarded)
            for name, value in counts.items()
            if value or counts is self.open
        }
        assert names == {region.name for region in snapshot}
        for region in snapshot:
            name = region.name
            assert (name in self.open, self.failed.get(name, 0), self.discarded.get(name, 0)) == (
                region.running,
                region.failed,
                region.discarded,
            )
            done = self.done.get(name, [])
            counted = done[self.skip_first :]
            kept = done if self.keep_last is None else done[max(len(done) - self.keep_last, 0) :]
            assert [duration / 1e9 for duration in kept] == self.tmr.get_time(name)
            if counted:
                stats = region.stats
                assert (len(counted), sum(counted) / 1e9, min(counted) / 1e9, max(counted) / 1e9) == (
                    stats.count,
                    stats.total,
                    stats.min,
                    stats.max,
                )
                assert stats == self.tmr.get_time_stats(name)
            else:
                assert region.stats is None
                with pytest.raises(NoTimesError):
                    self.tmr.get_time_stats(name)


AnyHistory.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=40)
TestAnyHistory = AnyHistory.TestCase

SCRIPTS = """
import json, random, sys
import deep500_timing
from deep500_timing import CPUGPUTimer, Timer, TimeType
from deep500_timing.testing import ManualClock, ManualDeviceClock

KEYS = [TimeType.BATCH, "BATCH", TimeType.IO, "load", "x" * 50, 5, "", None]

def plain(stats):
    # The forms fold in portions of different size, which percentiles within their 1 % and the deviation's last digits
    # may show.
    if stats is None:
        return None
    near = [stats.median, stats.p90, stats.p95, stats.p99, stats.stdev, *(stats.median_ci or ())]
    return {"same": [stats.min, stats.mean, stats.max, stats.count, stats.total, stats.skipped], "near": near}

def script(seed):
    chance = random.Random(seed)
    clock, device = ManualClock(), ManualDeviceClock()
    settings = {"keep_last": chance.choice([None, 0, 1, 100]), "skip_first": chance.choice([0, 1, 5])}
    on_device = chance.random() < 0.5
    tmr = CPUGPUTimer(clock=clock, device_clock=device, **settings) if on_device else Timer(clock=clock, **settings)
    told = []
    def use(handle):
        with handle:
            clock.advance_ns(chance.randrange(10**chance.randrange(1, 10)))
            device.launch(chance.random())
            if chance.random() < 0.1:
                raise ZeroDivisionError("on purpose")
    for _ in range(chance.randrange(1, 400)):
        key = KEYS[min(int(chance.expovariate(0.5)), 7)]
        gpu = {"gpu": True} if on_device and chance.random() < 0.5 else {}
        action = chance.choice(["start", "end", "with", "with", "with", "discard", "record", "advance", "finish",
                                "fail", "capture", "enabled", "reset", "read", "thread"])
        try:
            if action == "start":
                tmr.start(key, **gpu)
            elif action == "end":
                tmr.end(key, **gpu)
            elif action == "with":
                for _ in range(chance.choice([1, 1, 1, 150])):
                    use(tmr.region(key, **gpu))
            elif action == "discard":
                told.append(tmr.discard(key))
            elif action == "record":
                tmr.record(key, chance.randrange(-100, 100), chance.randrange(10**12))
            elif action == "advance":
                clock.advance_ns(chance.randrange(10**9))
                device.advance(chance.random())
            elif action == "finish":
                device.finish()
            elif action == "fail":
                tmr.fail(key)
            elif action == "capture":
                device.capturing = chance.random() < 0.2
            elif action == "enabled":
                tmr.enabled = chance.random() < 0.8
            elif action == "reset" and chance.random() < 0.1:
                tmr.reset()
            elif action == "read":
                told.append(tmr.get_time(key, **gpu))
                told.append(plain(tmr.get_time_stats(key, **gpu)))
            elif action == "thread":
                import threading
                thread = threading.Thread(target=lambda: tmr.start("load"), name="another")
                thread.start()
                thread.join()
        except Exception as error:
            told.append([type(error).__name__, str(error)])
    told += [repr(tmr), tmr.intervals("BATCH").tolist(), dict(device.calls)]
    for region in tmr.snapshot():
        told.append([region.name, region.device, region.running, region.pending, region.failed, region.discarded,
                     region.captured, plain(region.stats)])
    return told

# Threads that end inside a region are part of the scripts, warnings are not.
import warnings
warnings.simplefilter("ignore")
json.dump({"compiled": deep500_timing.compiled, "told": [script(seed) for seed in range(150)]}, sys.stdout)
"""


@pytest.mark.slow
@pytest.mark.one_form
def test_both_forms_do_the_same(python):
    """The same random calls get the same answers, errors and snapshots from the compiled and the plain form."""
    plain = json.loads(python(SCRIPTS, DEEP500_TIMING_PURE="1"))
    other = json.loads(python(SCRIPTS, DEEP500_TIMING_PURE=""))
    assert plain["compiled"] is False
    assert 1000 < sum(map(len, plain["told"]))
    if not other["compiled"]:
        assert not deep500_timing.compiled
        pytest.skip("the package is not compiled here")
    for seed, (expected, actual) in enumerate(zip(plain["told"], other["told"], strict=True)):
        near = [], []
        without_near = [take_near(told, found) for told, found in zip((expected, actual), near, strict=True)]
        assert without_near[0] == without_near[1], f"script {seed}"
        assert pytest.approx(near[0], rel=0.02) == near[1], f"script {seed}"


def take_near(told, found):
    """The text without the numbers that the forms may differ in, which go to ``found``."""
    if isinstance(told, dict):
        found += told.get("near", [])
        return {key: take_near(value, found) for key, value in told.items() if key != "near"}
    if isinstance(told, list):
        return [take_near(item, found) for item in told]
    return told
