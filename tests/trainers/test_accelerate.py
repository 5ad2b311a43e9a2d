"""Loops with Accelerate: counts, sums, the tracker, and no change."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from time import perf_counter

import pytest
import torch
from suite_ranks import Job
from suite_trainers import PARTS, counts, seconds, share
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="times loops with Accelerate")
from accelerate import Accelerator

import deep500_timing_torch as timer
from deep500_timing_torch.trainers.accelerate import TimerTracker, instrument

pytestmark = [pytest.mark.slow, pytest.mark.one_form, pytest.mark.timeout(300)]


def prepared(accumulated=1, width=512, **more):
    """An accelerator with its model, optimizer and loader, the same each time."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated, **more)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4))
    data = TensorDataset(torch.randn(320, 64), torch.randint(4, (320,)))
    return accelerator, *accelerator.prepare(net, torch.optim.Adam(net.parameters()), DataLoader(data, 16))


def train(accelerator, net, optimizer, loader, epochs=2):
    """Train with an evaluation after each epoch."""
    for _ in range(epochs):
        net.train()
        for rows, classes in loader:
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(rows), classes)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        net.eval()
        for rows, _ in loader:
            with torch.no_grad():
                net(rows)
    return [one.detach().clone() for one in net.parameters()]


@pytest.mark.parametrize("accumulated", [1, 4])
def test_counts_are_exact_and_parts_add_up(accumulated):
    """Each optimizer step is a BATCH with its micro-batches; an evaluation is none; nothing is changed or left."""
    plain = train(*prepared(accumulated))
    tmr = timer.CPUGPUTimer()
    accelerator, *rest = prepared(accumulated)
    with instrument(accelerator, tmr) as timed:
        weights = train(accelerator, *rest)
        assert timed.values()["time/BATCH_s"] > 0
    assert all(torch.equal(one, other) for one, other in zip(plain, weights, strict=True))
    assert "backward" not in vars(accelerator)
    steps = 40 // accumulated
    found = counts(tmr)
    micro = dict.fromkeys(("IO", "copy", "FORWARD", "BACKWARD"), 40)
    assert found == {"BATCH": steps, **micro, "clip": steps, "optimizer": steps}
    assert share(tmr, "BATCH", *PARTS) == pytest.approx(1, abs=0.02)


def test_times_agree_with_independent_clocks():
    """Stopwatches around the wait, the model, the backward pass and the optimizer see the same times."""
    own = dict.fromkeys(("IO", "FORWARD", "BACKWARD", "optimizer"), 0.0)

    def watch(name, call, *args):
        begun = perf_counter()
        try:
            return call(*args)
        finally:
            own[name] += perf_counter() - begun

    tmr = timer.CPUGPUTimer()
    accelerator, net, optimizer, loader = prepared(width=4096)
    with instrument(accelerator, tmr):
        batches = iter(loader)
        for _ in range(20):
            rows, classes = watch("IO", next, batches)
            loss = nn.functional.cross_entropy(watch("FORWARD", net, rows), classes)
            watch("BACKWARD", accelerator.backward, loss)
            watch("optimizer", optimizer.step)
            optimizer.zero_grad()
    for name, time_s in own.items():
        assert seconds(tmr, name) == pytest.approx(time_s, rel=0.02, abs=0.005), name


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt], ids=["exception", "ctrl-c"])
def test_an_exception_and_copies_of_the_model(error):
    """What is open is counted as failed; a model that is copied or saved meanwhile keeps nothing of the timing."""
    tmr = timer.CPUGPUTimer()
    accelerator, net, optimizer, loader = prepared()
    with pytest.raises(error), instrument(accelerator, tmr):
        torch.save(net, io.BytesIO())
        copy.deepcopy(net)(torch.randn(2, 64))
        train(accelerator, net, optimizer, loader, epochs=1)
        net.train()
        next(iter(loader))
        accelerator.backward(net(torch.randn(2, 64)).sum())
        raise error
    assert {one.name: one.failed for one in tmr.snapshot() if one.failed} == {"BATCH": 1}
    assert len(tmr.get_time("FORWARD")) == 21
    with pytest.raises(ValueError, match="has no optimizer"):
        instrument(Accelerator(cpu=True), tmr)


def test_the_tracker_keeps_what_is_logged(tmp_path):
    """Numbers by name and step are a table of the run; the settings are an event."""
    pytest.importorskip("duckdb", reason="reads a run")
    from deep500_timing.runs import Run

    tmr = timer.CPUGPUTimer()
    tracker = TimerTracker(tmr, str(tmp_path / "run"))
    accelerator, *rest = prepared(log_with=[tracker])
    assert tracker.tracker is tmr
    accelerator.init_trackers("project", {"rate": 0.1})
    with instrument(accelerator, tmr) as timed:
        train(accelerator, *rest, epochs=1)
        accelerator.log({"loss": 0.5, "text": "none", **timed.values()}, step=20)
    accelerator.end_training()
    tmr.run.close()
    with Run.open(tmp_path / "run") as run:
        logged = run.table("logged").arrow().to_pylist()
        assert [(one["step"], one["value"]) for one in logged if one["name"] == "loss"] == [(20, 0.5)]
        assert any(one["name"] == "time/BATCH_s" for one in logged)
        events = run.sql("select text from events where what = 'configuration'").arrow().to_pylist()
        assert events == [{"text": '{"rate": 0.1}'}]


RANKS = """
import json, os, sys
sys.path[:0] = sys.argv[2:]
import test_accelerate as t
found, rank = {}, int(os.environ["RANK"])
for accumulated in (1, 4):
    plain = t.train(*t.prepared(accumulated), epochs=1)
    tmr = t.timer.CPUGPUTimer()
    accelerator, *rest = t.prepared(accumulated)
    with t.instrument(accelerator, tmr):
        weights = t.train(accelerator, *rest, epochs=1)
    same = all(t.torch.equal(one, other) for one, other in zip(plain, weights, strict=True))
    found[accumulated] = [t.counts(tmr), t.share(tmr, "BATCH", *t.PARTS), same]
# Resume in mid-epoch, as Accelerate's own guide does it.
folder = sys.argv[1] + "/state"
accelerator, *rest = t.prepared()
accelerator.save_state(folder)
accelerator, net, optimizer, loader = t.prepared()
tmr = t.timer.CPUGPUTimer()
with t.instrument(accelerator, tmr):
    accelerator.load_state(folder)
    t.train(accelerator, net, optimizer, accelerator.skip_first_batches(loader, 6), epochs=1)
    accelerator.save_state(folder)
found["resumed"] = t.counts(tmr)
with open(sys.argv[1] + f"/{rank}.json", "w") as file:
    json.dump(found, file)
accelerator.end_training()
"""


def test_two_ranks_and_resume_in_mid_epoch(forks, tmp_path):
    """Each rank counts its own batches, weights are the same, and a resumed epoch has the batches that are left."""
    here = Path(__file__).parent
    job = Job(tmp_path, forks.start, ["-c", RANKS, str(tmp_path), str(here), str(here.parent / "support")], 2)
    for found in job.results(200):
        for accumulated in (1, 4):
            regions, parts, same = found[str(accumulated)]
            steps = -(-10 // accumulated)
            micro = dict.fromkeys(("IO", "FORWARD", "BACKWARD"), 10)
            assert {name: regions[name] for name in ("BATCH", "optimizer", *micro)} == {
                "BATCH": steps, "optimizer": steps, **micro,
            }  # fmt: skip
            assert parts == pytest.approx(1, abs=0.02)
            assert same
        assert [found["resumed"][name] for name in ("BATCH", "FORWARD", "CHECKPOINT")] == [4, 4, 1]
