"""Hugging Face's ``Trainer`` and the trainers built on it: counts, sums, independent clocks, and no change."""

from __future__ import annotations

import copy
import json
import pickle
from time import thread_time

import pytest
import torch
from suite_trainers import (
    FAULT_AT,
    FAULTS,
    PARTS,
    SAVED_AT,
    StopError,
    check_clock,
    check_two_ranks,
    counts,
    seconds,
    share,
    timer_of_processor,
)
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

pytest.importorskip("transformers", reason="times transformers.Trainer")
pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
from accelerate.optimizer import AcceleratedOptimizer
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from deep500_timing.runs import Run
from deep500_timing_torch import CPUGPUTimer
from deep500_timing_torch.trainers.huggingface import TimerCallback

pytestmark = [pytest.mark.slow, pytest.mark.one_form]


def tiny(**more):
    """A GPT-2 of two layers, the same each time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2, **more}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))


def made(count, length=32, seed=1):
    """Made data: ``count`` sequences of tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(96, (count, length), generator=generator)
    return [{"input_ids": one, "labels": one.clone()} for one in ids]


def arguments(folder, **more):
    """Settings of a short training on the CPU."""
    settings = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **more,
    }
    return TrainingArguments(str(folder), **settings)


def trained(folder, *callbacks, model=None, data=None, kind=Trainer, resume=None, evaluated=None, **more):
    """A trainer that has trained."""
    settings = arguments(folder, **more)
    trainer = kind(
        model or tiny(), settings, train_dataset=data or made(40), eval_dataset=evaluated, callbacks=list(callbacks)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class AtStep(TrainerCallback):
    """Calls a function after the optimizer of a step."""

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Call it."""
        if state.global_step == self.step:
            self.call()


@pytest.mark.parametrize("accumulated", [1, 4])
def test_counts_are_exact_and_parts_add_up(tmp_path, accumulated):
    """Each optimizer step is a BATCH with its micro-batches; the parts of BATCH, EPOCH and the Trainer's own time."""
    callback = TimerCallback(timer_of_processor())
    began_s = thread_time()
    trainer = trained(
        tmp_path,
        callback,
        data=made(80, 64),
        evaluated=made(8),
        gradient_accumulation_steps=accumulated,
        eval_strategy="epoch",
        save_strategy="epoch",
    )
    steps = 40 // accumulated
    found = counts(callback.timer)
    assert trainer.state.global_step == steps
    assert {name: found[name] for name in ("FIT", "EPOCH", "EPOCH (start)", "VALIDATION", "CHECKPOINT")} == {
        "FIT": 1,
        "EPOCH": 2,
        "EPOCH (start)": 2,
        "VALIDATION": 2,
        "CHECKPOINT": 2,
    }
    assert {name: found[name] for name in ("BATCH", "IO", "FORWARD", "BACKWARD", "clip", "optimizer")} == {
        "BATCH": steps,
        "IO": 40,
        "FORWARD": 40,
        "BACKWARD": 40,
        "clip": steps,
        "optimizer": steps,
    }
    timer = callback.timer
    assert share(timer, "BATCH", *PARTS) == pytest.approx(1, abs=0.02)
    assert share(timer, "EPOCH", "EPOCH (start)", "BATCH") == pytest.approx(1, abs=0.05)
    assert seconds(timer, "EPOCH") < seconds(timer, "FIT") < thread_time() - began_s


def test_times_agree_with_independent_clocks(tmp_path, monkeypatch):
    """Stopwatches in the data, the loss, the backward pass and the optimizer see the same times."""
    own = {name: [] for name in ("IO", "FORWARD", "BACKWARD", "optimizer")}

    def watch(name, call):
        def timed(*args, **kwargs):
            begun = thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                own[name].append(thread_time() - begun)

        return timed

    class Watched(Trainer):
        def compute_loss(self, *args, **kwargs):
            return watch("FORWARD", super().compute_loss)(*args, **kwargs)

    data = made(40)

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            begun, product = thread_time(), torch.zeros(64, 64)
            while thread_time() < begun + 0.003:
                product = product @ product
            own["IO"].append(thread_time() - begun)
            return data[index]

    callback = TimerCallback(timer_of_processor())
    trainer = Watched(tiny(), arguments(tmp_path, num_train_epochs=1), train_dataset=Slow(), callbacks=[callback])
    trainer.accelerator.backward = watch("BACKWARD", trainer.accelerator.backward)
    monkeypatch.setattr(AcceleratedOptimizer, "step", watch("optimizer", AcceleratedOptimizer.step))
    trainer.train()
    check_clock(callback.timer, own)


def test_training_is_bit_identical(tmp_path):
    """The callback changes no weight and no logged loss, and adds its values under its prefix only."""
    plain = trained(tmp_path / "a", gradient_accumulation_steps=2)
    timed = trained(tmp_path / "b", TimerCallback(prefix="t"), gradient_accumulation_steps=2)
    for one, other in zip(plain.model.parameters(), timed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(plain.state.log_history[:-1], timed.state.log_history[:-1], strict=True):
        assert one == {name: value for name, value in other.items() if not name.startswith("t/")}
    assert timed.state.log_history[0]["t/BATCH_s"] > 0
    json.dumps(timed.state.log_history)


def test_resume_in_mid_epoch(tmp_path):
    """A resumed training has the BATCHes that were left, numbered as in the first."""
    first = trained(tmp_path, save_strategy="steps", save_steps=6, max_steps=6)
    assert first.state.global_step == 6
    callback = TimerCallback()
    trained(tmp_path, callback, resume=str(tmp_path / "checkpoint-6"))
    found = counts(callback.timer)
    assert (found["BATCH"], found["IO"], found["FORWARD"], found["EPOCH"]) == (14, 14, 14, 2)
    assert "skip batches" not in found  # the sampler skips them, and nothing is fetched


@pytest.mark.parametrize("accumulated", [1, 2])
def test_skipped_batches_are_no_io(tmp_path, accumulated):
    """A stream has to be read up to where the training was: its own region, before the first BATCH."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(made(80))

    settings = {"data": Stream(), "gradient_accumulation_steps": accumulated, "save_strategy": "steps", "save_steps": 3}
    trained(tmp_path, max_steps=3, **settings)
    callback = TimerCallback()
    trained(tmp_path, callback, max_steps=8, resume=str(tmp_path / "checkpoint-3"), **settings)
    found = counts(callback.timer)
    assert (found["skip batches"], found["BATCH"]) == (1, 5)
    assert found["FORWARD"] == 5 * accumulated
    assert found["IO"] == 5 * accumulated + 1  # one batch is fetched ahead
    skip, batch = callback.timer.intervals("skip batches")[0], callback.timer.intervals("BATCH")[0]
    assert skip[1] <= batch[0]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_an_exception_in_mid_epoch(tmp_path, fault):
    """Open regions are counted as failed, all wrappers are gone, and the callback serves the next training."""
    callback = TimerCallback()
    fetch = _BaseDataLoaderIter.__next__
    settings = arguments(tmp_path)
    trainer = Trainer(tiny(), settings, train_dataset=made(40), callbacks=[callback, AtStep(FAULT_AT, fault)])
    with pytest.raises((StopError, KeyboardInterrupt)) as raised:
        trainer.train()
    assert not any(one.path.name in ("_fit.py", "huggingface.py") for one in raised.traceback[1:])
    failed = {one.name: one.failed for one in callback.timer.snapshot() if one.failed}
    assert failed == {"FIT": 1, "EPOCH": 1, "BATCH": 1}
    assert not any(one.running for one in callback.timer.snapshot())
    found = counts(callback.timer)
    assert (found["BATCH"], found["FORWARD"], found["optimizer"]) == (5, 6, 6)
    assert _BaseDataLoaderIter.__next__ is fetch
    assert "compute_loss" not in vars(trainer)
    assert "backward" not in vars(trainer.accelerator)
    trained(tmp_path, callback)
    assert counts(callback.timer)["BATCH"] == 25


def test_a_callback_that_is_added_later(tmp_path):
    """``add_callback`` and ``remove_callback`` work as for any other callback."""
    callback = TimerCallback()
    trainer = Trainer(tiny(), arguments(tmp_path), train_dataset=made(40))
    trainer.add_callback(callback)
    trainer.train()
    trainer.remove_callback(callback)
    trainer.train()
    assert counts(callback.timer)["BATCH"] == 20


def test_a_callback_is_pickled_copied_and_used_twice(tmp_path):
    """A copy has the settings, and its own timer."""
    callback = TimerCallback(prefix="p", peak_flops=1e12)
    trained(tmp_path, callback)
    trained(tmp_path, callback)
    assert counts(callback.timer)["BATCH"] == 40
    for other in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert (other.prefix, other.peak_flops) == ("p", 1e12)
        trained(tmp_path, other)
        assert counts(other.timer)["BATCH"] == 20
    assert counts(callback.timer)["BATCH"] == 40


def test_what_is_no_timer_is_refused():
    """The error names the argument and the remedy."""
    with pytest.raises(TypeError, match=r"TimerCallback\(3\): pass the timer .* such as CPUGPUTimer\(\), not int"):
        TimerCallback(3)


def test_a_fault_in_a_hook_costs_a_warning(tmp_path):
    """A timer with a region open elsewhere ends no training."""
    callback = TimerCallback()
    callback.timer.start("FORWARD")
    with pytest.warns(match="The training goes on; its times are incomplete"):
        trainer = trained(tmp_path, callback)
    assert trainer.state.global_step == 20


def test_tokens_are_counted_without_padding_and_evaluation(tmp_path):
    """Tokens by the attention mask, trained ones by their labels, over the BATCHes alone; the MFU from the config."""
    data = made(40)
    for one in data:
        one["attention_mask"] = torch.ones(32, dtype=torch.long)
        one["attention_mask"][24:] = 0
        one["labels"][:8] = -100
        one["labels"][24:] = -100
    callback = TimerCallback(peak_flops=1e12)
    trainer = trained(
        tmp_path, callback, data=data, evaluated=made(8), eval_strategy="steps", eval_steps=3,
        gradient_accumulation_steps=2, num_train_epochs=1,
    )  # fmt: skip
    rates, time_s = callback.throughput, seconds(callback.timer, "BATCH")
    assert rates.samples_per_s == pytest.approx(40 / time_s)
    assert rates.tokens_per_s == pytest.approx(40 * 24 / time_s)
    assert rates.trained_tokens_per_s == pytest.approx(40 * 16 / time_s)
    parameters = sum(one.numel() for one in trainer.model.parameters())
    flops = 6 * parameters + 12 * 2 * 2 * 32 * 32
    assert rates.utilization.ratio == pytest.approx(40 * 24 / time_s * flops / 1e12)
    logged = [one for one in trainer.state.log_history if "time/mfu" in one]
    assert [one["step"] for one in logged] == [2, 4]


def test_a_run_has_the_rates_of_a_training(tmp_path):
    """One sample of each known rate at its end, for the summary row of the page."""
    callback = TimerCallback(CPUGPUTimer(run=tmp_path / "run"), prefix=None, peak_flops=1e12)
    trained(tmp_path, callback, num_train_epochs=1)
    callback.timer.run.close()
    with Run.open(tmp_path / "run") as run:
        found = {row["metric"]: row["value"] for row in run.sql("select metric, value from samples").rows()}
    rates = callback.throughput
    assert found["throughput.samples_per_s"] == pytest.approx(rates.samples_per_s)
    assert found["throughput.mfu"] == pytest.approx(rates.utilization.ratio)


def test_mfu_is_unknown_without_a_peak(tmp_path):
    """There is no peak for a CPU, and none is guessed."""
    callback = TimerCallback()
    assert callback.throughput is None
    trainer = trained(tmp_path, callback, num_train_epochs=1)
    assert callback.throughput.utilization is None
    assert not any("time/mfu" in one for one in trainer.state.log_history)


def fit(folder, timer=None, *, accumulated=1, saves=False, resume=False, fault=None):
    """Train on this rank of two, and return the weights."""
    callback = TimerCallback(timer, peak_flops=1e12)
    callbacks = [] if timer is None else [callback]
    callbacks += [] if fault is None else [AtStep(FAULT_AT, fault)]
    settings = {"save_strategy": "steps", "save_steps": SAVED_AT, "max_steps": SAVED_AT} if saves else {}
    trainer = trained(
        f"{folder}/out", *callbacks, evaluated=made(8), eval_strategy="epoch", data=made(64), ddp_backend="gloo",
        gradient_accumulation_steps=accumulated, resume=f"{folder}/out/checkpoint-{SAVED_AT}" if resume else None,
        **settings,
    )  # fmt: skip
    weights = list(trainer.model.parameters())
    if timer is not None and len(timer.get_time("BATCH")) == trainer.state.global_step:
        # The one training of the timer: tokens and MFU are a rank's own.
        rate = 64 * 32 / seconds(timer, "BATCH")
        flops = 6 * sum(one.numel() for one in weights) + 12 * 2 * 2 * 32 * 32
        assert callback.throughput.tokens_per_s == pytest.approx(rate)
        assert callback.throughput.utilization.ratio == pytest.approx(rate * flops / 1e12)
    return weights


def test_two_ranks(forks, tmp_path):
    """Each rank counts its own batches, for any end or start of the training; the weights are those without us."""

    def counted(steps, batches, **more):
        return {"BATCH": steps, "optimizer": steps, **dict.fromkeys(("IO", "FORWARD", "BACKWARD"), batches), **more}

    check_two_ranks(
        forks, tmp_path, "test_huggingface",
        {
            "1": counted(16, 16, EPOCH=2, VALIDATION=2),
            "4": counted(4, 16, EPOCH=2, VALIDATION=2),
            "resumed": counted(11, 11, EPOCH=2, VALIDATION=2),
            "fault": {"BATCH": 5, "FORWARD": 6, "BACKWARD": 6, "optimizer": 6},
        },
        {"FIT", "EPOCH", "BATCH"},
    )  # fmt: skip
