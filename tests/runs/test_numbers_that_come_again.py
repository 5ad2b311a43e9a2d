"""A step number that comes again is another step; the program's number is a label."""

from __future__ import annotations

import pytest

pytest.importorskip("duckdb", reason="reads a run")
from deep500_timing import Timer
from deep500_timing.runs import Run, attach
from deep500_timing.runs._collector import StepCounter
from deep500_timing.testing import ManualClock


@pytest.mark.parametrize(
    ("numbers", "steps"),
    [
        ([0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6]),  # each epoch counts anew
        ([10, 11, 12, 11, 12, 13], [10, 11, 12, 13, 14, 15]),  # a run is rolled back
        ([0, 10, 20, 0, 10], [0, 10, 20, 21, 31]),  # one in ten
        ([5, 5, 5, 6, 6], [5, 5, 5, 6, 6]),  # micro-batches of one step
        ([0, 1, 2, 100, 101], [0, 1, 2, 100, 101]),  # a resumed run
        ([3, 2, 1], [3, 4, 5]),
    ],
)
def test_executions_are_numbered_by_us(numbers, steps):
    """In whatever pieces they come, a number that has been left is a new step, and each has its label."""
    for size in (1, 2, len(numbers)):
        counter, found, labels = StepCounter(), [], {}
        marks = [(time_ns, number) for time_ns, number in enumerate(numbers)]
        for at in range(0, len(marks), size):
            numbered, more = counter.number(marks[at : at + size])
            found += numbered
            labels |= {step: label for _, step, label in more}
        assert [step for _, step in found] == steps
        assert [labels.get(step, step) for step in steps] == numbers


def test_epochs_that_count_from_zero(tmp_path):
    """Three epochs of four steps are twelve steps of their own length, and ``why`` says which step 2 it means."""
    clock = ManualClock()
    tmr = Timer(clock=clock)
    with attach(tmr, tmp_path / "run"):
        for epoch in range(3):
            for number in range(4):
                tmr.step(number)
                with tmr.region("BATCH"):
                    clock.advance(5 if (epoch, number) == (1, 2) else 1)
            clock.advance(100)
    with Run.open(tmp_path / "run") as run:
        steps = run.steps().arrow().to_pylist()
        assert [(one["step"], one["dur_ns"] / 1e9, one["batches"]) for one in steps] == [
            (step, 5 if step == 6 else 1, 1) for step in range(12)
        ]
        slowest = run.why(2)
        assert (slowest.step, slowest.label, slowest.namesakes) == (6, 2, (2, 10))
        text = str(slowest)
        assert "3 steps have that number (the others are 2, 10); this is the slowest." in text
        assert "Step 6 (number 2 of the program) took 5" in text
        assert (run.why(7).step, run.why(7).label) == (7, 3)  # a number that the program has not given
        assert run.why().label == 0  # the pause between two epochs is longer
