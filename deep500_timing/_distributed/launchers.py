"""Which process of a job this is, as the program that launched it tells in the environment.

One table, one reading, for every part of the project. A further launcher is one more row of ``_LAUNCHERS``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deep500_timing._base.settings import JOBS


@dataclass(frozen=True, slots=True)
class Launch:
    """A launcher's description of this process."""

    launcher: str
    """Its name, ``"none"`` where there is none."""
    rank: int
    """Number of this process among all, from 0; below ``world_size``."""
    world_size: int
    """Processes in all."""
    local_rank: int
    """Number of this process among those of its machine; 0 if that is not told."""
    master: str | None
    """Host of rank 0; None if the launcher does not tell."""
    local_world_size: int | None = field(default=None, compare=False)
    """Processes of this machine; None if that is not told."""


@dataclass(frozen=True, slots=True)
class _Launcher:
    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str = ""


# In the order of trust, the more specific ones first. OMPI_COMM_WORLD_NODE_RANK would be the rank within the node as
# well; it counts ranks of all jobs there. Slurm speaks of tasks only inside a step: in a batch script SLURM_PROCID is
# 0 on one process.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher(
        "MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
              "JSM_NAMESPACE_LOCAL_SIZE"),
    _Launcher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    _Launcher("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)  # fmt: skip


_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def discover_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """The launcher's description: torchrun, MPI, jsrun, Flux, Slurm, ``TF_CONFIG``; else one process, under ``"none"``.

    A launcher is believed if its rank and world size are whole numbers and the rank is below the size; else the next
    one is asked. So a rank that was left over from another job does not hide the launcher that is there.

    Args:
        environ: Where to look; the environment of this process if None.
    """
    environ = os.environ if environ is None else environ
    for launcher in _LAUNCHERS:
        rank = _number(environ, launcher.rank)
        world_size = None if rank is None else _number(environ, launcher.world_size)
        if rank is not None and world_size is not None and rank < world_size:
            local_rank = _number(environ, launcher.local_rank) or 0
            local_size = _number(environ, launcher.local_size)
            master = _master(environ, launcher, world_size)
            return Launch(launcher.name, rank, world_size, local_rank, master, local_size)
    config = environ.get("TF_CONFIG")
    found = _of_tensorflow(config) if config else None
    if found is not None:
        return found
    return Launch("none", 0, 1, 0, environ.get("MASTER_ADDR") or "127.0.0.1")


def identity_of(launch: Launch, starter: str = "") -> str | None:
    """What the ranks of a launch share and no other launch has, as far as their launcher tells; None without one.

    Args:
        launch: The launch.
        starter: The process that started the ranks, which is one if all are on one host.
    """
    environ = os.environ
    if launch.launcher == "none":
        return None
    parts = [launch.launcher, *(environ.get(name, "") for name in (*JOBS, "SLURM_STEP_ID"))]
    if launch.launcher == "torchrun":
        is_local = launch.local_world_size == launch.world_size or launch.master in _LOOPBACK
        parts += [environ.get("TORCHELASTIC_RUN_ID", ""), launch.master or "", environ.get("MASTER_PORT", "")]
        parts += [starter] if is_local else []
    elif launch.launcher == "TF_CONFIG":
        parts += [str(launch.master), str(launch.world_size)]
    return " ".join(parts)


def _of_tensorflow(config: str) -> Launch | None:
    # As in a multi-worker strategy of TensorFlow: the tasks that train, the chief before the workers. Parameter
    # servers and evaluators are none of them.
    try:
        parsed = json.loads(config)
        cluster, task = parsed["cluster"], parsed["task"]
        tasks = [(kind, place) for kind in ("chief", "worker") for place in range(len(cluster.get(kind, ())))]
        rank = tasks.index((task["type"], int(task["index"])))
        hosts = [str(cluster[kind][place]).rpartition(":")[0] for kind, place in tasks]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    mine = hosts[rank]
    return Launch("TF_CONFIG", rank, len(tasks), hosts[:rank].count(mine), hosts[0] or None, hosts.count(mine))


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _master(environ: Mapping[str, str], launcher: _Launcher, world_size: int) -> str | None:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if world_size == 1 or _number(environ, launcher.local_size) == world_size:
        return "127.0.0.1"
    if launcher.name == "Slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        return first_host(nodes) if nodes else None
    if launcher.name == "jsrun":
        # The first is the node of the batch script, which runs no task.
        hosts = list(dict.fromkeys(environ.get("LSB_HOSTS", "").split()))
        return hosts[1] if len(hosts) > 1 else None
    return None


def first_host(nodes: str) -> str:
    """The first of a list of hosts as Slurm writes it: ``gpu[003-007,9],login1`` gives ``gpu003``."""
    found = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} is no list of hosts; set MASTER_ADDR to the host of rank 0.")
    return found[1] + (found[2] or "") + (found[3] or "")


def distributed() -> Any:
    """``torch.distributed`` if it is imported and initialised, else None."""
    module = sys.modules.get("torch.distributed")
    try:
        if module is not None and module.is_available() and module.is_initialized():
            return module
    except Exception:
        return None
    return None


def rank_and_world() -> tuple[int, int]:
    """The rank of this process and the number of processes; (0, 1) where nothing tells."""
    dist = distributed()
    if dist is not None:
        return int(dist.get_rank()), int(dist.get_world_size())
    found = discover_launch()
    return found.rank, found.world_size


def known_rank_and_world() -> tuple[int, int] | tuple[None, None]:
    """The rank of this process and the number of processes; None for both where nothing tells. Never raises."""
    try:
        is_known = distributed() is not None or discover_launch().launcher != "none"
        return rank_and_world() if is_known else (None, None)
    except Exception:
        return None, None


def wants(ranks: Iterable[int] | None) -> bool:
    """Whether this process is among ``ranks``; None means rank 0, and -1 among them every rank."""
    chosen = list(ranks or [0])
    return -1 in chosen or rank_and_world()[0] in chosen
