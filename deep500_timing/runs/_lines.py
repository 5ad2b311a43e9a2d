"""Text logs with one line for each time: writing and reading."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import deque
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deep500_timing._base.names import BATCH, CPU, GPU
from deep500_timing._base.warn import warn_once
from deep500_timing._summary.snapshot import ClockAnchor, take_anchor
from deep500_timing.runs._collector import StepCounter
from deep500_timing.runs._format import END, HEADER, Encoder, log_name
from deep500_timing.runs._header import Place, describe
from deep500_timing.runs._log import RunLog
from deep500_timing.runs._run import Run
from deep500_timing.runs._writer import Writer

if TYPE_CHECKING:
    from deep500_timing._recording.recorder import Recorder


_LINE = re.compile(
    r"\[RANK (\d+)\] (.*), start=(\d+\.\d+), end=(\d+\.\d+), cpu_dur=(\d+\.\d+)s, cuda_dur=(?:(\d+\.\d+)ms|missing)"
)
_FILE = re.compile(r"timer_rank(\d+)(?:\.(\d+))?\.log\Z")


class Line(NamedTuple):
    """One time of one rank."""

    rank: int
    name: str
    start_ns: int
    """Unix time, as the two below, rounded to 1 µs."""
    end_ns: int
    cpu_ns: int
    cuda_ns: int | None
    """None without a device, or without a time of it."""


def write_line(line: Line) -> str:
    start, end, cpu = (f"{_micro(value) // 10**6}.{_micro(value) % 10**6:06}" for value in line[2:5])
    cuda = "missing" if line.cuda_ns is None else f"{_micro(line.cuda_ns) // 1000}.{_micro(line.cuda_ns) % 1000:03}ms"
    name = line.name if line.name.isprintable() else line.name.encode("unicode_escape").decode("ascii")
    return f"[RANK {line.rank}] {name}, start={start}, end={end}, cpu_dur={cpu}s, cuda_dur={cuda}\n"


def read_line(text: str) -> Line | None:
    match = _LINE.fullmatch(text.rstrip("\r\n"))
    if match is None:
        return None
    rank, name, *seconds, cuda_ms = match.groups()
    start, end, cpu = (int(Decimal(value) * 10**9) for value in seconds)
    return Line(int(rank), name, start, end, cpu, None if cuda_ms is None else int(Decimal(cuda_ms) * 10**6))


def _micro(nanoseconds: int) -> int:
    return (max(nanoseconds, 0) + 500) // 1000


class _LineWriter(Writer):
    def _name(self, segment: int) -> str:
        # `timer_rank3.log`; `timer_rank3.1.log` if there is one of an earlier run.
        number = self.session + segment
        return f"timer_rank{self._rank}{f'.{number}' if number else ''}.log"


class LineLog(RunLog):
    """Writes a line for each time of a timer. A line waits for the time on the device until a later one has come."""

    _writer_type = _LineWriter

    def __init__(self, folder: str, timer: Recorder, **settings: Any) -> None:
        self._host_ns: dict[tuple[str, int], deque[tuple[int, int]]] = {}
        """Start and end of the times that are not written yet, by stage and thread."""
        self._device_ns: dict[tuple[str, int], dict[int, int]] = {}
        """The durations on the device by the start on the host."""
        self._is_dump = False
        anchor = take_anchor(timer.now_ns)
        self._offset_ns = anchor.unix_ns - anchor.host_ns
        super().__init__(folder, timer, rotate_bytes=sys.maxsize, gc=False, **settings)

    def attach(self, timer: Recorder) -> None:
        """Read a timer that may also write to a run."""
        self._clock, self._now = timer._clock, timer.now_ns
        self._collector.timers.append(timer)

    def dump(self) -> None:
        """Wait for pending device times and write the lines of everything that has ended."""
        for timer in self._collector.timers:
            timer._device.collect(wait=True)
        self._is_dump = True
        try:
            self.flush()
        finally:
            self._is_dump = False

    def _frames(self, encoder: Encoder, final: bool, reason: str) -> bytes:
        waits = any(not timer.device.find().is_null for timer in self._collector.timers)
        for part in self._collector.parts:
            key, (starts, ends) = (part.track.name, part.track.thread), part.pairs.T
            if part.track.device == CPU:
                self._host_ns.setdefault(key, deque()).extend(zip(starts.tolist(), ends.tolist(), strict=True))
            else:
                times = zip(part.hosts[:, 0].tolist(), (ends - starts).tolist(), strict=True)
                self._device_ns.setdefault(key, {}).update(times)
        lines, rank, offset_ns = [], self.find_place().rank, self._offset_ns
        for key, ended in self._host_ns.items():
            known = self._device_ns.get(key, {})
            newest = max(known, default=-1)
            while ended and (final or self._is_dump or not waits or ended[0][0] <= newest):
                start, end = ended.popleft()
                device_ns = known.pop(start, None)
                lines.append(Line(rank, key[0], start + offset_ns, end + offset_ns, end - start, device_ns))
        lines.sort(key=lambda line: line.end_ns)
        return "".join(map(write_line, lines)).encode("utf-8", "backslashreplace")


class _RunOfLines(Run):
    """A run with its logs in a temporary folder."""

    scratch: tempfile.TemporaryDirectory[str]

    def close(self) -> None:
        super().close()
        self.scratch.cleanup()


def run_of_lines(folder: str, engine: Any) -> Run:
    found = [match for name in os.listdir(folder) if (match := _FILE.match(name))] if os.path.isdir(folder) else []
    if not found:
        raise FileNotFoundError(
            f"Reading the logs of ranks in {folder!r}: there is no timer_rank*.log. A global_timer writes them."
        )
    scratch = tempfile.TemporaryDirectory(prefix="deep500-timing-lines-")
    try:
        for match in found:
            rank, session = int(match[1]), int(match[2] or 0)
            data = _log_of(rank, session, _read_file(os.path.join(folder, match[0])))
            with open(os.path.join(scratch.name, log_name(rank, session, 0)), "wb") as file:
                file.write(data)
        run = _RunOfLines([scratch.name], engine, None)
    except BaseException:
        scratch.cleanup()
        raise
    run.scratch = scratch
    return run


def _read_file(path: str) -> list[Line]:
    # Other lines, such as one cut short, are counted in one warning.
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        texts = file.readlines()
    lines = [line for text in texts if (line := read_line(text)) is not None]
    if len(lines) < len(texts):
        warn_once(f"Reading {path}: {len(texts) - len(lines)} of {len(texts)} lines hold no time, and are left out.")
    return sorted(lines, key=lambda line: (line.start_ns, -line.end_ns))


def _log_of(rank: int, session: int, lines: list[Line]) -> bytes:
    encoder, steps, place = Encoder(), StepCounter(), Place(rank, None, None, "")
    header = describe(
        place, session=session, segment=0, anchor=ClockAnchor(0, 0, 0), clock="Unix time, of lines", attributes={}
    )
    # The lines do not name their process.
    header |= {"host": None, "pid": None, "versions": {}, "devices": [], "command_sha256": None}
    starts, ends = (np.array([line[column] for line in lines], dtype=np.int64) for column in (2, 3))
    steps.add_batches(ends[[line.name == BATCH for line in lines]])
    on_host = {
        "start_ns": starts,
        "dur_ns": np.array([line.cpu_ns for line in lines], dtype=np.int64),
        "step": steps.label(starts, ends),
        "region": np.array([encoder.id_of(line.name) for line in lines], dtype=np.int64),
        "thread": np.zeros(len(lines), dtype=np.int64),
        "device": np.full(len(lines), encoder.id_of(CPU)),
    }
    timed = np.array([line.cuda_ns is not None for line in lines], dtype=bool)
    on_device = {name: values[timed] for name, values in on_host.items()}
    on_device["dur_ns"] = np.array([line.cuda_ns for line in lines if line.cuda_ns is not None], dtype=np.int64)
    on_device |= {"device": np.full(int(timed.sum()), encoder.id_of(GPU)), "host_start_ns": starts[timed]}
    frames = [encoder.document(HEADER, header), *encoder.rows("intervals", on_host)]
    frames += encoder.rows("device_intervals", on_device)
    frames.append(encoder.document(END, {"reason": "lines", "written": len(lines) + int(timed.sum()), "dropped": 0}))
    return b"".join(frames)
