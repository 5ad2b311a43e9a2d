"""The main job: train on real data with PyTorch and with Keras, and see where the time went.

Each of the two trainings has a fault that programs often have: the PyTorch loop decodes its images in the main process,
and a callback of the Keras fit saves the weights after every batch. The first finding of each run names the line.

It leaves a run of each, with a report to open in a browser, a table on the terminal, a text file, JSON Lines, an MLflow
run in a local SQLite store and an offline W&B run in ``demo-output/``, and says how to look at each.

Run it with::

    python examples/demo.py
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("MLFLOW_DISABLE_AGENT_SKILL_MESSAGE", "1")

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import deep500_timing
from deep500_timing.runs import RunLog

console = Console()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what libraries written in C say while they are imported off the terminal."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def encode(image: Any) -> bytes:
    """An image as a compressed file, as data sets keep them."""
    np.savez_compressed(file := io.BytesIO(), image=image)
    return file.getvalue()


def decode(data: bytes) -> Any:
    """The image of such a file."""
    with np.load(io.BytesIO(data)) as file:
        return file["image"].astype("float32")[None] / 16


class Digits:
    """A data set of compressed images: each is decoded when the loop asks for it."""

    def __init__(self, digits: Any) -> None:
        self._files = [encode(image) for image in digits.images]
        self._labels = digits.target

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return decode(self._files[index]), int(self._labels[index])


def save(model: Any, folder: Path) -> None:
    """Once an epoch would do."""
    model.save_weights(folder / "last.weights.h5")


def train_with_pytorch(digits: Any, epochs: int, progress: Progress, run: Path) -> deep500_timing.Timer:
    """A hand-written loop: the regions are put around its parts."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    import deep500_timing_torch as timer

    torch.manual_seed(0)
    torch.set_num_threads(1)  # enough for this model, also on a busy machine
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Digits(digits), batch_size=32, shuffle=True)  # num_workers=0: the loop decodes
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters())

    on_gpu = device.type != "cpu"
    tmr = timer.CPUGPUTimer(run=RunLog(run, stacks_s=0.02))  # with samples of the stack, which name lines
    bar = progress.add_task("PyTorch loop", total=epochs * len(loader))
    for _ in range(epochs):
        with tmr.region(timer.TimeType.EPOCH):
            for inputs, targets in tmr.steps(loader, gpu=on_gpu):  # BATCH, with the wait for it as IO
                with tmr.region(timer.TimeType.FORWARD, gpu=on_gpu):
                    loss = criterion(net(inputs.to(device)), targets.to(device))
                with tmr.region(timer.TimeType.BACKWARD, gpu=on_gpu):
                    optimizer.zero_grad()
                    loss.backward()
                with tmr.region("optimizer", gpu=on_gpu):
                    optimizer.step()
                progress.advance(bar)
    tmr.run.close()  # what follows is no training
    return tmr


def train_with_keras(digits: Any, epochs: int, progress: Progress, run: Path) -> deep500_timing.Timer:
    """No hand-written loop: a callback times `model.fit`."""
    import keras

    import deep500_timing_tensorflow as timer

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, "relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    tmr = timer.CPUGPUTimer(run=RunLog(run, stacks_s=0.02))
    bar = progress.add_task("Keras fit", total=epochs)
    model.fit(
        digits.images[..., None] / 16,
        digits.target,
        batch_size=32,
        epochs=epochs,
        validation_split=0.2,
        verbose=0,
        callbacks=[
            timer.TimerCallback(tmr),
            keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: save(model, run.parent)),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: progress.advance(bar)),
        ],
    )
    tmr.run.close()
    return tmr


def report(tmr: deep500_timing.Timer, name: str, folder: Path) -> None:
    """Send the same times to every place that a team may look at; `look` shows them here."""
    from deep500_timing.exporters import JsonLinesExporter

    tmr.save_all_time_stats(folder / f"{name}.txt")
    tmr.export(JsonLinesExporter(folder / "times.jsonl"))
    tmr.log_mlflow_all(name, stats=("mean", "median", "p95"))
    tmr.log_wb_all(name, stats=("mean", "median", "p95"))


def look(folder: Path) -> str:
    """Do what ``deep500-timing show`` and ``report`` do, and return where the page is."""
    from deep500_timing.report import write_report
    from deep500_timing.runs import Run

    run = os.path.relpath(folder)
    console.rule(f"deep500-timing show {Path(run).name}")
    subprocess.run([sys.executable, "-m", "deep500_timing", "show", run], check=True)
    with console.status("deep500-timing report"), Run.open(run) as opened:
        write_report(opened, f"{run}.html")
    return f"{run}.html"


@click.command()
@click.option("--epochs", default=5, show_default=True, type=click.IntRange(min=1), help="Epochs for each framework.")
@click.option("--output", default=Path("demo-output"), show_default=True, type=click.Path(path_type=Path))
def main(epochs: int, output: Path) -> None:
    """Train on scikit-learn's digits with PyTorch and with Keras, and see where the time went."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    folder = output / datetime.now().astimezone().strftime("%Y-%m-%d_%H%M%S_%f")
    folder.mkdir(parents=True)
    columns = TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        # The frameworks and trackers take far longer to import than the training takes to run.
        imports = progress.add_task("importing frameworks", total=5)
        from sklearn.datasets import load_digits

        progress.advance(imports)
        for module in ("torch", "keras", "mlflow", "wandb"):
            with quiet():
                __import__(module)
            progress.advance(imports)
        digits = load_digits()
        times = {
            "pytorch": train_with_pytorch(digits, epochs, progress, folder / "run-pytorch"),
            "keras": train_with_keras(digits, epochs, progress, folder / "run-keras"),
        }

    import mlflow
    import wandb

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    uri = f"sqlite:///{(output / 'mlflow.db').absolute()}"
    with console.status("opening the MLflow store and the W&B run (the first time takes a while)"):
        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment("deep500-timing demo")
        tracked = wandb.init(project="deep500-timing-demo", dir=folder)
    with mlflow.start_run() as run, tracked:
        for name, tmr in times.items():
            report(tmr, name, folder)
        wandb_folder = Path(tracked.dir).parent

    pages = [look(folder / f"run-{name}") for name in times]
    console.rule("what next")
    for place, where in (
        ("remedies", "docs/how-to.md for the loader, docs/findings.md for the callback"),
        ("try them", "`deep500-timing try -- python train.py` tries remedies on a program of your own"),
        ("files", f"{folder}/pytorch.txt, keras.txt, times.jsonl"),
        ("MLflow", f"run {run.info.run_name!r} in {uri}"),
        ("", f"look at it: mlflow ui --backend-store-uri {uri}"),
        ("W&B", f"offline run in {wandb_folder}"),
        ("", f"look at it: wandb sync {wandb_folder}"),
        ("reports", f"open in a browser: {pages[0]} {pages[1]}"),
    ):
        # Long paths are left whole, to be copied.
        console.print(f"{place:<12} {where}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
