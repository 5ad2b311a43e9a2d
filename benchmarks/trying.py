"""What ``deep500-timing try`` claims of real loops with a planted fault and of healthy ones; writes ``TRY.md``.

::

    python -m benchmarks.trying              # until each was tried 20 times, on a machine that does nothing else
    python -m benchmarks.trying --times 2 --steps 100 --only loader --only threads --out /tmp/try.md

What was tried is kept in a JSON file beside the page, so it may be interrupted at any time and goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

TORCH = """
import torch, time, gc
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(0); torch.set_num_threads(1)
class Rows(Dataset):
    def __init__(self, count, sleep_s=0.0): self.count, self.sleep_s = count, sleep_s
    def __len__(self): return self.count
    def __getitem__(self, at):
        time.sleep(self.sleep_s)
        return torch.randn(32), at % 2
def train(loader, net, epochs=1000, more=lambda: None):
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad(); nn.functional.cross_entropy(net(x), y).backward(); optimizer.step(); more()
def mlp(width=256):
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
rows = TensorDataset(torch.randn(2048, 32), torch.randint(2, (2048,)))
"""
KERAS = """
import os; os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np, keras
def fit(width, batch, count):
    model = keras.Sequential([keras.layers.Dense(width, activation="relu"), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    model.fit(np.ones((count, 64), "float32"), np.ones((count, 4), "float32"), batch_size=batch, epochs=1000, verbose=0)
"""
TF_DATA = """import tensorflow as tf, time
def slow(x):
    y = tf.py_function(lambda z: (time.sleep(0.02), z)[1], [x], "float32"); y.set_shape((16, 64)); return y, y
rows = tf.data.Dataset.from_tensor_slices(np.ones((4096, 64), "float32")).repeat().batch(16).map(slow)
model = keras.Sequential([keras.layers.Dense(64)]); model.compile("adam", "mse"); model.fit(rows, verbose=0)
"""
PLANTED = {
    "loader": (TORCH + "train(DataLoader(Rows(4000, 0.001), 16), mlp())", "num_workers"),
    "workers that restart": (TORCH + "train(DataLoader(Rows(320), 32, num_workers=2), mlp())", "persistent_workers"),
    "threads": (TORCH + "torch.set_num_threads(8)\ntrain(DataLoader(rows, 512), mlp(512))", "num_threads"),
    "heap": (
        TORCH + "heap = [[n] for n in range(3_000_000)]\n"
        "train(DataLoader(rows, 64), mlp(), more=lambda: [[n] for n in range(20_000)])",
        "gc.freeze",
    ),
    "keras, tiny steps": (KERAS + "fit(8, 8, 4096)", "steps_per_execution"),
    "tf.data": (KERAS + TF_DATA, "num_parallel_calls"),
}
"""Programs with a fault, and the parameter that mends it."""
HEALTHY = {
    "arrays": TORCH + "train(DataLoader(rows, 256), mlp(1024))",
    "small batches": TORCH + "train(DataLoader(rows, 32), mlp(1024))",
    "workers that keep up": TORCH
    + "train(DataLoader(Rows(20000), 64, num_workers=1, persistent_workers=True), mlp(2048))",
    "convolution": TORCH
    + "net = nn.Sequential(nn.Unflatten(1, (1, 4, 8)), nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(),\n"
    "    nn.Conv2d(64, 9, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))\n"
    "net(torch.randn(1, 32)); train(DataLoader(rows, 256), net)",
    "recurrent": TORCH + "class Net(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__(); self.rnn, self.out = nn.LSTM(4, 256, batch_first=True), nn.Linear(256, 2)\n"
    "    def forward(self, x): return self.out(self.rnn(x.view(-1, 8, 4))[0][:, -1])\n"
    "train(DataLoader(rows, 128), Net())",
    "attention": TORCH + "class Net(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__(); self.up, self.out = nn.Linear(4, 128), nn.Linear(128, 2)\n"
    "        self.layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)\n"
    "    def forward(self, x): return self.out(self.layer(self.up(x.view(-1, 8, 4))).mean(1))\n"
    "train(DataLoader(rows, 128), Net())",
    "Adam": TORCH + "torch.optim.SGD = lambda some, lr: torch.optim.AdamW(some, lr)\n"
    "train(DataLoader(rows, 256), mlp(1024))",
    "no loader": TORCH + "train([rows[:512]] * 1000, mlp(1024))",
    "keras, large steps": KERAS + "fit(4096, 1024, 65536)",
    # Each batch of so many rows would start a collection of all that was imported: 5 % of the step.
    "one batch an epoch": TORCH + "gc.disable(); train(DataLoader(rows, 2048), mlp(1024))",
}
"""Programs whose steps no remedy that can be set makes shorter."""


def tried(program: str, steps: list[str]) -> tuple[set[str], bool]:
    """The parameters that are claimed to help, and whether a file of the program's folder was made or changed."""
    with tempfile.TemporaryDirectory(prefix="trying-") as folder:
        script = Path(folder, "train.py")
        script.write_text(program)
        command = [sys.executable, "-m", "deep500_timing", "try", "--json", *steps]
        done = subprocess.run(
            [*command, "--", sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 3):
            raise RuntimeError(done.stderr[-2000:])
        is_changed = [one.name for one in Path(folder).iterdir()] != ["train.py"] or script.read_text() != program
        found = json.loads(done.stdout)
        return {one["remedy"]["parameter"] for one in found["tried"] if one["helps"]}, is_changed


def main() -> None:
    """Try each program so many times, in turn, and write the page after each trial."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--steps", help="Of each run, in place of what `try` chooses.")
    parser.add_argument("--only", action="append", help="A program; may be repeated.")
    parser.add_argument("--out", default=str(Path(__file__).parent / "TRY.md"))
    options = parser.parse_args()
    kept = Path(options.out).with_suffix(".json")
    found: dict[str, list[Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for number, name in product(range(options.times), options.only or [*PLANTED, *HEALTHY]):
        trials = found.setdefault(f"{name}, {options.steps} steps" if options.steps else name, [])
        if len(trials) > number:
            continue
        program, wanted = PLANTED.get(name) or (HEALTHY[name], "")
        helps, is_changed = tried(program, ["--steps", options.steps] if options.steps else [])
        is_right = wanted in helps if wanted else not helps
        trials.append((wanted, sorted(helps), is_right, is_changed, round(os.getloadavg()[0], 1)))
        print(name, *trials[-1], flush=True)
        kept.write_text(json.dumps(found))
        Path(options.out).write_text(page_of(found))


def page_of(found: dict[str, list[Any]]) -> str:
    """The page on all trials so far."""
    *_, changed, loads = zip(*(one for trials in found.values() for one in trials), strict=True)
    text = (
        f"# Remedies that are tried\n\n`python -m benchmarks.trying`, on {os.cpu_count()} cores, load {min(loads)} "
        f"to {max(loads)}.\nThe last column has the trials of each real loop; a claim about a healthy one is a false "
        "alarm.\n\n"
        "| program | what mends it | claimed | right |\n|---|---|---|---|\n"
    )
    for name, trials in found.items():
        claims = Counter(parameter for one in trials for parameter in one[1]).most_common()
        said = ", ".join(f"{parameter} {count}" for parameter, count in claims) or "none"
        right = sum(one[2] for one in trials)
        text += f"| {name} | {trials[0][0] or 'none'} | {said} | {right} of {len(trials)} |\n"
    return f"{text}\nFolders of programs that changed: {sum(changed)}.\n"


if __name__ == "__main__":
    main()
