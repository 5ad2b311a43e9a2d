"""What timing costs an operation of `torch.distributed`, next to DeepSpeed's `comm`: `python -m benchmarks.bench_comm`.

The backend is PyTorch's "fake" one, whose operations do nothing, so that what is measured is the Python around them:
the plain call, the timed one switched off and on, and DeepSpeed's switched off and on, all in one process and in turns.
On a device DeepSpeed's also waits for the device after each operation, which costs the time of queued work; nothing of
that shows here. It runs in its own process, which has a process group and DeepSpeed's set-up.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

from benchmarks import _machine
from benchmarks._process import lines_of

RANKS = 8
_LABELS = {
    "plain": "`torch.distributed`",
    "off": "`deep500_timing_torch.comm`, off",
    "on": "`deep500_timing_torch.comm`, on",
    "patched": "`comm.instrument()`, by patched functions",
    "kernel": "`comm.instrument()`, by the compiled kernel",
    "least": "the least that Python needs: a function around each, a handle around its own, two clock readings each",
    "deepspeed off": "`deepspeed.comm`, off",
    "deepspeed on": "`deepspeed.comm`, on",
}
_OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_reduce_async": "all_reduce, `async_op=True`, and `wait()`",
    "broadcast": "broadcast",
    "barrier": "barrier",
}


def _calls(module: Any) -> dict[str, Callable[[], object]]:
    import torch

    data = torch.zeros(1024)
    return {
        "all_reduce": lambda: module.all_reduce(data),
        "all_reduce_async": lambda: module.all_reduce(data, async_op=True).wait(),
        "broadcast": lambda: module.broadcast(data, 0),
        "barrier": lambda: module.barrier(),
    }


def _time(call: Callable[[], object], calls: int) -> float:
    began = perf_counter_ns()
    for _ in range(calls):
        call()
    return (perf_counter_ns() - began) / calls


def measure(*, rounds: int = 30, calls: int = 300) -> dict[str, Any]:
    """Nanoseconds per operation, the median over rounds, in which everybody takes a turn.

    Makes a process group in the calling process, so it is best called in a separate one.

    Args:
        rounds: How often each takes its turn.
        calls: Operations in a turn.

    Returns:
        ``ns``: for each contender and operation the time in ns; ``least_ns``: that of the best turn, which what else
        the machine did reaches least; ``missing``: why a contender is not there; ``calls``; ``load``: what the machine
        did meanwhile; ``date``.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from deep500_timing_torch import comm

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    contenders: dict[str, tuple[Any, Callable[[], Any]]] = {
        "plain": (dist, contextlib.nullcontext),
        "off": (comm, lambda: _switched(comm, False)),
        "on": (comm, lambda: _switched(comm, True)),
        "patched": (dist, lambda: comm.instrument(kernel=False)),
    }
    contenders["least"] = (_least(dist), contextlib.nullcontext)
    missing = {}
    try:
        comm.instrument(kernel=True).undo()
    except RuntimeError as error:
        missing["kernel"] = str(error)
    else:
        contenders["kernel"] = (dist, lambda: comm.instrument(kernel=True))
    try:
        deepspeed = _deepspeed()
    except Exception as error:
        missing["deepspeed"] = f"{type(error).__name__}: {error}"
    else:
        contenders["deepspeed off"] = (deepspeed, lambda: _switched(deepspeed, False))
        contenders["deepspeed on"] = (deepspeed, lambda: _fresh(deepspeed))
    turns: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            for name, (module, prepare) in contenders.items():
                with prepare():
                    for operation, call in _calls(module).items():
                        took = _time(call, calls if number else 20)
                        if number:  # the first round is warm-up
                            turns[name].setdefault(operation, []).append(took)
    finally:
        gc.enable()
    comm.reset_log()
    return {
        "ns": {
            name: {operation: statistics.median(took) for operation, took in found.items()}
            for name, found in turns.items()
        },
        "least_ns": {
            name: {operation: min(took) for operation, took in found.items()} for name, found in turns.items()
        },
        "missing": missing,
        "calls": calls,
        "load": _machine.load(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}",
    }


def _least(dist: Any) -> Any:
    # What no one who puts functions around functions can go below: nothing is counted, and no size is asked for.
    class Handle(dist.Work):  # type: ignore[misc]
        __slots__ = ("times", "work")

        def wait(self) -> Any:
            began = perf_counter_ns()
            result = self.work.wait()
            self.times = (*self.times, began, perf_counter_ns())
            return result

    def around(func: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter_ns()
            result = func(*args, **kwargs)
            ended = perf_counter_ns()
            if result is None:
                return None
            handle = Handle()
            handle.work, handle.times = result, (began, ended)
            return handle

        return operation

    return SimpleNamespace(**{name: around(getattr(dist, name)) for name in ("all_reduce", "broadcast", "barrier")})


@contextlib.contextmanager
def _switched(module: Any, enabled: bool, **more: Any) -> Any:
    module.configure(enabled=enabled, **more)
    try:
        yield
    finally:
        module.configure(enabled=module.__name__.startswith("deep500"))


@contextlib.contextmanager
def _fresh(deepspeed: Any) -> Any:
    # Its timers keep every interval and add them all up at each operation, so each turn begins with none.
    deepspeed.reset_log()
    deepspeed.comm.timers.timers.clear()
    with _switched(deepspeed, True, prof_all=True):
        yield


def _deepspeed() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import deepspeed.comm as deepspeed

            # Else it compiles its own operation for inference, which is not measured here and takes minutes.
            sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
            # It finds the process group that is there.
            deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    finally:
        logging.disable(logging.NOTSET)
    return deepspeed


def report_lines(*, quick: bool = False) -> list[str]:
    """The measurement as lines of Markdown, made in its own process.

    Args:
        quick: Fewer rounds.
    """
    return lines_of("benchmarks.bench_comm", as_lines, quick=quick, timeout_s=600)


def as_lines(found: dict[str, Any]) -> list[str]:
    """What :func:`measure` found, as a table in Markdown."""
    plain, least = found["ns"]["plain"], found["least_ns"]["plain"]
    lines = [
        "What timing adds to an operation, in ns: the median turn less the plain one's and, in brackets, the best turn "
        "less the plain one's best, which what else a machine does reaches least. On PyTorch's fake backend with "
        f"{RANKS} ranks, whose operations are over in their calls, {found['date']}, load {found['load']}. "
        "DeepSpeed's also synchronizes the device after every "
        "operation, which on a CPU is nothing; its cost grows with the operations so far, here up to "
        f"{found['calls']}.",
        "",
        "| | " + " | ".join(_OPERATIONS[operation] for operation in plain) + " |",
        "|---|" + "---:|" * len(plain),
        f"| {_LABELS['plain']}, in all | "
        + " | ".join(f"{plain[operation]:.0f} ({least[operation]:.0f})" for operation in plain)
        + " |",
    ]
    for name, times in found["ns"].items():
        if name != "plain":
            best = found["least_ns"][name]
            added = (
                f"{times[operation] - plain[operation]:+.0f} ({best[operation] - least[operation]:+.0f})"
                for operation in plain
            )
            lines.append(f"| {_LABELS[name]} | " + " | ".join(added) + " |")
    lines += [f"\nNot measured, {name}: {why}" for name, why in found["missing"].items()]
    return [*lines, ""]


def main() -> None:
    """Measure here, and print the table, or with ``--json`` the numbers."""
    quick = "--quick" in sys.argv
    found = measure(rounds=5 if quick else 30, calls=100 if quick else 300)
    if "--json" in sys.argv:
        print(json.dumps(found))
    else:
        print("\n".join(as_lines(found)))


if __name__ == "__main__":
    main()
