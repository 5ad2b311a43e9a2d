"""One small PyTorch loop with one planted fault: `python -m benchmarks._planted FAULT RUN` prints the fault's time.

The truth is a stopwatch around the fault, read with `time.perf_counter`; the timer knows nothing of it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

import deep500_timing_torch as timer
from deep500_timing_torch import TimeType

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCHS, STEPS = 3, 80


class Stopwatch:
    """Adds up the fault's time."""

    def __init__(self) -> None:
        self.seconds, self.times = 0.0, 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Measure a block."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began
        self.times += 1


class Data(Dataset[Any]):
    """Random batches; some faults are here."""

    def __init__(self, fault: str, rank: int, watch: Stopwatch) -> None:
        self.fault, self.rank, self.watch = fault, rank, watch

    def __len__(self) -> int:
        """One epoch."""
        return STEPS

    def __getitem__(self, index: int) -> Any:
        """A batch."""
        with self.watch():
            if self.fault in ("slow loader", "one slow worker"):
                time.sleep(0.02)
            if self.fault == "loader stalls" and index % 40 == 39:
                time.sleep(0.4)
            if self.fault == "slow loader of one rank" and self.rank == 1:
                time.sleep(0.02)
            if self.fault == "tokenizes in the loop":
                " ".join(str(number) for number in range(60_000)).split()
        return torch.randn(64, 256), torch.randint(10, (64,))


def slow_start(_: int) -> None:
    """A worker that takes half a second to start."""
    time.sleep(0.5)


class Loop:
    """The loop. Each method is a place for faults."""

    def __init__(self, fault: str, run: str) -> None:
        self.fault, self.watch = fault, Stopwatch()
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        workers = {"one slow worker": 1, "workers start slowly": 2}.get(fault, 0)
        self.loader = DataLoader(
            Data(fault, self.rank, self.watch),
            batch_size=None,
            num_workers=workers,
            worker_init_fn=slow_start if fault == "workers start slowly" else None,
        )
        self.kept: list[Any] = []
        self.tmr = timer.CPUGPUTimer(run=run)
        folder = Path(tempfile.mkdtemp())
        self.file, self.checkpoint = folder / "log", folder / "checkpoint"
        if fault == "garbage collection":
            self.kept = [[[] for _ in range(40)] for _ in range(20_000)]  # A large heap that the collector walks.

    def forward(self, x: Any, y: Any, step: int) -> Any:
        """The forward pass."""
        if self.fault == "compiles first" and step == 0:
            with self.watch():
                time.sleep(3)
        loss = nn.functional.cross_entropy(self.model(x), y)
        if self.fault == "slow from step 120 on" and step >= 120:
            with self.watch():
                for _ in range(6):
                    self.model(x)
        return loss

    def in_step(self, step: int, loss: Any) -> None:
        """The end of a step."""
        fault, watch, tmr = self.fault, self.watch, self.tmr
        if fault in ("clipping in no region", "clipping"):
            with tmr.region("clip") if fault == "clipping" else nullcontext(), watch():
                for _ in range(12):
                    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                time.sleep(0.01)
        elif fault == "sleep each 40th step" and step % 40 == 39:
            with watch():
                time.sleep(0.3)
        elif fault == "a list that grows":
            self.kept.extend([float(loss.detach())] * 8000)
            with watch():
                sum(self.kept)
        elif fault == "tensors are kept":
            self.kept.append(torch.randn(500_000))
        elif fault == "slow log":
            with watch(), self.file.open("a") as file:
                file.write(f"{step} {loss}\n")
                file.flush()
                os.fsync(file.fileno())
                time.sleep(0.008)
        elif fault == "garbage collection" and step % 40 == 39:
            with watch():
                gc.collect()
        if fault == "large gradients":
            with tmr.region(TimeType.COMM), watch():
                distributed.all_reduce(torch.zeros(2_000_000))
        elif self.ranks > 1:
            with tmr.region(TimeType.COMM):
                distributed.all_reduce(torch.zeros(100))

    def after_step(self, step: int) -> None:
        """Between two steps."""
        fault, watch, tmr = self.fault, self.watch, self.tmr
        if fault == "callback each 50th step" and step % 50 == 49:
            with watch():
                time.sleep(0.3)
        if fault in ("checkpoints in no region", "checkpoints") and step % 40 == 39:
            with tmr.region("checkpoint") if fault == "checkpoints" else nullcontext(), watch():
                torch.save(self.model.state_dict(), self.checkpoint)
                time.sleep(0.4)
        if fault == "validates often" and step % 5 == 4:
            with tmr.region("validation"), watch(), torch.no_grad():
                for _ in range(40):
                    self.model(torch.randn(256, 256))

    def run(self) -> dict[str, float]:
        """Train, and print the times of the loop and its fault."""
        tmr, step, began = self.tmr, -1, time.perf_counter()
        log = tmr.run
        for _ in range(EPOCHS):
            with tmr.region(TimeType.EPOCH):
                batches = iter(tmr.iterate(self.loader))
                for _ in range(STEPS):
                    step += 1
                    with tmr.region(TimeType.BATCH):
                        x, y = next(batches)
                        with tmr.region(TimeType.FORWARD):
                            loss = self.forward(x, y, step)
                        with tmr.region(TimeType.BACKWARD):
                            loss.backward()
                        with tmr.region("optimizer"):
                            self.optimizer.step()
                            self.optimizer.zero_grad()
                        self.in_step(step, loss)
                    self.after_step(step)
                    if log is not None and self.fault == "tensors are kept":
                        pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
                        log.sample("process.rss_bytes", 4096.0 * int(pages))
            if self.fault == "pauses between epochs" and step < EPOCHS * STEPS - 1:
                with self.watch():
                    time.sleep(2)
        return {"loop_s": time.perf_counter() - began, "fault_s": self.watch.seconds, "times": self.watch.times}


def main() -> None:
    """Run one loop."""
    torch.set_num_threads(1)
    fault, run = sys.argv[1:]
    if fault == "garbage collection":
        gc.disable()
    if "WORLD_SIZE" in os.environ:
        distributed.init_process_group("gloo")
    loop = Loop(fault, run)
    print(json.dumps(loop.run()))


if __name__ == "__main__":
    main()
