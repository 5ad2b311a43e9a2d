"""GPU times against a model: for any program the times equal plain additions, and none is lost."""

# ruff: noqa: D102 (the model's methods are named for a program's calls)

from __future__ import annotations

import random
import warnings
from collections import deque

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deep500_timing_torch as timer
from deep500_timing.devices import _pool as _device

KEYS = ("a", "b", "c")
STREAMS = 3
COUNTS = ("failed", "captured", "discarded")

pytestmark = pytest.mark.torch_device

CALLS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("toggle", "toggle", "toggle", "discard", "fail")), st.sampled_from(KEYS)),
        st.tuples(st.just("launch"), st.integers(0, 10**6)),
        st.tuples(st.just("advance"), st.integers(0, 3 * 10**6)),
        st.tuples(st.just("stream"), st.integers(0, STREAMS - 1)),
        st.tuples(st.just("capture"), st.booleans()),
        st.tuples(st.just("fault"), st.sampled_from(("record", "query", "stream_lookup"))),
        st.tuples(st.just("look"), st.booleans()),
        st.tuples(st.just("burst"), st.integers(1, 80)),
        st.tuples(
            st.just("across"), st.lists(st.tuples(st.integers(0, STREAMS - 1), st.integers(0, 10**6)), min_size=1)
        ),
    ),
    max_size=60,
)


class Model:
    """Streams as sums of durations, and regions as the sums at which they began and ended."""

    def __init__(self):
        self.now = 0
        self.tails = [0] * STREAMS
        self.stream = 0
        self.capturing = False
        self.open = {}
        self.times = {key: [] for key in KEYS}
        self.counts = {key: dict.fromkeys(COUNTS, 0) for key in KEYS}

    def launch(self, ns):
        if not self.capturing:
            self.tails[self.stream] = max(self.tails[self.stream], self.now) + ns

    def advance(self, ns):
        self.now += ns

    def mark(self, fault):
        # When the event is reached, or what becomes of it. A capture is seen once the stream is known.
        if fault == "stream_lookup":
            return "failed"
        if self.capturing:
            return "captured"
        return "failed" if fault == "record" else max(self.tails[self.stream], self.now)

    def start(self, key, fault):
        self.open[key] = self.mark(fault)

    def end(self, key, fault):
        begun = self.open.pop(key)
        # A region without a start asks the device for nothing at its end: the fault is left for the next.
        if isinstance(begun, str):
            self.counts[key][begun] += 1
            return False
        ended = self.mark(fault)
        if isinstance(ended, str):
            self.counts[key][ended] += 1
        elif ended < begun:
            self.counts[key]["failed"] += 1
        else:
            self.times[key].append(ended - begun)
        return True

    def drop(self, key, why):
        if key in self.open:
            del self.open[key]
            self.counts[key][why] += 1


class World:
    """The timer on the test device, and the model, made to do the same."""

    def __init__(self, dev, keep_last):
        dev.reset()
        dev.set_float32_elapsed(False)
        _device._pools.clear()
        self.dev = dev
        self.keep_last = keep_last
        self.tmr = timer.CPUGPUTimer(keep_last=keep_last)
        self.model = Model()
        self.streams = [torch.accelerator.current_stream(), torch.Stream(), torch.Stream()]
        self.waiting = deque()
        self.tmr.start("bind", gpu=True)  # The first look at a device asks it more than the later ones do.
        self.tmr.discard("bind")

    def toggle(self, key):
        fault = self.waiting[0] if self.waiting else None
        if fault is not None:
            self.dev.fail_next(fault)
        if key in self.model.open:
            self.tmr.end(key, gpu=True)
            used = self.model.end(key, fault)
        else:
            self.tmr.start(key, gpu=True)
            self.model.start(key, fault)
            used = True
        if fault is not None:
            self.dev.fail_next(fault, 0)
            if used:
                self.waiting.popleft()

    def discard(self, key):
        self.tmr.discard(key)
        self.model.drop(key, "discarded")

    def fail(self, key):
        self.tmr.fail(key)
        self.model.drop(key, "failed")

    def launch(self, ns):
        self.dev.launch(ns)
        self.model.launch(ns)

    def advance(self, ns):
        self.dev.advance(ns)
        self.model.advance(ns)

    def stream(self, index):
        torch.accelerator.set_stream(self.streams[index])
        self.model.stream = index

    def capture(self, on):
        self.dev.set_capturing(on)
        self.model.capturing = on

    def fault(self, kind):
        if kind == "query":
            self.dev.fail_next(kind)
        else:
            self.waiting.append(kind)

    def look(self, wait):
        self.dev.fail_next("query", 0)
        before = self.dev.counters().synchronizes
        if wait:
            # A wait takes the device on to the end of what is queued there.
            self.dev.drain()
            self.model.now = max(self.model.now, *self.model.tails)
            self.tmr.complete_all()
        else:
            self.tmr.snapshot()
            assert before == self.dev.counters().synchronizes

    def burst(self, regions):
        for _ in range(regions):
            self.toggle("a")
            self.launch(1000)
            self.toggle("a")
            self.advance(500)

    def across(self, steps):
        self.toggle("b")
        for stream, ns in steps:
            self.stream(stream)
            self.launch(ns)
        self.toggle("b")

    def check(self):
        self.capture(False)
        for key in KEYS:
            self.discard(key)
        # Pairs are all accounted for before the device is done, and after.
        for finished in (False, True):
            self.look(finished)
            snapshot = self.tmr.snapshot()
            for key in KEYS:
                times = snapshot.get(key, "GPU")
                if times is None:
                    assert 0 == len(self.model.times[key]) + sum(self.model.counts[key].values())
                    continue
                count = 0 if times.stats is None else times.stats.count
                ended = len(self.model.times[key]) + sum(self.model.counts[key].values())
                assert ended == count + times.pending + sum(getattr(times, name) for name in COUNTS)
                if finished:
                    assert 0 == times.pending
                    assert self.model.counts[key] == {name: getattr(times, name) for name in COUNTS}
                    assert len(self.model.times[key]) == count
                    kept = sorted(round(seconds * 1e9) for seconds in self.tmr.get_time(key, gpu=True))
                    if self.keep_last is None:
                        assert sorted(self.model.times[key]) == kept
        counters = self.dev.counters()
        assert 0 == counters.records_while_capturing
        assert 0 == counters.queries_while_capturing


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(CALLS, st.sampled_from((None, None, 5)))
def test_agrees_with_a_model(dev, calls, keep_last):
    """Any schedule of regions, work, streams, captures and faults gives exactly the model's times and counts."""
    world = World(dev, keep_last)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", timer.TimingWarning)
        for name, argument in calls:
            getattr(world, name)(argument)
        world.check()


def test_two_devices_of_four_streams(dev):
    """Regions nested, dropped and ended on eight streams that lag behind have the times that the streams say."""
    dev.reset()
    dev.set_float32_elapsed(False)
    _device._pools.clear()
    rng, tmr = random.Random(7), timer.CPUGPUTimer()
    streams = []
    for device in (0, 1):
        with torch.accelerator.device_index(device):
            own = torch.accelerator.current_stream()
        streams.append([own, *(torch.Stream(f"testdev:{device}") for _ in range(3))])
    true = {}
    for _ in range(3000):
        device, which = rng.randrange(2), rng.randrange(4)
        stream = streams[device][which]

        def reached(stream=stream):
            return max(dev.tail_ns(stream), dev.now_ns())

        with torch.accelerator.device_index(device):
            torch.accelerator.set_stream(stream)
            begun = []
            for depth in range(rng.choice((1, 1, 2, 3))):
                key = f"{device} {which} {depth}"
                tmr.start(key, gpu=True)
                begun.append((key, reached()))
                dev.launch(rng.randrange(1, 5000), stream)
            for key, start_ns in reversed(begun):
                dev.launch(rng.randrange(3000), stream)
                if rng.random() < 0.03:
                    tmr.discard(key)
                else:
                    tmr.end(key, gpu=True)
                    true.setdefault(key, []).append(reached() - start_ns)
        if rng.random() < 0.7:
            dev.advance(rng.randrange(6000))
    assert 0 == dev.counters().synchronizes
    dev.drain()
    found = {key: sorted(round(seconds * 1e9) for seconds in tmr.get_time(key, gpu=True)) for key in true}
    assert {key: sorted(times) for key, times in true.items()} == found
    torch.accelerator.set_device_index(0)


def test_a_full_launch_queue(dev):
    """Who issues into a full stream waits for its head, as without regions; the times and the bound of events stay."""
    waited, spent = [], []
    for timed in (False, True):
        dev.reset()
        _device._pools.clear()
        dev.set_queue_limit(100)
        tmr = timer.CPUGPUTimer()
        for _ in range(400):
            if timed:
                tmr.start("kernel", gpu=True)
            dev.launch(1_000_000)
            if timed:
                tmr.end("kernel", gpu=True)
        waited.append(dev.counters().full_queue_waits)
        dev.drain()
        spent.append(dev.now_ns())
        if timed:
            assert [0.001] * 400 == tmr.get_time("kernel", gpu=True)
            assert dev.counters().events_created <= 200
    assert waited[0] > 0
    assert spent[0] == spent[1]
