"""One clock for several hosts: its stated uncertainty holds, and an unknown clock is not merged."""

from __future__ import annotations

import json
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_stores import Memory

from deep500_timing import Timer, TimingWarning
from deep500_timing._distributed import clocks
from deep500_timing._distributed.clocks import (
    MOST_DRIFT,
    ClockExchange,
    ClockFit,
    Reading,
    UncalibratedError,
    fit_clock,
)
from deep500_timing._views.page._page import build
from deep500_timing._views.timeline import RankClock
from deep500_timing.ranks import StoreTransport, clocks_of, keep_clocks
from deep500_timing.report import write_timeline
from deep500_timing.runs import Run, RunLog
from deep500_timing.testing import ManualClock

S = 1_000_000_000


def trips(rng, offset_ns, drift, moments_ns, *, burst=8, way_ns=1_000_000):
    """Round trips of a clock that shows ``true * (1 + drift) + offset`` to a reference that shows true time."""
    found = []

    def shows(true_ns):
        return round(true_ns * (1 + drift) + offset_ns)

    for moment in moments_ns:
        at = moment
        for _ in range(burst):
            there, back = rng.exponential(way_ns, 2) + 20_000
            found.append(Reading(shows(at), round(at + there), shows(at + there + back)))
            at += there + back + 100_000
    return found


@pytest.mark.parametrize(("widths_ms", "drift_ns", "least_s"), [((0, 5, 0), 0, 0.005), ((0, 0, 0), 10**6, 0.001)])
def test_a_timeline_names_the_largest_uncertainty(widths_ms, drift_ns, least_s):
    """Of a session with a slow round trip in its middle, and of one with a drift that changes between two of them."""
    fit = ClockFit((0, 50 * S, 100 * S), (0, drift_ns, 0), tuple(width * 10**6 for width in widths_ms))
    place = RankClock({"first_unix_ns": 0, "last_unix_ns": 100 * S, "unix_offset_ns": 0}, 0, fit)
    assert place.within_s >= least_s


def test_512_hosts_that_are_off_and_drift():
    """Off by up to 5 s, drifting by up to 50 ppm: the ends of one collective coincide within the stated uncertainty."""
    rng = np.random.default_rng(512)
    collectives = np.sort(rng.integers(0, 3600 * S, 200))
    widest = 0.0
    for _ in range(512):
        offset, drift = rng.uniform(-5, 5) * S, rng.uniform(-50e-6, 50e-6)
        fit = fit_clock(trips(rng, offset, drift, range(30 * S, 3600 * S, 400 * S), burst=5))
        seen = np.rint(collectives * (1 + drift) + offset).astype(np.int64)
        errors = np.abs(fit.on_reference(seen) - collectives)
        said = fit.uncertainty_ns(seen)
        assert (errors <= said + 1).all()
        assert -drift == pytest.approx(fit.drift, abs=3e-6)
        widest = max(widest, float(np.median(said)))
    # Its use: the bound is of the order of a way there and back, not of seconds.
    assert widest < 5e6


@given(st.integers(-(10**12), 10**12), st.floats(-5e-5, 5e-5), st.integers(1, 4), st.integers(0, 2**32))
def test_the_bounds_hold(offset, drift, bursts, seed):
    """For any ways there and back, and however few round trips there are."""
    rng = np.random.default_rng(seed)
    fit = fit_clock(trips(rng, offset, drift, [k * 100 * S for k in range(bursts)], burst=3))
    true = np.arange(-50, 450, 7, dtype=np.int64) * S
    seen = np.array([round(int(t) * (1 + drift) + offset) for t in true], dtype=np.int64)
    assert (np.abs(fit.on_reference(seen) - true) <= fit.uncertainty_ns(seen) + 2).all()
    assert (1 == bursts) == (fit.drift is None)


def test_one_burst_knows_no_drift():
    """The uncertainty grows with the distance from it, by the most that two clocks may drift apart."""
    fit = fit_clock([Reading(0, 5 * S + 100, 200)])
    assert [5 * S, 5 * S + 1] == fit.on_reference([0, 1]).tolist()
    near, far = fit.uncertainty_ns([100, 1000 * S])
    assert 100 == pytest.approx(near, abs=1)
    assert MOST_DRIFT * 1000 * S == pytest.approx(far - near, rel=1e-3)


def test_a_clock_that_was_stepped():
    """Round trips that contradict each other, and none at all, are an error and no number."""
    with pytest.raises(UncalibratedError, match="a clock was stepped"):
        fit_clock([Reading(0, 100, 200), Reading(1000, S, 1200)])
    with pytest.raises(UncalibratedError, match="no round trip"):
        fit_clock([])


def test_ranks_compare_their_clocks():
    """Over a transport: every rank has round trips that bound how far its clock is off."""
    store = Memory()
    transports = [StoreTransport(store, rank, 2) for rank in range(2)]
    clocks = [Timer().now_ns, lambda: Timer().now_ns() + 7 * S]
    found, enough = [], threading.Event()

    def record(reading, burst):
        found.append(reading)
        if len(found) == 8:
            enough.set()

    exchanges = [
        ClockExchange(transport, clock, record, every_s=60.0)
        for transport, clock in zip(transports, clocks, strict=True)
    ]
    assert enough.wait(300)
    for exchange in exchanges:
        exchange.stop(10)
    fit = fit_clock(found)
    assert abs(-7 * S - fit.offset_ns[0]) <= fit.half_width_ns[0]


class FaultyTransport(StoreTransport):
    """One with first messages that fail."""

    faults = 3

    def send(self, topic, to, message):
        """Fail, or send."""
        if self.faults:
            self.faults -= 1
            raise OSError("the store is away")
        super().send(topic, to, message)


def test_a_fault_of_the_transport_is_not_the_end(monkeypatch):
    """It costs one warning and a pause; what comes afterwards is compared."""
    monkeypatch.setattr(clocks, "_PAUSE_S", 0.001)
    store = Memory()
    enough = threading.Event()
    with pytest.warns(TimingWarning, match=r"failed and is tried again in 0.001 s, later each time: OSError") as said:
        exchanges = [
            ClockExchange(kind(store, rank, 2), Timer().now_ns, lambda *_: enough.set())
            for rank, kind in enumerate((StoreTransport, FaultyTransport))
        ]
        assert enough.wait(300)
    for exchange in exchanges:
        exchange.stop(10)
    assert 1 == len(said)


def write_log(folder, rank, host, monkeypatch, readings=()):
    """A log of a rank on a host, with the round trips that it has made."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    timer = Timer()
    log = RunLog(folder, timer, rank=rank, flush_s=None)
    log.declare("clock_readings", time_ns="time", received_ns="int", reference_ns="int", burst="int", reference="int")
    for reading in readings:
        log.add("clock_readings", (reading.sent_ns, reading.received_ns, reading.reference_ns, 0, 0))
    with timer.region("BATCH"):
        pass
    log.close()


def test_logs_that_cannot_be_calibrated_are_named(tmp_path, monkeypatch):
    """Ranks of the reference's host share its clock; others need round trips, their own or of a rank of their host."""
    write_log(tmp_path, 0, "a", monkeypatch)
    write_log(tmp_path, 1, "a", monkeypatch)
    write_log(tmp_path, 2, "b", monkeypatch, [Reading(10, 3 * S + 20, 30), Reading(40, 3 * S + 50, 60)])
    write_log(tmp_path, 3, "b", monkeypatch)
    write_log(tmp_path, 4, "c", monkeypatch)
    with Run.open(tmp_path) as run:
        clocks = clocks_of(run)
    assert (0, [0, 1, 2, 3], [4]) == (clocks.reference, list(clocks.fits), list(clocks.uncalibrated))
    assert [77] == clocks.of(1).on_reference([77]).tolist()
    assert [3 * S + 77] == clocks.of(2).on_reference([77]).tolist() == clocks.of(3).on_reference([77]).tolist()
    with pytest.raises(UncalibratedError, match="clock of rank 4 with that of rank 0: no round trip"):
        clocks.of(4)


def test_keeping_clocks_needs_a_run():
    """The error says the missing part."""
    with pytest.raises(ValueError, match="no run to write to"):
        keep_clocks(Timer(clock=ManualClock()))


def write_collectives(folder, rank, host, monkeypatch, *, shift_ns, unix_shift_ns=0, readings=True, begin_ns=10**15):
    """A rank with a wrong clock meets the others five times, at moments that are the same for all."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    clock = ManualClock(begin_ns + shift_ns)
    clock.name = "perf_counter_ns"
    # A clock that stands still, apart from the others' by the test's offset, next to a Unix time that is shifted.
    monkeypatch.setattr(time, "time_ns", lambda: clock.now_ns() - shift_ns + unix_shift_ns)
    timer = Timer(clock=clock)
    log = RunLog(folder, timer, rank=rank, flush_s=None)
    log.declare("clock_readings", time_ns="time", received_ns="int", reference_ns="int", burst="int", reference="int")
    for burst, at in enumerate((begin_ns, begin_ns + 20 * S)):
        if readings and rank:
            sent = at + shift_ns
            log.add("clock_readings", (sent, sent + 2000, at + 1000, burst, 0))
    for number in range(5):
        with timer.region("BATCH"):
            clock.advance(1.0 + 0.1 * rank)
            start = timer.now_ns()
            clock.advance(0.5 - 0.1 * rank)
            log.collective("all_reduce", start, timer.now_ns(), group="world", sequence=number)
    log.close()
    monkeypatch.undo()


def slices(path, name):
    """Of a timeline in Chrome's format: where each slice of a name begins and ends, in ns, by process name."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found = {}
    for event in events:
        if event["name"] == name and event["ph"] == "X":
            start = round(event["ts"] * 1000)
            found.setdefault(names[event["pid"]], []).append((start, start + round(event["dur"] * 1000)))
    return found


def test_a_timeline_of_hosts_whose_clocks_are_compared(tmp_path, monkeypatch):
    """Hosts that disagree on Unix time by 3 s: the ends of each collective coincide, and how exactly is said."""
    write_collectives(tmp_path / "run", 0, "a", monkeypatch, shift_ns=0)
    write_collectives(tmp_path / "run", 1, "b", monkeypatch, shift_ns=777 * S, unix_shift_ns=-3 * S)
    with Run.open(tmp_path / "run") as run:
        write_timeline(run, tmp_path / "t.json")
        note = next(s.content for s in build(run)[1] if s.name == "steps").figures[0].note
    first, second = slices(tmp_path / "t.json", "all_reduce").items()
    assert [0, 0, 0, 0, 0] == pytest.approx([a[1] - b[1] for a, b in zip(first[1], second[1], strict=True)], abs=2000)
    assert ("clock" in first[0], " · clock ± 1.0" in second[0]) == (False, True), (first[0], second[0])
    assert "clocks are compared to within 1.0" in note


def test_a_timeline_of_hosts_whose_clocks_are_not(tmp_path, monkeypatch):
    """They are laid by their own Unix time, which is said by a warning and in the timeline; a page begins each at 0."""
    write_collectives(tmp_path / "run", 0, "a", monkeypatch, shift_ns=0)
    write_collectives(tmp_path / "run", 1, "b", monkeypatch, shift_ns=777 * S, readings=False)
    with Run.open(tmp_path / "run") as run:
        with pytest.warns(TimingWarning, match="The clock of rank 1 was not compared with that of the first rank"):
            write_timeline(run, tmp_path / "t.json")
        note = next(s.content for s in build(run)[1] if s.name == "steps").figures[0].note
    said = [name.endswith("clock not compared") for name in slices(tmp_path / "t.json", "all_reduce")]
    assert [False, True] == said
    assert "Each rank begins at 0" in note


def test_two_machines_of_one_name(tmp_path, monkeypatch):
    """Containers may be called alike; clocks that began hours apart are not taken for one."""
    write_collectives(tmp_path, 0, "box", monkeypatch, shift_ns=0)
    write_collectives(tmp_path, 1, "box", monkeypatch, shift_ns=3600 * S, readings=False)
    with Run.open(tmp_path) as run:
        assert [1] == list(clocks_of(run).uncalibrated)
