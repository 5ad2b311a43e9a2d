"""Ten scripts with one fault each, under `deep500-timing run` and nothing else: a part of `make findings`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from deep500_timing._views.findings import find
from deep500_timing.runs import Run

SCRIPT = """
import time, torch
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)
class Data(Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        {fetch}
        return torch.ones(8, 16)
class Model(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        {forward}
        return super().forward(x)
class Slow:
    def __reduce__(self): time.sleep(0.3); return Slow, ()
@torch.no_grad()
def validate():
    for _ in range(20): model(x)
def log_metrics():
    time.sleep(0.03)
step, model = 0, Model(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(Data(), batch_size=None, num_workers={workers}, persistent_workers={workers} > 0)
for epoch in range(4):
    for x in loader:
        loss = model(x).sum()
        {loss}
        optimizer.zero_grad()
        loss.backward()
        {gradients}
        optimizer.step()
        step += 1
        {after}
    {epoch}
"""
EMPTY = dict.fromkeys(("fetch", "forward", "loss", "gradients", "after", "epoch"), "pass") | {"workers": "0"}
FAULTS = {
    "the loader is slow": ("waits-for-data", {"fetch": "time.sleep(0.02)"}),
    "2 workers do not keep up": ("waits-for-data", {"fetch": "time.sleep(0.1)", "workers": "2"}),
    "a pause after each epoch": ("between-epochs", {"epoch": "time.sleep(1)"}),
    "checkpoints": ("outside-steps", {"after": "step % 20 == 0 and torch.save(Slow(), '/dev/null')"}),
    "validates often": (
        "outside-steps",
        {"after": "if step % 10 == 0: model.eval(); validate(); model.train()"},
    ),
    "logs each step": ("dominant-region", {"after": "log_metrics()"}),
    "reads the loss slowly": ("dominant-region", {"loss": "log_metrics()"}),
    "clips slowly": ("dominant-region", {"gradients": "log_metrics()"}),
    "a slow step now and then": ("spikes", {"forward": "step % 20 == 19 and time.sleep(0.4)"}),
    "slow from step 80 on": ("level-shift", {"forward": "step >= 80 and time.sleep(0.02)"}),
}
"""By the fault: the rule that must come first, and the lines that plant it."""


def scripts() -> list[str]:
    """The table."""
    rows, hits = [], 0
    for fault, (rule, lines) in FAULTS.items():
        with tempfile.TemporaryDirectory(prefix="script-") as folder:
            Path(folder, "train.py").write_text(SCRIPT.format(**(EMPTY | lines)), encoding="utf-8")
            command = [sys.executable, "-m", "deep500_timing", "run", "--quiet", "--run", "run", "train.py"]
            subprocess.run(command, cwd=folder, check=True, timeout=300)
            with Run.open(f"{folder}/run") as run:
                found = find(run)
        hit = bool(found) and found[0].rule == rule
        hits += hit
        said = found[0].text.replace("|", "/") if found else "nothing"
        rows.append(f"| {fault} | {'yes' if hit else '**no**'} | {said} |")
        print(rows[-1], file=sys.stderr, flush=True)
    return [
        "## Ten scripts",
        "",
        f"**Under `deep500-timing run` alone, the first finding is the fault in {hits} of {len(FAULTS)} scripts**",
        "(`benchmarks/_scripts.py`; sleeps stand for the work and for the fault).",
        "",
        "| fault | first | what was said first |",
        "|---|---|---|",
        *rows,
        "",
    ]
