"""Sections that train a model of GPT-2's size (124 million parameters, bfloat16), some 20 ms a step on an H100."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu._device import UnavailableError, kineto, need_torch, sized, spinner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Case = Callable[[], contextlib.AbstractContextManager[Callable[[], None]]]

__all__ = ["layers", "mfu", "nvml", "step", "step_compiled"]

STEPS = ["case", "steps", "step, ms", "more than untimed, median", "lower quartile", "upper quartile", "of a step"]


def _gpt() -> tuple[Any, Any]:
    """The model on the device, and tokens for it."""
    torch = need_torch()
    from torch import nn

    width, heads, depth, words = sized(768, 64), sized(12, 2), sized(12, 2), sized(50304, 256)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            mixed = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.mlp(self.norm2(x))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(depth)), nn.Linear(width, words, bias=False)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    if sized(0, 1):  # The rehearsal's device has no fused attention.
        for kernel in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
    with torch.device("cuda"):
        model = GPT().to(torch.bfloat16)
        return model, torch.zeros(sized(8, 2), sized(1024, 32), dtype=torch.long)


class Training:
    """The model and its steps, untimed and by the ways of timing."""

    def __init__(self, *, compiled: bool = False) -> None:
        """Build the model and train some steps."""
        self.torch = need_torch()
        self.model, self.tokens = _gpt()
        if compiled:
            # The rehearsal has no Triton, but graphs.
            self.model.compile(**({"backend": "cudagraphs"} if sized(0, 1) else {"mode": "reduce-overhead"}))
        self.optimizer = self.torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.trained = self.model
        for _ in range(sized(10, 2)):
            self.plain()
        self.torch.cuda.synchronize()

    def forward(self) -> Any:
        """The loss."""
        logits = self.trained(self.tokens)
        return self.torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten())

    def plain(self) -> None:
        """An untimed step."""
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, tmr: Any) -> None:
        """A step with four regions."""
        from deep500_timing_torch import TimeType

        with tmr.region(TimeType.BATCH, gpu=True):
            with tmr.region(TimeType.FORWARD, gpu=True):
                loss = self.forward()
            with tmr.region(TimeType.BACKWARD, gpu=True):
                loss.backward()
            with tmr.region("optimizer", gpu=True):
                self.optimizer.step()
                self.optimizer.zero_grad()

    @contextlib.contextmanager
    def untimed(self) -> Iterator[Callable[[], None]]:
        """Steps without a timer."""
        yield self.plain

    @contextlib.contextmanager
    def regions(self) -> Iterator[Callable[[], None]]:
        """Steps with four regions."""
        from deep500_timing_torch import CPUGPUTimer

        tmr = CPUGPUTimer(keep_last=1000)
        yield lambda: self.timed(tmr)

    @contextlib.contextmanager
    def in_layers(self) -> Iterator[Callable[[], None]]:
        """Steps with four regions and every layer."""
        from deep500_timing_torch import CPUGPUTimer
        from deep500_timing_torch.layers import LayerTimer

        tmr = CPUGPUTimer(keep_last=1000)
        with LayerTimer(self.model, timer=tmr):
            yield lambda: self.timed(tmr)

    @contextlib.contextmanager
    def run_log(self, system_s: float | None = None) -> Iterator[Callable[[], None]]:
        """Steps with four regions, which a run log writes."""
        from deep500_timing.runs import RunLog
        from deep500_timing_torch import CPUGPUTimer

        with tempfile.TemporaryDirectory() as folder:
            log = RunLog(folder, rank=0, system_s=system_s)
            tmr = CPUGPUTimer(keep_last=1000, run=log)
            yield lambda: self.timed(tmr)
            log.close()

    @contextlib.contextmanager
    def ddp(self, *, timed: bool = False) -> Iterator[Callable[[], None]]:
        """Steps under DDP in a world of one, its buckets timed or not."""
        from torch.nn.parallel import DistributedDataParallel

        from deep500_timing_torch import comm

        _ensure_world(self.torch)
        self.trained = DistributedDataParallel(self.model)
        if timed:
            comm.instrument_ddp(self.trained)
        for _ in range(2):  # DDP rebuilds its buckets after the first.
            self.plain()
        yield self.plain
        self.trained = self.model


def _ensure_world(torch: Any) -> None:
    dist = torch.distributed
    if not dist.is_initialized():
        device = torch.device("cuda:0")
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)


def in_turns(torch: Any, cases: dict[str, tuple[str, Case]]) -> Iterator[list[Any]]:
    """Steps of each case in turn, and how much longer they are than those of the case to compare with.

    Args:
        torch: PyTorch.
        cases: For each name the one to compare with, and what gives its step.
    """
    steps, rounds = sized(8, 2), sized(12, 2)
    took_ms: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, (_, case) in cases.items():
            with case() as run_step:
                run_step()
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(steps):
                    run_step()
                torch.cuda.synchronize()
                if number:  # The first round is a warm-up.
                    took_ms[name].append((time.perf_counter() - began) * 1e3 / steps)
    for name, (base, _) in cases.items():
        middle = statistics.median(took_ms[name])
        if base == name:
            yield [name, steps * rounds, middle, None, None, None, None]
            continue
        more = [(one - other) * 1e3 for one, other in zip(took_ms[name], took_ms[base], strict=True)]
        low, median, high = statistics.quantiles(more, n=4)
        share = f"{median / statistics.median(took_ms[base]) / 10:.2f} %"
        yield [name, steps * rounds, middle, median, low, high, share]


def step() -> Iterator[list[Any]]:
    """A step untimed, with regions, layers, a run log; and under DDP with its buckets timed."""
    torch = need_torch()
    yield STEPS
    training = Training()
    yield from in_turns(
        torch,
        {
            "untimed": ("untimed", training.untimed),
            "BATCH and 3 regions": ("untimed", training.regions),
            "the same and every layer": ("untimed", training.in_layers),
            "the regions and a run log": ("untimed", training.run_log),
        },
    )
    yield from in_turns(
        torch,
        {
            "DDP, untimed": ("DDP, untimed", training.ddp),
            "DDP, buckets timed": ("DDP, untimed", lambda: training.ddp(timed=True)),
        },
    )
    torch.distributed.destroy_process_group()


def step_compiled() -> Iterator[list[Any]]:
    """The same as CUDA graphs of compiled code."""
    torch = need_torch()
    yield STEPS
    training = Training(compiled=True)
    cases = {
        "untimed": ("untimed", training.untimed),
        "BATCH and 3 regions": ("untimed", training.regions),
        "the regions and a run log": ("untimed", training.run_log),
    }
    yield from in_turns(torch, cases)


def mfu() -> Iterator[list[Any]]:
    """A product of 8192³ in bfloat16 between two events, the model's steps, and the peak of the table."""
    torch = need_torch()
    from deep500_timing_torch.flop_counter import count_flops, device_peak_flops

    yield ["what", "TFLOP/s", "of the table's peak"]
    peak = device_peak_flops(dtype=torch.bfloat16)
    per_s = None if peak is None else peak.flops_per_s
    yield ["the table" if peak is None else f"the table: {peak.device}", per_s and per_s / 1e12, None]
    size = sized(8192, 512)
    one, other = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for count in (10, 100):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for event in events[1:]:
            torch.mm(one, other)
            event.record()
        torch.cuda.synchronize()
        taken_ms = [a.elapsed_time(b) for a, b in itertools.pairwise(events[1:])]
        rate = 2 * size**3 / statistics.median(taken_ms) * 1e3
        yield [f"{size}³, median of {count} products", rate / 1e12, per_s and rate / per_s]
    training = Training()
    model = count_flops(training.plain)
    steps = sized(50, 3)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        training.plain()
    torch.cuda.synchronize()
    if model is None:
        raise UnavailableError("PyTorch's FlopCounterMode counted nothing")
    rate = model.flops * steps / (time.perf_counter() - began)
    yield ["training steps, FLOPs by FlopCounterMode", rate / 1e12, per_s and rate / per_s]


def layers() -> Iterator[list[Any]]:
    """The forward passes of blocks by the layer timer, and by torch.profiler with a range around each block."""
    torch = need_torch()
    from torch.profiler import record_function

    from deep500_timing_torch.layers import LayerTimer

    yield ["layer", "layer timer, forward, median", "torch.profiler, mean", "kernels' own time, mean"]
    training, spin = Training(), spinner(torch)
    steps = sized(20, 3)
    with LayerTimer(training.model, gpu=True) as timed:
        for _ in range(steps):
            spin(0.02)  # The host gets ahead, so that no gap lies within a layer.
            training.plain()
        torch.cuda.synchronize()
        found = {layer.path: layer.gpu_stats["forward"].median for layer in timed.times().layers if layer.gpu_stats}
    opened: list[Any] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            opened.append(record_function(name))
            opened[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    paths = [f"blocks.{number}" for number in range(len(training.model.blocks))] + ["head"]
    for path in paths:
        module = training.model.get_submodule(path)
        module.register_forward_pre_hook(enter(f"range {path}"))
        module.register_forward_hook(leave)
    with kineto(torch) as profiler:
        for _ in range(steps):
            spin(0.02)
            training.plain()
        torch.cuda.synchronize()
    averages, events = ([], []) if profiler is None else (profiler.key_averages(), profiler.events())
    ranges = {event.key: event for event in averages if event.key.startswith("range ")}
    spans = [event for event in events if event.name.startswith("range ") and "CUDA" in event.device_type.name]
    for path in paths:
        kernels = ranges[f"range {path}"].device_time_total / steps if f"range {path}" in ranges else None
        own = [float(event.time_range.elapsed_us()) for event in spans if event.name == f"range {path}"]
        timed_us = found[path] * 1e6 if path in found else None
        yield [path, timed_us, statistics.mean(own) if own else None, kernels or None]


def nvml() -> Iterator[list[Any]]:
    """The cost and the values of a system sample, and of a step with a sample every 0.1 s."""
    torch = need_torch()
    from deep500_timing.runs._system import SystemSampler

    yield ["what", "is", "", "", "", "", ""]
    training = Training()
    training.plain()
    sampler, taken, seen = SystemSampler(1e-9), [], {}
    for _ in range(20):
        began = time.perf_counter()
        seen = dict(sampler.due(time.perf_counter_ns()))
        taken.append((time.perf_counter() - began) * 1e3)
    yield ["one sample, median, ms", statistics.median(taken), *[None] * 5]
    for metric, value in seen.items():
        if metric.startswith("gpu"):
            yield [metric, value, *[None] * 5]
    yield STEPS
    cases = {
        "untimed": ("untimed", training.untimed),
        "the regions and a run log": ("untimed", training.run_log),
        "and NVML each 0.1 s": ("untimed", lambda: training.run_log(0.1)),
    }
    yield from in_turns(torch, cases)
