"""How long the account of a long job takes: 30 days, 512 ranks, 5 starts.

``python -m benchmarks.bench_goodput``. It writes the logs by the log's own encoder, converts them, and times
``Run.goodput`` alone. A step takes five minutes, with an IO and a COMM in it; a checkpoint is saved every 24 steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from deep500_timing.runs import Run
from deep500_timing.runs._format import HEADER, TABLES, Encoder, described, log_name

DAY_NS, STEP_NS = 86_400 * 10**9, 300 * 10**9
UNIX_NS = 1_700_000_000 * 10**9


def write(folder: str, ranks: int, starts: int, steps: int) -> int:
    """Write the logs; returns the number of intervals."""
    Path(folder).mkdir()
    rng, intervals = np.random.default_rng(1), 0
    for rank in range(ranks):
        for session in range(starts):
            begin = session * (30 * DAY_NS // starts)
            first = session * (steps - 20)
            starts_ns = begin + 600 * 10**9 + np.arange(steps, dtype=np.int64) * STEP_NS
            jitter = rng.integers(0, 10**9, steps)
            encoder = Encoder()
            io, comm, batch = (encoder.id_of(name) for name in ("IO", "COMM", "BATCH"))
            rows = [(io, starts_ns, 10**10 + jitter), (comm, starts_ns + 25 * 10**10 + jitter, 3 * 10**10 - jitter)]
            rows.append((batch, starts_ns, np.full(steps, 29 * 10**10)))
            columns = {
                "start_ns": np.stack([of for _, of, _ in rows], axis=1).ravel(),
                "dur_ns": np.stack([of for *_, of in rows], axis=1).ravel(),
                "step": np.repeat(first + np.arange(steps), 3),
                "region": np.tile([name for name, *_ in rows], steps),
                "thread": np.zeros(3 * steps, np.int64),
                "device": np.full(3 * steps, encoder.id_of("CPU")),
            }
            header = {
                "schema": 1,
                "rank": rank,
                "session": session,
                "segment": 0,
                "host": f"host-{rank // 8}",
                "pid": rank,
                "world_size": ranks,
                "process_start_unix_ns": UNIX_NS + begin,
                "clock": "perf_counter_ns",
                "anchor": {"time_ns": 0, "unix_ns": UNIX_NS, "width_ns": 0},
                "tables": described(TABLES),
            }
            saved = np.arange(23, steps, 24)
            ends = starts_ns + 295 * 10**9
            marked = [(int(ends[at]), "checkpoint_saved", first + int(at), 5 * 10**9) for at in saved]
            end_ns = int(ends[-1])
            frames = [encoder.document(HEADER, header), *encoder.rows("intervals", columns)]
            frames += encoder.rows("marks", {"time_ns": starts_ns, "step": first + np.arange(steps)})
            frames += encoder.tuples("milestones", marked)
            frames += encoder.tuples("flushes", [(end_ns, UNIX_NS + end_ns, 0, 3 * steps, 0, steps)])
            (Path(folder) / log_name(rank, session, 0)).write_bytes(b"".join(frames))
            intervals += 3 * steps
    return intervals


def main() -> None:
    """Write, convert, account, and print the times."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/run"
        intervals = write(path, ranks, 5, 1720)
        began, used = time.perf_counter(), time.process_time()
        with Run.open(path) as run:
            opened, opened_used = time.perf_counter() - began, time.process_time() - used
            began, used = time.perf_counter(), time.process_time()
            account = run.goodput()
            took, took_used = time.perf_counter() - began, time.process_time() - used
    print(account)
    print(
        json.dumps(
            {
                "ranks": ranks,
                "intervals": intervals,
                "convert_s": round(opened, 2),
                "convert_cpu_s": round(opened_used, 2),
                "goodput_s": round(took, 2),
                "goodput_cpu_s": round(took_used, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
