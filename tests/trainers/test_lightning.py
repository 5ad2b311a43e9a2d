"""Lightning's ``Trainer``: counts, sums, its own SimpleProfiler, and no change."""

from __future__ import annotations

import copy
import pickle
import signal
import statistics
import time
import types

import pytest
import torch
from suite_trainers import (
    FAULT_AT,
    FAULTS,
    PARTS,
    SAVED_AT,
    StopError,
    check_two_ranks,
    counts,
    share,
    timer_of_processor,
)
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

pytest.importorskip("lightning", reason="times lightning.Trainer")
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.profilers import SimpleProfiler, simple

from deep500_timing_torch.trainers.lightning import TimerCallback, TimerProfiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.one_form,
    pytest.mark.filterwarnings("ignore::Warning"),  # Lightning's own advice
]


class Classifier:
    """A small classifier, the same each time."""

    def __init__(self, width=256):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )

    def training_step(self, batch, index):
        """The loss of a batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        """The same, in evaluation."""
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        """Adam."""
        return torch.optim.Adam(self.parameters())


class Net(Classifier, LightningModule):
    """It, of ``lightning``."""


class Adversaries(Net):
    """Two losses and two optimizers, by hand."""

    automatic_optimization = False

    def training_step(self, batch, index):
        """Step both."""
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self):
        """One for each half."""
        return [torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.SGD(self.net[2].parameters(), 0.1)]


class Repeated(Net):
    """An optimizer that computes the loss several times in a step."""

    def configure_optimizers(self):
        """L-BFGS."""
        return torch.optim.LBFGS(self.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)


class AtStep(Callback):
    """Calls a function before the optimizer of a step."""

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        """Call it."""
        if trainer.global_step == self.step:
            self.call()


def loader(batches, size=16, rows=64):
    """Made data."""
    generator = torch.Generator().manual_seed(1)
    count = batches * size
    return DataLoader(
        TensorDataset(torch.randn(count, rows, generator=generator), torch.randint(4, (count,), generator=generator)),
        size,
    )


class Stream(IterableDataset):
    """Made data without a length."""

    def __iter__(self):
        return iter(loader(10, 1).dataset)


def trained(folder, *callbacks, model=None, train=None, kind=Trainer, resume=None, **more):
    """A trainer that has trained."""
    settings = {
        "max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "devices": 1,
        "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder,
        "plugins": LightningEnvironment(),  # else Lightning looks for MPI, which starts a daemon
        **more,
    }  # fmt: skip
    trainer = kind(callbacks=list(callbacks), **settings)
    trainer.fit(model or Net(), loader(20) if train is None else train, loader(2), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("accumulated", [1, 4])
def test_counts_are_exact_and_parts_add_up(tmp_path, accumulated):
    """Each optimizer step is a BATCH with its micro-batches; the parts of BATCH and EPOCH add up."""
    callback = TimerCallback(timer_of_processor())
    trainer = trained(
        tmp_path, callback, ModelCheckpoint(tmp_path, save_top_k=-1), accumulate_grad_batches=accumulated,
        gradient_clip_val=1.0, enable_checkpointing=True, model=Net(1024),
    )  # fmt: skip
    steps, timer = 40 // accumulated, callback.timer
    assert trainer.global_step == steps
    found = counts(timer)
    whole = {"FIT": 1, "sanity check": 1, "EPOCH": 2, "EPOCH (start)": 2, "VALIDATION": 2, "CHECKPOINT": 2}
    assert {"logging"} >= found.keys() - {*PARTS, "BATCH", "clip", *whole}
    assert {name: found[name] for name in whole} == whole
    assert {name: found[name] for name in ("BATCH", "IO", "FORWARD", "BACKWARD", "clip", "optimizer")} == {
        "BATCH": steps, "IO": 40, "FORWARD": 40, "BACKWARD": 40, "clip": steps, "optimizer": steps,
    }  # fmt: skip
    assert share(timer, "BATCH", *PARTS) == pytest.approx(1, abs=0.02)
    assert share(timer, "EPOCH", "EPOCH (start)", "BATCH", "VALIDATION", "CHECKPOINT", "logging") == pytest.approx(
        1, abs=0.02
    )


def test_times_agree_with_the_simple_profiler(tmp_path, monkeypatch):
    """Lightning's own profiler, in the same training, sees the same times."""
    monkeypatch.setattr(simple, "time", types.SimpleNamespace(perf_counter=time.thread_time))
    callback, own = TimerCallback(timer_of_processor()), SimpleProfiler()
    trained(tmp_path, callback, profiler=own, model=Net(1024), max_epochs=1)
    for region, action in {
        "IO": (fetch := "[_TrainingEpochLoop].train_dataloader_next"),
        "FORWARD": "[Strategy]SingleDeviceStrategy.training_step",
        "BACKWARD": "[Strategy]SingleDeviceStrategy.backward",
        "EPOCH": "run_training_epoch",
    }.items():
        theirs, ours = own.recorded_durations[action], callback.timer.get_time(region)
        apart = statistics.median(abs(one - other) for one, other in zip(ours, theirs, strict=True))
        # What lies between the two takes longer where the shortest of them does: 80 µs of 880 on a slow machine.
        allowed = 0.02 * statistics.median(theirs) + 0.15 * statistics.median(own.recorded_durations[fetch])
        assert apart <= allowed, region


def test_training_is_bit_identical(tmp_path):
    """The callback and the profiler change no weight, no metric and no random number."""

    def trained_with(*callbacks, **more):
        trainer = trained(tmp_path, *callbacks, accumulate_grad_batches=2, **more)
        return [*trainer.model.parameters(), trainer.callback_metrics["val_loss"], torch.rand(1)]

    plain = trained_with()
    for timed in (trained_with(TimerCallback()), trained_with(profiler=TimerProfiler(actions=True))):
        assert all(torch.equal(one, other) for one, other in zip(plain, timed, strict=True))


def test_resume_in_mid_epoch(tmp_path):
    """A resumed training has the BATCHes that were left, numbered as in the first, and marks its checkpoints."""
    saves = ModelCheckpoint(tmp_path, "six", every_n_train_steps=6)
    trained(tmp_path, saves, enable_checkpointing=True, max_steps=7)
    marks = []

    class Run:
        def mark(self, what, *, step, dur_s=None):
            marks.append((what, step))

    class Marked(TimerCallback):
        def on_fit_start(self, trainer, pl_module):
            super().on_fit_start(trainer, pl_module)
            self._training.fit.timer = Timer(self.timer)

    class Timer:
        def __init__(self, timer):
            self._timer, self.run = timer, Run()

        def __getattr__(self, name):
            return getattr(self._timer, name)

    callback = Marked()
    trained(
        tmp_path, callback, ModelCheckpoint(tmp_path, every_n_train_steps=10), enable_checkpointing=True,
        resume=tmp_path / "six.ckpt",
    )  # fmt: skip
    found = counts(callback.timer)
    assert (found["BATCH"], found["FORWARD"], found["EPOCH"]) == (34, 34, 2)
    assert marks == [("checkpoint_restored", 5), *(("checkpoint_saved", step) for step in (9, 19, 29, 39))]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_an_exception_in_mid_epoch(tmp_path, fault):
    """Open regions are counted as failed, all wrappers are gone, and the callback serves the next training."""
    callback, trainers = TimerCallback(), []

    class Kept(Trainer):
        def __init__(self, **settings):
            super().__init__(**settings)
            trainers.append(self)

    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((StopError, SystemExit)) as raised:
            trained(tmp_path, callback, AtStep(FAULT_AT, fault), kind=Kept)
    finally:
        signal.signal(signal.SIGINT, on_interrupt)  # Lightning has it ignored
    assert not any(one.path.name in ("_fit.py", "lightning.py") for one in raised.traceback)
    failed = {one.name: one.failed for one in callback.timer.snapshot() if one.failed}
    assert failed == {"FIT": 1, "EPOCH": 1, "BATCH": 1}
    assert not any(one.running for one in callback.timer.snapshot())
    found = counts(callback.timer)
    assert (found["BATCH"], found["FORWARD"], found["optimizer"]) == (5, 6, 5)
    (trainer,) = trainers
    owners = (trainer, trainer.strategy, trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.precision_plugin)
    assert not any(getattr(one, "__wrapped__", None) for owner in owners for one in vars(owner).values())
    trained(tmp_path, callback)
    assert counts(callback.timer)["BATCH"] == 45


def test_a_callback_is_pickled_copied_and_used_twice(tmp_path):
    """A copy has its own timer."""
    callback, profiler = TimerCallback(), TimerProfiler(actions=True)
    for _ in range(2):
        trained(tmp_path, callback, max_epochs=1)
        trained(tmp_path, max_epochs=1, profiler=profiler)
    assert (counts(callback.timer)["BATCH"], counts(profiler.timer)["BATCH"]) == (40, 40)
    for other in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        trained(tmp_path, other, max_epochs=1)
        assert counts(other.timer)["BATCH"] == 20
    for other in (pickle.loads(pickle.dumps(profiler)), copy.deepcopy(profiler)):
        trained(tmp_path, profiler=other, max_epochs=1)
        assert other.actions
        assert counts(other.timer)["BATCH"] == 20
    assert counts(callback.timer)["BATCH"] == 40


@pytest.mark.parametrize("kind", [TimerCallback, TimerProfiler])
def test_what_is_no_timer_is_refused(kind):
    """The error names the argument and the remedy."""
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(3\): pass the timer .* such as CPUGPUTimer\(\), not int"):
        kind(3)


@pytest.mark.parametrize(("model", "passes"), [(Adversaries, 40), (Repeated, 60)])
def test_several_passes_in_a_step(tmp_path, model, passes):
    """FORWARD is what comes before each backward pass: of two optimizers by hand, and of one that repeats the loss."""
    callback = TimerCallback(timer_of_processor())
    trained(tmp_path, callback, model=model(1024), max_epochs=1)
    found = counts(callback.timer)
    assert (found["BATCH"], found["FORWARD"], found["BACKWARD"], found["optimizer"]) == (20, passes, passes, passes)
    assert share(callback.timer, "BATCH", *PARTS) == pytest.approx(1, abs=0.02)


def test_a_stream_and_a_fault_in_a_hook(tmp_path):
    """The end of data is no wait; a timer with a region open elsewhere ends no training."""
    callback = TimerCallback()
    trained(tmp_path, callback, train=DataLoader(Stream(), 2), max_epochs=1)
    assert counts(callback.timer)["BATCH"] == 5
    assert not any(one.failed for one in callback.timer.snapshot())
    callback.timer.start("FORWARD")
    with pytest.warns(match="The training goes on; its times are incomplete"):
        assert trained(tmp_path, callback, max_epochs=1).global_step == 20


def test_actions_fold_into_regions(tmp_path, caplog):
    """Actions inside the regions are no regions; the rest is, on request; a program's own actions always are."""

    class Own(Net):
        def on_train_epoch_end(self):
            with self.trainer.profiler.profile("my statistics"):
                pass

    def regions(**more):
        profiler = TimerProfiler(**more)
        trained(tmp_path, profiler=profiler, model=Own(), max_epochs=1)
        return counts(profiler.timer).keys()

    own = TimerCallback()
    trained(tmp_path, own, max_epochs=1)
    caplog.set_level("INFO", logger="lightning.pytorch.profilers.profiler")
    folded = regions()
    assert folded == {*counts(own.timer), "my statistics"}
    assert "Times by region" in caplog.text
    more = regions(actions=True) - folded
    assert "[LightningModule]Own.on_train_epoch_end" in more
    assert not any(
        one.endswith((".training_step", ".backward", "run_training_batch", ".train_dataloader_next")) for one in more
    )


def test_pytorch_lightning(tmp_path):
    """The package under its older name takes the same classes."""
    older = pytest.importorskip("pytorch_lightning", reason="times pytorch_lightning.Trainer")

    from pytorch_lightning.plugins.environments import LightningEnvironment as Environment

    class Older(Classifier, older.LightningModule):
        pass

    callback, profiler = TimerCallback(), TimerProfiler()
    trained(tmp_path, callback, model=Older(), kind=older.Trainer, plugins=Environment(), max_epochs=1)
    trained(tmp_path, model=Older(), kind=older.Trainer, plugins=Environment(), max_epochs=1, profiler=profiler)
    assert counts(callback.timer) == counts(profiler.timer)
    assert counts(callback.timer)["BATCH"] == 20


def fit(folder, timer=None, *, accumulated=1, saves=False, resume=False, fault=None):
    """Train on this rank of two, and return the weights."""
    callbacks = [] if timer is None else [TimerCallback(timer)]
    callbacks += [] if fault is None else [AtStep(FAULT_AT, fault)]
    callbacks += [ModelCheckpoint(folder, "saved", every_n_train_steps=SAVED_AT)] if saves else []
    trainer = trained(
        folder, *callbacks, model=Net(1024), devices=2, strategy="ddp", plugins=None, enable_checkpointing=saves,
        accumulate_grad_batches=accumulated, max_steps=SAVED_AT if saves else -1,
        resume=f"{folder}/saved.ckpt" if resume else None,
    )  # fmt: skip
    return list(trainer.model.parameters())


def test_two_ranks(forks, tmp_path):
    """Each rank counts its own batches, for any end or start of the training; the weights are those without us."""

    def counted(steps, batches):
        micro = dict.fromkeys(("IO", "FORWARD", "BACKWARD", "signal check"), batches)
        return {"BATCH": steps, "optimizer": steps, "EPOCH": 2, "VALIDATION": 2, **micro}

    check_two_ranks(
        forks, tmp_path, "test_lightning",
        {
            "1": counted(20, 20),
            "4": counted(6, 20),
            "resumed": counted(15, 15),
            "fault": {"BATCH": 5, "FORWARD": 6, "BACKWARD": 6, "optimizer": 5},
        },
        {"FIT", "EPOCH", "BATCH"},
        agent=True,
    )  # fmt: skip
