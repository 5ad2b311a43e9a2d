"""What trainers' callbacks add to a step, next to SimpleProfiler and TraceML: ``python -m benchmarks.bench_trainers``.

One training, whose epochs are blocks of steps: a contender is switched on at the end of an epoch, and off at the end of
the next. A sample is the median step of its block less that of the plain blocks before and after it, in CPU time of the
thread that trains, so that other programs and slow changes of the machine's speed fall out. "Nothing" is switched on
too, and shows the rest. TraceML cannot be switched off and needs an aggregator: it has a process, and comes last.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from time import thread_time_ns
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._summary import Interval

ROWS, STEPS, SETTLE, NOTHING, TRACEML = 64, 30, 5, "nothing", "TraceML"
Switch = Callable[[], Any]
"""Switches a contender on, and returns what switches it off."""


class Blocks:
    """Switches contenders between epochs, and clocks the steps."""

    def __init__(self, rounds: int, *, stays_on: bool = False) -> None:
        self.rounds = rounds
        self.stays_on = stays_on
        self.contenders: dict[str, Switch] = {NOTHING: lambda: bool}
        self.medians: list[float] = []
        self._ends: list[int] = []
        self._off: Callable[[], object] = bool

    @property
    def epochs(self) -> int:
        """The number of blocks."""
        return 2 * self.rounds * len(self.contenders) + 1

    def end_step(self) -> None:
        """A step ends now."""
        self._ends.append(thread_time_ns())

    def end_block(self) -> None:
        """An epoch ends: switch."""
        steps = [later - sooner for sooner, later in zip(self._ends[SETTLE:], self._ends[SETTLE + 1 :], strict=False)]
        self.medians.append(statistics.median(steps) / 1e3)
        self._ends = []
        self._off()
        self._off, number = bool, len(self.medians)
        if self.stays_on:
            if number == self.epochs // 2:
                self.contenders[TRACEML]()
        elif number % 2:
            self._off = list(self.contenders.values())[number // 2 % len(self.contenders)]()

    def print_added(self, framework: str) -> None:
        """Print a line for each contender."""
        samples: dict[str, list[float]] = {name: [] for name in self.contenders}
        for number in range(1, len(self.medians) - 1, 2):
            before, with_it, after = self.medians[number - 1 : number + 2]
            samples[list(samples)[number // 2 % len(samples)]].append(with_it - (before + after) / 2)
        plain = statistics.median(self.medians[::2])
        if self.stays_on:
            half = self.epochs // 2
            plain = statistics.median(self.medians[:half])
            samples = {TRACEML: [one - plain for one in self.medians[half + 1 :]]}
        for name, found in samples.items():
            added = Interval.of(found)
            print(
                f"{framework}, {name}: {added.median:+.0f} µs a step of {plain / 1e3:.2f} ms "
                f"({added.low:+.0f} to {added.high:+.0f} with 95 %; {added.median / plain:+.2%}), {added.rounds} blocks"
            )


def network(width: int) -> nn.Module:
    """Steps of 1024 take about 10 ms on one core."""
    layers = (nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
    return nn.Sequential(*layers)


def fit_lightning(blocks: Blocks, width: int) -> None:
    """Train with Lightning."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.profilers import SimpleProfiler

    from deep500_timing_torch.trainers.lightning import TimerCallback, TimerProfiler

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(width)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    class Clock(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            blocks.end_step()

        def on_train_epoch_end(self, *_: Any, **__: Any) -> None:
            blocks.end_block()

    module = Module()

    def callback() -> Callable[[], object]:
        ours = TimerCallback()
        trainer.callbacks.append(ours)
        ours.on_fit_start(trainer, module)

        def off() -> None:
            ours.on_fit_end(trainer, module)
            trainer.callbacks.remove(ours)

        return off

    def profiler(make: Callable[[], Any]) -> Callable[[], object]:
        before, trainer.profiler = trainer.profiler, make()
        return lambda: setattr(trainer, "profiler", before)

    def timer_profiler() -> Callable[[], object]:
        both = callback(), profiler(TimerProfiler)
        return lambda: [off() for off in both]

    if blocks.stays_on:
        blocks.contenders = {TRACEML: lambda: trainer.callbacks.append(_traceml("lightning", "TraceMLCallback"))}
    else:
        blocks.contenders |= {"TimerCallback": callback, "TimerProfiler": timer_profiler}
        blocks.contenders |= {"SimpleProfiler": lambda: profiler(SimpleProfiler)}
    data = TensorDataset(torch.randn(ROWS * STEPS, 64), torch.randint(4, (ROWS * STEPS,)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=blocks.epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, callbacks=[Clock()],
            plugins=LightningEnvironment(), default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, ROWS))


def fit_transformers(blocks: Blocks, width: int) -> None:
    """Train with transformers."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from deep500_timing_torch.trainers.huggingface import TimerCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(width)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            blocks.end_step()

        def on_epoch_end(self, *given: Any, **_: Any) -> None:
            nonlocal hook
            hook = given
            blocks.end_block()

    hook: tuple[Any, ...] = ()

    def callback() -> Callable[[], object]:
        ours = TimerCallback()
        trainer.add_callback(ours)
        ours.on_train_begin(*hook)

        def off() -> None:
            ours.on_train_end(*hook)
            trainer.remove_callback(ours)

        return off

    if blocks.stays_on:
        blocks.contenders = {TRACEML: lambda: trainer.add_callback(_traceml("huggingface", "TraceMLTrainerCallback"))}
    else:
        blocks.contenders |= {"TimerCallback": callback}
    data: Any = [{"x": torch.randn(64), "labels": n % 4} for n in range(ROWS * STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=blocks.epochs, per_device_train_batch_size=ROWS, use_cpu=True, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[Clock()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def _traceml(module: str, name: str) -> Any:
    traceml = import_module(f"traceml_ai.integrations.{module}")
    if traceml.init().disabled:
        raise SystemExit("TraceML found no aggregator.")
    return getattr(traceml, name)()


def beside_traceml(framework: str, *arguments: str) -> None:
    """Measure TraceML's callback, in a process with an aggregator."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    quiet: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": Path(__file__).parent.parent}
    with tempfile.TemporaryDirectory(prefix="deep500-timing-traceml-") as folder:
        serve = "import sys; from traceml_ai.launcher.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", serve, "serve", "--logs-dir", folder, "--aggregator-port", port]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, **quiet) as aggregator:
            try:
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.bench_trainers", *arguments, "--beside-traceml", framework],
                    env={**os.environ, "TRACEML_AGGREGATOR_PORT": port, "TRACEML_LOGS_DIR": folder},
                    check=True, timeout=600, **quiet,
                )  # fmt: skip
            finally:
                aggregator.kill()


def main() -> None:
    """Train and print a line for each contender."""
    fits = {"Lightning": fit_lightning, "transformers": fit_transformers}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each contender")
    parser.add_argument("--width", type=int, default=1024, help="of the network: 1024 takes some 10 ms a step")
    parser.add_argument("--only", choices=fits, action="append")
    parser.add_argument("--beside-traceml", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for framework in [arguments.beside_traceml] if arguments.beside_traceml else arguments.only or fits:
        blocks = Blocks(arguments.rounds, stays_on=bool(arguments.beside_traceml))
        fits[framework](blocks, arguments.width)
        blocks.print_added(framework)
        if importlib.util.find_spec("traceml_ai") is None:
            print("TraceML was not measured: `traceml-ai` is not installed.")
        elif not arguments.beside_traceml:
            beside_traceml(framework, "--rounds", str(arguments.rounds), "--width", str(arguments.width))


if __name__ == "__main__":
    main()
