"""Megatron's named timers, on one process; across ranks they are tested with real ones in tests/torch."""

from __future__ import annotations

import copy
import pickle

import pytest

from deep500_timing import NoTimesError, RegionNotOpenError, RegionOpenError, Timer, TimingWarning, megatron
from deep500_timing.megatron import Timer as MegatronTimer
from deep500_timing.megatron import Timers
from deep500_timing.testing import ManualClock


@pytest.fixture
def lines():
    """The logged lines."""
    return []


@pytest.fixture
def make(clock, lines):
    """Makes a group on the manual clock."""

    def make(log_level=2, log_option="minmax", **settings):
        return Timers(log_level, log_option, clock=clock, logging_fn=lines.append, **settings)

    return make


def spend(timer, clock, *seconds):
    """Time some intervals."""
    for length in seconds:
        timer.start(barrier=False)
        clock.advance(length)
        timer.stop()


class Board:
    """Takes scalars as TensorBoard's writer does."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, name, value, step):
        """Keep it."""
        self.scalars.append((name, value, step))


class Run:
    """Takes values as the wandb module does."""

    def __init__(self):
        self.logged = []

    def log(self, values, step):
        """Keep them."""
        self.logged.append((values, step))


class TestTimer:
    def test_elapsed_is_in_seconds(self, make, clock):
        """As in the original, one timer's time is in seconds."""
        timer = make()("forward")
        spend(timer, clock, 1.0, 2.0)
        assert timer.elapsed(reset=False) == pytest.approx(3.0)
        assert timer.elapsed() == pytest.approx(3.0)
        assert timer.elapsed() == 0.0

    def test_elapsed_of_a_running_timer(self, make, clock):
        """It reads and continues, also with a barrier in a world of one."""
        timer = make()("forward")
        timer.start(barrier=True)
        clock.advance(1.0)
        assert timer.elapsed(barrier=True) == pytest.approx(1.0)
        clock.advance(2.0)
        timer.stop(barrier=True)
        assert timer.elapsed() == pytest.approx(2.0)

    def test_a_barrier_is_before_the_read_and_before_the_restart(self, make, clock, monkeypatch):
        """``elapsed(barrier=True)`` of a running timer waits for the ranks twice; the second wait is in no time."""
        waits = []

        def wait(group):
            waits.append(group)
            clock.advance(1.0)

        monkeypatch.setattr(megatron, "wait_for_ranks", wait)
        timer = make()("forward")
        timer.set_barrier_group("group")
        timer.start()
        clock.advance(0.5)
        assert timer.elapsed(barrier=True) == pytest.approx(1.5)
        clock.advance(0.25)
        timer.stop()
        assert timer.elapsed(barrier=True) == pytest.approx(0.25)
        assert waits == ["group", "group"]

    def test_a_used_group_can_be_copied(self, make, clock):
        """An object that holds one can be checkpointed."""
        timers = Timers(2, "minmax")
        spend(timers("forward"), ManualClock(), 0.0)
        for again in (copy.deepcopy(timers), pickle.loads(pickle.dumps(timers))):
            again("forward").start()
            again("forward").stop()
            assert again.get_all_timers_string() is not None

    def test_active_time_outlives_resets(self, make, clock):
        """The active time is that of the timer's whole life."""
        timer = make()("forward")
        spend(timer, clock, 1.0)
        timer.elapsed()
        spend(timer, clock, 2.0)
        timer.reset()
        assert (timer.elapsed(), timer.active_time()) == (0.0, pytest.approx(3.0))

    def test_a_time_may_be_set(self, make, clock, lines):
        """``set_elapsed`` takes a time measured by other means; what follows adds to it."""
        timers = make()
        timers("startup").set_elapsed(12.5)
        spend(timers("startup"), clock, 1.0)
        assert timers("startup").elapsed(reset=False) == pytest.approx(13.5)
        timers.log(["startup"])
        assert "(13500.00, 13500.00)" in lines[0]
        assert timers("startup").elapsed() == 0.0

    def test_start_twice_and_stop_twice_are_errors(self, make):
        """They name the timer."""
        timer = make()("forward")
        timer.start()
        with pytest.raises(RegionOpenError, match="'forward'"):
            timer.start()
        timer.stop()
        with pytest.raises(RegionNotOpenError, match="'forward'"):
            timer.stop()

    def test_reset_stops_a_running_timer(self, make, clock):
        """As in the original."""
        timer = make()("forward")
        timer.start()
        clock.advance(1.0)
        timer.reset()
        timer.start()
        clock.advance(2.0)
        timer.stop()
        assert timer.elapsed() == pytest.approx(2.0)

    def test_a_timer_serves_without_a_group(self):
        """``Timer(name)`` works without a group."""
        timer = MegatronTimer("alone")
        timer.set_barrier_group(None)
        timer.start()
        timer.stop()
        assert timer.elapsed() >= 0.0


class TestLevels:
    def test_timers_above_the_level_do_nothing(self, make, lines):
        """They may be started twice and logged; asking for their time is an error with the remedy."""
        timers = make(log_level=1)
        quiet = timers("inner", log_level=2)
        quiet.start(barrier=True)
        quiet.start()
        quiet.set_barrier_group(None)
        quiet.set_elapsed(1.0)
        quiet.stop()
        quiet.reset()
        timers.log(["inner"])
        assert lines == []
        with pytest.raises(NoTimesError, match=r"switched off.*Raise the group's log_level"):
            quiet.elapsed()
        with pytest.raises(NoTimesError, match="switched off"):
            quiet.active_time()

    def test_a_timer_without_a_level_has_the_highest(self, make):
        """So only a group of level 2 times it."""
        assert make(log_level=1)("x").name == "dummy timer"
        assert make(log_level=2)("x").name == "x"

    def test_levels_are_checked(self, make):
        """A level above 2, and another one than before, are errors."""
        timers = make()
        timers("x", log_level=1)
        assert timers("x").name == "x"
        with pytest.raises(ValueError, match="made with log_level=1"):
            timers("x", log_level=0)
        with pytest.raises(ValueError, match="highest level is 2"):
            timers("y", log_level=3)

    def test_options_are_checked(self):
        """The option is one of three."""
        with pytest.raises(ValueError, match="'max', 'minmax', 'all'"):
            Timers(1, "median")


class TestLog:
    def test_minmax(self, make, clock, lines):
        """Shortest and longest over the ranks, in ms, dotted to a column."""
        timers = make()
        spend(timers("forward"), clock, 0.010, 0.010)
        spend(timers("backward"), clock, 0.040)
        timers.log(["forward", "backward", "never"], normalizer=2.0)
        assert lines == [
            "(min, max) time across ranks (ms):\n"
            f"    forward {'.' * 40}: (10.00, 10.00)\n"
            f"    backward {'.' * 39}: (20.00, 20.00)"
        ]
        assert timers("forward").elapsed() == 0.0

    def test_max(self, make, clock, lines):
        """The longest alone."""
        timers = make(log_option="max")
        spend(timers("forward"), clock, 0.010)
        timers.log(["forward"], reset=False)
        assert lines == [f"max time across ranks (ms):\n    forward {'.' * 40}: 10.00"]
        assert timers("forward").elapsed() == pytest.approx(0.010)

    def test_all(self, make, clock, lines):
        """Each rank on a line."""
        timers = make(log_option="all")
        spend(timers("forward"), clock, 0.010)
        timers.log(["forward"])
        assert lines == ["times across ranks (ms):\n  forward:\n     rank  0: 10.00"]

    def test_names_default_to_all(self, make, clock):
        """``get_all_timers_string()`` has every timer that was used since the last reset."""
        timers = make()
        spend(timers("b"), clock, 0.010)
        spend(timers("a"), clock, 0.010)
        text = timers.get_all_timers_string()
        assert ["b", "a"] == [line.split()[0] for line in text.splitlines()[1:]]
        assert timers.get_all_timers_string() is None

    def test_a_time_of_zero_is_not_a_missing_one(self, make, clock, lines):
        """A region that took no time is shown; one that was not entered is not."""
        timers = make()
        spend(timers("empty"), clock, 0.0)
        timers("never")
        timers.log(["empty", "never"])
        assert "empty" in lines[0]
        assert "(0.00, 0.00)" in lines[0]
        assert "never" not in lines[0]

    def test_it_is_for_one_rank(self, make, clock, lines, monkeypatch):
        """The last rank by default, or the one named."""
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        timers = make(deadline_s=0.0)
        spend(timers("forward"), clock, 0.010)
        timers.log(["forward"], reset=False)
        assert lines == []
        timers.log(["forward"], rank=0)
        assert "forward" in lines[0]

    def test_ranks_that_do_not_answer_are_named(self, make, clock, lines, monkeypatch):
        """A report that lacks a rank says so."""
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "3")
        timers = make(deadline_s=0.0)
        spend(timers("forward"), clock, 0.010)
        timers.log(["forward"], rank=1)
        assert lines[0].endswith("no times from rank 0, 2 within 0 s")

    def test_it_prints_where_no_function_is_given(self, clock, capsys):
        """The standard output is the default."""
        timers = Timers(2, "max", clock=clock)
        spend(timers("forward"), clock, 0.010)
        timers.log(["forward"])
        assert "forward" in capsys.readouterr().out

    @pytest.mark.parametrize("normalizer", [0.0, -1.0])
    def test_a_normalizer_must_be_positive(self, make, normalizer):
        """Dividing by nothing is an error that says so."""
        for call in (
            lambda: make().log([], normalizer=normalizer),
            lambda: make().write([], None, 0, normalizer=normalizer),
            lambda: make().get_all_timers_string(normalizer=normalizer),
        ):
            with pytest.raises(ValueError, match="normalizer"):
                call()


class TestWrite:
    def test_to_tensorboard_and_wandb(self, make, clock):
        """The longest over the ranks as ``name-time``, in seconds as in the original."""
        timers = make()
        board, run = Board(), Run()
        spend(timers("forward"), clock, 0.5)
        timers.write(["forward"], board, 7, normalizer=2.0, reset=False)
        timers.write(["forward", "never"], run, 8)
        assert board.scalars == [("forward-time", pytest.approx(0.25), 7)]
        assert run.logged == [({"forward-time": pytest.approx(0.5)}, 8)]
        assert timers("forward").elapsed() == 0.0

    def test_ranks_without_a_writer(self, make, clock):
        """They take part, and write nothing."""
        timers = make()
        spend(timers("forward"), clock, 0.5)
        timers.write(["forward"], None, 7)
        assert timers("forward").elapsed() == 0.0

    def test_something_else_is_an_error(self, make):
        """It names the methods of a writer."""
        with pytest.raises(TypeError, match="add_scalar"):
            make().write(["forward"], object(), 0)

    def test_a_writer_that_fails_costs_a_warning(self, make, clock):
        """A full disk does not end the run."""
        timers = make()
        spend(timers("forward"), clock, 0.5)
        board = Board()
        board.add_scalar = lambda *_: (_ for _ in ()).throw(OSError("disk full"))
        with pytest.warns(TimingWarning, match="disk full"):
            timers.write(["forward"], board, 7)


class TestOnADevice:
    def test_no_start_or_stop_waits(self, clock, device, lines):
        """The original synchronizes the device in every start and stop; here the first wait is for the log."""
        timers = Timers(2, "max", clock=clock, device_clock=device, logging_fn=lines.append)
        for _ in range(10):
            timers("forward").start()
            device.launch(0.010)
            timers("forward").stop()
        timers("forward").set_elapsed(0.0)
        timers("forward").reset()
        timers("forward").start()
        device.launch(0.010)
        timers("forward").stop()
        assert device.calls["wait"] == 0
        timers.log(["forward"])
        assert device.calls["wait"] == 1
        assert lines[0].endswith(": 10.00")
        assert timers("forward").active_time() == pytest.approx(0.110)

    def test_the_times_stand_in_a_timer_of_yours(self, clock):
        """Named timers are regions there."""
        tmr = Timer(clock=clock)
        spend(Timers(2, "max", tmr)("forward"), clock, 0.5)
        assert tmr.get_time("forward") == [pytest.approx(0.5)]
