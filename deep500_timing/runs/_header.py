"""The header of a log: process, machine, versions, and the relation of its clock to Unix time."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing._distributed.launchers import discover_launch, known_rank_and_world
from deep500_timing.runs._format import SCHEMA, TABLES, described, to_json
from deep500_timing.runs._worlds import process_start_unix_ns, world_of_process

if TYPE_CHECKING:
    from deep500_timing._summary.snapshot import ClockAnchor

SUBMITTED = "DEEP500_TIMING_SUBMIT_UNIX_S"
"""When the job was submitted, in Unix seconds, for goodput."""
_PACKAGES = ("numpy", "torch", "tensorflow", "keras", "jax", "cupy", "lightning", "transformers", "deepspeed")
MEASUREMENT = "DEEP500_TIMING_MEASUREMENT"
"""The environment variable in which ``deep500-timing ab`` marks a run, as JSON."""
_CPU = "/sys/devices/system/cpu/cpu0/cpufreq"


class Place(NamedTuple):
    """The ranks of this process."""

    rank: int
    world_size: int | None
    """None if unknown."""
    local_rank: int | None
    world: str
    """The name of the world of ranks that it is in."""


def find_place(rank: int | None) -> Place:
    """The given rank of this process, or that of ``torch.distributed`` or the launcher."""
    found, world_size = known_rank_and_world()
    launch = discover_launch()
    local_rank = None if launch.launcher == "none" else launch.local_rank
    world = world_of_process(rank_is_given=rank is not None)
    return Place((found or 0) if rank is None else rank, world_size, local_rank, world)


def describe(
    place: Place,
    *,
    session: int,
    segment: int,
    anchor: ClockAnchor,
    clock: str,
    attributes: Mapping[str, Any],
    whole_process: bool = False,
) -> dict[str, Any]:
    """The header of a log, as plain data."""
    return {
        "schema": SCHEMA,
        "written_by": f"deep500-timing {_version('deep500-timing')}",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start_unix_ns": _process_start_unix_ns(),
        "whole_process": whole_process,
        "job": _job(),
        "rank": place.rank,
        "local_rank": place.local_rank,
        "world_size": place.world_size,
        "session": session,
        "segment": segment,
        "clock": clock,
        "anchor": {"time_ns": anchor.host_ns, "unix_ns": anchor.unix_ns, "width_ns": anchor.width_ns},
        "devices": _devices(),
        "versions": {"python": platform.python_version(), **_versions()},
        "platform": f"{platform.system()}-{platform.release()}-{platform.machine()}",  # platform() starts a process
        "machine": _machine(),
        "measurement": _measurement(),
        "program": _program(),
        "command_sha256": _command_sha256(),
        "attributes": _plain(attributes),
        "tables": described(TABLES),
    }


def _program() -> str:
    # The name of a child says its role where several train. Ray writes what a process is over its command.
    child = process.current_process().name if (process := sys.modules.get("multiprocessing.process")) else "MainProcess"
    with suppress(OSError), open("/proc/self/cmdline", "rb") as file:
        title = file.read(200)
        child = title.partition(b".")[0].decode(errors="replace") if title.startswith(b"ray::") else child
    return os.path.basename(sys.argv[0] if sys.argv else "") + ("" if child == "MainProcess" else f" {child}")


def _command_sha256() -> str:
    # Of the program's name and the names of its options. A value, such as a password, could be found by guessing.
    options = [
        word.partition("=")[0] if word.startswith("--") else word[:2] for word in sys.argv[1:] if word[:1] == "-"
    ]
    text = "\0".join([os.path.basename(sys.argv[0]), *options])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    # Values that JSON cannot hold, such as NaN, become text.
    plain = {}
    for name, value in attributes.items():
        try:
            plain[str(name)] = json.loads(to_json(value))
        except (TypeError, ValueError, RecursionError):
            plain[str(name)] = repr(value)
    return plain


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def _versions() -> dict[str, str]:
    # Only of packages that the program has imported; of JAX, which TensorFlow imports as well, only if it has computed.
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    if not getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", True):
        found["jax"] = None
    return {name: str(version) for name, version in found.items() if isinstance(version, str)}


def _process_start_unix_ns() -> int | None:
    # None in an interactive session, which idles.
    return None if hasattr(sys, "ps1") or "ipykernel" in sys.modules else process_start_unix_ns()


def _machine() -> dict[str, Any]:
    """The properties that decide the speed of this machine; unknown ones are left out."""
    cpus = os.cpu_count() or 1
    found: dict[str, Any] = {"cpus": cpus}
    with suppress(OSError, AttributeError):
        found["load_per_cpu"] = round(os.getloadavg()[0] / cpus, 3)
    found["boot_id"] = _text_of("/proc/sys/kernel/random/boot_id")
    found["governor"] = _text_of(f"{_CPU}/scaling_governor")
    khz = _text_of(f"{_CPU}/scaling_max_freq")
    found["max_mhz"] = int(khz) // 1000 if khz.isdigit() else None
    lines = (line.partition(":") for line in _text_of("/proc/cpuinfo").splitlines())
    found["cpu"] = next((value.strip() for name, _, value in lines if name.strip() == "model name"), None)
    return {name: value for name, value in found.items() if value not in (None, "")}


def _text_of(path: str) -> str:
    # The beginning of a file; empty if it cannot be read.
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read(4096).strip()
    return ""


def _measurement() -> dict[str, Any]:
    # Session, pair and side, by which `deep500-timing ab` finds the runs that it has started.
    with suppress(ValueError):
        found = json.loads(os.environ.get(MEASUREMENT, "{}"))
        return found if isinstance(found, dict) else {}
    return {}


def _job() -> dict[str, float | None]:
    # When the job was submitted, which only the user can tell, and when Slurm allocated its nodes.
    found: dict[str, float | None] = {"submit_unix_s": None, "start_unix_s": None}
    for name, variable in zip(found, (SUBMITTED, "SLURM_JOB_START_TIME"), strict=True):
        with suppress(ValueError):
            seconds = float(os.environ.get(variable, "nan"))
            found[name] = seconds if math.isfinite(seconds) else None
    return found


def _devices() -> list[str]:
    # Only if the program uses CUDA already: the query would create a context on each device.
    torch = sys.modules.get("torch")
    with suppress(Exception):
        if torch is not None and torch.cuda.is_initialized():
            return [str(torch.cuda.get_device_name(index)) for index in range(torch.cuda.device_count())]
    return []
