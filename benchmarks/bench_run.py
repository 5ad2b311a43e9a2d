"""What ``deep500-timing run`` adds to a training step, next to TraceML: ``python -m benchmarks.bench_run``.

A process trains one model in blocks, by turns without and with timing. A sample compares a block with those before and
after it, so that processes are not compared with each other. A third kind of process begins nothing, which shows what
the machine itself does. TraceML cannot be switched off: its process has one block without it and one with it. The
processes of a round start in random order. Our loop is not edited; TraceML's needs ``with trace_step(model)`` around
each step, and a launcher with an aggregator process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import itertools
import json
import random
import statistics
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Any

NOTHING, OURS, TRACEML = "no timing", "`deep500-timing run`", "TraceML 0.5: `trace_step`"
SIZES = {0.24: (64, 16, 6000), 0.9: (192, 128, 3500), 1.4: (256, 128, 2000), 42.0: (1024, 384, 100)}
"""For each step, in ms on an idle machine: width of the network, batch size, and steps of one block: some 3 s, since
sampled stacks are new at first, and each new one is looked up."""
_TIMED_BLOCKS = 4
"""How many blocks of a process are timed, except TraceML's."""
_SETTLED = 0.2
"""The share of each block that is not counted."""
PAGE = Path(__file__).with_name("RUN.md")
_DISTURBED = 0.10
"""The share of a block's time in which the thread waited for a processor from which on its samples do not count."""
Samples = dict[float, dict[str, list[dict[str, float]]]]


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=float, action="append", choices=SIZES, help="of these steps alone")
    parser.add_argument("--print", action="store_true", help="print the page, and write nothing")
    arguments = parser.parse_args()
    from benchmarks._machine import describe
    from benchmarks._process import said_by

    kinds = [NOTHING, OURS] + [TRACEML] * (importlib.util.find_spec("traceml_ai") is not None)
    order = random.Random(0)
    samples: Samples = {size: {kind: [] for kind in kinds} for size in arguments.size or SIZES}
    for _ in range(arguments.rounds):
        for size, of_size in samples.items():
            for kind in order.sample(kinds, len(kinds)):
                of_size[kind] += json.loads(said_by(__file__, kind, size, under_traceml=kind == TRACEML))
                print(size, kind, of_size[kind][-1], file=sys.stderr)
    page = _page(samples, describe())
    if arguments.print:
        print(page)
    else:
        PAGE.write_text(page, encoding="utf-8")


def _page(samples: Samples, machine: Any) -> str:
    from benchmarks._summary import Interval

    lines = [
        "# What `deep500-timing run` adds to a step",
        "",
        "Written by `python -m benchmarks.bench_run`, which `make bench` runs. A plain loop of PyTorch with a",
        "`DataLoader` and four phases. Each process trains in blocks without timing and with it, by turns. A sample",
        "compares a timed block with the mean of the blocks before and after it. TraceML cannot be switched off: its",
        "blocks are compared with the one before. A sample is left out as disturbed if in one of its blocks the thread",
        "waited for a processor for 10 % of the time. The median is over samples, intervals have 95 %. The mean of",
        "steps includes what the threads of a timer take from a step; the median of steps mostly does not.",
        "",
        "| step of | kind | ratio of median steps | interval | ratio of mean steps | added to the median | interval "
        "| samples | disturbed |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for of_size in samples.values():
        bare = statistics.median(one["bare_us"] for of_kind in of_size.values() for one in of_kind)
        for kind, every in of_size.items():
            of_kind = [one for one in every if one["waited"] < _DISTURBED]
            if not of_kind:
                lines.append(f"| {bare / 1e3:.2f} ms | {kind} | unknown | | | | | 0 | {len(every)} |")
                continue
            ratio = Interval.of([one["timed_us"] / one["bare_us"] for one in of_kind])
            means = statistics.median(one["timed_mean_us"] / one["bare_mean_us"] for one in of_kind)
            added = Interval.of([one["timed_us"] - one["bare_us"] for one in of_kind])
            lines.append(
                f"| {bare / 1e3:.2f} ms | {kind} "
                f"| {ratio.median:.3f} | {ratio.low:.3f} … {ratio.high:.3f} | {means:.3f} "
                f"| {added.median:+.0f} µs | {added.low:+.0f} … {added.high:+.0f} | {len(of_kind)} "
                f"| {len(every) - len(of_kind)} |"
            )
    if TRACEML not in next(iter(samples.values())):
        lines += ["", "TraceML was not measured: `traceml-ai` is not installed."]
    described = ", ".join(f"{name}: {value}" for name, value in machine.items() if isinstance(value, (str, int, float)))
    return "\n".join([*lines, "", f"Machine: {described}.", ""])


def _program(kind: str, size: float, folder: Path) -> list[dict[str, float]]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import deep500_timing
    from benchmarks._machine import waited_ns

    torch.set_num_threads(1)
    width, batch, steps = SIZES[size]
    data = TensorDataset(torch.randn(batch * 50, 64), torch.randint(10, (batch * 50,)))
    loader = DataLoader(data, batch_size=batch)
    criterion = torch.nn.CrossEntropyLoss()
    net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
    if size > 1:
        net.insert(2, torch.nn.Linear(width, width))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    step: Any = contextlib.nullcontext

    def block() -> tuple[float, float, float]:
        gc.collect()
        waited = waited_ns()
        ended = [perf_counter_ns()]
        while len(ended) <= steps:
            for inputs, targets in loader:
                with step(net):
                    optimizer.zero_grad()
                    loss = criterion(net(inputs), targets)
                    loss.backward()
                    optimizer.step()
                ended.append(perf_counter_ns())
        times = [(end - begun) / 1e3 for begun, end in itertools.pairwise(ended)]
        counted = times[int(_SETTLED * len(times)) :]
        return statistics.median(counted), statistics.mean(counted), (waited_ns() - waited) / (ended[-1] - ended[0])

    block()
    samples, before = [], block()
    for number in range(1 if kind == TRACEML else _TIMED_BLOCKS):
        if kind == TRACEML:
            import traceml_ai

            traceml_ai.init(mode="auto")
            step = traceml_ai.trace_step
        log = deep500_timing.autolog(folder / f"run{number}", quiet=True) if kind == OURS else None
        timed, timed_mean, waited = block()
        if log is not None:
            log.close()
        after = before if kind == TRACEML else block()
        bare, bare_mean = ((one + other) / 2 for one, other in zip(before[:2], after[:2], strict=True))
        samples.append(
            {"bare_us": bare, "bare_mean_us": bare_mean, "timed_us": timed, "timed_mean_us": timed_mean}
            | {"waited": max(waited, before[2], after[2])}
        )
        before = after
    return samples


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in (NOTHING, OURS, TRACEML):
        with contextlib.suppress(ValueError):
            sys.path.remove(str(Path(__file__).parent))
        kind, size, said = sys.argv[1:]
        Path(said).write_text(json.dumps(_program(kind, float(size), Path(said).parent)), encoding="utf-8")
    else:
        main()
