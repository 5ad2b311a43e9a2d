"""DeepSpeed's own pipeline engine, timed: two gloo ranks on the CPU."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("torch")

from deep500_timing_deepspeed.pipe import instrument_deepspeed
from deep500_timing_torch.pipeline import instrument_schedule

pytestmark = pytest.mark.slow


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_wall_clock_breakdown_of_a_pipeline_works(ranks):
    """Untimed it fails in DeepSpeed 0.19.8; timed it trains and prints its lines, and detaching restores it."""
    job = ranks("deepspeeds.py", 2)
    results = job.results()
    for found in results:
        assert 3 == len(found["losses"])
        assert found["losses"][2] < found["losses"][0]
        assert (3, 12) == (found["batches"], found["forwards"])
        assert 0.2 == found["ideal"]
        assert 0 < found["bubble"] < 1
        assert all(found["named"][name] > 0 for name in ("fwd_microstep", "bwd_microstep", "step"))
        assert [] == found["left"]
        assert found["timers"]
        assert {"F", "B", "reduce", "step"} <= set(found["kinds"])
    assert {"load", "send activation", "wait for gradient"} <= set(results[0]["kinds"])
    assert {"load", "send gradient", "wait for activation"} <= set(results[1]["kinds"])
    text = job.text()
    assert "| pipe_recv_grad:" in text
    assert "fwd_microstep:" in text


@pytest.mark.parametrize("instrument", [instrument_deepspeed, instrument_schedule])
def test_what_is_no_pipeline_is_refused(instrument):
    """With what to call instead."""
    with pytest.raises(TypeError) as raised:
        instrument(object())
    assert "instrument_schedule" in str(raised.value) or "instrument_deepspeed" in str(raised.value)
