"""What the trainers' callbacks cost, beside SimpleProfiler and TraceML: ``python -m benchmarks.bench_trainers``.

Fits of one model with steps of about 10 ms, in turns, in one process. Of each the steady steps count: the time from the
end of a step to the end of the next, in the median. A ratio is to the plain fit of the same round. TraceML cannot be
undone and needs an aggregator, so each of its rounds is a process that fits plain and then with its callback.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, ROWS, STEPS, SETTLE = 1024, 64, 60, 10


def network() -> nn.Module:
    """Steps of it take about 10 ms on one core."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
    return nn.Sequential(*layers)


def fit_lightning(*, callbacks: list[Any], profiler: Any = None) -> float:
    """The median step of a fit of Lightning, in seconds."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    ends: list[float] = []

    class Clock(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            ends.append(perf_counter())

    data = TensorDataset(torch.randn(ROWS * STEPS, 64), torch.randint(4, (ROWS * STEPS,)))
    settings: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            callbacks=[*callbacks, Clock()], profiler=profiler, plugins=LightningEnvironment(),
            default_root_dir=folder, **settings,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(data, ROWS))
    return _median_step(ends)


def fit_transformers(*, callbacks: list[Any]) -> float:
    """The median step of a training of transformers, in seconds."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(perf_counter())

    data: Any = [{"x": torch.randn(64), "labels": n % 4} for n in range(ROWS * STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=1, per_device_train_batch_size=ROWS, use_cpu=True, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[*callbacks, Clock()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return _median_step(ends)


def _median_step(ends: list[float]) -> float:
    steps = [later - sooner for sooner, later in zip(ends[SETTLE:], ends[SETTLE + 1 :], strict=False)]
    return statistics.median(steps)


def beside_traceml(framework: str) -> list[float]:
    """The median step of a plain fit and of one with TraceML's callback, in a process with an aggregator."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    quiet: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": Path(__file__).parent.parent}
    with tempfile.TemporaryDirectory(prefix="deep500-timing-traceml-") as folder:
        serve = "import sys; from traceml_ai.launcher.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", serve, "serve", "--logs-dir", folder, "--aggregator-port", port]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, **quiet) as aggregator:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.bench_trainers", "--beside-traceml", framework],
                    env={**os.environ, "TRACEML_AGGREGATOR_PORT": port, "TRACEML_LOGS_DIR": folder},
                    stdout=subprocess.PIPE, text=True, check=True, timeout=300, **quiet,
                )  # fmt: skip
            finally:
                aggregator.kill()
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _plain_and_traceml(framework: str) -> list[float]:
    fit, module, callback = {
        "Lightning": (fit_lightning, "lightning", "TraceMLCallback"),
        "transformers": (fit_transformers, "huggingface", "TraceMLTrainerCallback"),
    }[framework]
    fit(callbacks=[])
    plain = fit(callbacks=[])
    traceml = import_module(f"traceml_ai.integrations.{module}")
    if traceml.init().disabled:
        raise SystemExit("TraceML found no aggregator.")
    return [plain, fit(callbacks=[getattr(traceml, callback)()])]


def main() -> None:
    """Run the rounds and print a line for each contender."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside-traceml", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if arguments.beside_traceml:
        print(json.dumps(_plain_and_traceml(arguments.beside_traceml)))
        return
    from lightning.pytorch.profilers import SimpleProfiler

    from deep500_timing_torch.trainers import huggingface, lightning

    contenders = {
        "Lightning, plain": lambda: fit_lightning(callbacks=[]),
        "Lightning, TimerCallback": lambda: fit_lightning(callbacks=[lightning.TimerCallback()]),
        "Lightning, TimerProfiler": lambda: fit_lightning(callbacks=[], profiler=lightning.TimerProfiler()),
        "Lightning, SimpleProfiler": lambda: fit_lightning(callbacks=[], profiler=SimpleProfiler()),
        "transformers, plain": lambda: fit_transformers(callbacks=[]),
        "transformers, TimerCallback": lambda: fit_transformers(callbacks=[huggingface.TimerCallback()]),
    }
    names = list(contenders)
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(arguments.rounds):
        steps = {name: contenders[name]() for name in (names if number % 2 else names[::-1])}
        for name in names:
            found.setdefault(name, []).append((steps[f"{name.partition(',')[0]}, plain"], steps[name]))
        if importlib.util.find_spec("traceml_ai") is not None:
            for framework in ("Lightning", "transformers"):
                plain, timed = beside_traceml(framework)
                found.setdefault(f"{framework}, TraceML", []).append((plain, timed))
    for name, pairs in sorted(found.items()):
        ratios = sorted(timed / plain for plain, timed in pairs)
        print(
            f"{name:28} {statistics.median(timed for _, timed in pairs) * 1e3:7.3f} ms a step, "
            f"{statistics.median(ratios):.3f} × plain ({ratios[0]:.3f} to {ratios[-1]:.3f} in {len(pairs)} rounds)"
        )
    if "Lightning, TraceML" not in found:
        print("TraceML was not measured: `traceml-ai` is not installed.")


if __name__ == "__main__":
    main()
