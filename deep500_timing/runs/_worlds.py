"""Where a process writes its log. One run is one training: that of one world of ranks, or of one process alone.

The first world that begins in a folder has it for its run; its name is in the file ``world`` there. Another world gets
a separate folder inside: ``2``, ``3`` and so on. It goes on in a run that is there only as a restart: as a later
process of a rank of the same world, or in a folder that the user named, after all that ran there has ended and the last
of it failed. A finished run in such a folder is left alone: the next one is ``FOLDER-2``, but with the setting
``append``.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from deep500_timing._base.files import append_line, make_folder
from deep500_timing._base.regular import read_bounded
from deep500_timing._base.settings import setting
from deep500_timing._distributed.launchers import discover_launch, distributed, identity_of, rank_and_world
from deep500_timing.runs import _current
from deep500_timing.runs._format import IN_ORDER, log_name, parse_name

OWNER = "world"
"""The file with a line for each world that a run is or was of: its name, its launch and its number."""
_OWNER_BYTES = 1 << 20
_SAME_NS = 10**9
"""Two processes of one number that began at least this far apart are two."""
_KEY = "deep500-timing/world"


class Earlier:
    """The newest session of a rank in a folder; ``paths`` are its logs, the oldest first."""

    def __init__(self, paths: list[str], session: int) -> None:
        from deep500_timing.runs._tables import Log, read_log

        self.session = session
        self.batches = 0
        """BATCHes at its last flush."""
        self._log = Log(paths[-1])
        for log in (self._log, *map(Log, paths[-2::-1])):
            with suppress(OSError, ValueError):
                for batch in read_log(log, ("flushes",)):
                    self.batches = int(batch.arrays["batches"][-1])
            if self.batches:
                break

    def is_of(self, pid: int) -> bool:
        """Whether a process of this host wrote it."""
        return _is_of(self._log.header, pid)

    @property
    def failed(self) -> bool:
        return self._log.end is None or self._log.end.get("reason") not in IN_ORDER

    def ended_before(self, began_ns: int) -> bool:
        """Whether its process had ended at a time, in Unix ns. A log that is written grows each second."""
        still_writes = self._log.end is None and is_running(self._log.header)
        return not still_writes and _written_before(self._log.path, began_ns)


def _is_of(header: Mapping[str, Any], pid: int) -> bool:
    return header.get("host") == socket.gethostname() and header.get("pid") == pid


def is_running(header: Mapping[str, Any]) -> bool:
    """Whether the process that wrote a log with this header runs on this host."""
    pid = header.get("pid", 0)
    start_ns, then_ns = process_start_unix_ns(pid), header.get("process_start_unix_ns")
    return _is_of(header, pid) and start_ns is not None and abs(start_ns - (then_ns or start_ns)) < _SAME_NS


_START_NS = 20_000_000
"""The start of a process is known in steps of the kernel's clock, so it may seem to lie before what came first."""


def _written_before(path: str, time_ns: int) -> bool:
    with suppress(OSError):
        return os.stat(path).st_mtime_ns < time_ns + _START_NS
    return True


def process_start_unix_ns(pid: int | str = "self") -> int | None:
    """When a process of this host began, to about 10 ms; None if it has ended, and on systems without ``/proc``."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
        # Not btime of /proc/stat, which is in whole seconds.
        booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return None if state in b"ZX" else booted_ns + int(fields[18]) * 10**9 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


@cache
def _name_of(pid: int) -> str:
    # Asked once: the start of a process is known to some ns less each time.
    return f"{socket.gethostname()} {pid} {process_start_unix_ns(pid)}"


def world_of_process(*, rank_is_given: bool) -> str:
    """A name that the ranks of this process's world share, and no other process has."""
    found: str | None = "given"
    own = _name_of(os.getpid())
    if not rank_is_given:
        launch = discover_launch()
        found = identity_of(launch, _current.starter)
        if (dist := distributed()) is not None and rank_and_world() != (launch.rank, launch.world_size):
            # The store is asked once, and keeps the name of the rank that asks first.
            with suppress(Exception):
                found = dist.distributed_c10d._get_default_store().compare_set(_KEY, "", own).decode()
    return hashlib.sha256((found or own).encode()).hexdigest()[:16]


def claim(folder: str, rank: int, world: str) -> tuple[str, Earlier | None]:
    """The folder for the log of a rank of a world, and the session there that it follows.

    Raises:
        OSError: The folder cannot be made or written to.
    """
    began_ns = process_start_unix_ns() or time.time_ns()
    is_requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    is_named = folder not in _current.unnamed or is_requeued
    appends = is_requeued or setting("append")
    base, place, number, finished, has_tried = folder, folder, 1, 1, False
    while True:
        make_folder(place)
        file, mine = os.path.join(place, OWNER), _earlier(place, rank)
        # Before the owner: of a log that is there by now, the owner was written before it.
        before = mine or _earlier(place)
        owner, its_launch, owners = _owner_of(file)
        if owner == world:
            if mine is None or mine.is_of(os.getpid()) or mine.ended_before(began_ns):
                return place, mine
        elif not has_tried:
            is_free = not owner and before is None
            if not is_free and is_named:
                is_over = _written_before(file, began_ns) if before is None else before.ended_before(began_ns)
                is_later = not _current.launch or its_launch != _current.launch
                may_go_on = before is None or before.failed
                if is_over and is_later and not may_go_on and not appends and number == 1:
                    finished += 1
                    base = place = f"{folder}-{finished}"
                    continue
                is_free = is_over and (may_go_on or (is_later and appends))
            if is_free:
                append_line(file, f"{world} {_current.launch or '-'} {owners}")
                has_tried = True  # Another world may have been faster.
                continue
        number, has_tried = number + 1, False
        place = os.path.join(base, str(number))


def _owner_of(file: str) -> tuple[str, str, int]:
    # The world of a run, its launch, and how many worlds it was of. Of several that wrote at once the first has it.
    found: dict[int, tuple[str, str]] = {}
    with suppress(OSError, ValueError):
        for line in read_bounded(file, _OWNER_BYTES).decode().splitlines():
            with suppress(ValueError):
                world, launch, number = line.split(" ")
                found.setdefault(int(number), (world, launch))
    last = max(found, default=-1)
    return *found.get(last, ("", "")), last + 1


def _earlier(place: str, rank: int | None = None) -> Earlier | None:
    # The newest session of a rank; of the lowest if None.
    places = [found for name in os.listdir(place) if (found := parse_name(name)) is not None]
    if rank is None and places:
        rank = min(places)[0]
    of_rank = sorted(found for found in places if found[0] == rank)
    if not of_rank:
        return None
    session = of_rank[-1][1]
    paths = [os.path.join(place, log_name(*found)) for found in of_rank if found[1] == session]
    return Earlier(paths, session)
