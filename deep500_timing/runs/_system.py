"""Samples of the machine: processor, memory, disk, network by psutil; GPUs by NVML where it is there."""

from __future__ import annotations

import gc
import os
from _thread import get_ident
from collections import deque
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.require import is_installed, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


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
        self._rates: dict[str, int] = {}
        self._gpus: list[Any] | None = None
        self._nvml: Any = None

    def _read(self, passed_s: float | None) -> Iterator[tuple[str, float]]:
        for read in (self._processor, self._memory, self._traffic, self._read_gpus):
            try:
                for metric, value, is_rate in read():
                    if is_rate == "count":
                        before = self._rates.get(metric)
                        self._rates[metric] = int(value)
                        if before is not None and passed_s:
                            yield metric, (value - before) / passed_s
                    elif not (passed_s is None and is_rate == "since"):
                        yield metric, float(value)
            except Exception:
                # A container may refuse one reading; the others continue.
                continue

    def _processor(self) -> Iterator[tuple[str, float, str]]:
        yield "system.cpu_percent", self._psutil.cpu_percent(None), "since"
        yield "process.cpu_percent", self._process.cpu_percent(None), "since"

    def _memory(self) -> Iterator[tuple[str, float, str]]:
        yield "system.memory_percent", self._psutil.virtual_memory().percent, ""
        yield "process.rss_bytes", self._process.memory_info().rss, ""

    def _traffic(self) -> Iterator[tuple[str, float, str]]:
        disk = self._psutil.disk_io_counters()
        if disk is not None:
            yield "system.disk_read_bytes_per_s", disk.read_bytes, "count"
            yield "system.disk_write_bytes_per_s", disk.write_bytes, "count"
        network = self._psutil.net_io_counters()
        if network is not None:
            yield "system.network_received_bytes_per_s", network.bytes_recv, "count"
            yield "system.network_sent_bytes_per_s", network.bytes_sent, "count"

    def _read_gpus(self) -> Iterator[tuple[str, float, str]]:
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
            for name, read in readings.items():
                try:
                    yield f"gpu{index}.{name}", float(read(gpu)), ""
                except nvml.NVMLError:
                    continue  # Unsupported by this device: missing, not zero.
            try:
                reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
            except nvml.NVMLError:
                continue
            for name, bit in _THROTTLED.items():
                yield f"gpu{index}.throttled_{name}", float(bool(reasons & bit)), ""

    def _find_gpus(self) -> list[Any]:
        if not is_installed("pynvml"):
            return []
        pynvml: Any = import_module("pynvml")
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:
            return []  # No driver, no NVIDIA device.
