"""Who started this process: the rank and the world that launchers tell their processes, and ``init_distributed``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

DEFAULT_PORT = 29500
"""The port of rank 0 where the launcher names none, as in PyTorch and DeepSpeed."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher says about this process."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    master: str | None
    """Host of rank 0 as far as the launcher tells, None if it does not."""


@dataclass(frozen=True, slots=True)
class _Launcher:
    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str = ""


# In the order of trust. OMPI_COMM_WORLD_NODE_RANK would be the rank within the node as well; it counts ranks of all
# jobs there. Slurm speaks of tasks only inside a step: in a batch script SLURM_PROCID is 0 on one process.
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


def discover(environ: Mapping[str, str] | None = None) -> Launch:
    """What the launcher says in the environment: torchrun, MPI, jsrun, Flux, Slurm; else one process by itself."""
    environ = os.environ if environ is None else environ
    for launcher in _LAUNCHERS:
        rank, world_size = _number(environ, launcher.rank), _number(environ, launcher.world_size)
        if rank is not None and world_size is not None:
            local_rank = _number(environ, launcher.local_rank)
            return Launch(
                launcher.name,
                rank,
                world_size,
                rank if local_rank is None and world_size == 1 else local_rank or 0,
                _master(environ, launcher, world_size),
            )
    return Launch("none", 0, 1, 0, environ.get("MASTER_ADDR") or "127.0.0.1")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    try:
        return int(environ[name]) if name else None
    except (KeyError, ValueError):
        return None


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


def _master_by_mpi() -> str | None:
    try:
        from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    import socket

    host: str = MPI.COMM_WORLD.bcast(socket.gethostbyname(socket.gethostname()), root=0)
    return host


def default_backend() -> str:
    """The backend for the accelerator that is there, gloo without one."""
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return str(dist.get_default_backend_for_device(found.type))
    return "gloo"


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    *,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    **options: Any,
) -> None:
    """Initialise the default process group from whatever launched this process; nothing if there is one already.

    Args:
        dist_backend: The backend, such as ``"nccl"``; the one of the accelerator that is there if None, else gloo.
        auto_mpi_discovery: Look for other launchers than torchrun: Open MPI, MVAPICH2, jsrun, Flux, PMI, Slurm.
        distributed_port: Port of rank 0, if ``MASTER_PORT`` is not set.
        timeout: Of the operations; the backend's own if None.
        init_method: URL of the rendezvous; ``env://`` if None.
        rank: This rank; found out if negative.
        world_size: Ranks in all; found out if negative.
        **options: As for ``torch.distributed.init_process_group``.

    Raises:
        RuntimeError: There are several processes and nothing tells where rank 0 is.
    """
    if dist.is_initialized():
        return
    found = discover()
    if found.launcher not in ("torchrun", "none") and not auto_mpi_discovery:
        found = Launch("none", 0, 1, 0, os.environ.get("MASTER_ADDR") or "127.0.0.1")
    rank = found.rank if rank < 0 else rank
    world_size = found.world_size if world_size < 0 else world_size
    if init_method is None and options.get("store") is None:
        master = found.master
        if master is None and found.launcher in ("Open MPI", "MVAPICH2", "PMI"):
            master = _master_by_mpi()
        if master is None:
            raise RuntimeError(
                f"init_distributed under {found.launcher} with {world_size} processes: nothing tells on which host "
                "rank 0 runs. Set MASTER_ADDR to it (and MASTER_PORT to a port that is free there), or install mpi4py."
            )
        os.environ.setdefault("MASTER_ADDR", master)
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    os.environ.setdefault("LOCAL_RANK", str(found.local_rank))
    if timeout is not None:
        options["timeout"] = timeout
    if options.get("store") is None:
        options["init_method"] = init_method or "env://"
    dist.init_process_group(dist_backend or default_backend(), rank=rank, world_size=world_size, **options)


# --- queries -------------------------------------------------------------------------------------------------------


def get_local_rank() -> int:
    """The rank among the processes of this machine, as the launcher tells it; 0 without a launcher."""
    return discover().local_rank


def get_world_group() -> Any:
    """The default process group.

    Raises:
        RuntimeError: There is none yet.
    """
    group = dist.GroupMember.WORLD
    if group is None:
        raise RuntimeError("get_world_group: there is no process group yet; call init_distributed first.")
    return group


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The global rank of a rank of a group (the default group if None)."""
    return int(dist.get_global_rank(get_world_group() if group is None else group, group_rank))


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The global ranks of a group (the default group if None), in the order of its own ranks."""
    return list(dist.get_process_group_ranks(get_world_group() if group is None else group))


def _has(*names: str) -> Callable[[], bool]:
    def has() -> bool:
        return any(hasattr(dist, name) for name in names)

    has.__name__ = has.__qualname__ = f"has_{names[0]}"
    has.__doc__ = f"Whether this PyTorch has ``{names[0]}``."
    return has


has_all_gather_into_tensor = _has("all_gather_into_tensor", "all_gather_single")
has_reduce_scatter_tensor = _has("reduce_scatter_tensor", "reduce_scatter_single")
has_all_reduce_coalesced = _has("all_reduce_coalesced")


def has_coalescing_manager() -> bool:
    """Whether this PyTorch can issue several operations as one."""
    return hasattr(dist.distributed_c10d, "_coalescing_manager")
