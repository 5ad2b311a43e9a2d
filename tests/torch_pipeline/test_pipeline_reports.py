"""The reports of an engine, from given times."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
import torch

from deep500_timing import Timer, TimeType
from deep500_timing_deepspeed.pipe import PipelineEngine, PipelineError
from deep500_timing_deepspeed.pipe._config import PipelineConfig

MS = 1_000_000


def engine_of(timer, *samples, rank=0, **config):
    """An engine of one rank, which has stage 1 and has trained batches of those sizes."""
    engine = object.__new__(PipelineEngine)
    engine.timer, engine.global_steps, engine.stage_id = timer, len(samples), 1
    engine.config = PipelineConfig(samples[-1], 2, samples[-1] // 2, **config)
    engine.module = SimpleNamespace(stage_numbers=[1], replica=0)
    engine.grid = SimpleNamespace(global_rank=rank)
    engine._samples, engine._timers, engine._microbatch = array("q", samples), {}, 3
    engine.log_stage = engine.log_data_parallel_id = -1
    return engine


def batches(timer, *lengths_ms):
    """Record batches that took so long."""
    for length in lengths_ms:
        timer.record(TimeType.BATCH, 0, length * MS)


def test_the_rate_counts_the_samples_of_each_batch():
    """Of batches that may differ in size; the first does not count, and a bounded timer uses the times that it kept."""
    timer, forgetful = Timer(), Timer(keep_last=1)
    assert engine_of(timer, 8).samples_per_second() is None
    for one in (timer, forgetful):
        batches(one, 900)
    assert engine_of(timer, 8).samples_per_second() is None
    for one in (timer, forgetful):
        batches(one, 100, 300)
    assert pytest.approx((8 + 24) / 0.4) == engine_of(timer, 8, 8, 24).samples_per_second()
    kept = forgetful.get_time(TimeType.BATCH)
    forgotten = 3 - len(kept)
    expected = sum([8, 8, 24][max(forgotten, 1) :]) / sum(kept[max(1 - forgotten, 0) :])
    assert pytest.approx(expected) == engine_of(forgetful, 8, 8, 24).samples_per_second()


@pytest.mark.parametrize(
    ("name", "regions", "mean", "count"),
    [
        ("fwd_microstep", {"stage 1 forward": [4, 6], "pipeline loss": [1, 3]}, 7, 2),
        ("bwd", {"stage 1 backward": [4, 6]}, 5, 2),
        ("bwd", {"stage 1 backward input": [4, 6], "stage 1 backward weight": [2, 4]}, 8, 2),
        ("pipe_recv_input", {"pipeline receive activation": [1, 1], "pipeline wait for activation": [5, 7]}, 7, 2),
        ("step", {}, None, 0),
    ],
)
def test_a_time_of_deepspeeds_name_is_that_of_a_whole_step(name, regions, mean, count):
    """Two regions here, as a pass with its loss or a message with its wait, are one timer there."""
    timer = Timer()
    for region, lengths in regions.items():
        for length in lengths:
            timer.record(region, 0, length * MS)
    times = engine_of(timer, 8).timers(name)
    assert (mean, count) == (times.mean() if mean is None else pytest.approx(times.mean()), times.count())
    total = sum(sum(lengths) for lengths in regions.values())
    assert pytest.approx(total) == times.elapsed(reset=True)
    assert pytest.approx(0) == times.elapsed()


def test_a_name_that_deepspeed_has_not_is_an_error():
    """It says which there are."""
    with pytest.raises(KeyError, match="fwd_microstep"):
        engine_of(Timer(), 8).timers("forward")


def test_progress_is_printed_every_so_many_batches(capsys):
    """On rank 0: step, loss, rate, and with ``wall_clock_breakdown`` the mean times by DeepSpeed's names."""
    timer = Timer()
    batches(timer, 50, 100)
    timer.record("stage 1 forward", 0, 4 * MS)
    engine_of(timer, 8, 8, steps_per_print=2)._print_progress(torch.tensor(0.25))
    assert "steps: 2 loss: 0.2500 samples/sec: 80.000\n" == capsys.readouterr().out
    loud = engine_of(timer, 8, 8, steps_per_print=2, wall_clock_breakdown=True)
    loud._print_progress(torch.tensor(0.25))
    _, breakdown = capsys.readouterr().out.splitlines()
    assert "time (ms) | fwd_microstep: 4.00 | fwd: 4.00 | train_batch: 75.00" == breakdown
    engine_of(timer, 8, 8, steps_per_print=3)._print_progress(torch.tensor(0.25))
    engine_of(timer, 8, 8, steps_per_print=2, rank=1)._print_progress(torch.tensor(0.25))
    assert "" == capsys.readouterr().out


def test_messages_are_printed_where_they_are_asked_for(capsys):
    """``log_for_device`` on the stages and replicas that are chosen, ``tput_log`` with the lines of progress."""
    engine = engine_of(Timer(), 8, steps_per_print=1)
    engine.log_for_device("hello", 1)
    engine.tput_log("rate")
    engine.log_stage = 0
    engine.log_for_device("not here")
    assert "RANK=0 PIPE-ID=1 DATA-ID=0 MBATCH-ID=3 STEP-ID=1 :: hello 1\nrate\n" == capsys.readouterr().out
    engine.log_stage, engine.log_data_parallel_id = 1, 1
    engine.log_for_device("nor here")
    engine_of(Timer(), 8).tput_log("never")
    assert "" == capsys.readouterr().out


@pytest.mark.parametrize("name", ["__call__", "forward", "backward", "step"])
def test_parts_of_a_batch_are_refused_as_in_deepspeed(name):
    """A pipeline trains whole batches."""
    with pytest.raises(PipelineError, match=r"Only train_batch\(\) and eval_batch\(\) are accessible in pipeline mode"):
        getattr(engine_of(Timer(), 8), name)(torch.ones(2))
