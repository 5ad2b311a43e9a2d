"""A training step under this timer and under its nearest neighbour, TraceML, each in separate processes.

TraceML is started around a program (``traceml run``) and patches PyTorch in it, so that it cannot take turns with
others in one process. This file is both: what starts the programs, and the program.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

WITHOUT = "no timing"
OURS = "deep500-timing: `iterate` and three regions"
OURS_WITH_RUN = "the same, with a log of every interval"
TRACEML = "TraceML: `trace_step`"
_SETTLED = 300
"""Steps before the first that counts."""


def in_processes(steps: int, rounds: int, step: Callable[[], None], seed: int = 0) -> dict[str, Any]:
    """The time of a step of a two-layer network, in µs, and what timing adds to it in percent, round by round.

    Each round starts one process of every kind, in an order drawn again, and takes the median of its steps.
    """
    from benchmarks._process import said_by
    from benchmarks._summary import Interval

    kinds = [WITHOUT, OURS, OURS_WITH_RUN]
    missing = {}
    if importlib.util.find_spec("traceml_ai") is None:
        missing[TRACEML] = "traceml-ai is not installed"
    else:
        kinds.append(TRACEML)
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = random.Random(seed)
    for _ in range(rounds):
        names = list(kinds)
        order.shuffle(names)
        for name in names:
            found[name].append(float(said_by(__file__, name, steps, under_traceml=name == TRACEML)))
        step()
    runs: dict[str, Any] = {}
    for name, taken in found.items():
        runs[name] = {"us": Interval.of(taken).as_json()}
        if name != WITHOUT:
            added = [own - bare for own, bare in zip(taken, found[WITHOUT], strict=True)]
            runs[name]["added_us"] = Interval.of(added).as_json()
    return {"steps": steps, "runs": runs, "missing": missing}


def _program(kind: str, steps: int, folder: Path) -> float:
    import torch

    from benchmarks._training import two_layers

    torch.set_num_threads(1)
    net, criterion, optimizer, batches = two_layers(steps)
    ended = []

    def plain() -> None:
        for inputs, targets in batches:
            loss = criterion(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ended.append(perf_counter_ns())

    def ours(tmr: Any, types: Any) -> None:
        for inputs, targets in tmr.iterate(batches, types.IO):
            with tmr.region(types.BATCH):
                with tmr.region(types.FORWARD):
                    loss = criterion(net(inputs), targets)
                with tmr.region(types.BACKWARD):
                    optimizer.zero_grad()
                    loss.backward()
                optimizer.step()
            ended.append(perf_counter_ns())

    def traceml() -> None:
        import traceml_ai

        traceml_ai.init()
        for inputs, targets in batches:
            with traceml_ai.trace_step(net):
                loss = criterion(net(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            ended.append(perf_counter_ns())

    if kind == WITHOUT:
        plain()
    elif kind == TRACEML:
        traceml()
    else:
        from deep500_timing import Timer, TimeType

        ours(Timer(run=folder / "run") if kind == OURS_WITH_RUN else Timer(), TimeType)
    return statistics.median(b - a for a, b in zip(ended[_SETTLED:], ended[_SETTLED + 1 :], strict=False)) / 1e3


if __name__ == "__main__":
    kind, steps, said = sys.argv[1:]
    with contextlib.suppress(ValueError):
        sys.path.remove(str(Path(__file__).parent))
    Path(said).write_text(str(_program(kind, int(steps), Path(said).parent)), encoding="utf-8")
