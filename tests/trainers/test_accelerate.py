"""Loops with Accelerate: counts, sums, the tracker, and no change."""

from __future__ import annotations

import contextlib
import copy
import io
from functools import partial
from time import thread_time

import pytest
import torch
from suite_trainers import FAULT_AT, PARTS, SAVED_AT, check_clock, check_two_ranks, counts, share, timer_of_processor
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="times loops with Accelerate")
from accelerate import Accelerator, data_loader

import deep500_timing_torch as timer
from deep500_timing_torch.trainers._data import Data
from deep500_timing_torch.trainers._fit import Fit
from deep500_timing_torch.trainers.accelerate import TimerTracker, instrument

pytestmark = [pytest.mark.slow, pytest.mark.one_form]


def prepared(accumulated=1, width=512, **more):
    """An accelerator with its model, optimizer and loader, the same each time."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated, **more)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4))
    data = TensorDataset(torch.randn(320, 64), torch.randint(4, (320,)))
    return accelerator, *accelerator.prepare(net, torch.optim.Adam(net.parameters()), DataLoader(data, 16))


def train(accelerator, net, optimizer, loader, epochs=2, each=lambda step: None):
    """Train with an evaluation after each epoch."""
    for _ in range(epochs):
        net.train()
        for step, (rows, classes) in enumerate(loader):
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(rows), classes)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                each(step)
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
    tmr = timer_of_processor()
    accelerator, *rest = prepared(accumulated)
    with instrument(accelerator, tmr) as timed:
        weights = train(accelerator, *rest)
        assert timed.values()["time/BATCH_s"] > 0
    assert all(torch.equal(one, other) for one, other in zip(plain, weights, strict=True))
    assert "backward" not in vars(accelerator)
    steps = 40 // accumulated
    found = counts(tmr)
    micro = dict.fromkeys(("FORWARD", "BACKWARD", "FORWARD (no grad)"), 40) | {"IO": 80}
    epochs = dict.fromkeys(("EPOCH", "EPOCH (start)", "VALIDATION"), 2)
    assert found == {"BATCH": steps, **micro, "clip": steps, "optimizer": steps, **epochs}
    assert share(tmr, "BATCH", *PARTS) == pytest.approx(1, abs=0.02)


@pytest.mark.filterwarnings("ignore:.*this timer was made for the CPU")
def test_a_copy_is_told_from_the_wait():
    """It is a region where there is an accelerator; the batch was counted before it, on the host."""
    rows = [{"input_ids": torch.ones(5), "labels": torch.tensor([-100, -100, 1, 1, 1])}] * 2
    with contextlib.closing(Fit(timer.CPUGPUTimer("cpu"), "cuda")) as fit:
        data = Data(fit)
        copied = data_loader.send_to_device(next(iter(DataLoader(rows, 2))), "meta")
        assert data.take(copied).trained_tokens == 6
    assert counts(fit.timer) == {"IO": 1, "copy": 1}


def test_times_agree_with_independent_clocks():
    """Stopwatches around the wait, the model, the backward pass and the optimizer see the same times."""
    own = {name: [] for name in ("IO", "FORWARD", "BACKWARD", "optimizer")}

    def watch(name, call, *args):
        begun = thread_time()
        try:
            return call(*args)
        finally:
            own[name].append(thread_time() - begun)

    tmr = timer_of_processor()
    accelerator, net, optimizer, loader = prepared(width=4096)
    # Around PyTorch's own: Accelerate looks for packages in each step, which takes half a millisecond.
    optimizer.optimizer.step = partial(watch, "optimizer", optimizer.optimizer.step)
    with instrument(accelerator, tmr):
        batches = iter(loader)
        for _ in range(20):
            rows, classes = watch("IO", next, batches)
            loss = nn.functional.cross_entropy(watch("FORWARD", net, rows), classes)
            watch("BACKWARD", accelerator.backward, loss)
            optimizer.step()
            optimizer.zero_grad()
    check_clock(tmr, own)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt], ids=["exception", "ctrl-c"])
def test_an_exception_and_copies_of_the_model(error):
    """An open region is counted as failed; a model that is copied or saved meanwhile is a model as any other."""
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
    assert len(tmr.get_time("FORWARD")) == 22
    assert not any(hasattr(one, "__wrapped__") for one in vars(nn.Sequential).values())
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


def fit(folder, timer=None, *, accumulated=1, saves=False, resume=False, fault=None):
    """Train on this rank of two, resumed as by Accelerate's own guide, and return the weights."""
    accelerator, net, optimizer, loader = prepared(accumulated)

    def each(step):
        if step == FAULT_AT and fault is not None:
            fault()
        if step == SAVED_AT and saves:
            accelerator.save_state(f"{folder}/state")

    with contextlib.nullcontext() if timer is None else instrument(accelerator, timer):
        if resume:
            accelerator.load_state(f"{folder}/state")
            loader = accelerator.skip_first_batches(loader, SAVED_AT)
        weights = train(accelerator, net, optimizer, loader, epochs=1, each=each)
        if resume:
            accelerator.save_state(f"{folder}/later")
        return weights


def test_two_ranks(forks, tmp_path):
    """Each rank counts its own batches, for any end or start of the training; the weights are those without us."""

    def counted(steps, batches, **more):
        micro = dict.fromkeys(("FORWARD", "BACKWARD"), batches) | {"IO": 2 * batches, "FORWARD (no grad)": batches}
        return {"BATCH": steps, "optimizer": steps, "VALIDATION": 1, **micro, **more}

    check_two_ranks(
        forks, tmp_path, "test_accelerate",
        {
            "1": counted(10, 10),
            "4": counted(3, 10),
            "resumed": counted(5, 5, CHECKPOINT=1),
            "fault": {"BATCH": 5, "FORWARD": 6, "BACKWARD": 6, "optimizer": 5},
        },
        {"BATCH"},
    )  # fmt: skip
