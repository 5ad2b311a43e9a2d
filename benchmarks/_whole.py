"""One-time costs: importing, statistics, and the memory of a run without end."""

from __future__ import annotations

import compileall
import importlib.util
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import psutil

from benchmarks._pairs import Step, without_gc
from benchmarks._summary import Spread, ratio

IMPORTS = {
    "deep500_timing (compiled)": "import deep500_timing",
    "deep500_timing (plain)": "import deep500_timing",
    "codetiming": "import codetiming",
    "OpenTelemetry SDK": "from opentelemetry.sdk.trace import TracerProvider",
    "torchtnt": "from torchtnt.utils.timer import Timer",
    "DeepSpeed": "from deepspeed.utils.timer import SynchronizedWallClockTimer",
    "Lightning": "from lightning.pytorch.profilers import SimpleProfiler",
    "torch": "import torch",
}
_HEAVY = ("torchtnt", "DeepSpeed", "Lightning", "torch")


def import_times(rounds: int, heavy_rounds: int, step: Step, seed: int = 0) -> dict[str, dict[str, float]]:
    """Milliseconds that an import adds to a bare interpreter, each in its own process, in turns.

    The plain form is imported from a copy of the package without its compiled modules, as a machine without a
    compiler would install it.
    """
    with tempfile.TemporaryDirectory(prefix="deep500-timing-plain-") as folder:
        plain = _copy_without_compiled(Path(folder))
        environments: dict[str, dict[str, str]] = {name: dict(os.environ) for name in IMPORTS}
        environments["deep500_timing (plain)"]["PYTHONPATH"] = str(plain)
        times: dict[str, list[float]] = {name: [] for name in IMPORTS}
        bare: dict[str, list[float]] = {name: [] for name in IMPORTS}
        failed: set[str] = set()
        names, order = list(IMPORTS), random.Random(seed)
        for turn in range(-1, rounds):  # The first fills the system's file cache.
            order.shuffle(names)
            for name in names:
                if name in failed or (name in _HEAVY and not 0 <= turn < heavy_rounds):
                    continue
                nothing = _run("pass", environments[name])
                taken = _run(IMPORTS[name], environments[name])
                if taken is None or nothing is None:
                    failed.add(name)
                elif turn >= 0:
                    bare[name].append(nothing)
                    times[name].append(taken)
            step()
    result = {}
    for name in IMPORTS:
        if name in failed or not times[name]:
            continue
        spread = Spread.of([a - b for a, b in zip(times[name], bare[name], strict=True)])
        result[name] = {**spread.as_json(), "least": min(times[name]) - min(bare[name])}
    return result


def _copy_without_compiled(folder: Path) -> Path:
    spec = importlib.util.find_spec("deep500_timing")
    if spec is None or spec.origin is None:
        raise ImportError("deep500_timing is not installed")
    target = folder / "deep500_timing"
    shutil.copytree(Path(spec.origin).parent, target, ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    compileall.compile_dir(target, quiet=2)
    return folder


def _run(code: str, environment: dict[str, str]) -> float | None:
    # Away from the tree: the folder of `-c` comes first on the path, before the copy without compiled modules.
    start = perf_counter()
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, check=False)
    return (perf_counter() - start) * 1e3 if done.returncode == 0 else None


def statistics_of(packages: dict[str, ModuleType], count: int, rounds: int, step: Step) -> dict[str, Any]:
    """Milliseconds for the statistics of many intervals: this timer's, and five of Python's on a list of floats.

    Each of this timer's answers starts from the recorded intervals; Python's list is there already, to its advantage.
    """
    timers = {}
    for group, package in packages.items():
        for name, keep_last in ((f"every interval kept ({group})", None), (f"keep_last=1000 ({group})", 1000)):
            timer = package.Timer(keep_last=keep_last)
            key = package.TimeType.BATCH
            for _ in range(count):
                timer.start(key)
                timer.end(key)
            timers[name] = (timer, key)
            timer.get_time_stats(key)
    times = next(timer.get_time(key) for timer, key in timers.values() if timer.keep_last is None)
    measured: dict[str, list[float]] = {name: [] for name in timers}
    python = []
    with without_gc():
        for _ in range(rounds):
            for name, (timer, key) in timers.items():
                start = perf_counter()
                timer.get_time_stats(key)
                measured[name].append((perf_counter() - start) * 1e3)
            start = perf_counter()
            min(times), statistics.mean(times), statistics.median(times), max(times), statistics.stdev(times)
            python.append((perf_counter() - start) * 1e3)
            step()
    return {
        "count": count,
        "python_ms": Spread.of(python).as_json(),
        "ms": {name: Spread.of(values).as_json() for name, values in measured.items()},
        "ratio": {name: ratio(python, values).as_json() for name, values in measured.items()},
    }


def memory_of_long_run(package: ModuleType, regions: int, step: Step, keep_last: int = 1000) -> dict[str, float]:
    """Resident memory in bytes along a run of many regions with ``keep_last``.

    Returns:
        The memory after a hundredth of the run, the largest and the last after that, and how long a region took.
    """
    process = psutil.Process()
    timer, key = package.Timer(keep_last=keep_last), package.TimeType.BATCH
    start_s = perf_counter()
    _regions(timer, key, regions // 100)
    first = process.memory_info().rss
    later = []
    for _ in range(99):
        _regions(timer, key, regions // 100)
        later.append(process.memory_info().rss)
        step()
    taken_s = perf_counter() - start_s
    stats = timer.get_time_stats(key)
    return {
        "regions": stats.count,
        "keep_last": keep_last,
        "first_bytes": first,
        "largest_bytes": max(later),
        "last_bytes": later[-1],
        "growth_bytes": later[-1] - first,
        "ns_per_region": taken_s * 1e9 / regions,
    }


def _regions(timer: Any, key: Any, count: int) -> None:
    for _ in range(count):
        timer.start(key)
        timer.end(key)
