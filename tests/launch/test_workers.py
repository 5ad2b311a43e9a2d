"""The workers of data loaders under ``autolog``: nothing changes, and the parts add up to their wall clock."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="times PyTorch")
pytest.importorskip("duckdb", reason="reads a run")
pytestmark = pytest.mark.slow

DATA = '''
import json, os, random, signal, time
from multiprocessing.util import Finalize
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

class Watch:
    """A clock of each worker, from before its start to its end, and from its first code of ours to its last."""
    def __init__(self, loader): self.loader, self.began_ns = loader, time.perf_counter_ns()
    def __call__(self, worker):
        self.first_ns = time.perf_counter_ns()
        Finalize(None, self.end, (worker,), exitpriority=100)
    def end(self, worker):
        whole_ns, inner_ns = time.perf_counter_ns() - self.began_ns, last_ns - self.first_ns
        with open(f"{self.loader}-{worker}.json", "w") as file:
            json.dump([inner_ns, whole_ns], file)

last_ns = 0
def sample(index):
    global last_ns
    time.sleep(0.004)
    last_ns = time.perf_counter_ns()
    return torch.rand(4) + random.random() + index

class Rows(Dataset):
    def __len__(self): return 96
    def __getitem__(self, index): return sample(index)

class Lists(Rows):
    def __getitems__(self, indices): return [sample(index) for index in indices]

class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        return (sample(index) for index in range(worker.id, 97, worker.num_workers))

class Nested(IterableDataset):
    """A loader in a worker, or in the main process one with workers."""
    def __init__(self, workers): self.workers = workers
    def __iter__(self):
        yield from DataLoader(Rows(), 3, num_workers=self.workers)

class Order(Sampler):
    def __iter__(self): return iter(sorted(range(96), key=lambda index: index * 7 % 96))
    def __len__(self): return 96

class Killed(Rows):
    def __getitem__(self, index):
        if index == 50: os.kill(os.getpid(), signal.SIGKILL)
        return sample(index)

class Wrong(Rows):
    def __getitem__(self, index):
        if index == 50: raise LookupError(f"no row {index}")
        return sample(index)

def stacked(samples):
    return torch.stack(samples) * 2

def wrong(samples):
    raise ValueError("cannot be a batch")
'''
PROGRAM = """
import hashlib, re, sys, traceback
sys.path.insert(0, ".")
from data import *
torch.manual_seed(0); random.seed(0); torch.set_num_threads(1)
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.0)
def train(rows):
    net(rows.reshape(-1, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
def case(name, data, batch_size=4, *, epochs=1, **settings):
    watch = Watch(name)
    if "batch_sampler" not in settings: settings["batch_size"] = batch_size
    loader = DataLoader(data, **{"num_workers": 2, "worker_init_fn": watch, **settings})
    digest, batches = hashlib.sha256(), 0
    watch.began_ns = time.perf_counter_ns()
    try:
        for _ in range(epochs):
            for rows in loader:
                digest.update(rows.numpy().tobytes()); batches += 1
                train(rows)
    except Exception as raised:
        error, text = raised, None
        while text is None:
            try:
                text = "".join(traceback.format_exception(error))
            except RuntimeError as later:  # PyTorch's handler of SIGCHLD raises anywhere, on a busy machine only here
                error = later
        text = re.sub(r"line \\d+, in _next_data", "", text)  # one for each order of batches
        error.__traceback__ = None  # PyTorch's cycle through it would leave the end of the workers to the collector
        if name == "killed":  # PyTorch notices it at any line
            text = [type(error).__name__, bool(re.search("exited unexpectedly|is killed by signal: Killed", text))]
        print(json.dumps([name, text]))
        return
    print(json.dumps([name, batches, digest.hexdigest(), torch.rand(1).item()]))
train(torch.zeros(1, 4))
"""
CASES = {  # the call, and the samples that workers make in it
    "sampler": ("Rows(), sampler=Order()", 96),
    "batch_sampler": ("Rows(), batch_sampler=BatchSampler(Order(), 5, False), collate_fn=stacked", 96),
    "stream": ("Stream()", 97),
    "getitems": ("Lists(), shuffle=True", 96),
    "single": ("Rows(), None", 96),
    "persistent": ("Rows(), epochs=2, persistent_workers=True, shuffle=True", 192),
    "nested": ("Nested(0), None", 64),
    "killed": ("Killed()", None),
    "raises": ("Wrong()", None),
    "collate": ("Rows(), collate_fn=wrong", 0),
    "spawn": ("Rows(), num_workers=1, shuffle=True, multiprocessing_context='spawn'", 96),
    "forkserver": ("Stream(), num_workers=1, multiprocessing_context='forkserver'", 97),
    "outer": ("Nested(1), None, num_workers=0", 0),
}


@pytest.fixture(scope="module")
def runs(forks, tmp_path_factory):
    """The program's output without the timing and with it, and the folder of the latter."""
    said = []
    calls = "".join(f"case({name!r}, {call})\n" for name, (call, _) in CASES.items())
    for begin in ("\n\n", "import deep500_timing\nlog = deep500_timing.autolog('run', quiet=True)\n"):
        folder = tmp_path_factory.mktemp("workers")
        (folder / "data.py").write_text(DATA)
        program = f"import os\nos.chdir({str(folder)!r})\n" + begin + PROGRAM + calls
        text = forks.printed(program, folder / "output", 200).replace(str(folder), "")
        said.append([json.loads(line) for line in text.splitlines() if line.startswith("[")])
    return said, folder


def test_samples_and_errors_are_those_without_the_timing(runs):
    """Each sample, their order, the random state and the errors, with PyTorch's own text and traceback."""
    (plain, timed), _ = runs
    assert [name for name, *_ in plain] == list(CASES)
    assert timed == plain
    said = {name: text for name, *_, text in timed}
    assert said["killed"][0] == "RuntimeError"
    assert "in DataLoader worker process 0." in said["raises"]
    assert said["collate"].endswith("ValueError: cannot be a batch\n\n")


def test_parts_add_up_to_the_wall_clock_of_a_worker(runs):
    """Start, idle, fetch, collate and put are the time that a worker's own clock has around them, and not within."""
    from deep500_timing.runs import Run

    _, folder = runs
    with Run.open(folder / "run") as run:
        rows = run.sql(
            "select loader, worker, samples, start_us + idle_us + fetch_us + collate_us + put_us as whole_us "
            "from loader_workers "
            "qualify row_number() over (partition by loader, iteration, worker order by time_ns desc) = 1 "
            "order by loader, worker"
        ).rows()
    names = [*CASES, "inner"]
    assert {row["loader"] for row in rows} == set(range(len(names)))
    for number, (name, (_, samples)) in enumerate(CASES.items()):
        workers = [row for row in rows if row["loader"] == number]
        if samples is not None:
            assert sum(row["samples"] for row in workers) == samples, name
        for row in workers if name not in ("killed", "outer") else ():
            inner_ns, whole_ns = json.loads((folder / f"{name}-{row['worker']}.json").read_text())
            assert inner_ns - 10_000 <= row["whole_us"] * 1000 <= whole_ns, name  # Each part is cut to microseconds.
