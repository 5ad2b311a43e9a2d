"""Samples of the machine: processor, memory, disk, network by psutil; GPUs by NVML where it is there."""

from __future__ import annotations

import gc
import os
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deep500_timing._base.require import is_installed, require

LEAST_NS = 1_000_000
"""Shorter collections are not recorded: they happen thousands of times a second and explain no slow step."""
_QUEUE = 10_000


class CollectorTimes:
    """Measures each collection by ``gc.callbacks``, on the thread that collects."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._start_ns = 0
        self._new: deque[tuple[int, int, int]] = deque(maxlen=_QUEUE)
        gc.callbacks.append(self._measure)

    def _measure(self, phase: str, _info: dict[str, Any]) -> None:
        # The interpreter collects on one thread at a time.
        if phase == "start":
            self._start_ns = self._now()
            return
        end_ns = self._now()
        if end_ns - self._start_ns >= LEAST_NS:
            self._new.append((get_ident(), self._start_ns, end_ns))

    def take(self, cut_ns: int | None) -> dict[int, NDArray[np.int64]]:
        """Start and end in ns of the collections that ended by a time, by thread. Each is given once."""
        found: dict[int, list[tuple[int, int]]] = {}
        while self._new and (cut_ns is None or self._new[0][2] <= cut_ns):
            ident, start_ns, end_ns = self._new.popleft()
            found.setdefault(ident, []).append((start_ns, end_ns))
        return {ident: np.array(pairs, dtype=np.int64) for ident, pairs in found.items()}

    def close(self) -> None:
        if self._measure in gc.callbacks:
            gc.callbacks.remove(self._measure)


# Bits of nvmlDeviceGetCurrentClocksEventReasons, from nvml.h. Idle GPUs and clocks set by the user are not listed.
_THROTTLED = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}


class ResidentMemory:
    """Reads the resident memory of this process once in a period, without psutil. Linux only; elsewhere no samples."""

    def __init__(self, period_s: float) -> None:
        self._period_ns = round(period_s * 1e9)
        self._last_ns: int | None = None

    def due(self, now_ns: int) -> Iterator[tuple[str, float]]:
        """Metrics and values; nothing if the period has not passed."""
        last_ns = self._last_ns
        if last_ns is None or now_ns - last_ns >= self._period_ns:
            self._last_ns = now_ns
            yield from self._read(None if last_ns is None else (now_ns - last_ns) / 1e9)

    def _read(self, passed_s: float | None) -> Iterator[tuple[str, float]]:
        with suppress(OSError, ValueError, IndexError, AttributeError), open("/proc/self/statm", "rb") as file:
            yield "process.rss_bytes", float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


class SystemSampler(ResidentMemory):
    """Reads the machine's state once in a period, on the calling thread. A rate needs two samples."""

    def __init__(self, period_s: float) -> None:
        super().__init__(period_s)
        self._psutil = require("psutil", extra="system", caller="RunLog(system_s=...)")
        self._process = self._psutil.Process(os.getpid())
        self._counts: dict[str, int] = {}
        self._gpus: list[Any] | None = None
        self._nvml: Any = None

    def _read(self, passed_s: float | None) -> Iterator[tuple[str, float]]:
        for read in (self._processor, self._memory, self._traffic, self._read_gpus):
            # A container may refuse one reading; the others continue.
            with suppress(Exception):
                yield from read(passed_s)

    def _processor(self, passed_s: float | None) -> Iterator[tuple[str, float]]:
        of_system, of_process = self._psutil.cpu_percent(None), self._process.cpu_percent(None)
        if passed_s is not None:  # They are of the time since the last reading.
            yield "system.cpu_percent", float(of_system)
            yield "process.cpu_percent", float(of_process)

    def _memory(self, _: float | None) -> Iterator[tuple[str, float]]:
        yield "system.memory_percent", float(self._psutil.virtual_memory().percent)
        yield "process.rss_bytes", float(self._process.memory_info().rss)

    def _traffic(self, passed_s: float | None) -> Iterator[tuple[str, float]]:
        before, self._counts = self._counts, {}
        disk, network = self._psutil.disk_io_counters(), self._psutil.net_io_counters()
        if disk is not None:
            self._counts |= {"disk_read": disk.read_bytes, "disk_write": disk.write_bytes}
        if network is not None:
            self._counts |= {"network_received": network.bytes_recv, "network_sent": network.bytes_sent}
        for name, count in self._counts.items():
            if passed_s and name in before:
                yield f"system.{name}_bytes_per_s", (count - before[name]) / passed_s

    def _read_gpus(self, _: float | None) -> Iterator[tuple[str, float]]:
        if self._gpus is None:
            self._gpus = self._find_gpus()
        nvml = self._nvml
        for index, gpu in enumerate(self._gpus):
            readings: dict[str, Callable[[Any], float]] = {
                "utilization_percent": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
                "memory_used_bytes": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
                "sm_clock_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
                "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
                "temperature_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            }
            # Unsupported by this device: missing, not zero.
            for name, read in readings.items():
                with suppress(nvml.NVMLError):
                    yield f"gpu{index}.{name}", float(read(gpu))
            with suppress(nvml.NVMLError):
                reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
                for name, bit in _THROTTLED.items():
                    yield f"gpu{index}.throttled_{name}", float(bool(reasons & bit))

    def _find_gpus(self) -> list[Any]:
        if is_installed("pynvml"):
            nvml = self._nvml = import_module("pynvml")
            with suppress(nvml.NVMLError):  # no driver, no NVIDIA device
                nvml.nvmlInit()
                return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return []
