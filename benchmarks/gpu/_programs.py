"""Programs under ``deep500-timing run``: their exit, their own count of steps next to ours, and the first finding."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu._device import UnavailableError, need_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["programs"]

LIMIT_S = 60
FOLDER = Path(__file__).parent / "programs"
NEEDS = {"hugging_face": "transformers", "lightning_fit": "lightning", "jax_step": "jax"}


def programs() -> Iterator[list[Any]]:
    """Each program plain, then under ``run``."""
    need_torch()
    import importlib.util

    if importlib.util.find_spec("duckdb") is None:
        raise UnavailableError("needs duckdb, which reads the runs")
    columns = [
        "program",
        "exit",
        "steps, its own count",
        "ours",
        "median step, its own, ms",
        "ours",
        "a step on the GPU",
    ]
    yield [*columns, "whole program, plain, s", "under run", "first finding"]
    for path in sorted(FOLDER.glob("*.py")):
        if (package := NEEDS.get(path.stem)) and importlib.util.find_spec(package) is None:
            yield [path.stem, f"needs {package}", *[None] * 8]
            continue
        plain, plain_s = _run([sys.executable, str(path)])
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "deep500_timing", "run", "--run", folder, str(path)]
            timed, timed_s = _run(command)
            said = timed.stdout.strip().splitlines()
            own = next((json.loads(line) for line in said if line.startswith('{"steps"')), {})
            yield [
                path.stem,
                _exit(plain, timed),
                own.get("steps"),
                *_seen(folder, own),
                plain_s,
                timed_s,
                _first(folder),
            ]


def _run(command: list[str]) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, -1, "", f"stopped after {LIMIT_S} s")
    return done, time.perf_counter() - began


def _exit(plain: Any, timed: Any) -> str:
    if plain.returncode == timed.returncode == 0:
        return "0"
    last = (timed.stderr.strip().splitlines() or [""])[-1]
    return f"{plain.returncode} plain, {timed.returncode} under run: {last[:100]}"


def _seen(folder: str, own: dict[str, Any]) -> list[Any]:
    """Our count of steps, the program's own median in ms, ours, and what lay on the GPU a step."""
    from deep500_timing.runs import Run

    try:
        with Run.open(folder) as run:
            (row,) = run.sql(
                "select cast(sum(cast(region = 'BATCH' as int)) as bigint) as steps, "
                "median(case when region = 'BATCH' then dur_ns end) / 1e6 as ms, "
                "cast(sum(case when device <> 'CPU' then dur_ns end) as double) / 1e6 as gpu_ms from intervals"
            ).rows()
    except Exception as error:
        return [f"{type(error).__name__}: {error}", own.get("step_ms"), None, None]
    gpu_ms = row["gpu_ms"] / row["steps"] if row["gpu_ms"] else None
    return [int(row["steps"] or 0), own.get("step_ms"), row["ms"], gpu_ms]


def _first(folder: str) -> str:
    done, _ = _run([sys.executable, "-m", "deep500_timing", "show", folder])
    paragraphs = [" ".join(part.split()) for part in done.stdout.split("\n\n") if part.strip()]
    return " / ".join(paragraphs[:2])[:600] or done.stderr[-200:]
