"""How true the numbers are: regions around work of known length, measured against their true times.

Run it with ``make accuracy``. It writes ``benchmarks/ACCURACY.md``. A module next to this one that is named
``accuracy_<subject>.py`` and has a function ``rows()`` adds its rows.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress

import deep500_timing
from deep500_timing import CPUGPUTimer, Timer

HERE = Path(__file__).parent


@dataclass
class Row:
    """One case: the work, its true time, and the timer's reading."""

    case: str
    true_s: float
    """The true time, in seconds."""
    measured_s: float
    """Median of its readings."""
    error_percent: float
    spread: str
    """From the 5th to the 95th percentile of the error."""

    @classmethod
    def of(cls, case: str, true_s: np.ndarray | float, times_s: list[float]) -> Row:
        """Compare times with their true values, one by one."""
        true, times = np.broadcast_to(true_s, len(times_s)), np.asarray(times_s)
        errors = 100 * (times - true) / true
        low, high = np.percentile(errors, (5, 95))
        return cls(
            case, float(np.median(true)), float(np.median(times)), float(np.median(errors)), f"{low:+.3f} … {high:+.3f}"
        )


def spin(seconds: float) -> float:
    """Keep the processor busy, and return for how long, by the clock's readings in here."""
    start_ns = now_ns = time.perf_counter_ns()
    end_ns = start_ns + seconds * 1e9
    while now_ns < end_ns:
        now_ns = time.perf_counter_ns()
    return (now_ns - start_ns) / 1e9


def sleep(seconds: float) -> float:
    """Sleep, and return for how long, by the clock's readings in here."""
    start_ns = time.perf_counter_ns()
    time.sleep(seconds)
    return (time.perf_counter_ns() - start_ns) / 1e9


def host_rows() -> Iterator[Row]:
    """Regions on the host around spins and sleeps, through each way of opening a region."""
    for name, work, seconds, repeats in (
        ("spin", spin, 10e-6, 2000),
        ("spin", spin, 1e-3, 300),
        ("spin", spin, 50e-3, 20),
        ("sleep", sleep, 1e-3, 300),
        ("sleep", sleep, 50e-3, 20),
    ):
        for way in ("start/end", "with region", "timed", "iterate"):
            tmr = Timer(skip_first=0)
            true = list(_WAYS[way](tmr, work, seconds, repeats))
            yield Row.of(f"host, {way}, {name} of {seconds * 1e3:g} ms", np.asarray(true), tmr.get_time("work"))


def _start_end(tmr: Timer, work: Callable[[float], float], seconds: float, repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        tmr.start("work")
        true = work(seconds)
        tmr.end("work")
        yield true


def _region(tmr: Timer, work: Callable[[float], float], seconds: float, repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        with tmr.region("work"):
            true = work(seconds)
        yield true


def _timed(tmr: Timer, work: Callable[[float], float], seconds: float, repeats: int) -> Iterator[float]:
    timed = tmr.timed("work")(work)
    for _ in range(repeats):
        yield timed(seconds)


def _iterate(tmr: Timer, work: Callable[[float], float], seconds: float, repeats: int) -> Iterator[float]:
    yield from tmr.iterate((work(seconds) for _ in range(repeats)), "work")


_WAYS = {"start/end": _start_end, "with region": _region, "timed": _timed, "iterate": _iterate}


def device_rows() -> Iterator[Row]:
    """Regions on a simulated device: the host runs far ahead, and the times are the device's."""
    from deep500_timing.testing import ManualDeviceClock

    random = np.random.default_rng(0)
    for name, ahead in (("keeps up", 0.0), ("lags by 50 regions", 50 * 5.5e-3)):
        device = ManualDeviceClock()
        tmr = CPUGPUTimer(device_clock=device)
        true = random.uniform(1e-3, 10e-3, size=2000).round(9)
        for seconds in true:
            with tmr.region("work", gpu=True):
                device.launch(seconds)
            if device._tails["stream 0"] / 1e9 - device.now_ns / 1e9 > ahead:
                device.advance(seconds)
        yield Row.of(f"simulated device that {name}, 1-10 ms", true, tmr.get_time("work", gpu=True))


def torch_device_rows() -> Iterator[Row]:
    """Regions timed by real ``torch.Event`` objects on the virtual clock of the tests' accelerator."""
    path = HERE.parent / "tests" / "torch_device" / "__init__.py"
    spec = importlib.util.spec_from_file_location("torch_device", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["torch_device"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    device = module.load()
    import deep500_timing_torch as timer

    device.reset()
    for float32 in (False, True):
        device.set_float32_elapsed(float32)
        tmr = timer.CPUGPUTimer()
        true = np.random.default_rng(0).integers(1_000_000, 10_000_000, size=2000)
        for nanoseconds in true:
            with tmr.region("work", gpu=True):
                device.launch(int(nanoseconds))
            device.advance(int(nanoseconds))
        kind = "float32 milliseconds, as CUDA gives" if float32 else "exact"
        yield Row.of(f"torch.Event on a virtual clock, {kind}, 1-10 ms", true / 1e9, tmr.get_time("work", gpu=True))


def cuda_rows() -> Iterator[Row]:
    """Regions on a real GPU around work of known length, against the host clock with a synchronize on either side."""
    import torch

    if not torch.cuda.is_available():
        return
    import deep500_timing_torch as timer

    tmr = timer.CPUGPUTimer()
    matrix = torch.randn(4096, 4096, device="cuda")
    true = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with tmr.region("work", gpu=True):
            for _ in range(20):
                matrix = (matrix @ matrix).clamp_(-1, 1)
        torch.cuda.synchronize()
        true.append(time.perf_counter() - start)
    yield Row.of("CUDA, 20 matrix products, against synchronize", np.asarray(true), tmr.get_time("work", gpu=True))


def other_rows() -> Iterator[Row]:
    """The rows of the other modules."""
    sys.path.insert(0, str(HERE))
    for path in sorted(HERE.glob("accuracy_*.py")):
        module: Any = importlib.import_module(path.stem)
        for row in module.rows():
            yield row if isinstance(row, Row) else Row(**row)


def write(rows: list[Row], missing: list[str], path: Path) -> None:
    """Write the table, with the notes for a reader."""
    lines = [
        "# Accuracy",
        "",
        f"Written by `make accuracy` on {datetime.now(UTC):%Y-%m-%d}: {platform.machine()}, "
        f"{platform.system()}, Python {platform.python_version()}, "
        f"the hot path {'compiled' if deep500_timing.compiled else 'in plain Python'}.",
        "",
        "Each row times work of known length many times. *true* is that length: for spins and sleeps what the work",
        "itself read on the clock, so that a sleep's own lateness does not count against the timer, while the call of",
        "the work and the timer's own cost do; for devices and models what they were told to take. The error is the",
        "median of (measured − true) ÷ true; the spread goes from its 5th to its 95th percentile.",
        "",
        "| case | true (ms) | measured (ms) | error (%) | spread of the error (%) |",
        "|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {r.case} | {r.true_s * 1e3:.4f} | {r.measured_s * 1e3:.4f} | {r.error_percent:+.3f} | {r.spread} |"
        for r in rows
    ]
    if missing:
        lines += ["", *(f"Not measured: {reason}." for reason in missing)]
    path.write_text("\n".join(lines) + "\n")


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=HERE / "ACCURACY.md", show_default=True)
def main(output: Path) -> None:
    """Measure, print and write."""
    console = Console(stderr=True)
    rows: list[Row] = []
    missing: list[str] = []
    with Progress(console=console) as progress:
        for source in (host_rows, device_rows, torch_device_rows, cuda_rows, other_rows):
            task = progress.add_task(source.__name__.removesuffix("_rows"), total=None)
            before = len(rows)
            for row in source():
                rows.append(row)
                progress.advance(task)
            progress.update(task, total=1, completed=1)
            if source is cuda_rows and len(rows) == before:
                missing.append("times on a real GPU; PyTorch finds none on this machine")
    write(rows, missing, output)
    for row in rows:
        console.print(f"{row.case:<70} {row.error_percent:+9.3f} %   [{row.spread}]", highlight=False)
    console.print(f"written to {output}")


if __name__ == "__main__":
    main()
