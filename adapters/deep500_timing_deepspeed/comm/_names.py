"""DeepSpeed's other names: backends, launchers' ranks, groups, and the names of its documentation."""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module
from typing import Any

import torch.distributed as dist

from deep500_timing.adapters import discover_launch
from deep500_timing_deepspeed.comm._launch import DEFAULT_PORT, init_distributed
from deep500_timing_deepspeed.comm._logger import comms_logger, log_summary_as
from deep500_timing_deepspeed.comm._operations import configure
from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer

_COMM = "deep500_timing_deepspeed.comm"
NCCL_BACKEND, GLOO_BACKEND, MPI_BACKEND = "nccl", "gloo", "mpi"
CCL_BACKEND, HCCL_BACKEND, SCCL_BACKEND = "ccl", "hccl", "sccl"
TORCH_DISTRIBUTED_DEFAULT_PORT = DEFAULT_PORT
default_pg_timeout = getattr(dist.distributed_c10d, "default_pg_timeout", None)


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
        """As PyTorch's."""
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
        """Every operation of :mod:`deep500_timing_deepspeed.comm`."""
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


cdb: Backend | None = None


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


def mpi_discovery(distributed_port: int = DEFAULT_PORT, verbose: bool = True) -> None:
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


def has_comm_data() -> bool:
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    return comms_logger.get_operation_names()


def configure_logging(config: Any) -> None:
    """Take over a config of DeepSpeed's, as :func:`configure` does."""
    configure(config)


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
TimerManager = SynchronizedWallClockTimer
CommsBackend = Backend
global_timers = timers
global_comms_logger = comms_logger
is_backend_initialized = dist.is_initialized
is_communication_package_available = dist.is_available
create_new_group = dist.new_group
set_current_backend = set_backend
log_communication_summary = log_summary_as


def main() -> None:
    """The command line: ``python -m deep500_timing_torch.comm``."""
    runpy.run_module("deep500_timing_torch.comm", run_name="__main__")


_PUBLIC = (
    "CCLBackend", "CCL_BACKEND", "CommsBackend", "GLOO_BACKEND", "HCCL_BACKEND", "MPI_BACKEND", "NCCL_BACKEND",
    "ProcessGroup", "ReduceOp", "SCCL_BACKEND", "TORCH_DISTRIBUTED_DEFAULT_PORT", "TimerManager", "TorchBackend",
    "configure_logging", "create_new_group", "default_pg_timeout", "get_comm_operation_count", "get_logged_comm_ops",
    "global_comms_logger", "global_timers", "has_comm_data", "init_deepspeed_backend", "initialize_backend",
    "is_backend_initialized", "is_communication_package_available", "log_communication_summary", "main",
    "mpi_discovery", "set_backend", "set_current_backend", "timer_summary", "timers",
)  # fmt: skip
NAMES: dict[str, Any] = {name: globals()[name] for name in _PUBLIC}
"""The names that :mod:`deep500_timing_deepspeed.comm` takes from here."""
