"""The cost of the timed face of a pipeline: ``python -m benchmarks.bench_pipeline``.

Two real gloo ranks run PyTorch's 1F1B, as it is and timed by ``instrument_schedule``, in turns in the same processes.
Its stages sleep, and wait out the last of a pass busily, so that a pass takes what it shall to a microsecond. With it
the addition between the passes in one process, which no other disturbs much; and the
bubble of sleeping stages of 50 ms, which on idle cores is the closed form's but for what messages and sleeping add.
"""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import _between_passes, _machine
from deep500_timing._summary.stats import median_confidence_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

MICROBATCHES = 8
PASSES_MS = (0.5, 1.0)
"""How long a stage computes forward, and as long backward."""
BLOCK = 6
"""Batches that count, of a block."""
_BUSY_S = 0.0002
"""How much of a pass is no sleep: more than a sleep is too long."""
_TELLING = 0.1
"""An interval wider than that share of a micro-batch says nothing."""
_LIMIT_S = 150


def measure(rank: int, *, seconds: float) -> dict[str, Any]:
    """A batch's time bare and timed, and the bubble; to be called on both ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from deep500_timing_torch.pipeline import instrument_schedule

    _sleep_exactly()

    def compute(seconds: float) -> None:
        end = time.perf_counter() + seconds
        if seconds > _BUSY_S:
            time.sleep(seconds - _BUSY_S)
        while time.perf_counter() < end:
            pass

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any, seconds: float) -> Any:
            ctx.seconds = seconds
            compute(seconds)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            compute(ctx.seconds)
            return gradients[0], None

    class Sleeping(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, value: Any) -> Any:
            return Pause.apply(value * self.weight, self.seconds)  # type: ignore[no-untyped-call]

    def schedule_of(seconds: float) -> Any:
        stage = PipelineStage(Sleeping(seconds), rank, 2, torch.device("cpu"))
        return Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())

    data, labels = torch.ones(MICROBATCHES, 4), torch.zeros(MICROBATCHES, 4)

    def batch(schedule: Any) -> tuple[float, float]:
        dist.barrier()
        began, began_busy = time.perf_counter(), time.thread_time()
        if rank == 0:
            schedule.step(data)
        else:
            schedule.step(target=labels, losses=[])
        busy = time.thread_time() - began_busy
        dist.barrier()
        return time.perf_counter() - began, busy

    def compared(pass_ms: float) -> dict[str, Any]:
        schedule = schedule_of(pass_ms / 1e3)
        times = instrument_schedule(schedule)
        batch(schedule)
        times.detach()

        def block() -> tuple[float, float]:
            # The first batch after attaching or detaching is that of code with invalid caches.
            batch(schedule)
            found = [batch(schedule) for _ in range(BLOCK)]
            return statistics.median(one[0] for one in found), statistics.median(one[1] for one in found)

        blocks: dict[str, list[tuple[float, float]]] = {"bare": [], "again": [], "timed": []}
        order, names, end = random.Random(0), list(blocks), time.perf_counter() + seconds
        while True:
            gc.collect()
            goes_on = torch.tensor([time.perf_counter() < end])
            dist.broadcast(goes_on, 0)
            if not goes_on.item():
                break
            order.shuffle(names)
            for name in names:
                if name == "timed":
                    with times:
                        blocks[name].append(block())
                else:
                    blocks[name].append(block())
        return {"pass_ms": pass_ms, "rounds": len(blocks["bare"])} | _differences(blocks)

    gc.disable()
    rows = [compared(pass_ms) for pass_ms in PASSES_MS]
    gc.enable()
    long = schedule_of(0.05)
    with instrument_schedule(long) as times:
        for _ in range(3):
            batch(long)
        bubble = times.bubble(deadline_s=30)
    return {
        "rows": rows,
        "bubble": bubble.bubble,
        "ideal": float(bubble.ideal or 0),
        "load": _machine.load(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}",
    }


def _sleep_exactly() -> None:
    """On Linux, let no sleep be too long by the 50 µs that a process grants the kernel."""
    if sys.platform == "linux":
        import ctypes

        set_timer_slack = 29
        ctypes.CDLL(None).prctl(set_timer_slack, 1, 0, 0, 0)


def _differences(blocks: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Microseconds a micro-batch, from seconds of batches: the median of the rounds and its 95 % interval.

    The timed block is compared with the mean of both bare blocks of its round.
    """
    found: dict[str, Any] = {"bare_ms": statistics.median(one[0] for one in blocks["bare"]) * 1e3}
    for column, what in enumerate(("wall", "busy")):
        bare, again, timed = ([one[column] for one in blocks[name]] for name in ("bare", "again", "timed"))
        added = [one - (first + second) / 2 for one, first, second in zip(timed, bare, again, strict=True)]
        noise = [second - first for first, second in zip(bare, again, strict=True)]
        found[f"added_{what}_us"] = _median(one * 1e6 / MICROBATCHES for one in added)
        found[f"again_{what}_us"] = _median(one * 1e6 / MICROBATCHES for one in noise)
    return found


def _median(numbers: Iterable[float]) -> list[float]:
    """The median and the ends of its 95 % confidence interval."""
    ordered = sorted(numbers)
    low, high = median_confidence_ranks(len(ordered)) or (1, len(ordered))
    return [statistics.median(ordered), ordered[low - 1], ordered[high - 1]]


def report_lines(*, quick: bool = False) -> list[str]:
    """The measurement as lines of Markdown, made by two separate processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.bench_pipeline", "--rank", folder, *(["--quick"] if quick else [])]
        base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        base["OMP_NUM_THREADS"] = "1"
        root = Path(__file__).parent.parent
        ranks = [
            subprocess.Popen(
                command, cwd=root, env={**base, "RANK": str(rank)}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
            for rank in range(2)
        ]
        try:
            errors = [rank.communicate(timeout=_LIMIT_S)[1].decode(errors="replace") for rank in ranks]
        except subprocess.TimeoutExpired:
            return [f"Not measured: two ranks did not end within {_LIMIT_S} s", ""]
        finally:
            for one in ranks:
                one.kill()
        if any(one.returncode for one in ranks):
            return [f"Not measured: {(errors[0] + errors[1]).strip().splitlines()[-1]}", ""]
        found = json.loads((Path(folder) / "found.json").read_text())
    return as_lines(found | {"between": _between_passes.measure(50 if quick else 500)})


def as_lines(found: dict[str, Any]) -> list[str]:
    """What :func:`measure` found, as Markdown."""

    def of(middle: float, low: float, high: float) -> str:
        return f"{middle:+.1f} ({low:+.1f} … {high:+.1f})"

    return [
        f"PyTorch's 1F1B on two gloo ranks, {MICROBATCHES} micro-batches. Each round runs {BLOCK} batches of the bare "
        "schedule, of the bare schedule again and of the one timed by `instrument_schedule`, in an order drawn anew, "
        "each after one that does not count; its time is their median, as some are held up by what else the machine "
        "does. In µs a micro-batch, the median over the rounds and its 95 % confidence interval: what timing adds to "
        "the mean of both bare ones, and what the second bare one differs from the first "
        f"({found['date']}, load {found['load']}).",
        "",
        "| a micro-batch on a stage: forward and backward pass | rounds | bare batch, ms | timed, µs | bare again, µs "
        "| timed, processor of rank 0, µs | bare again, µs |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {row['pass_ms']:g} ms + {row['pass_ms']:g} ms | {row['rounds']} | {row['bare_ms']:.2f} "
            f"| {of(*row['added_wall_us'])} | {of(*row['again_wall_us'])} | {of(*row['added_busy_us'])} "
            f"| {of(*row['again_busy_us'])} |"
            for row in found["rows"]
        ),
        "",
        *(_verdict(row) for row in found["rows"]),
        "",
        *_lines_of_between(found["between"]),
        "",
        f"The bubble of stages that sleep 50 ms: {found['bubble']:.4f}, in closed form {found['ideal']:.4f} "
        f"({100 * (found['bubble'] / found['ideal'] - 1):+.1f} %).",
        "",
    ]


def _verdict(row: dict[str, Any]) -> str:
    middle, low, high = row["added_wall_us"]
    whole_us = 2e3 * row["pass_ms"]
    what = f"At {2 * row['pass_ms']:g} ms a micro-batch the time that is added"
    if high - low > _TELLING * whole_us:
        return f"{what} cannot be told: the machine was too busy."
    if low > 0:
        return f"{what} is beyond the noise: {100 * middle / whole_us:.1f} % of it."
    return f"{what} is within the noise; more than {high:.0f} µs ({100 * high / whole_us:.1f} %) would have been seen."


def _lines_of_between(found: dict[str, Any]) -> list[str]:
    bare, timed = found["bare_ns"], found["timed_ns"]
    middle, low, high = _median((one - other) / 1e3 for one, other in zip(timed, bare, strict=True))
    return [
        "In one process and without messages, a micro-batch in the middle of a pipeline between its passes, each of "
        f"which reads {_between_passes.READS_MIB} MiB: {statistics.median(bare) / 1e3:.1f} µs bare, timed "
        f"{middle:+.1f} µs ({low:+.1f} … {high:+.1f}), {100 * middle / 1e3:.1f} % of 1 ms."
    ]


def main() -> None:
    """Measure and print; with ``--rank FOLDER`` be one of the two ranks."""
    quick = "--quick" in sys.argv
    if "--rank" not in sys.argv:
        print("\n".join(report_lines(quick=quick)))
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = measure(rank, seconds=2 if quick else 25)
    if rank == 0:
        Path(sys.argv[sys.argv.index("--rank") + 1], "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
