"""Where and with which tools the measurements were made."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks._cold import last_level_cache_bytes

_PACKAGES = ("deep500-timing", "numpy", "torch", "keras", "tensorflow-cpu", "tensorflow", "Cython")


def describe() -> dict[str, str]:
    """The machine, the interpreter, the versions, the date and the load, as text."""
    facts = {
        "processor": f"{_processor()}, {os.cpu_count()} cores, last-level cache {last_level_cache_bytes() >> 20} MiB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()} ({sys.version.split('[')[-1][:-1]})",
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "load before": load(),
    }
    for name in _PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    return facts


def load() -> str:
    """Processes that ran or waited to run, on average over 1, 5 and 15 minutes."""
    return ", ".join(f"{value:.2f}" for value in os.getloadavg()) if hasattr(os, "getloadavg") else "unknown"


def waited_ns() -> int:
    """How long this thread was ready to run and had no processor, since it began; 0 where the kernel does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def now() -> str:
    """The date, and the load."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load {load()}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
