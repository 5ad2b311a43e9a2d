"""DeepSpeed's timers and ours side by side on the same work: equal where the original is right, and right elsewhere."""

from __future__ import annotations

import math
import types

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deep500_timing import RegionNotOpenError, RegionOpenError, trim_mean
from deep500_timing import wallclock as ours
from deep500_timing.memory import MemoryUsage
from deep500_timing.testing import ManualClock, ManualDeviceClock

NAMES = ("fwd", "bwd")
CONFIG = types.SimpleNamespace(enabled=True, synchronized=False)

operations = st.lists(
    st.one_of(
        st.tuples(st.just("spend"), st.sampled_from(NAMES), st.integers(0, 10**9)),
        st.tuples(st.just("wait"), st.just(""), st.integers(0, 10**9)),
        st.tuples(
            st.sampled_from(
                ["start", "stop", "elapsed", "elapsed_keep", "mean", "reset", "log", "log_keep", "get_mean"]
            ),
            st.sampled_from(NAMES),
            st.just(0),
        ),
    ),
    max_size=30,
)


def values(text):
    """The numbers of a logged line, without the rank before them."""
    return text.partition("time (ms)")[2].strip()


def perform(operation, name, length_ns, timers, clock, log, unit):
    """Do one thing with one group; return the answer, errors by their kind."""
    timer = timers(name) if name else None
    if operation == "wait":
        clock.advance_ns(length_ns)
        return None
    if operation in ("start", "spend"):
        try:
            timer.start()
        except (AssertionError, RegionOpenError):
            return "refused"
        if operation == "start":
            return None
        clock.advance_ns(length_ns)
        timer.stop()
        return None
    if operation == "stop":
        try:
            return timer.stop()
        except (AssertionError, RegionNotOpenError):
            return "refused"
    if operation.startswith("elapsed"):
        return timer.elapsed(reset=operation == "elapsed")
    if operation == "mean":
        return float(timer.mean())
    if operation == "reset":
        return timer.reset()
    if operation == "get_mean":
        return timers.get_mean([*NAMES, "never"], normalizer=2.0, reset=False).get(name, 0.0) / unit
    timers.log([*NAMES, "never"], normalizer=4.0, reset=operation == "log")
    return log()


@given(script=operations)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_script_reads_the_same(their, script):
    """After any order of starts, stops, reads and resets every value of the original is ours."""
    printed, logged, answers = [], [], {}
    for whose in ("theirs", "ours"):
        clock = ManualClock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(their, "time", types.SimpleNamespace(time=lambda clock=clock: 1.0 + clock.now_ns() / 1e9))
            patch.setattr(their, "print_dist", lambda text, ranks: printed.append(text))
            if whose == "theirs":
                # Its get_mean is 1000 times its mean; another test shows that fault.
                timers, log, unit = their.SynchronizedWallClockTimer(), lambda: values(printed[-1]), 1000.0
            else:
                timers, unit = ours.SynchronizedWallClockTimer(clock=clock, logging_fn=logged.append), 1.0
                log = lambda: values(logged[-1])  # noqa: E731
            answers[whose] = [perform(*step, timers, clock, log, unit) for step in script]
    for step, theirs_says, ours_says in zip(script, answers["theirs"], answers["ours"], strict=True):
        if isinstance(theirs_says, float | int):
            assert ours_says == pytest.approx(float(theirs_says), rel=1e-6, abs=1e-5), step
        elif isinstance(theirs_says, str) and ":" in theirs_says:
            assert logged_values(ours_says) == pytest.approx(logged_values(theirs_says), abs=0.011), step
        else:
            assert ours_says == theirs_says, step


def logged_values(text):
    """The value of each name in a line."""
    pairs = (part.split(":") for part in text.split("|") if ":" in part)
    return {name.strip(): float(value) for name, value in pairs}


def test_the_names_are_the_same(deepspeed):
    """Every constant that names a timer has the original's value."""
    names = [name for name in vars(deepspeed) if name.endswith("_TIMER")]
    assert len(names) == 10
    assert {name: getattr(deepspeed, name) for name in names} == {name: getattr(ours, name) for name in names}


def test_the_faces_are_the_same(deepspeed):
    """Every method there is a method here."""
    for kind in ("SynchronizedWallClockTimer", "NoopTimer", "ThroughputTimer"):
        theirs, mine = vars(getattr(deepspeed, kind)), dir(getattr(ours, kind))
        assert {name for name in theirs if not name.startswith("_")} <= set(mine)
    theirs = vars(deepspeed.SynchronizedWallClockTimer.Timer)
    assert {name for name in theirs if not name.startswith("_")} <= set(dir(ours.SynchronizedWallClockTimer.Timer))


@given(data=st.lists(st.floats(-1e9, 1e9), max_size=40), share=st.floats(0.0, 0.49))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_trim_mean_is_the_same_where_something_is_left(deepspeed, data, share):
    """Equal where the original gives a number; where it gives NaN, ours is an error. The input stays as it is."""
    before = list(data)
    n = len(data)
    if n and 2 * round(n * share) >= n:
        with pytest.raises(ValueError, match="leaves none"):
            trim_mean(data, share)
    else:
        assert trim_mean(data, share) == pytest.approx(float(deepspeed.trim_mean(data, share)), rel=1e-9, abs=1e-6)
    assert data == before


class TestFaultsOfTheOriginal:
    """Faults of the original, shown, and right here."""

    @pytest.fixture
    def both(self, their, clock):
        """A group of each, in which ``fwd`` took 10 ms and 30 ms."""
        groups = their.SynchronizedWallClockTimer(), ours.SynchronizedWallClockTimer(clock=clock)
        for length in (0.010, 0.030):
            for group in groups:
                group("fwd").start()
            clock.advance(length)
            for group in groups:
                group("fwd").stop()
        return groups

    def test_get_mean_is_in_microseconds(self, both):
        """Theirs multiplies a mean that is in ms by 1000; ours is in ms."""
        theirs, mine = both
        assert theirs.get_mean(["fwd"], reset=False) == {"fwd": pytest.approx(20_000.0)}
        assert mine.get_mean(["fwd"], reset=False) == {"fwd": pytest.approx(20.0)}
        assert mine("fwd").mean() == pytest.approx(20.0)

    def test_get_mean_ignores_reset(self, both):
        """Theirs keeps times that it was asked to forget."""
        theirs, mine = both
        for group in both:
            group.get_mean(["fwd"], reset=True)
        assert theirs("fwd").elapsed(reset=False) == pytest.approx(40.0)
        assert mine("fwd").elapsed(reset=False) == 0.0

    def test_stop_ignores_reset(self, both, clock):
        """Theirs adds up where it was asked to restart."""
        theirs, mine = both
        for group in both:
            group("fwd").start()
        clock.advance(0.005)
        for group in both:
            group("fwd").stop(reset=True)
        assert theirs("fwd").elapsed() == pytest.approx(45.0)
        assert mine("fwd").elapsed() == pytest.approx(5.0)

    def test_stop_ignores_record(self, both, clock):
        """Theirs has no mean any more once a log has reset the sum; ours keeps the recorded times."""
        theirs, mine = both
        for group in both:
            group("fwd").start()
        clock.advance(0.005)
        for group in both:
            group("fwd").stop(record=True)
            group("fwd").elapsed(reset=True)
        assert theirs("fwd").mean() == 0
        assert mine("fwd").mean() == pytest.approx(5.0)

    def test_log_ignores_memory_breakdown(self, both, capsys):
        """Theirs prints times only."""
        theirs, mine = both

        class WithMemory(ours.SynchronizedWallClockTimer):
            memory_reader = types.SimpleNamespace(
                read=lambda: MemoryUsage(device_allocated_bytes=2**30, device_reserved_bytes=2**31)
            )

        theirs.log(["fwd"], memory_breakdown=True)
        mine.__class__ = WithMemory
        mine.log(["fwd"], memory_breakdown=True)
        without, with_memory = capsys.readouterr().out.splitlines()
        assert without.endswith("time (ms) | fwd: 40.00")
        assert with_memory.endswith("time (ms) | fwd: 40.00 | mem_allocated: 1.0000 GB | cache_allocated: 2.0000 GB")

    def test_two_events_are_made_for_each_region(self, their, monkeypatch):
        """Theirs makes two events a region; ours come from a pool."""
        device = ManualDeviceClock()
        made = []

        class Event:
            def __init__(self, enable_timing):
                made.append(self)
                self.event = device.new_event(None)

            def record(self):
                device.record(self.event, "stream 0")

            def synchronize(self):
                device.wait(self.event)

            def elapsed_time(self, end):
                return device.elapsed_ns(self.event, end.event) / 1e6

        accelerator = types.SimpleNamespace(
            Event=Event,
            use_host_timers=lambda: False,
            current_stream=lambda: types.SimpleNamespace(wait_event=lambda event: None),
        )
        monkeypatch.setattr(their, "get_accelerator", lambda: accelerator)
        groups = their.SynchronizedWallClockTimer(), ours.SynchronizedWallClockTimer(device_clock=device)
        for _ in range(500):
            for group in groups:
                group("fwd").start()
            device.launch(0.001)
            for group in groups:
                group("fwd").stop()
            device.finish()
        theirs, mine = groups
        assert (theirs("fwd").elapsed(), mine("fwd").elapsed()) == (pytest.approx(500.0), pytest.approx(500.0))
        assert len(made) == 1000
        assert mine.timer.device.events < 64


def throughputs(their, clock, batch_size=10, start_step=2, **settings):
    """A ThroughputTimer of each."""
    theirs = their.ThroughputTimer(CONFIG, batch_size, start_step, logging_fn=lambda text: None, **settings)
    mine = ours.ThroughputTimer(batch_size, start_step, logging_fn=lambda text: None, clock=clock, **settings)
    return theirs, mine


def step(timers, clock, seconds, global_step=True, **stop):
    """A micro-step of both."""
    for timer in timers:
        timer.start()
    clock.advance(seconds)
    for timer in timers:
        timer.stop(global_step=global_step, **stop)


class TestThroughput:
    @given(
        start_step=st.integers(0, 3),
        steps=st.lists(st.lists(st.integers(1, 10**10), min_size=1, max_size=3), min_size=1, max_size=12),
    )
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_rates_are_the_same_after_warm_up(self, their, start_step, steps):
        """For any steps of any micro-steps, counts and average are the original's once it has one."""
        clock = ManualClock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(their, "time", types.SimpleNamespace(time=lambda: 1.0 + clock.now_ns() / 1e9))
            theirs, mine = timers = throughputs(their, clock, batch_size=32, start_step=start_step)
            for micro_steps in steps:
                for place, length_ns in enumerate(micro_steps):
                    step(timers, clock, length_ns / 1e9, global_step=place == len(micro_steps) - 1)
                assert mine.global_step_count == theirs.global_step_count
                assert mine.micro_step_count == theirs.micro_step_count
                if theirs.global_step_count > start_step:
                    assert mine.avg_samples_per_sec() == pytest.approx(theirs.avg_samples_per_sec(), rel=1e-6)
                    assert mine.total_elapsed_time == pytest.approx(theirs.total_elapsed_time, rel=1e-6)

    def test_the_logged_line_is_the_same(self, their, clock):
        """Name for name; theirs adds a microsecond to each step, and its accelerator's memory."""
        lines = {"theirs": [], "ours": []}
        theirs = their.ThroughputTimer(CONFIG, 10, 0, 2, logging_fn=lines["theirs"].append)
        mine = ours.ThroughputTimer(10, 0, 2, logging_fn=lines["ours"].append, clock=clock)
        for _ in range(4):
            step((theirs, mine), clock, 0.5)
        assert len(lines["ours"]) == len(lines["theirs"]) == 2
        for their_line, our_line in zip(*lines.values(), strict=True):
            head, _, rates = our_line.partition(", RunningAvgSamplesPerSec=")
            assert their_line.startswith(head + ", RunningAvgSamplesPerSec=")
            assert rates == "20.0, CurrSamplesPerSec=20.0"

    def test_a_config_first_works_as_there(self, their, clock):
        """The class of the torch adapter takes a config before the batch size, and a config that is off."""
        from deep500_timing_deepspeed.wallclock import ThroughputTimer

        on = ThroughputTimer(CONFIG, batch_size=10, start_step=0, clock=clock)
        off = ThroughputTimer(types.SimpleNamespace(enabled=False, synchronized=True), 10, 0, clock=clock)
        step((on, off), clock, 1.0)
        assert on.avg_samples_per_sec() == pytest.approx(10.0)
        assert (off.avg_samples_per_sec(), off.global_step_count) == (None, 0)

    def test_average_divides_by_zero_at_the_end_of_warm_up(self, their, clock):
        """Theirs raises when the number of steps equals ``start_step``; ours has no rate yet."""
        theirs, mine = timers = throughputs(their, clock)
        step(timers, clock, 1.0)
        step(timers, clock, 1.0)
        with pytest.raises(ZeroDivisionError):
            theirs.avg_samples_per_sec()
        assert mine.avg_samples_per_sec() is None

    def test_average_is_minus_infinity_at_the_beginning(self, their, clock):
        """Theirs is -inf before the first step; ours is None."""
        theirs, mine = throughputs(their, clock)
        assert theirs.avg_samples_per_sec() == -math.inf
        assert mine.avg_samples_per_sec() is None

    def test_the_batch_size_is_frozen(self, their, clock):
        """Theirs multiplies all steps by the batch size of the moment; ours counts each step's own."""
        theirs, mine = timers = throughputs(their, clock, batch_size=10, start_step=0)
        step(timers, clock, 1.0)
        for timer in timers:
            timer.batch_size = 30
        step(timers, clock, 1.0)
        assert theirs.avg_samples_per_sec() == pytest.approx(30.0)
        assert mine.avg_samples_per_sec() == pytest.approx(20.0)

    def test_a_resumed_run_counts_what_it_did_not_see(self, their, clock):
        """Theirs takes the steps before the checkpoint for its own; ours does not."""
        theirs, mine = timers = throughputs(their, clock, batch_size=10, start_step=0)
        for timer in timers:
            timer.global_step_count = 1_000
        step(timers, clock, 1.0)
        assert theirs.avg_samples_per_sec() == pytest.approx(10_010.0)
        assert mine.avg_samples_per_sec() == pytest.approx(10.0)
        assert mine.global_step_count == theirs.global_step_count

    def test_accumulation_lowers_the_average_between_global_steps(self, their, clock):
        """Theirs counts the time of micro-steps before their samples."""
        theirs, mine = timers = throughputs(their, clock, batch_size=10, start_step=0)
        step(timers, clock, 1.0)
        step(timers, clock, 1.0, global_step=False)
        assert theirs.avg_samples_per_sec() == pytest.approx(5.0)
        assert mine.avg_samples_per_sec() == pytest.approx(10.0)

    def test_a_clock_that_stands_still(self, their, clock):
        """Theirs divides by zero; ours has no rate."""
        theirs, mine = timers = throughputs(their, clock, start_step=0)
        step(timers, clock, 0.0)
        with pytest.raises(ZeroDivisionError):
            theirs.avg_samples_per_sec()
        assert mine.avg_samples_per_sec() is None


def test_trim_mean_of_nothing_is_zero_on_both(deepspeed):
    """An empty list gives 0."""
    assert trim_mean([], 0.1) == deepspeed.trim_mean([], 0.1) == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_trimming_everything(deepspeed):
    """Theirs gives NaN where nothing is left; ours says so."""
    assert math.isnan(deepspeed.trim_mean([1.0, 2.0], 0.5))
    with pytest.raises(ValueError, match=r"trim_percent=0.5"):
        trim_mean([1.0, 2.0], 0.5)


def test_the_no_op_timers_answer_alike(deepspeed):
    """A script reads the same values with timing off."""
    for timers in (deepspeed.NoopTimer(), ours.NoopTimer()):
        timers("x").start()
        timers("x").stop(record=True)
        assert (timers("x").elapsed(reset=True), timers("x").mean(), timers.get_timers()) == (0, 0, {})


def test_every_attribute_of_theirs_is_ours(their):
    """What their timers have, attributes and methods, ours have; what may be set there may be set here."""
    from deep500_timing_deepspeed import wallclock

    config = types.SimpleNamespace(enabled=True, synchronized=False)
    pairs = [
        (their.SynchronizedWallClockTimer(), wallclock.SynchronizedWallClockTimer(device="cpu")),
        (their.SynchronizedWallClockTimer()("a"), wallclock.SynchronizedWallClockTimer(device="cpu")("a")),
        (their.SynchronizedWallClockTimer.Timer("b"), wallclock.SynchronizedWallClockTimer.Timer("b")),
        (their.NoopTimer(), wallclock.NoopTimer()),
        (their.NoopTimer()("a"), wallclock.NoopTimer()("a")),
        (their.ThroughputTimer(config, 8), wallclock.ThroughputTimer(config, 8, device="cpu")),
    ]
    for original, mine in pairs:
        wanted = {name for name in dir(original) if not name.startswith("__")}
        assert set() == {name for name in wanted if not hasattr(mine, name)}, type(original)
    assert set() == {name for name in vars(their) if name.isupper() and not hasattr(wallclock, name)}
    throughput = pairs[-1][1]
    assert throughput.config is config
    throughput.batch_size, throughput.global_step_count, throughput.total_elapsed_time = 16, 4, 1.0
    assert (16, 4, 1.0) == (throughput.batch_size, throughput.global_step_count, throughput.total_elapsed_time)
