"""What timing adds to training: a Keras ``fit`` and a PyTorch loop, with it and without, in turns."""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable
from time import perf_counter
from types import ModuleType
from typing import Any

from benchmarks._pairs import Step
from benchmarks._summary import Interval

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# One thread each: on a small machine the waiting of threads for each other is noise larger than what is looked for.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")

Run = Callable[[], object]
WITHOUT, AGAIN = "no timing", "no timing, again"


def compare(runs: dict[str, Run], rounds: int, step: Step, seed: int = 0) -> dict[str, Any]:
    """Time each run once per round, in random order, and what it adds to :data:`WITHOUT` in percent, per round.

    A run that returns a float says itself how many seconds count; else it is the whole call. The second run without
    timing, :data:`AGAIN`, shows what the method makes of no difference at all.
    """
    for run in runs.values():
        run()
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(seed)
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            start = perf_counter()
            said = runs[name]()
            seconds[name].append(said if isinstance(said, float) else perf_counter() - start)
        step()
    result: dict[str, Any] = {}
    for name in runs:
        percent = [100 * (taken / base - 1) for taken, base in zip(seconds[name], seconds[WITHOUT], strict=True)]
        result[name] = {"ms": Interval.of([1e3 * taken for taken in seconds[name]]).as_json()}
        if name != WITHOUT:
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


def keras_fit(steps: int, rounds: int, step: Step) -> dict[str, Any]:
    """``fit`` of a tiny model for one epoch, with no callback, with one that does nothing, and with ours.

    From the call to the end of the last hook. After it TensorFlow takes down its data, whose tuning thread sleeps for
    10, 20, 40 ms and so on. It is woken up before the flag is set that it is to end, so that now and then it sleeps on,
    and ``fit`` returns up to hundreds of milliseconds late, with a callback and without.
    """
    import keras

    import deep500_timing_tensorflow as timer

    inputs, targets = _data(32 * steps)

    class Nothing(keras.callbacks.Callback):
        """Asks for the end of each batch, which makes Keras wait for it, and does nothing with it."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """Do nothing."""

    class Ends(keras.callbacks.CallbackList):
        """Notes when the last hook of a fit came to its end."""

        ended = 0.0

        def on_train_end(self, logs: Any = None) -> None:
            """Call the hooks, ours among them, and read the clock."""
            super().on_train_end(logs)
            self.ended = perf_counter()

    def fit(*callbacks: Any) -> Run:
        model = _model()

        def run() -> float:
            began = perf_counter()
            hooks = Ends(list(callbacks), add_history=True, model=model, epochs=1, steps=steps)
            model.fit(inputs, targets, batch_size=32, verbose=0, shuffle=False, callbacks=hooks)
            return hooks.ended - began

        return run

    runs = {
        WITHOUT: fit(),
        AGAIN: fit(),
        "a callback that does nothing": fit(Nothing()),
        "TimerCallback": fit(timer.TimerCallback(timer.Timer())),
        "TimerCallback(phases=True)": fit(timer.TimerCallback(timer.Timer(), phases=True)),
    }
    measured = compare(runs, rounds, step)
    return {"steps": steps, "backend": keras.backend.backend(), "keras": keras.__version__, "runs": measured}


def keras_first_batch(rounds: int, step: Step) -> dict[str, Any]:
    """From the call of ``fit`` to the end of its first batch, of a new model, which is traced, and of one that was."""
    import keras

    import deep500_timing_tensorflow as timer

    inputs, targets = _data(32 * 4)

    class Probe(keras.callbacks.Callback):
        """Notes when the first batch ended."""

        ended = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """Read the clock, once."""
            self.ended = self.ended or perf_counter()

    def first_batch(callback: Callable[[], list[Any]], model: Any = None) -> float:
        fitted, probe = model or _model(), Probe()
        callbacks = [probe, *callback()]
        began = perf_counter()
        fitted.fit(inputs, targets, batch_size=32, verbose=0, shuffle=False, callbacks=callbacks)
        return probe.ended - began

    makers: dict[str, Callable[[], list[Any]]] = {
        WITHOUT: list,
        AGAIN: list,
        "TimerCallback": lambda: [timer.TimerCallback(timer.Timer())],
        "TimerCallback(phases=True)": lambda: [timer.TimerCallback(timer.Timer(), phases=True)],
    }
    new: dict[str, Run] = {name: functools.partial(first_batch, made) for name, made in makers.items()}
    warm: dict[str, Run] = {name: functools.partial(first_batch, made, _model()) for name, made in makers.items()}
    return {"new": compare(new, rounds, step), "warm": compare(warm, 2 * rounds, step)}


def _data(samples: int) -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    return random.standard_normal((samples, 64)).astype("float32"), random.integers(0, 10, samples)


def _model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
