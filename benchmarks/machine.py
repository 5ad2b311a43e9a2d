"""Whether findings name the machine where the machine is at fault: ``python -m benchmarks.machine``.

Two small trainings run under ``deep500-timing run`` with one disturbance at a time, with none, and with a fault of the
program next to a moderate neighbour. Told is the rule of the first two findings, and whether a line of the program or a
region is blamed for the seconds in which the thread had no processor. It takes about 45 minutes on a quiet machine of
two cores, and stops after ``--minutes`` with as many runs as were made by then; the page is written after each round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).with_name("MACHINE.md")
PROGRAM = """
import os, sys, time
import torch
from torch import nn

settings = dict(word.split("=") for word in sys.argv[1:])
model, workers, fault = settings["model"], int(settings.get("workers", 0)), settings.get("fault", "")
torch.manual_seed(0)
if "threads" in settings:
    torch.set_num_threads(int(settings["threads"]))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * 40

    def __getitem__(self, index):
        if fault == "reads":
            with open(settings["file"], "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(index % 32 << 21)
                file.read(1 << 21)
        if fault == "busy":
            sum(range(400_000))
        if fault == "slow item":
            time.sleep(0.004)
        return (torch.randn(3, 32, 32) if model == "conv" else torch.randint(0, 100, (64,))), index % 10

if model == "conv":
    parts = nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18816, 10)
    net = nn.Sequential(*parts)
else:
    layer = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True, dropout=0.0)
    net = nn.Sequential(nn.Embedding(100, 96), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(6144, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for epoch in range(int(settings["epochs"])):
    for batch, target in torch.utils.data.DataLoader(Data(), 16, num_workers=workers):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(batch), target)
        loss.backward()
        optimizer.step()
        if fault == "sleep":
            time.sleep(0.03)
    if fault == "checkpoint":
        for part in range(100):
            torch.save(net.state_dict(), settings["file"])
"""
BURN = "while True: pass"
HALF = """
import time
while True:
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end: pass
    time.sleep(0.01)
"""
CGROUPS = (
    ("cpu", (("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "50000"))),
    (".", (("cpu.max", "50000 100000"),)),
)
"""Where groups of processes are, and what limits one to half a core, by the first and the second version."""
DISTURBANCES: dict[str, tuple[str, ...]] = {
    "two burning neighbours": ("cpu-contention",),
    "one core (taskset)": ("one-core", "too-many-threads"),
    "8 threads": ("too-many-threads",),
    "a cgroup's limit of half a core": ("cpu-limit",),
    "reads that are in no cache": ("disk-wait", "waits-for-data"),
    "6 loader workers that compute": ("too-many-threads",),
}
"""For each disturbance the rules that name it."""
FAULTS = {
    "slow item": ("waits-for-data",),
    "sleep": ("dominant-region", "unnamed"),
    "checkpoint": ("outside-steps", "between-epochs"),
}
"""For each fault of the program the rules that name it, next to a neighbour that takes half a core."""
MACHINE_RULES = {
    *("cpu-contention", "too-many-threads", "one-core", "cpu-limit"),
    *("steal", "swapping", "disk-wait", "low-clock"),
}
LINES_BLAMED = ("spikes", "level-shift", "drift", "warm-up")


def main() -> None:
    """Run all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="of each; three times as many undisturbed")
    parser.add_argument("--epochs", type=int, default=3, help="of 40 steps")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--only", choices=("disturbances", "faults", "quiet"))
    parser.add_argument("--models", nargs="+", default=["conv", "transformer"])
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Neighbours end with this process.
    chosen = [
        *((name, rules, name) for name, rules in DISTURBANCES.items() if arguments.only in (None, "disturbances")),
        *(
            (name, rules, f"{name}, beside half a core")
            for name, rules in FAULTS.items()
            if arguments.only in (None, "faults")
        ),
        *([("none", (), "none")] * 3 if arguments.only in (None, "quiet") else []),
    ]
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        script, data = Path(folder) / "train.py", Path(folder) / "data.bin"
        script.write_text(PROGRAM)
        data.write_bytes(os.urandom(1 << 20) * 65)
        group = _group()
        end = time.monotonic() + 60 * arguments.minutes
        for number in range(arguments.runs):
            if time.monotonic() > end:
                break
            model = arguments.models[number % len(arguments.models)]
            workers = number // len(arguments.models) % 2
            for name, rules, of in chosen:
                if group is None and "cgroup" in name:
                    continue
                words = [f"model={model}", f"epochs={arguments.epochs}"]
                rows[of].append(_told(folder, script, data, name, rules, words, workers, group))
            arguments.page.write_text(_page(rows, group is not None))


@contextlib.contextmanager
def _neighbours(*programs: str) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _told(
    folder: str,
    script: Path,
    data: Path,
    name: str,
    rules: tuple[str, ...],
    words: list[str],
    workers: int,
    group: Path,
) -> dict[str, Any]:
    before, neighbours = [], ()
    if name == "two burning neighbours":
        neighbours = (BURN, BURN)
    elif name == "one core (taskset)":
        before = ["taskset", "-c", "0"]
    elif name == "8 threads":
        words += ["threads=8"]  # MKL takes no more from OMP_NUM_THREADS than there are processors.
    elif name == "a cgroup's limit of half a core":
        before = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"']
    elif name == "reads that are in no cache":
        words += ["fault=reads", f"file={data}"]
    elif name == "6 loader workers that compute":
        words += ["fault=busy"]
        workers = 6
    elif name in FAULTS:
        words += [f"fault={name}", f"file={Path(folder) / 'checkpoint.pt'}"]
        neighbours = (HALF,)
    words.append(f"workers={workers}")
    run = Path(folder) / f"run-{time.monotonic_ns()}"
    ours = ("-m", "deep500_timing", "run", "--quiet", "--run", str(run))
    with _neighbours(*neighbours):
        command = [*before, sys.executable, *ours, script.name, *words]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)
    found = _read(run)
    named = [rule for rule, _ in found["findings"]]
    blames = [text for rule, text in found["findings"] if rule in LINES_BLAMED and ".py" in text]
    row = found | {
        "named": not rules or bool({*named[:2]} & {*rules}),
        "machine": [rule for rule in named if rule in MACHINE_RULES],
        "blames": blames,
    }
    print(name, *words, json.dumps(row), file=sys.stderr)
    return row


def _group() -> Path | None:
    # A group of processes with half a core; None where none can be made.
    for where, limits in CGROUPS:
        group = Path("/sys/fs/cgroup", where, "deep500-timing-benchmark")
        with contextlib.suppress(OSError):
            group.mkdir(exist_ok=True)
            for name, limit in limits:
                (group / name).write_text(limit)
            return group
    return None


def _read(path: Path) -> dict[str, Any]:
    from deep500_timing._views.findings import evidence_of, find
    from deep500_timing.runs import Run

    with Run.open(path) as run:
        evidence = evidence_of(run)
        parts, machine = evidence.processor, evidence.machine
        rates = {} if machine is None else machine.rates
        return {
            "findings": [(one.rule, one.text) for one in find(evidence)],
            "waited": parts and parts.waited,
            "blocked": parts and parts.blocked,
            **{name: rates.get(name) for name in ("busy_cores", "process_cores")},
        }


def _page(rows: dict[str, list[dict[str, Any]]], has_groups: bool) -> str:
    from benchmarks._machine import describe

    lines = [
        "# Whose fault it is: the machine's or the program's",
        "",
        "Written by `python -m benchmarks.machine`. "
        + ", ".join(f"{name}: {of}" for name, of in describe().items())
        + ".",
        *([] if has_groups else ["No group of processes could be limited on this machine: its row is missing."]),
        "",
        "A small convolutional net and a small transformer, by turns, with and without a loader worker, epochs of 40",
        "steps. *Named*: the disturbance, or the fault, is the first or the second finding. *Machine*: a rule of the",
        "machine speaks. *Line*: a rule about slow steps names a line of the program. *Waited*: the share of the time",
        "in which the training thread waited for a processor, the median of the runs.",
        "",
        "| disturbance | runs | named | machine | line | waited | the first finding of the last run |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, found in rows.items():
        waits = sorted(row["waited"] for row in found if row["waited"] is not None)
        waited = f"{waits[len(waits) // 2]:.0%}" if waits else "unknown"
        counts = (sum(bool(row[what]) for row in found) for what in ("named", "machine", "blames"))
        first = found[-1]["findings"][0][1] if found[-1]["findings"] else "none"
        lines.append(f"| {name} | {len(found)} | {' | '.join(map(str, counts))} | {waited} | {first} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
