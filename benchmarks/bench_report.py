"""The cost of a page of a long run, and how large it is: ``python -m benchmarks.bench_report 1e7 16``.

The run is the made-up one of ``bench_runs``. The command ``deep500-timing report`` runs in its own process, twice:
from the logs as a training leaves them, and again from the tables that the first has made.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._machine import describe
from benchmarks.bench_runs import write


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("intervals", type=float)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--folder", type=Path, help="where the logs are, or shall be and stay")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="bench-report-"))
    try:
        count = write(folder, int(arguments.intervals), arguments.ranks)
        shutil.rmtree(folder / "compacted", ignore_errors=True)
        page = folder / "page.html"
        figures = {"machine": describe(), "ranks": arguments.ranks, "intervals": count}
        figures["from_logs_wall_s"] = _report(folder, page)
        figures["again_wall_s"] = _report(folder, page)
        figures["largest_memory_mb"] = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
        figures["page_bytes"] = page.stat().st_size
        json.dump(figures, sys.stdout, indent=1)
        print()
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)


def _report(folder: Path, page: Path) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "deep500_timing", "report", str(folder), str(page)], check=True)
    return round(time.perf_counter() - begin, 2)


if __name__ == "__main__":
    main()
