"""The sections of a session on a GPU. Each returns the columns and rows of its table."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu._device import UnavailableError, need_cupy, need_torch, spinner

if TYPE_CHECKING:
    from collections.abc import Callable

    Table = tuple[list[str], list[list[Any]]]

__all__ = ["ALL", "Section", "UnavailableError"]


@dataclass(frozen=True)
class Section:
    """One table.

    Attributes:
        title: Its heading.
        measure: Gives the columns and the rows.
        limit_s: How long it may take.
        anywhere: Whether it needs no GPU.
        plain: Whether it runs in the plain form, where another of the same ran in whatever form there is.
    """

    title: str
    measure: Callable[[], Table]
    limit_s: float = 60.0
    anywhere: bool = False
    plain: bool = False


def machine() -> Table:
    """What it runs on."""
    torch = need_torch()
    import deep500_timing

    asked = "nvidia-smi --query-gpu=driver_version,clocks.max.sm --format=csv,noheader"
    return ["what", "is"], [
        ["GPU", torch.cuda.get_device_name()],
        ["GPUs", torch.cuda.device_count()],
        ["driver, highest clock", subprocess.getoutput(asked).splitlines()[0]],
        ["PyTorch", torch.__version__],
        ["CUDA", torch.version.cuda],
        ["Python", sys.version.split()[0]],
        ["form", "compiled" if deep500_timing.compiled else "plain"],
    ]


def tests() -> Table:
    """The tests that need a GPU."""
    need_torch()
    command = ["make", "test-gpu", f"GPU_PYTHON={sys.executable}", "PYTEST_ARGS=-q -p no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout.strip().splitlines()
    failed = [[line.partition(" ")[2]] for line in said if line.startswith(("FAILED", "ERROR"))]
    return ["result"], [[said[-1] if said else done.stderr[-200:]], *failed]


def truth() -> Table:
    """Regions around kernels of known length, beside what CUPTI says of the same kernels."""
    torch = need_torch()
    from torch.profiler import ProfilerActivity, profile

    import deep500_timing_torch as timer

    spin, tmr, rows = spinner(torch), timer.CPUGPUTimer("cuda"), []
    for microseconds in (2, 10, 100, 1_000, 10_000, 50_000):
        count, key = (20 if microseconds > 5_000 else 100), f"{microseconds} us"
        spin(microseconds / 1e6)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            spin(0.02)  # the host gets ahead, so that events and kernels lie back to back
            for _ in range(count):
                with tmr.region(key, gpu=True):
                    spin(microseconds / 1e6)
            torch.cuda.synchronize()
        on_device = [event for event in profiler.events() if event.device_type.name == "CUDA" and "spin" in event.name]
        kernels = [float(event.time_range.elapsed_us()) for event in on_device][-count:]
        mine = [seconds * 1e6 for seconds in tmr.get_time(key, gpu=True)]
        if len(kernels) != count:
            rows.append([microseconds, len(kernels), None, statistics.median(mine), None, None])
            continue
        over = sorted(region - kernel for region, kernel in zip(mine, kernels, strict=True))
        middle, most = over[count // 2], over[int(0.95 * count)]
        rows.append([microseconds, count, statistics.median(kernels), statistics.median(mine), middle, most])
    return ["asked", "kernels", "CUPTI, median", "region, median", "region − CUPTI, median", "95 %"], rows


def cost() -> Table:
    """A pair of start and end beside two bare events, in turn, the least of many."""
    torch = need_torch()
    import deep500_timing
    import deep500_timing_torch as timer

    stream = torch.cuda.current_stream()
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    tmr, named = timer.CPUGPUTimer(keep_last=100), timer.CPUGPUTimer("cuda:0", keep_last=100)

    def pair(of: Any, **gpu: bool) -> Callable[[], None]:
        def call() -> None:
            of.start("region", **gpu)
            of.end("region", **gpu)

        return call

    def bare() -> None:
        first.record(stream)
        second.record(stream)

    cases = {
        "two records of torch.cuda.Event": bare,
        "start and end, host only": pair(tmr),
        "start and end, gpu=True": pair(tmr, gpu=True),
        "start and end, gpu=True, device by number": pair(named, gpu=True),
    }
    least = dict.fromkeys(cases, float("inf"))
    for _ in range(200):
        for name, call in cases.items():
            began = time.perf_counter_ns()
            for _ in range(50):
                call()
            least[name] = min(least[name], (time.perf_counter_ns() - began) / 50)
            torch.cuda.synchronize()
    base = least["two records of torch.cuda.Event"]
    form = "compiled" if deep500_timing.compiled else "plain"
    return ["what", "form", "ns", "of two bare records"], [[name, form, ns, ns / base] for name, ns in least.items()]


def calls() -> Table:
    """Every call of the CUDA runtime that 2 000 regions make."""
    torch = need_torch()
    from torch.profiler import ProfilerActivity, profile

    import deep500_timing_torch as timer

    tmr = timer.CPUGPUTimer("cuda")
    for _ in range(200):
        with tmr.region("warm", gpu=True):
            pass
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(2000):
            with tmr.region("region", gpu=True):
                pass
        tmr.snapshot()
    counted = Counter(event.name for event in profiler.events() if event.name.startswith(("cuda", "cu")))
    counted.setdefault("any …Synchronize", sum(n for name, n in counted.items() if "Synchronize" in name))
    return ["call", "times", "for each region"], [[name, n, n / 2000] for name, n in counted.most_common()]


def memory() -> Table:
    """Events and memory over a long run."""
    torch = need_torch()
    import deep500_timing_torch as timer

    tmr, rows = timer.CPUGPUTimer(keep_last=100), []
    data = torch.zeros(1024, device="cuda")
    began = time.perf_counter()
    for number in range(300_001):
        with tmr.region("region", gpu=True):
            data += 1
        if number % 100_000 == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            rows.append([number, tmr.device.events, resident, torch.cuda.memory_reserved() / 2**20])
    rows.append([f"{time.perf_counter() - began:.1f} s", tmr.device.events, None, None])
    return ["regions", "events", "resident MiB", "reserved on the GPU, MiB"], rows


def captures() -> Table:
    """What a capture lives through, by who does what on which thread, and in which mode."""
    torch = need_torch()
    import deep500_timing_torch as timer

    def on_thread(what: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            thread = threading.Thread(target=what)
            thread.start()
            thread.join()

        return run

    tmr = timer.CPUGPUTimer("cuda")
    data = torch.zeros(8, device="cuda")
    event = torch.cuda.Event()
    event.record()

    def regions() -> None:
        for _ in range(60):
            with tmr.region("inside", gpu=True):
                pass

    def query() -> None:
        try:
            event.query()
        except RuntimeError:
            return

    cases: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "a bare query, this thread": query,
        "a bare query, another thread": on_thread(query),
        "snapshot, this thread": tmr.snapshot,
        "regions, this thread": regions,
        "snapshot, another thread": on_thread(tmr.snapshot),
        "regions, another thread": on_thread(regions),
        "get_time, another thread": on_thread(lambda: tmr.get_time("outside", gpu=True)),
    }
    rows = []
    for name, what in cases.items():
        row: list[Any] = [name]
        for mode in ("global", "thread_local", "relaxed"):
            for _ in range(40):
                with tmr.region("outside", gpu=True):
                    data += 1
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode=mode):
                    data += 1
                    what()
                graph.replay()
                torch.cuda.synchronize()
                row.append("alive")
            except Exception as error:
                row.append(f"dead: {str(error).splitlines()[0][:60]}")
        rows.append(row)
    return ["while capturing", "global", "thread_local", "relaxed"], rows


def _program(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50, check=False)


def fork() -> Table:
    """Whether a child that was forked after this may start CUDA."""
    need_torch()
    rows = []
    for what in ("pass", "timer.CPUGPUTimer()", "timer.SynchronizedWallClockTimer()", "torch.cuda.is_available()"):
        done = _program(
            "import os, torch, deep500_timing_torch as timer\n"
            f"{what}\n"
            "pid = os.fork()\n"
            "if pid == 0:\n"
            "    try: torch.zeros(1, device='cuda'); print('yes', flush=True)\n"
            "    except Exception as error: print('no:', str(error).splitlines()[0], flush=True)\n"
            "    os._exit(0)\n"
            "os.waitpid(pid, 0)\n"
        )
        rows.append([what, done.stdout.strip() or done.stderr.strip()[-100:]])
    return ["the parent did", "the child may use CUDA"], rows


def exits() -> Table:
    """What the process says as it ends, and a child that ends by sys.exit."""
    need_torch()
    use = "import os, sys, torch, deep500_timing_torch as timer\ntmr = timer.CPUGPUTimer('cuda')\n" + (
        "for _ in range(100):\n    with tmr.region('r', gpu=True): pass\n"
    )
    cases = {
        "ends": use,
        "ends, a forked child by sys.exit": use + "pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)\n",
    }
    rows = []
    for name, text in cases.items():
        done = _program(text)
        rows.append([name, done.returncode, len(done.stderr.splitlines()), done.stderr.strip()[:100] or "nothing"])
    return ["the process", "exit status", "lines on stderr", "beginning with"], rows


def collectives() -> Table:
    """Asynchronous operations that are issued together, beside the backend's own durations (one rank)."""
    torch = need_torch()
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise UnavailableError("this PyTorch has no NCCL")
    from deep500_timing_torch import comm

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    # Gathers into another tensor: in place, NCCL launches nothing in a world of one.
    full, shard = torch.empty(1 << 28, device="cuda"), torch.ones(1 << 28, device="cuda")
    dist.all_gather_into_tensor(full, shard)
    dist.GroupMember.WORLD._enable_collectives_timing()  # pyright: ignore[reportOptionalMemberAccess]
    torch.cuda.synchronize()
    before = torch.cuda.max_memory_reserved()
    comm.reset_log()
    works = [comm.all_gather_into_tensor(full, shard, async_op=True) for _ in range(6)]
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    found = comm.summary(wait=True)
    times = found.find("all_gather_into_tensor")
    mean_s = None if times is None else times.mean_s
    rows: list[list[object]] = [
        ["six all_gather of 1 GiB issued together, mean", None if mean_s is None else mean_s * 1e6],
        ["the backend's own durations, mean", statistics.mean(work._get_duration() * 1e3 for work in works)],
        ["upper bound", times is not None and times.upper_bound],
        ["timed", found.device_times],
        ["reserved more, MiB", (torch.cuda.max_memory_reserved() - before) / 2**20],
    ]
    dist.destroy_process_group()
    return ["measurement", "µs, or as said"], rows


def context() -> Table:
    """The current device, and the GPUs on which the process has a context, with a timer of another device."""
    torch = need_torch()
    if torch.cuda.device_count() < 2:
        raise UnavailableError("needs two GPUs")
    import deep500_timing_torch as timer

    asked = "nvidia-smi --query-compute-apps=gpu_uuid,pid --format=csv,noheader"

    def seen() -> int:
        return sum(line.endswith(f" {os.getpid()}") for line in subprocess.getoutput(asked).splitlines())

    torch.zeros(1, device="cuda:1")
    before = seen()
    tmr = timer.CPUGPUTimer("cuda:1")
    for _ in range(100):
        with tmr.region("region", gpu=True):
            pass
    tmr.complete_all()
    rows = [["GPUs used by the process", before, seen()]]
    torch.cuda.set_device(0)
    tmr = timer.CPUGPUTimer()
    tmr.start("across", gpu=True)
    torch.cuda.set_device(1)
    tmr.end("across", gpu=True)
    tmr.snapshot()
    rows.append(["current device, after a region across set_device", 1, torch.cuda.current_device()])
    return ["what", "before", "after"], rows


def gil() -> Table:
    """How long another Python thread stands still while the launch queue is full."""
    torch = need_torch()
    import deep500_timing_torch as timer

    spin, tmr = spinner(torch), timer.CPUGPUTimer("cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4000)]

    def longest(launch: Callable[[int], None]) -> float:
        worst, stop = [0.0], threading.Event()

        def watch() -> None:
            last = time.perf_counter()
            while not stop.is_set():
                time.sleep(0)
                now = time.perf_counter()
                worst[0], last = max(worst[0], now - last), now

        thread = threading.Thread(target=watch)
        thread.start()
        for number in range(2000):
            launch(number)
        stop.set()
        thread.join()
        torch.cuda.synchronize()
        return worst[0] * 1e3

    def timed(number: int) -> None:
        with tmr.region("region", gpu=True):
            spin(0.0005)

    def bare(number: int) -> None:
        events[2 * number].record()
        spin(0.0005)
        events[2 * number + 1].record()

    cases = {"kernels alone": lambda number: spin(0.0005), "regions": timed, "bare torch.cuda.Event": bare}
    return ["2 000 kernels of 0.5 ms", "longest standstill of another thread, ms"], [
        [name, longest(launch)] for name, launch in cases.items()
    ]


def cupy() -> Table:
    """The contract of device clocks over CuPy's events, with a kernel that spins."""
    need_cupy()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "gpu",
            "tests/tensorflow/test_cupy_gpu.py",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.strip().splitlines()
    return ["result"], [[line] for line in said if line.startswith(("FAILED", "ERROR"))] + [
        [said[-1] if said else done.stderr[-200:]]
    ]


def anchors() -> Table:
    """One minute of regions on an idle stream: where they are placed against where the host saw them."""
    torch = need_torch()
    import deep500_timing_torch as timer

    spin, tmr = spinner(torch), timer.CPUGPUTimer("cuda")
    bounds = []
    began = time.monotonic()
    while time.monotonic() - began < 60:
        torch.cuda.synchronize()
        low_ns = time.perf_counter_ns()
        with tmr.region("region", gpu=True):
            spin(0.002)
        torch.cuda.synchronize()
        bounds.append((low_ns, time.perf_counter_ns()))
        time.sleep(0.02)
    placed = tmr.intervals("region", gpu=True)
    early = [low - start for (low, _), (start, _) in zip(bounds, placed.tolist(), strict=True)]
    late = [end - high for (_, high), (_, end) in zip(bounds, placed.tolist(), strict=True)]
    return ["over a minute", "µs"], [
        ["regions", len(bounds)],
        ["placed before the host began them, at most", max(early) / 1e3],
        ["placed after the host saw them done, at most", max(late) / 1e3],
        ["uncertainty that is stated", tmr.device.uncertainty_ns / 1e3],
    ]


def drift() -> Table:
    """Ten minutes simulated: a device whose clock runs at another rate, and how far off its regions are placed."""
    from deep500_timing import Timer
    from deep500_timing.testing import ManualDeviceClock

    rows = []
    for parts_per_million in (0, 5, 20, 40):
        device = ManualDeviceClock()

        class Host:
            def __init__(self, device: ManualDeviceClock, rate: float) -> None:
                self.device, self.rate = device, rate

            def now_ns(self) -> int:
                return round(self.device.now_ns * self.rate)

        host = Host(device, 1 - parts_per_million * 1e-6)
        tmr, true = Timer(device, clock=host), []
        for _ in range(6000):
            true.append(host.now_ns())
            with tmr.region("region", gpu=True):
                device.launch(0.02)
            device.advance(0.1)
        placed = tmr.intervals("region", gpu=True)[:, 0].tolist()
        worst = max(abs(place - truth) for place, truth in zip(placed, true, strict=True))
        rows.append([parts_per_million, worst / 1e3, tmr.device.uncertainty_ns / 1e3])
    return ["clocks part by, ppm", "largest error", "uncertainty that is stated"], rows


ALL = {
    "machine": Section("The machine", machine, 150),
    "captures": Section("What a capture lives through", captures, 90),
    "truth": Section("Regions against CUPTI", truth),
    "calls": Section("Calls of the CUDA runtime in 2 000 regions", calls),
    "cost": Section("Cost of a pair", cost),
    "cost-plain": Section("Cost of a pair, in the plain form", cost, plain=True),
    "memory": Section("Events and memory over 3·10⁵ regions", memory, 90),
    "fork": Section("Forked children", fork, 120),
    "exits": Section("The end of the process", exits),
    "context": Section("Devices and contexts", context),
    "collectives": Section("Collectives that are issued together", collectives),
    "gil": Section("A full launch queue", gil),
    "cupy": Section("CuPy's clock", cupy),
    "anchors": Section("The place of a region, one minute", anchors, 90),
    "drift": Section("The place of a region, ten minutes simulated", drift, anywhere=True),
    "tests": Section("The tests marked gpu", tests, 240),
}
"""What decides whether times are right first; the tests last, as a compiler takes its time there."""
