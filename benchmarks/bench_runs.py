"""The cost of a run to write, to compact and to ask, at a size: ``python -m benchmarks.bench_runs 1e7 16``.

The logs are of made-up intervals: an EPOCH, in it BATCHes, in each of them 29 regions with medians from 20 µs to 20 ms
and 5 % spread, one in 17 steps slow. The measure is CPU time, children's included, and the largest memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks._machine import describe
from deep500_timing._summary.snapshot import ClockAnchor
from deep500_timing.runs import Run
from deep500_timing.runs._format import END, HEADER, Encoder, log_name
from deep500_timing.runs._header import Place
from deep500_timing.runs._header import describe as header_of

REGIONS = 29
MEDIANS_NS = np.geomspace(2e4, 2e7, REGIONS)
FLUSH_STEPS = 64
LATENESS = """
with slowest as (
    select step, region, max(dur_ns) as longest, min(dur_ns) as shortest, count(*) as ranks
    from intervals where depth = 2 group by step, region
)
select i.rank, i.region, avg(i.dur_ns - s.shortest) as excess, sum((i.dur_ns = s.longest)::int) as slowest
from intervals i join slowest s on i.step = s.step and i.region = s.region
where i.depth = 2 group by i.rank, i.region order by i.rank, i.region
"""


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("intervals", type=float)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--folder", type=Path, help="where the logs are, or shall be and stay")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="bench-runs-"))
    figures: dict[str, object] = {"machine": describe(), "ranks": arguments.ranks}
    try:
        with _cpu(figures, "encode_cpu_s"):
            count = write(folder, int(arguments.intervals), arguments.ranks)
        figures["intervals"] = count
        figures["log_bytes_per_interval"] = sum(path.stat().st_size for path in folder.glob("*.d5log")) / count
        with _cpu(figures, "compact_cpu_s"):
            run = Run.open(folder, memory="2GB")
        parquet = sum(path.stat().st_size for path in (folder / "compacted").glob("intervals-*.parquet"))
        figures["parquet_bytes_per_interval"] = parquet / count
        with _cpu(figures, "regions_cpu_s"):
            figures["regions"] = len(run.regions(by_rank=True).rows())
        with _cpu(figures, "join_cpu_s"):
            figures["joined"] = len(run.sql(LATENESS).rows())
        run.close()
        figures["largest_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        json.dump(figures, sys.stdout, indent=1)
        print()
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)


@contextmanager
def _cpu(figures: dict[str, object], name: str) -> Iterator[None]:
    """Add the CPU time of a block to the figures."""
    start = time.process_time()
    yield
    figures[name] = round(time.process_time() - start, 2)


def write(folder: Path, intervals: int, ranks: int) -> int:
    """Write the logs of so many ranks; returns how many intervals they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = intervals // ranks // (REGIONS + 1)
    count = 0
    for rank in range(ranks):
        path = folder / log_name(rank, 0, 0)
        if path.exists():
            count += steps * (REGIONS + 1)
            continue
        rng = np.random.default_rng(rank)
        encoder = Encoder()
        clock = 10**12 + rank
        with path.open("wb") as file:
            anchor = ClockAnchor(clock, 1_700_000_000_000_000_000 + rank, 100)
            place = Place(rank, ranks, rank % 8, "")
            header = header_of(place, session=0, segment=0, anchor=anchor, clock="made up", attributes={})
            file.write(encoder.document(HEADER, header))
            epoch = clock
            for first in range(0, steps, FLUSH_STEPS):
                number = min(FLUSH_STEPS, steps - first)
                clock, arrays = _steps(rng, encoder, clock, first, number)
                frames = [*encoder.rows("intervals", arrays), *encoder.tuples("open", [(epoch, "EPOCH", 0)])]
                count += number * (REGIONS + 1)
                frames += encoder.tuples("flushes", [(clock, clock + 1_700_000_000 * 10**9, 100, count, 0, first)])
                file.write(b"".join(frames))
            file.write(encoder.document(END, {"reason": "closed", "written": count, "dropped": 0}))
    return count


def _steps(rng: np.random.Generator, encoder: Encoder, clock: int, first: int, number: int) -> tuple[int, dict]:
    durations = (MEDIANS_NS * np.exp(rng.normal(0, 0.05, (number, REGIONS)))).astype(np.int64)
    steps = np.arange(first, first + number)
    durations[steps % 17 == 0, ::5] *= 3
    gaps = rng.exponential(2000, (number, REGIONS)).astype(np.int64) + 200
    ends = clock + np.cumsum((durations + gaps).ravel()).reshape(number, REGIONS)
    starts = ends - durations
    batches = starts[:, 0] - 100
    all_starts = np.concatenate((batches[:, None], starts), axis=1)
    all_durations = np.concatenate(((ends[:, -1] + 50 - batches)[:, None], durations), axis=1)
    rows = number * (REGIONS + 1)
    names = [encoder.id_of(name) for name in ("BATCH", *(f"region_{place}" for place in range(REGIONS)))]
    arrays = {
        "start_ns": all_starts.ravel(),
        "dur_ns": all_durations.ravel(),
        "step": np.repeat(steps, REGIONS + 1),
        "region": np.tile(np.array(names), number),
        "thread": np.zeros(rows, dtype=np.int64),
        "device": np.full(rows, encoder.id_of("CPU")),
    }
    return int(ends[-1, -1]) + 1000, arrays


if __name__ == "__main__":
    main()
