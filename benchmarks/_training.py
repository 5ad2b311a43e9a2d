"""What timing adds to training: a PyTorch loop with it and without, in turns; for Keras see ``_keras_fits.py``."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from time import perf_counter
from types import ModuleType
from typing import Any

from benchmarks._pairs import Step
from benchmarks._summary import Interval

Run = Callable[[], object]
WITHOUT, AGAIN = "no timing", "no timing, again"


def compare(runs: dict[str, Run], rounds: int, step: Step, seed: int = 0) -> dict[str, Any]:
    """Time each run once per round, in random order, and its addition to :data:`WITHOUT` in percent, per round.

    A run that returns a float says itself how many seconds count; else it is the whole call. The second run without
    timing, :data:`AGAIN`, shows the method's answer to no difference at all; all others are compared with the mean of
    both.
    """
    seconds = in_turns(runs, rounds, step, seed)
    return overheads(seconds)


def in_turns(runs: dict[str, Run], rounds: int, step: Step, seed: int = 0) -> dict[str, list[Any]]:
    """What each run returns, once per round in random order; the seconds that it takes if it returns nothing."""
    for run in runs.values():
        run()
    names = list(runs)
    said: dict[str, list[Any]] = {name: [] for name in names}
    order = random.Random(seed)
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            start = perf_counter()
            found = runs[name]()
            said[name].append(perf_counter() - start if found is None else found)
        step()
    return {name: said[name] for name in runs}


def overheads(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """What each run adds to :data:`WITHOUT`, by the seconds that each took, one number per round."""
    result: dict[str, Any] = {}
    bare, again = seconds[WITHOUT], seconds[AGAIN]
    both = [(one + other) / 2 for one, other in zip(bare, again, strict=True)]
    for name, taken in seconds.items():
        result[name] = {"ms": Interval.of([1e3 * value for value in taken]).as_json()}
        if name != WITHOUT:
            base = bare if name == AGAIN else both
            percent = [100 * (took / without - 1) for took, without in zip(taken, base, strict=True)]
            result[name]["overhead_percent"] = Interval.of(percent).as_json()
    return result


def two_layers(steps: int) -> tuple[Any, Any, Any, list[tuple[Any, Any]]]:
    """A network of two layers for PyTorch, its loss, its optimizer, and so many batches of random data."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    batches = [(torch.randn(32, 64), torch.randint(0, 10, (32,))) for _ in range(steps)]
    return net, nn.CrossEntropyLoss(), optimizer, batches


def pytorch_loop(packages: dict[str, ModuleType], steps: int, rounds: int, step: Step) -> dict[str, Any]:
    """A two-layer network on random data, each step with the regions BATCH, IO, FORWARD and BACKWARD."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        net, criterion, optimizer, batches = two_layers(steps)
        runs: dict[str, Run] = {}

        def untimed() -> None:
            for inputs, targets in batches:
                loss = criterion(net(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        def timed_with(package: ModuleType, **settings: Any) -> Run:
            tmr = package.Timer(**settings)
            types = package.TimeType

            def run() -> None:
                for inputs, targets in tmr.iterate(batches, types.IO):
                    with tmr.region(types.BATCH):
                        with tmr.region(types.FORWARD):
                            loss = criterion(net(inputs), targets)
                        with tmr.region(types.BACKWARD):
                            optimizer.zero_grad()
                            loss.backward()
                        optimizer.step()

            return run

        def timed_before(package: ModuleType, **settings: Any) -> Run:
            tmr = package.Timer(**settings)
            types = package.TimeType
            batch, forward, backward = tmr.region(types.BATCH), tmr.region(types.FORWARD), tmr.region(types.BACKWARD)

            def run() -> None:
                for inputs, targets in tmr.iterate(batches, types.IO):
                    with batch:
                        with forward:
                            loss = criterion(net(inputs), targets)
                        with backward:
                            optimizer.zero_grad()
                            loss.backward()
                        optimizer.step()

            return run

        def with_nothing() -> None:
            lock = threading.RLock()
            for inputs, targets in iter(batches):
                with lock:
                    with lock:
                        loss = criterion(net(inputs), targets)
                    with lock:
                        optimizer.zero_grad()
                        loss.backward()
                    optimizer.step()

        runs[WITHOUT] = untimed
        runs[AGAIN] = untimed
        runs["three `with` of a lock, which time nothing"] = with_nothing
        for group, package in packages.items():
            runs[f"4 regions per step ({group})"] = timed_with(package)
            runs[f"the same, the regions made before the loop ({group})"] = timed_before(package)
            runs[f"4 regions per step, disabled ({group})"] = timed_with(package, enabled=False)
            runs[f"the same, disabled, made before the loop ({group})"] = timed_before(package, enabled=False)
        return {"steps": steps, "runs": compare(runs, rounds, step)}
    finally:
        torch.set_num_threads(threads)
