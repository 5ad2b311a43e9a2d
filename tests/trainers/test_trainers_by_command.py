"""Unchanged scripts of the trainers through ``deep500-timing run``: the right regions, none of them twice."""

from __future__ import annotations

import itertools

import pytest
import suite_ranks

pytest.importorskip("torch", reason="the trainers train with PyTorch")
pytest.importorskip("duckdb", reason="reads a run")
from deep500_timing.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.one_form]

DATA = """
import warnings; warnings.simplefilter("ignore")
import torch
from torch import nn
torch.manual_seed(0); torch.set_num_threads(1)
rows = [{"x": torch.randn(16), "labels": torch.tensor(n % 4)} for n in range(80)]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    def forward(self, x, labels):
        out = self.net(x)
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}
"""
# What comes after the training is a loop by hand, which the plug-in of PyTorch times.
BY_HAND = """
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for batch in torch.utils.data.DataLoader(rows, 8):
    optimizer.zero_grad(); net(**batch)["loss"].backward(); optimizer.step()
print("RESULT", [float(one.detach().double().sum()) for one in net.parameters()])
"""
HUGGINGFACE = (
    DATA
    + """
from transformers import Trainer, TrainingArguments
net = Net()
arguments = TrainingArguments("out", num_train_epochs=2, gradient_accumulation_steps=2, report_to=[], use_cpu=True,
    disable_tqdm=True, save_strategy="epoch", eval_strategy="epoch", remove_unused_columns=False, logging_steps=5)
trainer = Trainer(net, arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=CALLBACKS)
trainer.train()
print("RESULT", sorted({name for one in trainer.state.log_history for name in one}))
"""
    + BY_HAND
)
LIGHTNING = (
    DATA
    + """
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
net = Net()
class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, index):
        return self.net(**batch)["loss"]
    def validation_step(self, batch, index):
        self.log("val", self.net(**batch)["loss"])
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
loader = lambda rows: torch.utils.data.DataLoader(rows, 8)
trainer = Trainer(max_epochs=2, accumulate_grad_batches=2, accelerator="cpu", devices=1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, plugins=LightningEnvironment(), callbacks=CALLBACKS)
trainer.fit(Module(), loader(rows), loader(rows[:8]))
"""
    + BY_HAND
)
ACCELERATE = (
    DATA
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net, optimizer, loader = accelerator.prepare(
    Net(), torch.optim.Adam(Net().parameters()), torch.utils.data.DataLoader(rows, 8))
for epoch in range(2):
    net.train()
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step(); optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        net(**next(iter(loader)))
print("RESULT", [float(one.detach().double().sum()) for one in net.parameters()])
"""
)
STEPS = {"BATCH": 10, "BACKWARD": 20, "optimizer": 10, "FORWARD": 20}
TRAINER = {name: count + 10 for name, count in STEPS.items()} | {"VALIDATION": 2, "CHECKPOINT": 2, "FIT": 1, "EPOCH": 3}
CASES = {
    "transformers": (HUGGINGFACE, "[]", TRAINER | {"IO": 30}),
    # The record of a program's own timer is left to it, also after the training.
    "transformers with a callback": (HUGGINGFACE, "[Own()]", STEPS | {"IO": 20, "VALIDATION": 2, "FIT": 1, "EPOCH": 2}),
    "lightning": (LIGHTNING, "[]", TRAINER | {"IO": 30, "sanity check": 1}),
    "accelerate": (ACCELERATE, "[]", STEPS | {"VALIDATION": 2, "EPOCH": 2}),
}
OWN = "from deep500_timing_torch.trainers.huggingface import TimerCallback as Own\n"
RUNS = [*CASES]
RUNS[1] = pytest.param(RUNS[1], marks=pytest.mark.matrix)


@pytest.mark.parametrize("name", RUNS)
def test_an_unchanged_script(name, forks, tmp_path, monkeypatch):
    """It computes and prints the same as without the command; each region is there as often as it happened."""
    pytest.importorskip(name.partition(" ")[0], reason="a script that uses it")
    program, callbacks, expected = CASES[name]
    script = tmp_path / "script.py"
    script.write_text((OWN if "Own" in callbacks else "") + program.replace("CALLBACKS", callbacks))
    monkeypatch.chdir(tmp_path)
    plain = forks.printed(script.read_text(), tmp_path / "plain", TOKENIZERS_PARALLELISM="false")
    timed = forks.run(tmp_path, "--run", "run", str(script), TOKENIZERS_PARALLELISM="false")
    assert 0 == timed.returncode, timed.stdout
    results = [[line for line in text.splitlines() if line.startswith("RESULT")] for text in (plain, timed.stdout)]
    assert results[0] == results[1] != []
    with Run.open(tmp_path / "run") as run:
        rows = run.intervals().arrow().to_pylist()
    found = {region: sum(row["region"] == region for row in rows) for region in {row["region"] for row in rows}}
    assert {region: found.get(region) for region in expected} == expected
    batches = sorted((row["start_ns"], row["start_ns"] + row["dur_ns"]) for row in rows if row["region"] == "BATCH")
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(batches))


TRACKED = (
    DATA
    + """
import os, sys, tempfile
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=tempfile.mkdtemp(),
    MLFLOW_TRACKING_URI=f"sqlite:///{tempfile.mkdtemp()}/runs.db")
import mlflow, wandb
from transformers import Trainer, TrainingArguments
from deep500_timing_torch.trainers.huggingface import TimerCallback
def train(*callbacks):
    torch.manual_seed(0)
    arguments = TrainingArguments(tempfile.mkdtemp(), max_steps=8, eval_strategy="steps", eval_steps=4, save_steps=4,
        report_to=sys.argv[2:], use_cpu=True, disable_tqdm=True, remove_unused_columns=False, **eval(sys.argv[1]))
    trainer = Trainer(Net(), arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[*callbacks])
    trainer.train()
    run_id, found = mlflow.last_active_run().info.run_id, {"W&B": dict(wandb.run.summary)}
    wandb.finish(); mlflow.end_run()
    for name in mlflow.get_run(run_id).data.metrics:
        history = mlflow.MlflowClient().get_metric_history(run_id, name)
        found[name] = [(one.step, one.value) for one in history]
    return found
def of_user(names):
    clocks = ("time/", "runtime", "per_second", "_timestamp", "_wandb", "_step")
    return {name: value for name, value in names.items() if not any(clock in name for clock in clocks)}
alone, beside = train(), train(TimerCallback())
users = [{**of_user(one), "W&B": of_user(one["W&B"])} for one in (alone, beside)]
ours = {name: [step for step, _ in points] for name, points in beside.items() if "time/BATCH" in name}
theirs = [step for step, _ in beside["loss"]]
print([users[0] == users[1], len(users[0]) > 4 < len(users[0]["W&B"]), bool(ours),
    all(steps == theirs for steps in ours.values()), any("time/BATCH" in name for name in beside["W&B"])])
"""
)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("settings", "trackers"),
    [
        ("dict(logging_steps=2)", ["mlflow", "wandb"]),
        ("dict(logging_steps=2)", ["wandb", "mlflow"]),
        ("dict(logging_steps=1, gradient_accumulation_steps=2)", ["mlflow", "wandb"]),
    ],
)
def test_two_trackers_keep_all_that_is_the_users(settings, trackers, forks, tmp_path):
    """Each has the user's values to the last digit, and ours at the steps of the user's losses."""
    for needed in ("transformers", "mlflow", "wandb"):
        pytest.importorskip(needed, reason="is the trainer or one of its trackers")
    output = tmp_path / "output"
    program = forks.start(["-c", TRACKED, settings, *trackers], suite_ranks.environment(), output)
    assert 0 == program.wait(300), output.read_text()[-3000:]
    assert output.read_text().splitlines()[-1] == str([True] * 5)
