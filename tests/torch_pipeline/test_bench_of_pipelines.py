"""The benchmark of pipelines says what its figures say."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from benchmarks import _between_passes, bench_pipeline


def found(added, passes_ms=0.5):
    """Measurements of two ranks."""
    again = busy = [0.0, -1.0, 1.0]
    row = {"pass_ms": passes_ms, "rounds": 9, "bare_ms": 12.0, "added_wall_us": added, "again_wall_us": again}
    row |= {"added_busy_us": busy, "again_busy_us": busy}
    return {"rows": [row], "bubble": 0.12, "ideal": 0.1, "load": "0", "date": "now"}


@pytest.mark.parametrize(
    ("added", "verdict"),
    [
        ([4.0, -1.0, 9.0], "is within the noise; more than 9 µs (0.9 %) would have been seen."),
        ([4.0, 1.0, 9.0], "is beyond the noise: 0.4 % of it."),
        ([4.0, -80.0, 90.0], "cannot be told: the machine was too busy."),
    ],
)
def test_the_verdict_is_computed(added, verdict):
    """From the interval of what timing adds; one that is too wide says nothing."""
    between = {"bare_ns": [9000, 10000, 11000], "timed_ns": [12000, 13000, 14000]}
    lines = bench_pipeline.as_lines(found(added) | {"between": between})
    assert f"At 1 ms a micro-batch the time that is added {verdict}" in lines
    assert "10.0 µs bare, timed +3.0 µs (+3.0 … +3.0), 0.3 % of 1 ms." in "\n".join(lines)
    assert "(+20.0 %)" in lines[-2]


def test_what_is_timed_is_compared_with_the_bare_blocks_of_its_round():
    """With their mean, in each round, by micro-batch."""
    blocks = {"bare": [(1.0, 0.5)] * 3, "again": [(3.0, 0.5)] * 3, "timed": [(4.0, 0.5 + 8e-6)] * 3}
    differences = bench_pipeline._differences(blocks)
    assert [2e6 / 8] * 3 == differences["added_wall_us"] == differences["again_wall_us"]
    assert pytest.approx([1.0] * 3) == differences["added_busy_us"]
    assert [0.0] * 3 == differences["again_busy_us"]


def test_between_passes_both_are_measured():
    """As often, and the schedule is as it was."""
    measured = _between_passes.measure(3)
    assert [3, 3] == [len(measured[name]) for name in ("bare_ns", "timed_ns")]
    assert min(measured["bare_ns"] + measured["timed_ns"]) > 0
