"""DeepSpeed's names next to the operations: ``init_distributed``, queries of groups, backends, and documented names."""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from deep500_timing.adapters import Launch, discover_launch
from deep500_timing_deepspeed.comm._logger import CommsLogger, comms_logger
from deep500_timing_deepspeed.comm._logger import log_summary_as as log_summary
from deep500_timing_deepspeed.comm._operations import configure
from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer

_COMM = "deep500_timing_deepspeed.comm"
_logger = logging.getLogger(_COMM)
NCCL_BACKEND, GLOO_BACKEND, MPI_BACKEND = "nccl", "gloo", "mpi"
CCL_BACKEND, HCCL_BACKEND, SCCL_BACKEND = "ccl", "hccl", "sccl"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
"""The port of rank 0 where the launcher names none, as in PyTorch and DeepSpeed."""
default_pg_timeout = getattr(dist.distributed_c10d, "default_pg_timeout", None)


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
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "gloo" if found is None else str(dist.get_default_backend_for_device(found.type))


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
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


def _has(name: str, *names: str) -> Callable[[], bool]:
    def has() -> bool:
        return any(hasattr(dist.distributed_c10d, each) for each in names)

    has.__name__ = has.__qualname__ = f"has_{name}"
    has.__doc__ = f"Whether this PyTorch has ``{names[0]}``."
    return has


has_all_gather_into_tensor = _has("all_gather_into_tensor", "all_gather_into_tensor", "all_gather_single")
has_reduce_scatter_tensor = _has("reduce_scatter_tensor", "reduce_scatter_tensor", "reduce_scatter_single")
has_all_reduce_coalesced = _has("all_reduce_coalesced", "all_reduce_coalesced")
has_coalescing_manager = _has("coalescing_manager", "_coalescing_manager")


class _LikeTorchs(type):
    """A class of DeepSpeed's that also stands for the one of PyTorch's with its name."""

    torchs: Any

    def __getattr__(cls, name: str) -> Any:
        return getattr(type.__getattribute__(cls, "torchs"), name)

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(instance, cls.torchs)


class ProcessGroup(metaclass=_LikeTorchs):
    """DeepSpeed's note of a group: its number and its ranks. A group of PyTorch's is an instance of it as well."""

    torchs = dist.ProcessGroup

    def __init__(self, comm_id: int, ranks: list[int] | None = None) -> None:
        self.comm_id = comm_id
        self.ranks = list(ranks or ())
        self.size = len(self.ranks)


class ReduceOp(metaclass=_LikeTorchs):
    """PyTorch's reductions, and ``UNUSED``, which DeepSpeed has besides and no backend knows."""

    torchs = dist.ReduceOp
    UNUSED = "UNUSED"

    def __new__(cls, *args: Any) -> Any:
        return dist.ReduceOp(*args)


class Backend:
    """DeepSpeed's object for a backend: here the process group of PyTorch, under DeepSpeed's names."""

    def __init__(self, name: str = "backend", rank: int = 0, size: int = 1) -> None:
        self.name = name
        self.world_size = dist.get_world_size() if dist.is_initialized() else size
        self.world_rank = dist.get_rank() if dist.is_initialized() else rank
        self.using_mpi = name == MPI_BACKEND

    def is_initialized(self) -> bool:
        return bool(dist.is_initialized())

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[_COMM], name)


class TorchBackend(Backend):
    """The process group of PyTorch, initialised if it is not."""

    def __init__(
        self, backend: str, timeout: Any = None, init_method: str | None = None, rank: int = -1, world_size: int = -1,
        name: str = "torch",
    ) -> None:  # fmt: skip
        init_distributed(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size)
        super().__init__(name)


class CCLBackend(TorchBackend):
    """Intel's oneCCL, by PyTorch's backend for it; DeepSpeed's own C++ binding of it is not here."""

    def __init__(self, name: str = "ccl", rank: int = -1, world_size: int = -1, timeout: Any = None) -> None:
        """Initialise the backend ``ccl``, which the package oneccl_bindings_for_pytorch registers."""
        super().__init__(CCL_BACKEND, timeout, None, rank, world_size, name)


def current_backend() -> Backend | None:
    """The current backend, None before there is a process group."""
    return Backend("torch") if dist.is_initialized() else None


def set_backend(backend: str | None = None) -> None:
    """PyTorch's process groups know their backend, so there is none to choose; an unknown name is refused.

    Raises:
        ValueError: This PyTorch has no backend of that name.
    """
    if backend is not None and not hasattr(dist.Backend, backend.upper()):
        raise ValueError(f"set_backend({backend!r}): this PyTorch has {', '.join(dist.Backend.backend_list)}.")


def init_deepspeed_backend(ds_backend: str, timeout: Any = None, init_method: str | None = None) -> None:
    """DeepSpeed's own backends are not here: PyTorch's of that name is initialised if there is no process group."""
    init_distributed(ds_backend, timeout=timeout, init_method=init_method)


def initialize_backend(backend_type: str | None = None, timeout: Any = None, init_method: str | None = None) -> None:
    """Initialise the default process group, as :func:`init_distributed` does."""
    init_distributed(backend_type, timeout=timeout, init_method=init_method)


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Put what MPI says of this process into the environment that PyTorch reads.

    Raises:
        RuntimeError: No launcher says anything.
    """
    found = discover_launch()
    if found.launcher == "none":
        raise RuntimeError("mpi_discovery: no launcher has told this process its rank; start it by mpirun or torchrun.")
    names = {"RANK": found.rank, "WORLD_SIZE": found.world_size, "LOCAL_RANK": found.local_rank}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.setdefault("MASTER_ADDR", found.master or "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    if verbose and found.rank == 0:
        print(f"{found.launcher}: {names}", file=sys.stderr)


has_comm_data = comms_logger.has_data
get_comm_operation_count = comms_logger.get_total_operations
get_logged_comm_ops = comms_logger.get_operation_names


FROM_DEEPSPEED = frozenset({
    "enable_symm_mem_for_group", "get_caller_func", "get_debug_log_name", "get_default_args",
    "get_local_rank_from_launcher", "get_msg_size_from_args", "get_tensor_kwarg", "get_tensor_position",
    "get_world_rank_from_launcher", "get_world_size_from_launcher", "in_aml", "in_aws_sm", "in_dlts",
    "initialize_mesh_device", "patch_aml_env_for_torch_nccl_backend", "patch_aws_sm_env_for_torch_nccl_backend",
})  # fmt: skip
"""Helpers that time nothing: taken from ``deepspeed.comm`` of an installed DeepSpeed."""


def helper_of_deepspeed(name: str) -> Any:
    try:
        return getattr(import_module("deepspeed.comm"), name)
    except ImportError as error:
        raise AttributeError(f"comm.{name} is a helper of DeepSpeed: pip install deepspeed ({error})") from error


timers = SynchronizedWallClockTimer(device="cpu")
"""DeepSpeed keeps an operation's time in here while it runs; operations are timed without it, and it is yours."""
timer_summary: dict[str, Any] = {}

# The names of DeepSpeed's documentation.
configure_logging = configure
TimerManager = SynchronizedWallClockTimer
CommsBackend = Backend
global_timers = timers
global_comms_logger = comms_logger
is_backend_initialized = dist.is_initialized
is_communication_package_available = dist.is_available
create_new_group = dist.new_group
set_current_backend = set_backend
log_communication_summary = log_summary


def main() -> None:
    """The command line: ``python -m deep500_timing_torch.comm``."""
    runpy.run_module("deep500_timing_torch.comm", run_name="__main__")


__all__ = [
    "CCL_BACKEND", "GLOO_BACKEND", "HCCL_BACKEND", "MPI_BACKEND", "NCCL_BACKEND", "SCCL_BACKEND",
    "TORCH_DISTRIBUTED_DEFAULT_PORT", "CCLBackend", "CommsBackend", "CommsLogger", "ProcessGroup", "ReduceOp",
    "TimerManager", "TorchBackend", "comms_logger", "configure", "configure_logging", "create_new_group",
    "default_pg_timeout", "get_all_ranks_from_group", "get_comm_operation_count", "get_global_rank", "get_local_rank",
    "get_logged_comm_ops", "get_world_group", "global_comms_logger", "global_timers", "has_all_gather_into_tensor",
    "has_all_reduce_coalesced", "has_coalescing_manager", "has_comm_data", "has_reduce_scatter_tensor",
    "init_deepspeed_backend", "init_distributed", "initialize_backend", "is_backend_initialized",
    "is_communication_package_available", "log_communication_summary", "log_summary", "main", "mpi_discovery",
    "set_backend", "set_current_backend", "timer_summary", "timers",
]  # fmt: skip
