"""The facts of a run for the heading, as plain data, and the tree of its regions with trends and counters."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import BATCH, CPU
from deep500_timing._summary.text import format_time, safe_name, times
from deep500_timing.runs._format import CUT, IN_ORDER
from deep500_timing.runs._worlds import is_running

if TYPE_CHECKING:
    from deep500_timing.runs import Run

_NEWEST = 21
"""The newest steps, which give the current speed."""
_OLD_S = 60.0
"""Seconds without data after which a run may have been killed: logs are written each second."""

_FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "cupy", "lightning", "transformers", "deepspeed")


@dataclass(frozen=True, slots=True)
class About:
    """Name, size, length and environment of a run. Pass its texts through ``safe_name`` before printing."""

    name: str
    folder: str
    """The folder as passed to ``Run.open``, for commands."""
    program: str
    """Its file, and the name of a child of ``multiprocessing`` or of Ray's process; of the lowest rank."""
    ranks: tuple[int, ...]
    """The ranks with a log, rising."""
    world_size: int | None
    """The number of ranks of the training; None if unknown."""
    hosts: tuple[str, ...]
    sessions: int
    epochs: int
    """EPOCHs that ended, on the lowest rank."""
    steps: int
    first_unix_s: float | None
    """When the first interval began, in Unix time; None where it is not known."""
    wall_s: float | None
    """From the first interval's start to the last one's end."""
    ended: bool
    """Whether every rank has ended its log. For a restarted rank, the latest session decides."""
    running: bool
    """Whether the process of a log without an end runs on this host."""
    ends: tuple[str, ...]
    """The reasons of these ends, each once: ``"closed"``, ``"KeyboardInterrupt"``."""
    earlier_ends: tuple[str, ...]
    """The same of earlier sessions; ``"killed"`` for a log without an end."""
    versions: dict[str, str]
    """Versions of Python and of frameworks, by name, of the lowest rank."""
    devices: tuple[str, ...]
    """Names of accelerators, of the lowest rank."""
    has_device_times: bool
    platform: str
    attributes: dict[str, Any]
    dropped: int
    """Intervals that were recorded and could not be written."""
    damaged_bytes: int
    """Bytes of logs that cannot be read."""
    missing_frames: int
    """Frames of logs that are not there."""
    repeated_frames: int
    """Frames that a log has again, which are not counted again."""
    repeated_logs: int
    """Logs that are there again in another folder: their intervals count again."""
    unread_logs: int
    """Logs that cannot be read, or not to their end."""
    clock_step_s: float
    """The largest step of Unix time against the timers' clock, with its sign."""

    @property
    def frameworks(self) -> str:
        named = [f"{name} {self.versions[name]}" for name in _FRAMEWORKS if name in self.versions]
        if self.devices:
            different = dict.fromkeys(self.devices)
            named += [f"{self.devices.count(name)} × {name}" if len(self.devices) > 1 else name for name in different]
        elif not self.has_device_times:
            named.append("CPU only")
        return ", ".join(named)

    @property
    def state(self) -> str:
        """Whether the run has ended, and the reason if it was interrupted."""
        if not self.ended:
            return "running" if self.running else "not ended: killed, or running"
        broken = [end for end in self.ends if end not in IN_ORDER]
        lost = any(self.lost.values()) or self.missing_ranks
        if broken:
            return f"ended by {', '.join(map(safe_name, broken))}"
        return CUT if CUT in self.ends else "ended" if lost else "complete"

    @property
    def lost(self) -> dict[str, int]:
        """How much the logs lack, by what."""
        return {
            "intervals dropped": self.dropped,
            "bytes of logs damaged": self.damaged_bytes,
            "frames of logs missing": self.missing_frames,
            "frames of logs repeated": self.repeated_frames,
            "logs not read": self.unread_logs,
        }

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks of the training without a log."""
        return tuple(sorted({*range(self.world_size or 0)}.difference(self.ranks)))


def about_run(run: Run) -> About:
    logs = run.table("logs").rows()
    ranks = tuple(sorted({log["rank"] for log in logs}))
    lowest = min(ranks, default=0)
    [counts] = run.sql(
        f"select count(distinct case when region = '{BATCH}' then step end) as steps, "
        f"sum(case when region = 'EPOCH' and device = '{CPU}' and rank = {int(lowest)} then 1 else 0 end) as epochs, "
        f"sum(case when device <> '{CPU}' then 1 else 0 end) as on_device "
        f"from intervals where region in ('{BATCH}', 'EPOCH') or device <> '{CPU}'"
    ).rows()
    firsts = [log["first_unix_ns"] for log in logs if log["first_unix_ns"] is not None]
    lasts = [log["last_unix_ns"] for log in logs if log["last_unix_ns"] is not None]
    of_lowest = [log for log in logs if log["rank"] == lowest]
    header = json.loads(of_lowest[-1]["header"]) if of_lowest else {}
    # The last file of a session says how it ended.
    last_files = {
        (log["rank"], log["session"]): log
        for log in sorted(logs, key=lambda log: log["segment"] or 0)
        if log["fault"] is None
    }
    # The sessions of a rank that a later one followed. Two that ran at the same time both count.
    followed = run.sql(
        "with spans as (select rank, session, min(first_unix_ns) as began, coalesce(max(last_unix_ns), 0) as ended "
        "from logs group by rank, session) select distinct early.rank as rank, early.session as session "
        "from spans early join spans late on early.rank = late.rank and early.session < late.session "
        "and early.ended < late.began"
    )
    replaced = {(row["rank"], row["session"]) for row in followed.rows()}
    newest = [log for start, log in last_files.items() if start not in replaced]
    ends = [log["end"] for log in newest]
    earlier = [log["end"] or "killed" for start, log in last_files.items() if start in replaced]
    steps_of_clock = [log["clock_step_ns"] for log in logs if log["clock_step_ns"] is not None]
    folder = run.folders[0]
    above, name = os.path.split(os.path.abspath(folder))
    return About(
        # One of several trainings in one folder.
        name=os.path.join(os.path.basename(above), name) if name.isdecimal() else name or folder,
        folder=folder,
        program=str(header.get("program") or ""),
        ranks=ranks,
        world_size=max((log["world_size"] for log in logs if log["world_size"] is not None), default=None),
        hosts=tuple(sorted({log["host"] for log in logs if log["host"]})),
        sessions=len({log["session"] for log in logs}),
        epochs=int(counts["epochs"] or 0),
        steps=counts["steps"] or 0,
        first_unix_s=min(firsts) / 1e9 if firsts else None,
        wall_s=(max(lasts) - min(firsts)) / 1e9 if firsts and lasts else None,
        ended=all(ends),
        running=any(is_running(json.loads(log["header"])) for log in newest if not log["end"]),
        ends=tuple(sorted({str(end) for end in ends if end})),
        earlier_ends=tuple(sorted(set(map(str, earlier)))),
        versions={str(name): str(version) for name, version in header.get("versions", {}).items()},
        devices=tuple(str(name) for name in header.get("devices", ())),
        has_device_times=bool(counts["on_device"]),
        platform=str(header.get("platform", "")),
        attributes=header.get("attributes", {}),
        dropped=sum(log["dropped"] or 0 for log in last_files.values()),
        damaged_bytes=sum(log["damaged_bytes"] or 0 for log in logs),
        missing_frames=sum(log["missing_frames"] or 0 for log in logs),
        repeated_frames=sum(log["repeated_frames"] or 0 for log in logs),
        repeated_logs=len(logs) - len({(log["rank"], log["session"], log["segment"]) for log in logs}),
        unread_logs=sum(log["fault"] is not None for log in logs),
        clock_step_s=max(steps_of_clock, key=abs, default=0) / 1e9,
    )


def live_line(run: Run, rank: int | None = None, *, now_unix_s: float | None = None) -> str:
    """The state of a run that is being written: its speed, its last step and how old the data are."""
    about = about_run(run)
    rank = about.ranks[0] if rank is None else rank
    parts = []
    rows = run.sql(
        f"select step, min(start_ns) as start_ns from intervals where region = '{BATCH}' and device = '{CPU}' "
        f"and rank = {int(rank)} and step is not null and session = (select max(session) from intervals "
        f"where rank = {int(rank)}) group by step order by start_ns desc limit {_NEWEST}"
    ).rows()
    if len(rows) > 1:
        parts.append(f"{1e9 * (len(rows) - 1) / max(rows[0]['start_ns'] - rows[-1]['start_ns'], 1):.3g} steps/s")
    if rows:
        parts.append(f"last step {rows[0]['step']}")
    if about.first_unix_s is not None and about.wall_s is not None:
        age_s = max((time.time() if now_unix_s is None else now_unix_s) - about.first_unix_s - about.wall_s, 0.0)
        is_lost = age_s > _OLD_S and not about.running
        parts.append(f"data {format_time(age_s)} old" + ("; perhaps killed" if is_lost else ""))
    return " · ".join(parts)


def title_of(about: About, *, with_date: bool = False) -> tuple[str, ...]:
    size = count(len(about.ranks), "rank")
    if about.missing_ranks:
        size = f"{len(about.ranks)} of {about.world_size} ranks"
    parts = [safe_name(about.name), f"{size} on {count(len(about.hosts) or 1, 'host')}"]
    steps = [count(about.epochs, "epoch")] if about.epochs else []
    steps += [count(about.steps, "step")] if about.steps else []
    parts += [", ".join(steps)] if steps else []
    if about.wall_s is not None:
        parts += times([about.wall_s])
    if about.first_unix_s is not None and with_date:
        parts.append(f"began {datetime.fromtimestamp(about.first_unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC")
    if about.sessions > 1:
        parts.append(f"{about.sessions} sessions")
    parts += [safe_name(about.frameworks)] if about.frameworks else []
    return (*parts, about.state)


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
