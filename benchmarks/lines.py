"""Whether findings name the lines that take the time between the regions: `python -m benchmarks.lines` writes LINES.md.

Real PyTorch loops on the CPU, timed by `autolog()` alone. Each has one function that takes a share of the step. A loop
counts as found if the first or second finding names that function. Healthy loops have no such function.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deep500_timing import autolog
from deep500_timing._views.findings import find
from deep500_timing.runs import Run

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 150
SHARES = (0.2, 0.4, 0.6)
"""The share of the step that the function takes: 1, 2 and 3 times the threshold."""
RULES = ("dominant-region", "unnamed", "outside-steps")


def write_log(until: float) -> None:
    """Write a line and flush it to the disk."""
    with tempfile.TemporaryFile("w") as file:
        while time.perf_counter() < until:
            file.write("0.5\n")
            file.flush()
            os.fsync(file.fileno())


def tokenize(until: float) -> None:
    """Count words in Python."""
    counts: dict[str, int] = {}
    while time.perf_counter() < until:
        for word in ("a", "few", "words", "of", "a", "text"):
            counts[word] = counts.get(word, 0) + 1


def confusion(until: float) -> None:
    """A metric in NumPy."""
    while time.perf_counter() < until:
        np.bincount(np.arange(10_000) % 100, minlength=100).reshape(10, 10)


def dump(until: float) -> None:
    """Encode a record as JSON."""
    while time.perf_counter() < until:
        json.dumps({str(number): [number] * 5 for number in range(200)})


def wait_for_server(until: float) -> None:
    """Wait for a service."""
    time.sleep(max(until - time.perf_counter(), 0.0))


def average_weights(until: float) -> None:
    """An average of weights in PyTorch."""
    mean = torch.zeros(256, 256)
    while time.perf_counter() < until:
        mean.mul_(0.9).add_(torch.ones(256, 256), alpha=0.1)


def grad_norm(until: float) -> None:
    """The norm of gradients, one by one."""
    while time.perf_counter() < until:
        torch.zeros(50_000).norm().item()


CAUSES: dict[Callable[[float], None], str] = {
    write_log: "after optimizer",
    tokenize: "after IO",
    confusion: "loss",
    dump: "after optimizer",
    wait_for_server: "after optimizer",
    average_weights: "after optimizer",
    grad_norm: "after BACKWARD",
}
"""Each function and the place in the step where it is called."""


def train(cause: Callable[[float], None] | None, seconds: float) -> float:
    """A loop; the function takes so long in each step. Returns the median step in seconds."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = DataLoader(TensorDataset(torch.randn(32 * STEPS, 1024), torch.randint(10, (32 * STEPS,))), batch_size=32)

    def here(place: str) -> None:
        if cause is not None and CAUSES[cause] == place:
            cause(time.perf_counter() + seconds)

    steps = []
    for x, y in data:
        began = time.perf_counter()
        here("after IO")
        loss = nn.functional.cross_entropy(model(x), y)
        here("loss")
        optimizer.zero_grad()
        loss.backward()
        here("after BACKWARD")
        optimizer.step()
        here("after optimizer")
        steps.append(time.perf_counter() - began)
    return statistics.median(steps)


def judge(cause: Callable[[float], None] | None, seconds: float) -> list[Any]:
    """The findings of a loop."""
    folder = tempfile.mkdtemp(prefix="lines-")
    try:
        log = autolog(folder, quiet=True)
        try:
            train(cause, seconds)
        finally:
            log.close()
        with Run.open(folder) as run:
            return find(run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run all loops, and write the table."""
    torch.set_num_threads(1)
    usual = train(None, 0.0)
    rows, hits = [], dict.fromkeys(SHARES, 0)
    for cause, place in CAUSES.items():
        said = []
        for share in SHARES:
            found = judge(cause, usual * share / (1 - share))
            rank = next((at for at, finding in enumerate(found) if f"in {cause.__name__} (" in finding.text), None)
            hits[share] += rank is not None and rank < 2
            said.append("no" if rank is None else f"yes, {rank + 1}.")
            print(cause.__name__, share, said[-1], [finding.text for finding in found], flush=True)
        rows.append(f"| `{cause.__name__}` | {place} | {' | '.join(said)} |")
    healthy, wrong = 20, 0
    for _ in range(healthy):
        found = [finding for finding in judge(None, 0.0) if finding.rule in RULES]
        wrong += bool(found)
        print("healthy", [finding.text for finding in found], flush=True)
    counted = ", ".join(f"{hits[share]} of {len(CAUSES)} at {share:.0%}" for share in SHARES)
    lines = [
        "# Lines of the program",
        "",
        "Written by `python -m benchmarks.lines`: real PyTorch loops on the CPU, timed by `autolog()` alone. One",
        "function takes a share of the step; the rules speak from 20 % on. A cell says whether a finding names the",
        "function, and the place of that finding. The share is planned from the step of a first loop: on a busy one",
        "the function takes more, as the sentences say that the command prints.",
        "",
        f"**As the first or second finding: {counted}.**",
        f"Of {healthy} healthy loops, {wrong} have a finding of these rules.",
        "",
        f"| function | region | {' | '.join(f'{share:.0%}' for share in SHARES)} |",
        "|---|---|---|---|---|",
        *rows,
    ]
    Path(__file__).with_name("LINES.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
