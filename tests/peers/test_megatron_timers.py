"""Megatron's timers and ours side by side on the same work, where ``megatron-core`` is installed."""

from __future__ import annotations

import types
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deep500_timing import RegionNotOpenError, RegionOpenError
from deep500_timing import megatron as ours
from deep500_timing.testing import ManualClock

# Megatron calls functions of PyTorch that are on their way out.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
NAMES = ("forward", "backward")


@pytest.fixture(scope="module")
def megatron():
    """Megatron's timers in a job of one process, with the GPU that they need stood in for."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("megatron.core.timers", exc_type=ImportError)
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        module.synchronizes = []
        patch.setattr(torch.cuda, "synchronize", lambda: module.synchronizes.append(1))
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        yield module
    dist.destroy_process_group()


class Both:
    """A group of each on one clock, with what each logged."""

    def __init__(self, megatron, option):
        self.clock = ManualClock()
        self.logged = {"theirs": [], "ours": []}
        self.patch = pytest.MonkeyPatch()
        # It takes a first start for one at the time of its making.
        self.patch.setattr(megatron, "time", types.SimpleNamespace(time=lambda: self.clock.now_ns() / 1e9))
        self.patch.setattr(megatron, "logger", types.SimpleNamespace(info=self.logged["theirs"].append))
        self.groups = {
            "theirs": megatron.Timers(2, option),
            "ours": ours.Timers(2, option, clock=self.clock, logging_fn=self.logged["ours"].append),
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.patch.undo()

    def spend(self, name, seconds):
        """Time some work with both."""
        for group in self.groups.values():
            group(name).start()
        self.clock.advance(seconds)
        for group in self.groups.values():
            group(name).stop()


operations = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.just("forward"), st.integers(1, 10**9)),
        st.tuples(
            st.sampled_from(["start", "stop", "elapsed", "elapsed_keep", "reset", "active_time", "set_elapsed"]),
            st.sampled_from(NAMES),
            st.integers(1, 1000),
        ),
    ),
    max_size=30,
)


def perform(timer, operation, value):
    """Do one thing with one timer; return the answer, errors by their kind."""
    try:
        if operation.startswith("elapsed"):
            return timer.elapsed(reset=operation == "elapsed")
        if operation == "set_elapsed":
            return timer.set_elapsed(float(value))
        return getattr(timer, operation)()
    except (AssertionError, RegionOpenError, RegionNotOpenError):
        return "refused"


@given(script=operations)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_script_reads_the_same(megatron, script):
    """After any order of starts, stops, sets, reads and resets every value is the original's."""
    if not hasattr(megatron.Timer, "set_elapsed"):
        script = [step for step in script if step[0] != "set_elapsed"]
    with Both(megatron, "max") as both:
        for operation, name, value in script:
            if operation == "wait":
                both.clock.advance_ns(value)
                continue
            theirs, mine = (perform(group(name), operation, value) for group in both.groups.values())
            if isinstance(theirs, float):
                assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6), operation
            else:
                assert mine == theirs, operation


@pytest.mark.parametrize("option", ["max", "minmax", "all"])
def test_reports_are_the_same(megatron, option):
    """The text of a report is the original's to the letter."""
    with Both(megatron, option) as both:
        both.spend("forward", 0.125)
        both.spend("a-name-that-is-longer-than-the-column-of-forty-eight", 2.5)
        for group in both.groups.values():
            group.log(["forward", "a-name-that-is-longer-than-the-column-of-forty-eight", "never"], normalizer=2.0)
            group.log(["forward"])
        assert both.logged["ours"] == both.logged["theirs"]
        assert len(both.logged["ours"]) == 1


def test_what_is_written_is_the_same(megatron, monkeypatch):
    """Names, values in seconds and steps of the scalars are the original's."""

    class Writer:
        def __init__(self):
            self.scalars = []

        def add_scalar(self, *scalar):
            self.scalars.append(scalar)

    monkeypatch.setattr(megatron, "SummaryWriter", Writer)
    with Both(megatron, "max") as both:
        both.spend("forward", 0.5)
        writers = []
        for group in both.groups.values():
            writers.append(Writer())
            group.write(["forward", "never"], writers[-1], 7, normalizer=2.0)
        theirs, mine = (writer.scalars for writer in writers)
        assert mine == theirs == [("forward-time", 0.25, 7)]


def test_every_start_and_stop_synchronizes(megatron):
    """Theirs waits for the GPU twice a region; ours does not even ask."""
    with Both(megatron, "max") as both:
        del megatron.synchronizes[:]
        both.spend("forward", 0.5)
        assert len(megatron.synchronizes) == 2


def test_a_time_of_zero_is_taken_for_a_missing_one(megatron):
    """Theirs leaves a region out that took no time, as if it had not been entered."""
    with Both(megatron, "max") as both:
        both.spend("empty", 0.0)
        for group in both.groups.values():
            group.log(["empty"])
        assert both.logged["theirs"] == []
        assert "empty" in both.logged["ours"][0]
