"""What a run is: the facts of its heading, as plain data."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deep500_timing.runs import Run

_FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "cupy", "lightning", "transformers", "deepspeed")


@dataclass(frozen=True, slots=True)
class About:
    """Name, size, length and environment of a run. Texts are strangers' texts: to be made safe where shown."""

    name: str
    """The folder's name."""
    folder: str
    """The folder as it was given to ``Run.open``, for commands."""
    ranks: tuple[int, ...]
    """Those that have written, rising."""
    world_size: int | None
    """How many there should be; None where nobody told."""
    hosts: tuple[str, ...]
    """Their names."""
    sessions: int
    """How often the run was started."""
    epochs: int
    """EPOCHs that ended, on the lowest rank."""
    steps: int
    """Different steps."""
    first_unix_s: float | None
    """When the first interval began, in Unix time; None where it is not known."""
    wall_s: float | None
    """From the first interval's start to the last one's end."""
    ended: bool
    """Whether every rank has ended its log."""
    ends: tuple[str, ...]
    """The reasons for which logs were ended, each once: ``"closed"``, ``"KeyboardInterrupt"``."""
    versions: dict[str, str]
    """Versions of Python and of frameworks, by name, of the lowest rank."""
    devices: tuple[str, ...]
    """Names of accelerators, of the lowest rank."""
    has_device_times: bool
    """Whether anything was timed on a device."""
    platform: str
    """The system of the lowest rank."""
    attributes: dict[str, Any]
    """What the program said about itself."""
    dropped: int
    """Intervals that were recorded and could not be written."""
    damaged_bytes: int
    """Bytes of logs that cannot be read."""
    missing_frames: int
    """Frames of logs that are not there."""
    clock_step_s: float
    """By how much Unix time was stepped against the timers' clock at most, with its sign."""

    @property
    def frameworks(self) -> str:
        """As ``"torch 2.13.0, CPU only"``."""
        named = [f"{name} {self.versions[name]}" for name in _FRAMEWORKS if name in self.versions]
        if self.devices:
            different = dict.fromkeys(self.devices)
            named += [f"{self.devices.count(name)} × {name}" if len(self.devices) > 1 else name for name in different]
        elif not self.has_device_times:
            named.append("CPU only")
        return ", ".join(named)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks that should be there and have written nothing."""
        return tuple(rank for rank in range(self.world_size or 0) if rank not in set(self.ranks))


def about_run(run: Run) -> About:
    """Read the facts of a run."""
    logs = run.table("logs").rows()
    ranks = tuple(sorted({log["rank"] for log in logs}))
    counts = run.sql(
        "select count(distinct step) as steps, sum(case when device <> 'CPU' then 1 else 0 end) as on_device "
        "from intervals where region = 'BATCH' or device <> 'CPU'"
    ).rows()[0]
    lowest = min(ranks, default=0)
    epochs = run.sql(
        f"select count(*) as n from intervals where region = 'EPOCH' and device = 'CPU' and rank = {int(lowest)}"
    ).rows()[0]["n"]
    firsts = [log["first_unix_ns"] for log in logs if log["first_unix_ns"] is not None]
    lasts = [log["last_unix_ns"] for log in logs if log["last_unix_ns"] is not None]
    of_lowest = [log for log in logs if log["rank"] == lowest]
    header = _header(of_lowest[-1]) if of_lowest else {}
    # A file that was followed by another says so; the last one of each start of a rank says how that ended.
    last_files: dict[tuple[int, int], dict[str, Any]] = {}
    for log in logs:
        known = last_files.get((log["rank"], log["session"]))
        if known is None or (log["segment"] or 0) >= (known["segment"] or 0):
            last_files[log["rank"], log["session"]] = log
    ends = [log["end"] for log in last_files.values()]
    steps_of_clock = [log["clock_step_ns"] for log in logs if log["clock_step_ns"] is not None]
    folder = run.folders[0]
    return About(
        name=os.path.basename(os.path.abspath(folder)) or folder,
        folder=folder,
        ranks=ranks,
        world_size=max((log["world_size"] for log in logs if log["world_size"] is not None), default=None),
        hosts=tuple(sorted({log["host"] for log in logs if log["host"]})),
        sessions=len({log["session"] for log in logs}),
        epochs=epochs or 0,
        steps=counts["steps"] or 0,
        first_unix_s=min(firsts) / 1e9 if firsts else None,
        wall_s=(max(lasts) - min(firsts)) / 1e9 if firsts and lasts else None,
        ended=all(ends),
        ends=tuple(dict.fromkeys(sorted(str(end) for end in ends if end))),
        versions={str(name): str(version) for name, version in header.get("versions", {}).items()},
        devices=tuple(str(name) for name in header.get("devices", ())),
        has_device_times=bool(counts["on_device"]),
        platform=str(header.get("platform", "")),
        attributes=header.get("attributes", {}),
        dropped=sum(log["dropped"] or 0 for log in last_files.values()),
        damaged_bytes=sum(log["damaged_bytes"] or 0 for log in logs),
        missing_frames=sum(log["missing_frames"] or 0 for log in logs),
        clock_step_s=max(steps_of_clock, key=abs, default=0) / 1e9,
    )


def _header(log: dict[str, Any]) -> dict[str, Any]:
    try:
        header = json.loads(log["header"] or "{}")
    except ValueError:
        return {}
    return header if isinstance(header, dict) else {}
