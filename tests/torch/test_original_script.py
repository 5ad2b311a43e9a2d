"""A training loop as users of the original timers wrote it, with nothing but the import line changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

import deep500_timing_torch as timer
from deep500_timing.exporters import _delivery

pytestmark = [pytest.mark.slow, pytest.mark.one_form]


def run_epoch(loader, net, criterion, optimizer, tmr):
    """One pass, every part of it timed: batches include the wait for their data."""
    tmr.start(timer.TimeType.BATCH, gpu=True)
    tmr.start(timer.TimeType.IO)
    for number, (inputs, targets) in enumerate(loader):
        tmr.end(timer.TimeType.IO)

        tmr.start(timer.TimeType.FORWARD, gpu=True)
        loss = criterion(net(inputs), targets)
        tmr.end(timer.TimeType.FORWARD, gpu=True)

        tmr.start(timer.TimeType.BACKWARD, gpu=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tmr.end(timer.TimeType.BACKWARD, gpu=True)

        tmr.end(timer.TimeType.BATCH, gpu=True)
        if number % 10 == 0:
            tmr.complete_all()
        if number + 1 < len(loader):
            tmr.start(timer.TimeType.BATCH, gpu=True)
            tmr.start(timer.TimeType.IO)
    return loss.item()


def run_training(args, loader, net, criterion, optimizer):
    """All passes, and the reports at the end."""
    net.train()
    tmr = timer.CPUGPUTimer()
    losses = []
    for _ in range(args.num_epochs):
        tmr.start(timer.TimeType.EPOCH)
        losses.append(run_epoch(loader, net, criterion, optimizer, tmr))
        tmr.end(timer.TimeType.EPOCH)
    tmr.print_all_time_stats()
    tmr.log_mlflow_all("train")
    return tmr, losses


@pytest.fixture
def problem():
    """A small classification that a small net can learn."""
    torch.manual_seed(1)
    inputs = torch.randn(120, 8)
    targets = (inputs.sum(dim=1) > 0).long()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    return loader, net, torch.nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.5)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A real MLflow store, in SQLite."""
    mlflow = pytest.importorskip("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/runs.db")
    yield mlflow
    mlflow.set_tracking_uri(before)


@pytest.fixture
def logged(store):
    """Starts a run, and gives a function that ends it and reads back the logged values."""
    run = store.start_run()

    def read():
        store.end_run()
        for exporter in list(_delivery._exporters):  # As the end of the program does.
            assert exporter._wait_until_empty(60)
        return store.MlflowClient().get_run(run.info.run_id).data.metrics

    yield read
    store.end_run()


@pytest.mark.filterwarnings("ignore::deep500_timing.TimingWarning")
def test_example_runs(problem, logged, capsys):
    """The loop trains, and every region has as many times as it was run, printed and logged."""
    epochs, batches = 3, len(problem[0])
    tmr, losses = run_training(SimpleNamespace(num_epochs=epochs), *problem)
    assert losses[-1] < losses[0]
    keys = ("BATCH", "FORWARD", "BACKWARD", "IO")
    assert [epochs * batches] * 4 == [len(tmr.get_time(timer.TimeType[key])) for key in keys]
    assert epochs == len(tmr.get_time(timer.TimeType.EPOCH))
    stats = tmr.get_time_stats(timer.TimeType.BATCH)
    assert stats.min <= stats.median <= stats.max
    assert stats.mean == pytest.approx(sum(tmr.get_time(timer.TimeType.BATCH)) / stats.count)
    printed = capsys.readouterr().out
    assert [] == [key for key in ("EPOCH", *keys) if key not in printed]
    metrics = logged()
    assert [] == [key for key in ("EPOCH", *keys) if f"train/CPU/{key}" not in metrics]
    assert metrics["train/CPU/BATCH"] == pytest.approx(stats.mean)


@pytest.mark.torch_device
def test_example_on_a_device(problem, logged, capsys, dev):
    """The same on a machine with an accelerator has GPU times for what asked for them, reported apart."""
    batches = len(problem[0])
    tmr, _ = run_training(SimpleNamespace(num_epochs=1), *problem)
    assert [batches] * 3 == [
        len(tmr.get_time(timer.TimeType[key], gpu=True)) for key in ("BATCH", "FORWARD", "BACKWARD")
    ]
    assert [] == tmr.get_time(timer.TimeType.IO, gpu=True)
    assert "GPU" in capsys.readouterr().out
    assert {"train/CPU/BATCH", "train/GPU/BATCH"} <= logged().keys()
