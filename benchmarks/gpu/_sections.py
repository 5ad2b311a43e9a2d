"""The sections of a GPU session. Each yields the columns of its table, then its rows, each when it is measured."""

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

from benchmarks.gpu import _nccl, _programs, _training
from benchmarks.gpu._device import UnavailableError, kineto, need_cupy, need_torch, sized, spinner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Table = Iterator[list[Any]]

__all__ = ["ALL", "Section", "UnavailableError"]


@dataclass(frozen=True)
class Section:
    """One table.

    Attributes:
        title: Its heading.
        measure: Yields the columns and the rows.
        limit_s: How long it may take.
        anywhere: Whether it needs no GPU.
        process: Sections in a row that name the same one share a process. In ``plain`` nothing is compiled.
    """

    title: str
    measure: Callable[[], Table]
    limit_s: float = 60.0
    anywhere: bool = False
    process: str = "alone"


def machine() -> Table:
    """GPU, driver and versions."""
    torch = need_torch()
    import deep500_timing

    asked = "nvidia-smi --query-gpu=driver_version,clocks.max.sm --format=csv,noheader"
    yield ["what", "is"]
    yield ["GPU", torch.cuda.get_device_name()]
    yield ["GPUs", torch.cuda.device_count()]
    yield ["driver, highest clock", subprocess.getoutput(asked).splitlines()[0]]
    yield ["PyTorch", torch.__version__]
    yield ["CUDA", torch.version.cuda]
    yield ["Python", sys.version.split()[0]]
    yield ["form", "compiled" if deep500_timing.compiled else "plain"]


def tests() -> Table:
    """The tests that need a GPU."""
    need_torch()
    command = ["make", "test-gpu", f"GPU_PYTHON={sys.executable}", "PYTEST_ARGS=-q -p no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.strip().splitlines() if not line.startswith("make")]
    failed = [[line.partition(" ")[2]] for line in said if line.startswith(("FAILED", "ERROR"))]
    yield ["result"]
    yield [said[-1] if said else done.stderr[-200:]]
    yield from failed


def truth() -> Table:
    """Regions around kernels of known length, compared with two bare events and with Kineto."""
    torch = need_torch()
    import deep500_timing_torch as timer

    yield ["asked", "region, median", "two bare events", "Kineto", "region − bare", "region − Kineto", "95 %"]
    spin, tmr = spinner(torch), timer.CPUGPUTimer("cuda")
    for microseconds in (2, 10, 100, 1_000, 10_000, 50_000):
        count, key = sized(20 if microseconds > 5_000 else 100, 5), f"{microseconds} us"
        bare = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        spin(microseconds / 1e6)
        torch.cuda.synchronize()
        with kineto(torch) as profiler:
            spin(0.02)  # The host gets ahead, so that events and kernels lie back to back.
            for start, end in bare:
                with tmr.region(key, gpu=True):
                    spin(microseconds / 1e6)
                start.record()
                spin(microseconds / 1e6)
                end.record()
            torch.cuda.synchronize()
        events = [] if profiler is None else profiler.events()
        on_device = [event for event in events if event.device_type.name == "CUDA" and "spin" in event.name]
        kernels = [float(event.time_range.elapsed_us()) for event in on_device][-2 * count :]
        mine = [seconds * 1e6 for seconds in tmr.get_time(key, gpu=True)]
        region, two = statistics.median(mine), statistics.median(start.elapsed_time(end) * 1e3 for start, end in bare)
        if len(kernels) != 2 * count:  # Kineto has seen none, or has lost some.
            yield [microseconds, region, two, None, region - two, None, None]
            continue
        over = sorted(whole - inner for whole, inner in zip(mine, kernels[::2], strict=True))
        kernel = statistics.median(kernels[::2])
        yield [microseconds, region, two, kernel, region - two, over[count // 2], over[int(0.95 * count)]]


def cost() -> Table:
    """Start and end of a region compared with two bare events, in turns, on an idle and on a busy GPU; minima."""
    torch = need_torch()
    import deep500_timing
    import deep500_timing_torch as timer

    form = "compiled" if deep500_timing.compiled else "plain"
    yield ["what", "form", "GPU", "ns", "of two bare records"]
    spin, stream = spinner(torch), torch.cuda.current_stream()
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
    for is_busy in (False, True):
        least = dict.fromkeys(cases, float("inf"))
        for _ in range(sized(200, 10)):
            for name, call in cases.items():
                if is_busy:
                    spin(0.002)
                began = time.perf_counter_ns()
                for _ in range(50):
                    call()
                least[name] = min(least[name], (time.perf_counter_ns() - began) / 50)
                torch.cuda.synchronize()
        base = least["two records of torch.cuda.Event"]
        for name, ns in least.items():
            yield [name, form, "busy" if is_busy else "idle", ns, ns / base]
    began = time.perf_counter_ns()
    for _ in range(10_000):
        with tmr.region("region", gpu=True):
            pass
    yield [
        "one of 10 000 regions in a loop, the GPU following",
        form,
        "busy",
        (time.perf_counter_ns() - began) / 1e4,
        None,
    ]
    torch.cuda.synchronize()
    for name, call in {
        "Event.query": first.query,
        "Event.elapsed_time": lambda: first.elapsed_time(second),
    }.items():
        began = time.perf_counter_ns()
        for _ in range(1000):
            call()
        yield [name, form, "idle", (time.perf_counter_ns() - began) / 1e3, None]


def calls() -> Table:
    """Every call of the CUDA runtime that 2 000 regions make."""
    torch = need_torch()
    import deep500_timing_torch as timer

    tmr = timer.CPUGPUTimer("cuda")
    for _ in range(200):
        with tmr.region("warm", gpu=True):
            pass
    torch.cuda.synchronize()
    with kineto(torch) as profiler:
        for _ in range(2000):
            with tmr.region("region", gpu=True):
                pass
        tmr.snapshot()
    if profiler is None:
        raise UnavailableError("needs CUPTI, which the rehearsal does not have")
    counted = Counter(event.name for event in profiler.events() if event.name.startswith(("cuda", "cu")))
    counted.setdefault("any …Synchronize", sum(n for name, n in counted.items() if "Synchronize" in name))
    yield ["call", "times", "for each region"]
    for name, n in counted.most_common():
        yield [name, n, n / 2000]


def memory() -> Table:
    """Events and memory over a long run."""
    torch = need_torch()
    import deep500_timing_torch as timer

    yield ["regions", "events", "resident MiB", "reserved on the GPU, MiB"]
    tmr, total = timer.CPUGPUTimer(keep_last=100), sized(300_000, 30_000)
    data = torch.zeros(1024, device="cuda")
    began = time.perf_counter()
    for number in range(total + 1):
        with tmr.region("region", gpu=True):
            data += 1
        if number % (total // 3) == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            yield [number, tmr.device.events, resident, torch.cuda.memory_reserved() / 2**20]
    yield [f"{time.perf_counter() - began:.1f} s", tmr.device.events, None, None]


def captures() -> Table:
    """Whether a capture survives a call, by call, thread and capture mode."""
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
    yield ["while capturing", "global", "thread_local", "relaxed"]
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
        yield row


def _program(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50, check=False)


def fork() -> Table:
    """Whether a child that was forked after this may start CUDA."""
    need_torch()
    yield ["the parent did", "the child may use CUDA"]
    named = "from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer as timers; timers()"
    for what in ("pass", "timer.CPUGPUTimer()", named, "torch.cuda.is_available()"):
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
        yield [what, done.stdout.strip() or done.stderr.strip()[-100:]]


def exits() -> Table:
    """Messages at the exit of a process, and of a forked child that calls ``sys.exit``."""
    need_torch()
    # Python 3.12 warns of any fork next to CUDA's threads.
    use = "import os, sys, warnings, torch, deep500_timing_torch as timer\ntmr = timer.CPUGPUTimer('cuda')\n" + (
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "for _ in range(100):\n    with tmr.region('r', gpu=True): pass\n"
    )
    cases = {
        "ends": use,
        "ends, a forked child by sys.exit": use + "pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)\n",
    }
    yield ["the process", "exit status", "lines on stderr", "beginning with"]
    for name, text in cases.items():
        done = _program(text)
        yield [name, done.returncode, len(done.stderr.splitlines()), done.stderr.strip()[:100] or "nothing"]


def context() -> Table:
    """The current device and the process's contexts, with a timer of another device."""
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
    yield ["what", "before", "after"]
    yield ["GPUs used by the process", before, seen()]
    torch.cuda.set_device(0)
    tmr = timer.CPUGPUTimer()
    tmr.start("across", gpu=True)
    torch.cuda.set_device(1)
    tmr.end("across", gpu=True)
    tmr.snapshot()
    yield ["current device, after a region across set_device", 1, torch.cuda.current_device()]


def gil() -> Table:
    """The longest pause of another Python thread while the launch queue is full."""
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

    cases: dict[str, Callable[[int], Any]] = {
        "no kernels": lambda number: time.sleep(0.0005),
        "kernels alone": lambda number: spin(0.0005),
        "regions": timed,
        "bare torch.cuda.Event": bare,
    }
    yield ["2 000 kernels of 0.5 ms", "longest pause of another thread, ms"]
    for name, launch in cases.items():
        yield [name, longest(launch)]


def cupy() -> Table:
    """The contract of device clocks over CuPy's events, and CuPy's region around PyTorch's, on one stream."""
    cuda = need_cupy().cuda
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    done = subprocess.run([*command, "tests/tensorflow/test_cupy_gpu.py"], capture_output=True, text=True, check=False)
    said = done.stdout.strip().splitlines()
    yield ["what", "result"]
    yield ["contract of device clocks", said[-1] if said else done.stderr[-200:]]
    yield from ([line, None] for line in said if line.startswith(("FAILED", "ERROR")))
    torch = need_torch()
    import deep500_timing_tensorflow
    import deep500_timing_torch
    from deep500_timing import Timer

    outer = Timer(deep500_timing_tensorflow.CupyEventClock(synchronize=lambda: None))
    inner, spin = deep500_timing_torch.CPUGPUTimer("cuda"), spinner(torch)
    with cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        for _ in range(20):
            with outer.region("region", gpu=True), inner.region("region", gpu=True):
                spin(0.001)
    for name, tmr in (("PyTorch's events", inner), ("CuPy's events around them", outer)):
        yield [f"kernel of 1 ms, median by {name}", statistics.median(tmr.get_time("region", gpu=True)) * 1e6]


def anchors() -> Table:
    """Regions on an idle stream for five minutes: their places, compared with the host's view of them."""
    torch = need_torch()
    import deep500_timing_torch as timer

    yield ["s", "regions", "placed before the host's start by", "placed after the host's end by", "stated uncertainty"]
    spin, tmr = spinner(torch), timer.CPUGPUTimer("cuda")
    bounds: list[tuple[int, int]] = []
    began, shown = time.monotonic(), 0.0
    while shown < sized(300, 6):
        torch.cuda.synchronize()
        low_ns = time.perf_counter_ns()
        with tmr.region("region", gpu=True):
            spin(0.002)
        torch.cuda.synchronize()
        bounds.append((low_ns, time.perf_counter_ns()))
        time.sleep(0.02)
        if time.monotonic() - began - shown < sized(30, 3):
            continue
        shown = time.monotonic() - began
        placed = tmr.intervals("region", gpu=True).tolist()
        early = max(low - start for (low, _), (start, _) in zip(bounds, placed, strict=True)) / 1e3
        late = max(end - high for (_, high), (_, end) in zip(bounds, placed, strict=True)) / 1e3
        yield [shown, len(bounds), early, late, tmr.device.uncertainty_ns / 1e3]


def drift() -> Table:
    """Ten simulated minutes of a device with a drifting clock: the error of its regions' places."""
    from deep500_timing import Timer
    from deep500_timing.testing import ManualDeviceClock

    yield ["drift, ppm", "largest error", "stated uncertainty"]
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
        yield [parts_per_million, worst / 1e3, tmr.device.uncertainty_ns / 1e3]


ALL = {
    "machine": Section("The machine", machine, process="main"),
    "step": Section("A training step, timed and untimed", _training.step, 90, process="main"),
    "cost": Section("Cost of a pair", cost, process="main"),
    "truth": Section("Regions, bare events and Kineto", truth, process="main"),
    "mfu": Section("MFU beside a timed product", _training.mfu, process="main"),
    "layers": Section("Layers beside torch.profiler", _training.layers, process="main"),
    "nvml": Section("Cost of NVML", _training.nvml, process="main"),
    "recorder": Section("NCCL: the flight recorder beside _get_duration", _nccl.recorder, process="nccl"),
    "held": Section("NCCL: memory of asynchronous gathers", _nccl.held, process="nccl"),
    "parallel": Section("DDP and FSDP2 in a world of one", _nccl.parallel, process="nccl"),
    "step-compiled": Section('A step under torch.compile(mode="reduce-overhead")', _training.step_compiled, 120),
    "cost-plain": Section("Cost of a pair, in the plain form", cost, process="plain"),
    "captures": Section("Calls during a capture", captures, process="more"),
    "calls": Section("CUDA runtime calls of 2 000 regions", calls, process="more"),
    "memory": Section("Events and memory over many regions", memory, 90, process="more"),
    "gil": Section("A full launch queue", gil, process="more"),
    "context": Section("Devices and contexts", context),
    "fork": Section("Forked children", fork, 120, process="programs"),
    "exits": Section("The end of the process", exits, process="programs"),
    "cupy": Section("CuPy's clock, and PyTorch in the same process", cupy, process="programs"),
    "tests": Section("The tests marked gpu", tests, 150, process="programs"),
    "programs": Section("Programs under `deep500-timing run`", _programs.programs, 240, process="run"),
    "drift": Section("The place of a region, ten minutes simulated", drift, anywhere=True),
    "anchors": Section("The place of a region, five minutes", anchors, 320),
}
"""Ordered by worth. The last one uses the remaining time; each of its rows is complete."""
