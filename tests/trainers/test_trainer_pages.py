"""The blocks of ``docs/trainers.md`` and the examples run as they stand, where their packages are installed."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.slow,
    pytest.mark.one_form,
    pytest.mark.filterwarnings("ignore::Warning"),  # the trainers' own advice
]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^(?:## )?(\w+)[^\n]*\n\n```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))
EXAMPLES = {"hf_trainer.py": "transformers", "lightning_fit.py": "lightning", "accelerate_loop.py": "accelerate"}


def network():
    """A small classifier."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def rows():
    """Made data."""
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), 8)


def of_transformers():
    """What its block needs."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    arguments = TrainingArguments("out", max_steps=2, report_to=[], use_cpu=True, save_strategy="no")
    data = [{"input_ids": row, "labels": row} for row in torch.randint(32, (16, 8))]
    return {"Trainer": Trainer, "model": model, "arguments": arguments, "data": data}


def of_lightning():
    """What its block needs."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def trainer(**settings):
        return Trainer(accelerator="cpu", devices=1, logger=False, plugins=LightningEnvironment(), **settings)

    return {"Trainer": trainer, "module": Module(), "loader": rows()}


def of_accelerate():
    """What its block needs."""
    from accelerate import Accelerator

    import deep500_timing_torch as timer

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"Accelerator": Accelerator, "tmr": timer.CPUGPUTimer(), "loader": rows(), "model": model,
            "optimizer": optimizer}  # fmt: skip


def of_ignite():
    """What its block needs."""
    from ignite.engine import create_supervised_trainer

    made = of_accelerate()
    return {**made, "create_supervised_trainer": create_supervised_trainer, "loss": nn.functional.cross_entropy}


def of_fastai():
    """What its block needs."""
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner

    return {"Learner": Learner, "loaders": DataLoaders(rows(), rows()), "model": network(),
            "loss": nn.functional.cross_entropy}  # fmt: skip


RUN = {
    "Hugging": ("transformers", of_transformers),
    "Lightning": ("lightning", of_lightning),
    "Accelerate": ("accelerate", of_accelerate),
    "Ignite": ("ignite", of_ignite),
    "fastai": ("fastai", of_fastai),
}


@pytest.mark.parametrize("name", RUN)
def test_a_block_runs(name, tmp_path, monkeypatch, capsys):
    """The lines that a user would type time a training."""
    package, make = RUN[name]
    pytest.importorskip(package, reason="a block for it")
    monkeypatch.chdir(tmp_path)
    space = make()
    exec(compile(BLOCKS[name], name, "exec"), space)
    if "timed" in space:
        space["timed"].close()
    else:
        said = capsys.readouterr()
        assert "BATCH" in said.out + said.err


def test_each_block_is_known():
    """A block that no test runs is Python at least, and the page says whether it was run."""
    rest = BLOCKS.keys() - RUN.keys()
    assert rest == {"Composer", "Ray"}
    for name in rest:
        compile(BLOCKS[name], name, "exec")
    assert "Composer was not run" in " ".join(PAGE.split())


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    """It prints its regions."""
    if importlib.util.find_spec(EXAMPLES[name]) is None:
        pytest.skip(f"needs {EXAMPLES[name]}")
    monkeypatch.chdir(tmp_path)
    if name == "lightning_fit.py":  # it looks for MPI, which starts a daemon
        from lightning.fabric.plugins.environments import mpi

        monkeypatch.setattr(mpi, "_MPI4PY_AVAILABLE", False)
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("BATCH", "FORWARD", "BACKWARD", "optimizer"))
