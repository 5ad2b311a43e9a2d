"""Faults at one, two and five times the threshold of their rule, in real loops: a part of `make findings`.

Each run is a process, forked from one that has imported PyTorch, and timed by `deep500_timing.autolog` alone. A sleep
stands for the work of a step and for the fault, so that the share of the fault is known.
"""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import duckdb  # noqa: F401 (imported by the server of forks, once)
import pyarrow as pa  # noqa: F401
import torch
import torch._dynamo  # the first step of an optimizer imports it
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

import deep500_timing
import deep500_timing_torch  # noqa: F401
from deep500_timing._views.findings import disturbance, evidence_of, find
from deep500_timing.runs import Run

RATIOS = (1, 2, 5)
STEP_S, STEPS, EPOCHS = 0.01, 120, 4
WHOLE_S = STEPS * STEP_S
MEETING_STEP_S, MEETING_S, MEETING_STEPS = 0.15, 0.008, 60
"""The steps of four ranks that meet in an `all_reduce`, which takes some 8 ms with gloo after a sleep."""
MEETING_SHARE = 0.10
"""The share of the step from which on a loop is not healthy: the threshold of the rule about communication."""
WORKERS_STEP_S = 0.03
"""The step with workers: to take a batch over from one costs the loop 1.5 ms."""
MOST = 0.8
"""The largest share that is planted; five times a threshold may be more than all."""


class Question(NamedTuple):
    """The question, the rules that may answer it, and the threshold as a share of the step or of the run."""

    rules: tuple[str, ...]
    threshold: float
    planted: str


QUESTIONS = {
    "what do the workers do": Question(("waits-for-data",), 0.10, "`__getitem__` sleeps, with 0 and 2 workers"),
    "why does it stand still between epochs": Question(("between-epochs",), 0.05, "a sleep between two epochs"),
    "what do checkpoints cost": Question(("outside-steps",), 0.05, "`torch.save` to a slow file every 20 steps"),
    "what does evaluation cost": Question(("outside-steps",), 0.20, "`model.eval()` and slow batches, every 40 steps"),
    "what does logging cost": Question(("dominant-region",), 0.20, "a sleep in `log_metrics` after each step"),
    "what is inside the rest": Question(("dominant-region",), 0.20, "a sleep in a function; its name must be said"),
    "recompilation": Question(("recompilation",), 3, "so many new shapes; the backend sleeps for 20 ms"),
    "who is late": Question(("late-rank",), 0.03, "rank 1 of 4 sleeps longer in the forward pass"),
}


ALONE = "who is late"


class Data(Dataset[Any]):
    """Batches that take some time."""

    def __init__(self, slow_s: float, steps: int) -> None:
        self.slow_s, self.steps = slow_s, steps

    def __len__(self) -> int:
        """One epoch."""
        return self.steps // EPOCHS

    def __getitem__(self, index: int) -> Any:
        """A batch."""
        if self.slow_s:
            time.sleep(self.slow_s)
        return torch.ones(8, 16)


class SlowTensor:
    """Takes some time to save."""

    def __init__(self, slow_s: float) -> None:
        self.slow_s = slow_s

    def __reduce__(self) -> Any:
        """Sleep."""
        time.sleep(self.slow_s)
        return SlowTensor, (0.0,)


class Model(nn.Module):
    """A layer, and a sleep that stands for the work."""

    def __init__(self, step_s: float, seed: int) -> None:
        super().__init__()
        self.layer, self.step_s, self.random = nn.Linear(16, 4), step_s, random.Random(seed)

    def forward(self, x: Any) -> Any:
        """Work for about the time of a step."""
        time.sleep(self.step_s * self.random.gauss(1, 0.02))
        return self.layer(x)


def log_metrics(slow_s: float) -> None:
    """Write down how the training goes, slowly."""
    time.sleep(slow_s)


def slow_backend(graph: Any, _: Any) -> Any:
    """A compiler."""
    time.sleep(0.02)
    return graph.forward


def extra_s(share: float, of_s: float = STEP_S) -> float:
    """What to add for it to be that share of the whole."""
    return of_s * share / (1 - share)


def train(question: str, ratio: float, seed: int, rank: int) -> tuple[list[float], float]:
    """Run the loop with its fault, none with a ratio of 0; returns a stopwatch's times of its operations and of all."""
    share = min(QUESTIONS[question].threshold * ratio, MOST)
    is_of = {name: question == name for name in QUESTIONS}
    workers = 2 * (seed % 2) if is_of["what do the workers do"] else 0
    fetch_s = 0.0
    if is_of["what do the workers do"] and ratio:
        fetch_s = (WORKERS_STEP_S + extra_s(share, WORKERS_STEP_S)) * 2 if workers else extra_s(share)
    step_s = WORKERS_STEP_S if workers else STEP_S
    if is_of["who is late"]:
        step_s = MEETING_STEP_S - MEETING_S + (extra_s(share, MEETING_STEP_S) if rank == 1 else 0.0)
    model: Any = Model(step_s, seed + rank)
    several: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    steps = MEETING_STEPS if is_of["who is late"] else STEPS
    loader = DataLoader(Data(fetch_s, steps), batch_size=None, num_workers=workers, **several)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    compiled: Any = None
    if is_of["recompilation"]:
        compiled = torch.compile(model.layer, backend=slow_backend, dynamic=False)
        compiled(torch.ones(8, 16))
    shapes = round(3 * ratio)
    step, met, all_began = 0, [], time.perf_counter()
    for epoch in range(EPOCHS):
        if epoch and ratio and is_of["why does it stand still between epochs"]:
            time.sleep(extra_s(share, WHOLE_S) / (EPOCHS - 1))
        for x in loader:
            loss = model(x).sum()
            if compiled is not None:
                at = (step - 20) // 5 + 1 if step >= 20 else 0
                loss = loss + compiled(torch.ones(8 + max(min(at, shapes), 0), 16)).sum()
            optimizer.zero_grad()
            loss.backward()
            if distributed.is_initialized():
                began = time.perf_counter()
                distributed.all_reduce(model.layer.weight.grad)
                met.append(time.perf_counter() - began)
            optimizer.step()
            step += 1
            if ratio and (is_of["what does logging cost"] or is_of["what is inside the rest"]):
                log_metrics(extra_s(share))
            if ratio and is_of["what do checkpoints cost"] and step % 20 == 0:
                torch.save({"model": SlowTensor(extra_s(share, WHOLE_S) / (STEPS / 20))}, io.BytesIO())
            if is_of["what does evaluation cost"] and step % 40 == 0:
                model.eval()
                batch_s = extra_s(share, WHOLE_S) / (STEPS / 40) / 4 if ratio else 0.001
                with torch.no_grad():
                    for _ in range(4):
                        model.step_s = batch_s
                        model(x)
                model.step_s = step_s
                model.train()
    return met, time.perf_counter() - all_began


def one_run(question: str, ratio: float, seed: int, answer: Any) -> None:
    """In its own process: train, and send the findings."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 100  # type: ignore[attr-defined,unused-ignore]
    folder = tempfile.TemporaryDirectory(prefix="threshold-")
    rank, ranks = 0, 4  # Two ranks cannot tell which of them is late from how much ranks differ (STRAGGLERS.md).
    children = []
    if question == "who is late":
        for number in range(1, ranks):
            child = os.fork()
            if not child:
                rank, children = number, []
                break
            children.append(child)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    log = deep500_timing.autolog(f"{folder.name}/run", quiet=True)
    if question == "who is late":
        distributed.init_process_group("gloo", f"file://{folder.name}/store", rank=rank, world_size=ranks)
        distributed.barrier()
    met, all_s = train(question, ratio, seed, rank)
    log.close()
    of_ranks = [met]
    if question == "who is late":
        of_ranks *= ranks
        distributed.all_gather_object(of_ranks, met)
    if rank:
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    with Run.open(f"{folder.name}/run") as run:
        evidence = evidence_of(run)
        said = [(finding.rule, finding.text) for finding in find(evidence)]
        calm = not disturbance(evidence)
    # As long as an operation takes the rank that comes last, it is no waiting.
    answer.send((said, calm, sum(map(min, zip(*of_ranks, strict=True))) / all_s))
    folder.cleanup()


def ask_calm(case: tuple[str, float, int]) -> tuple[str, float, int, list[tuple[str, str]], bool, float]:
    """The same; a healthy run up to three times, until the machine lets it be healthy."""
    question, ratio, seed = case
    for again in range(3):
        said, calm, share = ask((question, ratio, seed + 1000 * again))
        calm = calm and share < MEETING_SHARE
        if calm or ratio:
            break
    return question, ratio, seed, said, calm, share


def ask(case: tuple[str, float, int]) -> tuple[list[tuple[str, str]], bool, float]:
    """The findings of a run, whether its thread did not wait for a processor, and the share of its communication."""
    context = mp.get_context("forkserver")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=one_run, args=(*case, sending))
    process.start()
    sending.close()
    try:
        answer: tuple[list[tuple[str, str]], bool, float] = receiving.recv()
        return answer
    except EOFError:
        raise RuntimeError(f"The run {case} ended without an answer.") from None
    finally:
        process.join()


def is_found(question: str, said: list[tuple[str, str]]) -> bool:
    """Whether the first or second finding names the cause."""
    word = "log_metrics" if question == "what is inside the rest" else ""
    word = "ank 1" if question == "who is late" else word
    return any(rule in QUESTIONS[question].rules and word in text for rule, text in said[:2])


def thresholds(runs: int, jobs: int, seconds: float, ratios: list[int]) -> list[str]:
    """The table, of the runs that have begun after so many seconds; twice the threshold first."""
    mp.get_context("forkserver").set_forkserver_preload(["benchmarks._thresholds"])
    order = {2: 0, 0: 1, 5: 2, 1: 3}
    cases = [(question, ratio, seed) for seed in range(runs) for ratio in ratios for question in QUESTIONS]
    cases.sort(key=lambda case: order[case[1]] + 0.1 * (case[2] >= runs // 2))
    asked: Counter[tuple[str, float]] = Counter()
    hits: Counter[tuple[str, float]] = Counter()
    loads: dict[str, list[float]] = {question: [] for question in QUESTIONS}
    wrong: list[str] = []
    shares: list[float] = []
    healthy, until = 0, time.monotonic() + seconds

    def ask_in_time(case: tuple[str, float, int]) -> Any:
        return ask_calm(case) if time.monotonic() < until else None

    # Ranks that share two cores with other runs are late by turns, and a healthy run would be disturbed.
    alone, shared = [], []
    for case in cases:
        (alone if case[0] == ALONE or not case[1] else shared).append(case)
    with ThreadPoolExecutor(jobs) as pool:
        answers = chain(pool.map(ask_in_time, shared), map(ask_in_time, alone))
        for place, (question, ratio, seed, said, calm, share) in enumerate(filter(None, answers)):
            asked[question, ratio] += 1
            loads[question].append(os.getloadavg()[0])
            hits[question, ratio] += is_found(question, said)
            healthy += calm and not ratio
            shares += [share] if share and not ratio else []
            if not ratio and said and calm:
                wrong.append(f"- {question}, run {seed}: {said[0][0]}: {said[0][1]}")
            if (not ratio and said) or (ratio > 1 and not is_found(question, said)):
                print(f"{place + 1}/{len(cases)}", question, ratio, seed, calm, said, file=sys.stderr, flush=True)
    busy = sum(asked[one, 0] for one in QUESTIONS) - healthy
    return [
        "## At multiples of the threshold",
        "",
        f"**{len(wrong)} of {healthy} healthy runs have a finding.** In {busy} more the thread waited for a processor,",
        "because of other programs on the machine, or communication took 10 % by a stopwatch, and they do not",
        f"count. Of the loops of several ranks it took {median(shares or [0]):.1%}, at most {max(shares or [0]):.1%}.",
        "The table counts runs whose first or second finding names the cause. Each is a real loop on the CPU of",
        f"{STEPS} steps of {1000 * STEP_S:.0f} ms, {1000 * WORKERS_STEP_S:.0f} with workers, and of several ranks",
        f"{MEETING_STEPS} of {1000 * MEETING_STEP_S:.0f} ms, timed as by",
        f"`deep500-timing run`, {jobs} at a time, the healthy ones and those of several ranks one at a time. A sleep",
        "stands for the work and for the fault (`benchmarks/_thresholds.py`). Shares above 80 % are planted as 80 %.",
        "The load is the machine's over a minute, these runs included, in the median.",
        "",
        "| question | planted | threshold | 1 × | 2 × | 5 × | healthy, with this finding | load |",
        "|---|---|---|---|---|---|---|--:|",
        *(
            f"| {question} | {what} | {f'{share:.0%}' if share < 1 else f'{share} times'} | "
            + " | ".join(
                (f"{hits[question, ratio]} of {asked[question, ratio]}" if asked[question, ratio] else "–")
                for ratio in (*RATIOS, 0)
            )
            + f" | {median(loads[question] or [0]):.1f} |"
            for question, (_, share, what) in QUESTIONS.items()
        ),
        "| which line makes the CPU wait for the GPU; is the GPU busy "
        "| made-up runs, `tests/views/test_findings_sweep.py` | | | | | | |",
        "",
        *wrong,
        "",
    ]
