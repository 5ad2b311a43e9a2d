"""Reads text logs of ranks as a run, by converting each file to a run log."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.names import BATCH, CPU, GPU
from deep500_timing._summary.anchor import ClockAnchor
from deep500_timing.runs._encoder import Encoder
from deep500_timing.runs._files import name_of
from deep500_timing.runs._header import Place, describe
from deep500_timing.runs._kinds import END, HEADER
from deep500_timing.runs._lines import Line, find_files, read_file
from deep500_timing.runs._run import Run
from deep500_timing.runs._steps import StepCounter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]


class _RunOfLines(Run):
    """A run with its logs in a temporary folder."""

    scratch: tempfile.TemporaryDirectory[str]

    def close(self) -> None:
        """Close the engine and remove the folder."""
        super().close()
        self.scratch.cleanup()


def run_of_lines(folder: str, engine: Any) -> Run:
    """See :func:`deep500_timing.ranklog.read_rank_logs`."""
    try:
        files = find_files(folder)
    except FileNotFoundError:
        files = []
    if not files:
        raise FileNotFoundError(
            f"Reading the logs of ranks in {folder!r}: there is no timer_rank*.log. A global_timer writes them."
        )
    scratch = tempfile.TemporaryDirectory(prefix="deep500-timing-lines-")
    try:
        for rank, session, path in files:
            _write_log(scratch.name, rank, session, read_file(path))
        run = _RunOfLines([scratch.name], engine, None)
    except BaseException:
        scratch.cleanup()
        raise
    run.scratch = scratch
    return run


def _write_log(folder: str, rank: int, session: int, lines: list[Line]) -> None:
    encoder = Encoder()
    place = Place(rank, None, None)
    header = describe(
        place, session=session, segment=0, anchor=ClockAnchor(0, 0, 0), clock="Unix time, of lines", attributes={}
    )
    # The lines do not name their process.
    header |= {"host": None, "pid": None, "versions": {}, "devices": [], "command_sha256": None}
    lines = sorted(lines, key=lambda line: (line.start_ns, -line.end_ns))
    steps = StepCounter()
    starts, ends = (np.array([line[column] for line in lines], dtype=np.int64) for column in (2, 3))
    batches = np.array([line.name == BATCH for line in lines], dtype=bool)
    steps.add_batches(ends[batches])
    labels = steps.label(starts, ends)
    regions = np.array([encoder.id_of(line.name) for line in lines], dtype=np.int64)
    frames = [encoder.document(HEADER, header)]
    cuda = np.array([line.cuda_ns is not None for line in lines], dtype=bool)
    durations = np.array([line.cpu_ns for line in lines], dtype=np.int64)
    device_durations = np.array([line.cuda_ns or 0 for line in lines], dtype=np.int64)
    for device, chosen, lengths in ((CPU, batches | True, durations), (GPU, cuda, device_durations)):
        if chosen.any():
            table = "intervals" if device == CPU else "device_intervals"
            frames += encoder.rows(
                table,
                {
                    "start_ns": starts[chosen],
                    "dur_ns": lengths[chosen],
                    "step": labels[chosen],
                    "region": regions[chosen],
                    "thread": np.zeros(int(chosen.sum()), dtype=np.int64),
                    "device": np.full(int(chosen.sum()), encoder.id_of(device)),
                    "host_start_ns": starts[chosen],
                },
            )
    count = len(lines) + int(cuda.sum())
    frames.append(encoder.document(END, {"reason": "lines", "written": count, "dropped": 0}))
    with open(os.path.join(folder, name_of(rank, session, 0)), "wb") as file:
        file.write(b"".join(frames))
