"""``init_distributed`` under any launcher, and queries of the groups."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deep500_timing.adapters import Launch, discover_launch
from deep500_timing_deepspeed.comm._operations import configure

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

_logger = logging.getLogger("deep500_timing_deepspeed.comm")
DEFAULT_PORT = 29500
"""The port of rank 0 where the launcher names none, as in PyTorch and DeepSpeed."""


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
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
    **options: Any,
) -> None:
    """Initialise the default process group under any launcher; nothing if there is one already.

    Args:
        dist_backend: The backend, such as ``"nccl"``; the one of the accelerator that is there if None, else gloo.
        auto_mpi_discovery: Look for other launchers than torchrun: Open MPI, MVAPICH2, jsrun, Flux, PMI, Slurm.
        distributed_port: Port of rank 0, if ``MASTER_PORT`` is not set.
        verbose: Log the initialisation, with the logger ``deep500_timing_deepspeed.comm``.
        timeout: Of the operations; the backend's own if None.
        init_method: URL of the rendezvous; ``env://`` if None.
        dist_init_required: False if other code makes the process group: none is made here.
        config: A config of DeepSpeed's, handed to :func:`configure`.
        rank: This rank; taken from the launcher if negative.
        world_size: Number of ranks; taken from the launcher if negative.
        **options: As for ``torch.distributed.init_process_group``.

    Raises:
        RuntimeError: There are several processes and the address of rank 0 is unknown.
    """
    if config is not None:
        configure(config)
    if dist.is_initialized() or dist_init_required is False:
        return
    found = discover_launch()
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
    backend = dist_backend or default_backend()
    if verbose:
        _logger.info("Initialising %s as rank %d of %d", backend, rank, world_size)
    dist.init_process_group(backend, rank=rank, world_size=world_size, **options)


# --- queries -------------------------------------------------------------------------------------------------------


def get_local_rank() -> int:
    """The rank among the processes of this machine, as the launcher tells it; 0 without a launcher."""
    return discover_launch().local_rank


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
    """The global ranks of a group (the default group if None), in the order of the group's ranks."""
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
