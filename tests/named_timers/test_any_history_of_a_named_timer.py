"""Any history of one named timer, on the host and on a device, against a simple model."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deep500_timing import CPUGPUTimer, RegionNotOpenError, RegionOpenError
from deep500_timing._named import NamedTimer
from deep500_timing.testing import ManualClock, ManualDeviceClock

STEPS = st.lists(
    st.sampled_from(
        [
            "start", "start", "stop", "stop", "stop, reset", "stop, record", "forget", "read", "read, reset",
            "pass over", "pass over, reset", "take", "recorded", "recorded, reset", "wait", "switch",
        ]
    ),
    max_size=30,
)  # fmt: skip


class Model:
    """The expected state of a named timer. Time is the work so far, in ns; each step follows a stretch of work."""

    def __init__(self, reentrant):
        self.reentrant = reentrant
        self.now = self.depth = self.generation = self.forgiven = 0
        self.since = None
        self.enabled = True
        self.times, self.kept = [], []

    def start(self):
        """Begin a stretch, or count the start, or refuse it."""
        if not self.enabled:
            return
        if self.since is None:
            self.since, self.depth = self.now, 0
        elif self.reentrant:
            self.depth += 1
        else:
            raise RegionOpenError

    def stop(self, reset=False, record=False):
        """End the stretch with the last stop; after a switch one stop is forgiven."""
        if self.since is None and not self.enabled:
            return
        if self.since is None:
            if self.forgiven == self.generation:
                raise RegionNotOpenError
            self.forgiven = self.generation
        elif self.depth:
            self.depth -= 1
        else:
            if reset:
                self.times = []
            self.count()
            self.kept += self.times[-1:] if record else []
            self.since = None

    def count(self):
        """Count the running stretch up to now."""
        if self.since is not None:
            self.times.append(self.now - self.since)
            self.since = self.now

    def read(self, reset):
        """What came since the last reset."""
        self.count()
        return self.take() if reset else self.times

    def take(self):
        """Return the finished times since the last reset and restart."""
        taken, self.times = self.times, []
        return taken

    def recorded(self, reset):
        """The recorded times."""
        kept = self.kept
        self.kept = [] if reset else kept
        return kept

    def forget(self):
        """Drop the stretch that is running."""
        self.since = None

    def switch(self):
        """Switch the timer below off, or on again."""
        self.enabled = not self.enabled
        self.generation += 1
        self.since = None


def outcome(call, *arguments, **settings):
    """The result of a call, or the class of the timer's error."""
    try:
        return call(*arguments, **settings)
    except (RegionOpenError, RegionNotOpenError) as error:
        return type(error)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@given(steps=STEPS, reentrant=st.booleans())
@example(steps=["start", "start", "forget", "start", "stop"], reentrant=True)
def test_it_does_as_a_simple_model(on_device, steps, reentrant):
    """Every answer and every error is the model's, after any history."""
    clock, device = ManualClock(), ManualDeviceClock()
    below = CPUGPUTimer(clock=clock, device_clock=device if on_device else None)
    timer, model = NamedTimer("a", below, reentrant=reentrant), Model(reentrant)

    def work(nanoseconds):
        device.launch(nanoseconds / 1e9)
        clock.advance_ns(nanoseconds)
        model.now += nanoseconds

    for number, step in enumerate(steps):
        work(2**number)  # so that a sum identifies its parts
        name, *rest = step.split(", ")
        reset, record = "reset" in rest, "record" in rest
        if name == "start":
            assert outcome(model.start) is outcome(timer.start)
        elif name == "stop":
            expected = outcome(model.stop, reset=reset, record=record)
            assert expected is outcome(timer.stop, reset=reset, record=record)
        elif name == "forget":
            model.forget()
            timer.forget_running()
        elif name == "read":
            expected = model.read(reset)
            totals = timer.read(reset=reset)
            assert (expected, len(expected)) == (list(totals.durations_ns), totals.count)
            assert (sum(expected), len(expected), 0) == (totals.total_ns, totals.expected, totals.missing)
        elif name == "pass over":
            model.read(reset)
            timer.read(reset=reset, wait=False)
        elif name == "take":
            taken = timer.take()
            timer.wait()
            assert model.take() == list(taken.durations_ns)
        elif name == "recorded":
            timer.wait()
            assert model.recorded(reset) == list(timer.recorded(reset=reset).durations_ns)
        elif name == "wait":
            timer.wait()
        else:
            model.switch()
            below.enabled = model.enabled
        assert (model.since is not None) == timer.running
