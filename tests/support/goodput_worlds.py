"""Random jobs with a known account: kills, older checkpoints, elastic sizes, overlaps, clock steps, torn logs."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from unittest import mock

from deep500_timing import Timer
from deep500_timing.runs import RunLog, _log
from deep500_timing.runs._format import log_name
from deep500_timing.testing import ManualClock

EPOCH_NS = 1_700_000_000 * 10**9
MS = 10**6
ORDER = ("restore", "checkpoint", "evaluation", "compilation")
INNER = ("data", "communication", "productive")
REGIONS = {
    "data": "IO",
    "communication": "COMM",
    "productive": "BATCH",
    "checkpoint": "CHECKPOINT",
    "evaluation": "VALIDATION",
    "compilation": "compile",
    "restore": "load checkpoint",
}


@dataclass
class Process:
    """One process: true times in ns since the job began, and its records."""

    rank: int
    generation: int
    begin: int
    end: int = 0
    reason: str | None = None
    intervals: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    """Number, start, end; the end of an unfinished step is None."""
    marks: list = field(default_factory=list)
    world_size: int = 1
    lost_in_log: tuple = ()
    """Intervals and marks that were recorded after the last whole flush."""


class World:
    """A job. ``folder`` gets its logs; the truth is in the attributes."""

    def __init__(self, seed, *, ranks=None, overlaps=None, clock_steps=None, elastic=None, torn=None):
        rng = self.rng = random.Random(seed)
        self.ranks = ranks or rng.randint(1, 4)
        self.overlaps = rng.random() < 0.4 if overlaps is None else overlaps
        self.clock_steps = rng.random() < 0.3 if clock_steps is None else clock_steps
        self.elastic = rng.random() < 0.3 if elastic is None else elastic
        self.torn = rng.random() < 0.3 if torn is None else torn
        self.processes = []
        now, first = 0, 0
        starts = rng.randint(1, 5)
        for generation in range(starts):
            present = range(self.ranks)
            if self.elastic and generation:
                present = sorted(rng.sample(range(self.ranks), rng.randint(1, self.ranks)))
            last, saved, now = self._generation(generation, present, now, first, is_last=generation == starts - 1)
            # From the newest checkpoint or from an older one; from the very beginning if there is none.
            first = max(saved) + 1 if saved and rng.random() < 0.7 else (min(saved) + 1 if saved else first)
            first = rng.randint(first, last + 1) if rng.random() < 0.3 and first <= last + 1 else first
            now += rng.randint(0, 5_000) * MS
        for process in self.processes if self.torn else ():
            if process.reason is None and rng.random() < 0.5:
                self._tear(process)

    def _generation(self, generation, present, now, first, *, is_last):
        rng = self.rng
        of = {rank: Process(rank, generation, now + rng.randint(0, 300) * MS) for rank in present}
        at = {rank: process.begin + rng.randint(50, 900) * MS for rank, process in of.items()}
        for rank, process in of.items():
            process.world_size = len(of)
            if generation and rng.random() < 0.8:
                at[rank] = self._spend(process, "restore", at[rank], 200)
            # A process without any record writes no log.
            at[rank] = self._spend(process, "compilation", at[rank], 400)
        saved, number = [], first
        count = rng.randint(0, 12)
        killed_at = rng.random() if not is_last else 1.0
        for place in range(count):
            kill = place == count - 1 and killed_at < 0.8
            unfinished = kill and rng.random() < 0.6
            joins = []
            for rank, process in of.items():
                process.marks.append((number, at[rank]))
                begin = at[rank]
                if rng.random() < 0.9:
                    begin = self._spend(process, "data", begin, 30)
                work = begin + rng.randint(20, 80) * MS
                if rng.random() < 0.1:
                    self._spend(process, "compilation", begin + 5 * MS, 10)
                joins.append((rank, process, begin, work))
            end = max(work for *_, work in joins) + rng.randint(1, 20) * MS
            for rank, process, begin, work in joins:
                if unfinished:
                    process.steps.append((number, process.marks[-1][1], None))
                    at[rank] = work
                    continue
                process.intervals.append(("productive", begin, end))
                if self.ranks > 1:
                    process.intervals.append(("communication", work, end))
                if self.overlaps and rng.random() < 0.3:
                    # Data that are fetched across the end of the step, and a save inside one.
                    process.intervals.append(("data", end - rng.randint(1, 15) * MS, end + rng.randint(1, 9) * MS))
                    process.intervals.append(("checkpoint", begin + MS, begin + rng.randint(2, 19) * MS))
                process.steps.append((number, begin, end))
                at[rank] = end + rng.randint(0, 10) * MS
            if not unfinished and not kill and rng.random() < 0.3:
                saved.append(number)
                for rank, process in of.items():
                    at[rank] = self._spend(process, "checkpoint", at[rank], 60)
            if not unfinished and not kill and rng.random() < 0.2:
                for rank, process in of.items():
                    at[rank] = self._spend(process, "evaluation", at[rank], 90)
            number += not unfinished
        for rank, process in of.items():
            process.end = at[rank] + rng.randint(10, 40) * MS
            process.reason = None if count and killed_at < 0.8 else rng.choice(["closed", "exit"])
            self.processes.append(process)
        return number - 1, saved, max(process.end for process in of.values())

    def _spend(self, process, label, begin, most_ms):
        end = begin + self.rng.randint(1, most_ms) * MS
        process.intervals.append((label, begin, end))
        return end

    def _tear(self, process):
        # The log is cut inside the first write after `at`: it knows the process up to then.
        at = self.rng.randint(min(end for _, _, end in process.intervals), process.end - 1)
        kept = [interval for interval in process.intervals if interval[2] <= at]
        marks = [mark for mark in process.marks if mark[1] <= at]
        process.lost_in_log = (
            [interval for interval in process.intervals if interval[2] > at],
            [mark for mark in process.marks if mark[1] > at],
        )
        begun = dict(marks)
        process.steps = [
            step if step[2] is not None and step[2] <= at else (step[0], begun[step[0]], None)
            for step in process.steps
            if step[0] in begun
        ]
        process.intervals, process.marks, process.end = kept, marks, at

    # --- the truth -----------------------------------------------------------------------------------------------

    @property
    def span(self):
        """First begin and last end of all processes."""
        return min(p.begin for p in self.processes), max(p.end for p in self.processes)

    def redone(self, process):
        """The lowest number that a later generation begins with; None if there is none."""
        later = [p.marks[0][0] for p in self.processes if p.generation > process.generation and p.marks]
        return min(later, default=None)

    def lost_steps(self):
        """Generation and number of each finished step that was computed again."""
        found = set()
        for process in self.processes:
            redone = self.redone(process)
            if redone is not None:
                found |= {(process.generation, n) for n, _, end in process.steps if end is not None and n >= redone}
        return found

    def account(self, rank):
        """Seconds by label of one rank, one elementary segment at a time."""
        layers = []
        for process in (p for p in self.processes if p.rank == rank):
            layers.append(("process", process.begin, process.end))
            layers += process.intervals
            first = process.steps[0][1] if process.steps else process.end
            layers.append(("startup", process.begin, first))
            redone = self.redone(process)
            lost = [step for step in process.steps if redone is not None and step[0] >= redone]
            if lost and process.reason is None:
                layers.append(("lost", lost[0][1], process.end))
            elif [step for step in lost if step[2] is not None]:
                layers.append(("lost", lost[0][1], max(step[2] for step in lost if step[2] is not None)))
        low, high = self.span
        found = {}
        for first, last in pairwise(sorted({low, high, *(t for _, a, b in layers for t in (a, b))})):
            names = {name for name, a, b in layers if a <= first and last <= b}
            label = self._label(names)
            found[label] = found.get(label, 0) + last - first
        return found

    @staticmethod
    def _label(names):
        if "process" not in names:
            return "absent"
        if "lost" in names:
            return "lost"
        for name in ORDER:
            if name in names:
                return (
                    ("startup_compilation" if "startup" in names else "recompilation")
                    if name == "compilation"
                    else name
                )
        if "startup" in names:
            return "initialization"
        return next((name for name in INNER if name in names), "unknown")

    # --- the logs ------------------------------------------------------------------------------------------------

    def write(self, folder):
        """Write the logs, process by process."""
        stepped = 0
        for process in sorted(self.processes, key=lambda p: (p.rank, p.generation)):
            if process.generation == min(p.generation for p in self.processes if p.rank == process.rank):
                stepped = 0
            stepped = self._write(folder, process, stepped)

    def _write(self, folder, process, stepped):
        rng, origin = self.rng, self.rng.randint(0, 10**12)
        clock = ManualClock(origin)
        now = process.begin
        unix = {"step": stepped}

        def time_ns():
            return EPOCH_NS + now + unix["step"]

        with (
            mock.patch("deep500_timing._summary.snapshot.time.time_ns", side_effect=time_ns),
            mock.patch(
                "deep500_timing.runs._header._process_start_unix_ns", return_value=EPOCH_NS + process.begin + stepped
            ),
            mock.patch(
                "deep500_timing.runs._header.known_rank_and_world", return_value=(process.rank, process.world_size)
            ),
        ):
            tmr = Timer(clock=clock)
            log = RunLog(folder, tmr, rank=process.rank, flush_s=None, gc=False)

            def record(intervals, marks):
                for number, at in marks:
                    log.step(number, at - process.begin + origin)
                for label, begin, end in sorted(intervals, key=lambda i: i[2]):
                    tmr.record(REGIONS[label], begin - process.begin + origin, end - process.begin + origin)

            record(process.intervals, process.marks)
            log.flush()
            if self.clock_steps:
                unix["step"] += rng.choice([-1, 1]) * rng.randint(0, 3_600_000) * MS
            clock.advance_ns(process.end - process.begin)
            now = process.end
            log.flush()
            if process.lost_in_log:
                earlier = [p for p in self.processes if p.rank == process.rank and p.generation < process.generation]
                path = Path(folder) / log_name(process.rank, len(earlier), 0)
                whole = path.stat().st_size
                record(*process.lost_in_log)
                log.event("torn")
                log.flush()
                os.truncate(path, whole + rng.randint(1, 8))
            if process.reason is None:
                _log._after_fork()  # Nothing is written at the end of a process that is killed.
            else:
                log.close(reason=process.reason)
        return unix["step"]
