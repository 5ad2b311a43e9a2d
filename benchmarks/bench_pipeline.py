"""What the timed face of a pipeline costs: ``python -m benchmarks.bench_pipeline``.

Two real gloo ranks run PyTorch's 1F1B over stages that sleep for 1 ms in each pass, once as it is and once timed by
``instrument_schedule``, in turns. Beside it the bubble of sleeping stages of 50 ms, which on idle cores is the closed
form's but for what messages and sleeping add.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import _machine
from deep500_timing._summary.stats import median_confidence_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

MICROBATCHES = 8
BLOCK = 3
"""Batches that count, of a block."""
_LIMIT_S = 120


def measure(rank: int, *, rounds: int) -> dict[str, Any]:
    """What a batch takes plain and timed, and the bubble; to be called on both ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from deep500_timing_torch.pipeline import instrument_schedule

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any, seconds: float) -> Any:
            ctx.seconds = seconds
            time.sleep(seconds)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            time.sleep(ctx.seconds)
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
        return (time.perf_counter() - began) * 1e3, busy * 1e6

    short = schedule_of(0.001)
    times_of_short = instrument_schedule(short)
    batch(short)
    times_of_short.detach()

    def block() -> tuple[float, float]:
        # The first batch after attaching or detaching is that of code whose caches have become invalid.
        batch(short)
        found = [batch(short) for _ in range(BLOCK)]
        return statistics.median(one[0] for one in found), statistics.median(one[1] for one in found)

    plain, timed, again = [], [], []
    for number in range(rounds):
        for what in ("plain", "timed", "again") if number % 2 else ("again", "timed", "plain"):
            if what == "timed":
                with times_of_short:
                    timed.append(block())
            else:
                (plain if what == "plain" else again).append(block())
    long = schedule_of(0.05)
    with instrument_schedule(long) as times:
        for _ in range(3):
            batch(long)
        bubble = times.bubble(deadline_s=30)
    return {
        "plain_ms": statistics.median(one[0] for one in plain),
        "timed_ms": statistics.median(one[0] for one in timed),
        "added_us": _of_pairs(timed, plain, 0, 1e3),
        "again_us": _of_pairs(again, plain, 0, 1e3),
        "busy_us": _of_pairs(timed, plain, 1, 1),
        "busy_again_us": _of_pairs(again, plain, 1, 1),
        "rounds": rounds,
        "bubble": bubble.bubble,
        "ideal": float(bubble.ideal or 0),
        "load": _machine.load(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}",
    }


def _of_pairs(ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]], column: int, unit: float) -> Any:
    """Microseconds a micro-batch: the median of the differences and the ends of its 95 % confidence interval."""
    differences = sorted((one[column] - other[column]) * unit for one, other in zip(ones, others, strict=True))
    low, high = median_confidence_ranks(len(differences)) or (1, len(differences))
    return [
        each / MICROBATCHES for each in (statistics.median(differences), differences[low - 1], differences[high - 1])
    ]


def report_lines(*, quick: bool = False) -> list[str]:
    """The measurement as lines of Markdown, made by two processes of its own."""
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
        return as_lines(json.loads((Path(folder) / "found.json").read_text()))


def as_lines(found: dict[str, Any]) -> list[str]:
    """What :func:`measure` found, as Markdown."""

    def of(name: str) -> str:
        middle, low, high = found[name]
        return f"{middle:+.1f} ({low:+.1f} … {high:+.1f})"

    _, low, high = found["added_us"]
    verdict = "is within the noise" if low <= 0 <= high else "is beyond the noise"
    return [
        f"PyTorch's 1F1B on two gloo ranks, {MICROBATCHES} micro-batches that sleep 1 ms forward and 1 ms backward. "
        f"Blocks of {BLOCK} batches in turns, {found['rounds']} rounds; a batch takes {found['plain_ms']:.2f} ms "
        f"as it is and {found['timed_ms']:.2f} ms timed by `instrument_schedule`. Added to a micro-batch of 2 ms, the "
        f"median of the rounds' differences with its 95 % confidence interval ({found['date']}, load {found['load']}):",
        "",
        "| | time, µs | processor time of rank 0, µs |",
        "|---|---:|---:|",
        f"| timed | {of('added_us')} | {of('busy_us')} |",
        f"| the bare schedule a second time (the noise) | {of('again_us')} | {of('busy_again_us')} |",
        "",
        f"The time that is added {verdict}: its interval {'holds' if low <= 0 <= high else 'does not hold'} 0.",
        "",
        f"The bubble of stages that sleep 50 ms: {found['bubble']:.4f}, in closed form {found['ideal']:.4f} "
        f"({100 * (found['bubble'] / found['ideal'] - 1):+.1f} %).",
        "",
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
    found = measure(rank, rounds=12 if quick else 60)
    if rank == 0:
        Path(sys.argv[sys.argv.index("--rank") + 1], "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
