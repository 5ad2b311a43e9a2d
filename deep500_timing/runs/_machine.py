"""The work of the process and the machine, once a second, from the kernel's own files: who had the processors.

Any source may be missing, as in a container or on another system. Its columns are then NaN, and
:attr:`MachineReader.missing` names it.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

_LEAST_S = 0.1
"""The kernel counts some of the sums in ticks of 10 ms."""
_MOST_READ = 64
"""Threads, and worker processes, that are read: each costs about 10 µs."""
RATES = {
    "process_cores": "usage",
    "major_faults": "usage",
    "process_waiting": "threads",
    "workers_cores": "workers",
    "workers_waiting": "workers",
    "busy_cores": "stat",
    "steal_cores": "stat",
    "iowait_cores": "stat",
    "pressure_cpu": "pressure",
    "pressure_io": "pressure",
    "pressure_memory": "pressure",
    "throttled": "cgroup",
    "swapped_pages": "vmstat",
    "read_bytes": "io",
    "written_bytes": "io",
}
"""Columns that are means since the row before, by the source that tells them. Cores, waiting threads and shares are
seconds in a second; the others are counts in a second."""
LEVELS = {"limit_cores": "cgroup", "clock_share": "clock"}
"""Columns of the moment: cores that the cgroup may use, and the clock's frequency as a share of the highest."""


def usable_cores() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main_thread_times(root: str = "/") -> tuple[int, int] | None:
    """How long the main thread ran on a processor and waited for one since it began, in ns; None if unknown."""
    try:
        with open(os.path.join(root, "proc/self/schedstat"), "rb") as file:
            ran, waited = map(int, file.read().split()[:2])
    except (OSError, ValueError):
        return None
    return ran, waited


class MachineReader:
    """Reads process and machine once in a period, on the calling thread.

    Args:
        period_s: Seconds between two readings.
        root: Where ``proc`` and ``sys`` are.
    """

    def __init__(self, period_s: float, root: str = "/") -> None:
        self.missing: list[str] = []
        """Sources that the first reading did not find, by name."""
        self._period_s = period_s
        self._root = root
        self._last_s: float | None = None
        self._sums: dict[str, float] = {}
        self._waited_ns: dict[str, int] = {}
        """How long each task waited for a processor, by file."""
        self._waited_s: dict[str, float] = {}
        """How long all of a kind did."""
        self._cgroup = ""
        self._readers: dict[str, Callable[[], dict[str, float]]] = {
            "usage": self._usage,
            "threads": self._threads,
            "workers": self._workers,
            "stat": self._stat,
            "pressure": self._pressure,
            "cgroup": self._limit,
            "vmstat": self._vmstat,
            "io": self._io,
            "clock": self._clock,
        }

    def due(self, *, at_once: bool = False) -> dict[str, float] | None:
        """The columns of a row, NaN where unknown; None before the second reading, and if the period has not passed.

        ``at_once`` asks for what is left of a period that will not end.
        """
        now_s, last_s = time.perf_counter(), self._last_s
        if last_s is not None and now_s - last_s < (_LEAST_S if at_once else self._period_s):
            return None
        self._last_s = now_s
        before, self._sums = self._sums, {}
        for source, reader in list(self._readers.items()):
            try:
                self._sums.update(reader())
            except Exception:  # It is missing, or of another form.
                del self._readers[source]
                self.missing.append(source)
        if last_s is None:
            return None
        row = {name: (self._sums.get(name, math.nan) - before.get(name, math.nan)) / (now_s - last_s) for name in RATES}
        return row | {name: self._sums.get(name, math.nan) for name in LEVELS}

    def _text(self, path: str) -> str:
        with open(os.path.join(self._root, path), encoding="ascii", errors="replace") as file:
            return file.read()

    # Each returns sums since some beginning, in seconds or counts, or a level.

    def _usage(self) -> dict[str, float]:
        import resource

        own = resource.getrusage(resource.RUSAGE_SELF)
        return {"process_cores": own.ru_utime + own.ru_stime, "major_faults": own.ru_majflt}

    def _threads(self) -> dict[str, float]:
        tasks = os.listdir(os.path.join(self._root, "proc/self/task"))[:_MOST_READ]
        _, waiting = self._add_up("threads", [f"proc/self/task/{task}/schedstat" for task in tasks])
        return {"process_waiting": waiting}

    def _workers(self) -> dict[str, float]:
        # Loaders' workers are processes of multiprocessing. The list of them is only looked at: active_children() would
        # reap.
        started: Iterable[Any] = getattr(sys.modules.get("multiprocessing.process"), "_children", ())
        pids = [worker.pid for worker in list(started)][:_MOST_READ]
        ran, waiting = self._add_up("workers", [f"proc/{pid}/schedstat" for pid in pids])
        # Workers that ended since the last reading, as at the end of an epoch, are in the account of this process.
        ended = map(int, self._text("proc/self/stat").rpartition(")")[2].split()[13:15])
        return {"workers_cores": ran + sum(ended) / os.sysconf("SC_CLK_TCK"), "workers_waiting": waiting}

    def _add_up(self, kind: str, paths: list[str]) -> tuple[float, float]:
        # How long those that are there have run, and how long all have waited. A task that ends takes its sums along,
        # so only what each has added is added up.
        # Where the kernel has no such file, or does not count, the sums are unknown, not 0.
        if int(self._text("proc/self/schedstat").split()[0]) == 0:
            raise ValueError("the kernel does not count the time on a processor")
        ran = added = 0
        for path in paths:
            try:
                ran_ns, waited_ns = map(int, self._text(path).split()[:2])
            except (FileNotFoundError, ProcessLookupError):  # It has ended.
                continue
            ran += ran_ns
            added += max(waited_ns - self._waited_ns.get(path, 0), 0)
            self._waited_ns[path] = waited_ns
        waited_s = self._waited_s[kind] = self._waited_s.get(kind, 0.0) + added / 1e9
        return ran / 1e9, waited_s

    def _stat(self) -> dict[str, float]:
        user, nice, system, _, iowait, irq, softirq, steal = map(int, self._text("proc/stat").split()[1:9])
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        busy = user + nice + system + irq + softirq
        return {"busy_cores": busy * tick_s, "steal_cores": steal * tick_s, "iowait_cores": iowait * tick_s}

    def _pressure(self) -> dict[str, float]:
        # some avg10=0.00 avg60=0.00 avg300=0.00 total=12345
        found = {}
        for what in ("cpu", "io", "memory"):
            some = self._text(f"proc/pressure/{what}").splitlines()[0]
            found[f"pressure_{what}"] = int(some.rpartition("total=")[2]) / 1e6
        return found

    def _limit(self) -> dict[str, float]:
        if not self._cgroup:
            self._cgroup = self._find_cgroup()
        stat = dict(line.split() for line in self._text(f"{self._cgroup}/cpu.stat").splitlines())
        if "throttled_usec" in stat:
            throttled_s = int(stat["throttled_usec"]) / 1e6
            quota, period = self._text(f"{self._cgroup}/cpu.max").split()
        else:
            throttled_s = int(stat["throttled_time"]) / 1e9
            quota, period = (self._text(f"{self._cgroup}/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        limit = math.nan if quota in ("max", "-1") else int(quota) / int(period)
        return {"throttled": throttled_s, "limit_cores": limit}

    def _find_cgroup(self) -> str:
        # The process's own one; in a container, its files are those of the mount.
        for line in self._text("proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                for mount in (f"sys/fs/cgroup/{controllers}".rstrip("/"), "sys/fs/cgroup/cpu", "sys/fs/cgroup"):
                    for folder in (f"{mount}{path.rstrip('/')}", mount):
                        if any(os.path.exists(os.path.join(self._root, folder, name)) for name in _LIMITS):
                            return folder
        raise FileNotFoundError("no cgroup with a limit of the processor")

    def _vmstat(self) -> dict[str, float]:
        counts = dict(line.split() for line in self._text("proc/vmstat").splitlines())
        return {"swapped_pages": int(counts["pswpin"]) + int(counts["pswpout"])}

    def _io(self) -> dict[str, float]:
        counts = dict(line.split(": ") for line in self._text("proc/self/io").splitlines())
        return {"read_bytes": int(counts["read_bytes"]), "written_bytes": int(counts["write_bytes"])}

    def _clock(self) -> dict[str, float]:
        folder = "sys/devices/system/cpu"
        shares = [
            int(self._text(f"{folder}/cpu{core}/cpufreq/scaling_cur_freq"))
            / int(self._text(f"{folder}/cpu{core}/cpufreq/cpuinfo_max_freq"))
            for core in sorted(os.sched_getaffinity(0))[:_MOST_READ]
        ]
        return {"clock_share": sum(shares) / len(shares)}


_LIMITS = ("cpu.max", "cpu.cfs_quota_us")
