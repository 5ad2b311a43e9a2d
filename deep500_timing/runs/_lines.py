"""Text logs with one line for each time: writing and reading."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from deep500_timing._base.warn import warn_once

_LINE = re.compile(
    r"\[RANK (\d+)\] (.*), start=(\d+)\.(\d+), end=(\d+)\.(\d+), cpu_dur=(\d+)\.(\d+)s, "
    r"cuda_dur=(?:(\d+)\.(\d+)ms|missing)"
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
    """The line of a time, with its end."""
    start, end, cpu = (f"{_micro(value) // 10**6}.{_micro(value) % 10**6:06}" for value in line[2:5])
    cuda = "missing" if line.cuda_ns is None else f"{_micro(line.cuda_ns) // 1000}.{_micro(line.cuda_ns) % 1000:03}ms"
    return f"[RANK {line.rank}] {_one_line(line.name)}, start={start}, end={end}, cpu_dur={cpu}s, cuda_dur={cuda}\n"


def read_line(text: str) -> Line | None:
    """The time of a line; None for other lines."""
    match = _LINE.fullmatch(text.rstrip("\r\n"))
    if match is None:
        return None
    groups = match.groups()
    start, end, cpu = (_nanoseconds(groups[place], groups[place + 1], 9) for place in (2, 4, 6))
    cuda = None if groups[8] is None else _nanoseconds(groups[8], groups[9], 6)
    return Line(int(groups[0]), groups[1], start, end, cpu, cuda)


def name_of_file(rank: int, session: int) -> str:
    """``timer_rank3.log``; ``timer_rank3.1.log`` if there is one of an earlier run."""
    return f"timer_rank{rank}{f'.{session}' if session else ''}.log"


def find_files(folder: str) -> list[tuple[int, int, str]]:
    """The logs in a folder: rank, session, path; in order."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _FILE.match(entry.name)
            if match is not None:
                found.append((int(match[1]), int(match[2] or 0), entry.path))
    return sorted(found)


def read_file(path: str) -> list[Line]:
    """The times of a log. Other lines, such as one cut short, are counted in one warning."""
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        texts = file.readlines()
    lines = [line for text in texts if (line := read_line(text)) is not None]
    if len(lines) < len(texts):
        warn_once(f"Reading {path}: {len(texts) - len(lines)} of {len(texts)} lines hold no time, and are left out.")
    return lines


def _micro(nanoseconds: int) -> int:
    return (max(nanoseconds, 0) + 500) // 1000


def _nanoseconds(whole: str, fraction: str, digits: int) -> int:
    return int(whole + fraction[:digits].ljust(digits, "0"))


def _one_line(name: str) -> str:
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")
