"""``python -m benchmarks.prices``: what making timers, reading and reporting cost, beside a fixed reference.

The reference is ``numpy.sort`` of a million numbers in the same process, so that a ratio says the same on another
machine. Each number is processor time: of the calling thread, or, for commands, of their processes. This file imports
nothing of the tree, so that ``bench_before_after`` can run it with the package of any commit.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

REFERENCE = "numpy.sort of 10⁶ numbers"
NAMES = [f"region {number}" for number in range(30)]
COMMAND = [sys.executable, "-m", "deep500_timing"]
COMMANDS = {"show": [], "why": ["100"], "report": ["page.html"], "compare": []}
ROUNDS = 15
SCRIPT = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in torch.utils.data.DataLoader(torch.zeros(400, 8), batch_size=2):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


def least(call: Callable[[], object], clock: Callable[[], float] = time.thread_time, rounds: int = ROUNDS) -> float:
    """The least time of several calls in seconds, which what else the machine does reaches least."""
    found = []
    for _ in range(rounds):
        begin = clock()
        call()
        found.append(clock() - begin)
    return min(found)


def fill(timer: Any, times: int) -> Any:
    """Record so many intervals of each of 30 regions."""
    for _ in range(times):
        for name in NAMES:
            timer.start(name)
            timer.end(name)
    return timer


def report(timer: Any, exporter: Any) -> float:
    """The least time in seconds of a report to an exporter, 20 new intervals in each region."""
    found = []
    for step in range(ROUNDS):
        fill(timer, 20)
        begin = time.thread_time()
        timer.export(exporter, step=step)
        found.append(time.thread_time() - begin)
        exporter.flush()
    return min(found)


def of_wandb(timer: Any, exporter: Any, folder: Path) -> tuple[float, float]:
    """The least time in seconds of a report to an offline W&B run, and of W&B's own log of 30 values."""
    import wandb

    wandb.init(project="prices", mode="offline", dir=folder, settings=wandb.Settings(silent=True))
    values = {f"plain/{name}": 1.0 for name in NAMES}
    ours = 0.0 if exporter is None else report(timer, exporter)
    theirs = least(lambda: wandb.log(values))
    wandb.finish()
    return ours, theirs


def of_comm() -> float:
    """The least time in seconds that 300 operations of one gloo rank take longer by timed functions."""
    import torch
    import torch.distributed as dist

    from deep500_timing_torch import comm

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(1024)
    plain = least(lambda: [dist.all_reduce(tensor) for _ in range(300)])
    with comm.instrument(kernel=False):
        return least(lambda: [dist.all_reduce(tensor) for _ in range(300)]) - plain


def of_keras(numbers: Any) -> float:
    """The median time in seconds that 400 batches of Keras take longer with the callback."""
    import keras

    from deep500_timing_tensorflow import CPUGPUTimer, TimerCallback

    model = keras.Sequential([keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    data = numbers[:12_800].reshape(3200, 4) / 2**40
    fit = functools.partial(model.fit, data, data, batch_size=8, verbose=0)
    timed = functools.partial(fit, callbacks=[TimerCallback(CPUGPUTimer())])
    return sorted(least(timed, rounds=1) - least(fit, rounds=1) for _ in range(9))[4]


def ranks(kind: Any, folder: Path) -> None:
    """A run of 64 ranks, 20 steps each."""
    from deep500_timing.runs import RunLog

    for rank in range(64):
        timer = kind()
        with RunLog(folder, timer, rank=rank, flush_s=None):
            for _ in range(20):
                with timer.region("BATCH"):
                    fill(timer, 1)


def measure(folder: Path) -> dict[str, float]:
    """Each price in units of the reference. What the package of that commit does not have is left out."""
    rows: dict[str, float] = {}
    begin = time.process_time()
    import deep500_timing

    deep500_timing.Timer()
    rows["import and the first Timer"] = time.process_time() - begin

    import numpy as np

    numbers = np.random.default_rng(0).integers(0, 1 << 40, 1_000_000)
    kind = deep500_timing.Timer

    def row(name: str, price: Callable[[], float]) -> None:
        with contextlib.suppress(Exception):
            rows[name] = price()

    def exporter(name: str, *arguments: Any, **settings: Any) -> Any:
        import deep500_timing.exporters as exporters

        return getattr(exporters, name)(*arguments, **settings)

    row("100 further Timers", lambda: least(lambda: [kind() for _ in range(100)]))
    timer = fill(kind(), 100)
    row("snapshot of 30 regions", lambda: least(timer.snapshot))
    row("report: JSON Lines", lambda: report(timer, exporter("JsonLinesExporter", folder / "times.jsonl")))
    row("report: CSV", lambda: report(timer, exporter("CsvExporter", folder / "times.csv")))
    row("report: TensorBoard", lambda: report(timer, exporter("TensorBoardExporter", folder / "tensorboard")))
    row("report: W&B, offline", lambda: of_wandb(timer, exporter("WandbExporter", "d5"), folder)[0])
    row("  its own log of as many values", lambda: of_wandb(timer, None, folder)[1])
    row("report: Prometheus, text file", lambda: report(timer, exporter("PrometheusExporter", folder=folder / "prom")))
    fill(timer, 10_000)
    row("report: JSON Lines, after 10⁴ steps", lambda: report(timer, exporter("JsonLinesExporter", folder / "late")))
    fill(timer, 90_000)
    row("report: JSON Lines, after 10⁵ steps", lambda: report(timer, exporter("JsonLinesExporter", folder / "later")))
    row(
        "table of 30 × 10⁵ intervals side by side",
        lambda: least(lambda: timer.print_all_time_stats(io.StringIO()), rounds=2),
    )
    timer.reset()
    few = fill(kind(keep_last=1000), 2000)
    row("report: JSON Lines, keep_last=1000", lambda: report(few, exporter("JsonLinesExporter", folder / "few")))
    many = kind()
    for number in range(10_000):
        many.record(f"region {number}", 0, 1000)
    row("snapshot of 10⁴ regions", lambda: least(many.snapshot, rounds=5))

    runs = [folder / "a", folder / "b"]
    for run in runs:
        begin = time.process_time()
        logged: Any = kind(run=run)
        for _ in range(4000):
            with logged.region("BATCH"):
                fill(logged, 1)
        logged.run.close()
        rows["run log of 10⁵ intervals"] = time.process_time() - begin
    for command, more in COMMANDS.items():
        row(f"command {command}", functools.partial(_price_of, command, runs, more, folder))
    logged = kind(run=folder / "long")
    for _ in range(33_000):
        with logged.region("BATCH"):
            fill(logged, 1)
    logged.run.close()
    row("command show, first reading of 10⁶ intervals", lambda: _price_of("show", [folder / "long"], [], folder, 1))
    ranks(kind, folder / "ranks")
    row("command why, 64 ranks", lambda: _price_of("why", [folder / "ranks"], ["10"], folder))
    (folder / "script.py").write_text(SCRIPT)
    plain = _children([sys.executable, "script.py"], folder)
    row(
        "command run of 200 steps, beside the script", lambda: _children([*COMMAND, "run", "script.py"], folder) - plain
    )
    row("300 operations of communication, beside untimed ones", of_comm)
    row("400 batches of Keras, beside those without a callback", lambda: of_keras(numbers))
    rows[REFERENCE] = least(lambda: np.sort(numbers))
    return {name: price / rows[REFERENCE] for name, price in rows.items()}


def _price_of(command: str, runs: list[Path], more: list[str], folder: Path, times: int = 2) -> float:
    """Processor time of a command in seconds, the second time: the first makes tables of the logs."""
    arguments = list(map(str, runs if command == "compare" else runs[:1])) + more
    return [_children([*COMMAND, command, *arguments], folder) for _ in range(times)][-1]


def _children(command: list[str], folder: Path) -> float:
    """Processor time of a command and its children in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure, and print a table or, for ``--json``, one line."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="deep500-timing-prices-") as folder, contextlib.chdir(folder):
        found = measure(Path(folder))
    rows = "\n".join(f"  {name:<54}{price * 1e3:10.2f}" for name, price in found.items())
    print(json.dumps(found) if "--json" in sys.argv else f"Processor time in thousandths of {REFERENCE}:\n{rows}")


if __name__ == "__main__":
    main()
