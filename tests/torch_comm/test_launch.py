"""What launchers tell their processes, and a process group from it."""

from __future__ import annotations

import pytest
import torch.distributed as plain
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing_torch import comm
from deep500_timing_torch.comm._launch import Launch, discover, first_host

SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[03-04]"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch("none", 0, 1, 0, "127.0.0.1")),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "head", **SLURM},
            Launch("torchrun", 3, 8, 1, "head"),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "7"},
            Launch("Open MPI", 3, 4, 3, "127.0.0.1"),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            Launch("Open MPI", 3, 8, 0, None),
        ),
        (
            {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "1", "MV2_COMM_WORLD_LOCAL_RANK": "0"},
            Launch("MVAPICH2", 0, 1, 0, "127.0.0.1"),
        ),
        (
            {"JSM_NAMESPACE_RANK": "6", "JSM_NAMESPACE_SIZE": "12", "JSM_NAMESPACE_LOCAL_RANK": "0",
             "LSB_HOSTS": "batch1 h1 h1 h2 h2"},
            Launch("jsrun", 6, 12, 0, "h1"),
        ),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"}, Launch("Flux", 1, 2, 1, None)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, Launch("PMI", 1, 2, 1, None)),
        (SLURM, Launch("Slurm", 5, 8, 1, "gpu03")),
        # A batch script: Slurm names a process, but no step is running.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, Launch("none", 0, 1, 0, "127.0.0.1")),
        ({"RANK": "not a number", "WORLD_SIZE": "8"}, Launch("none", 0, 1, 0, "127.0.0.1")),
    ],
)  # fmt: skip
def test_launchers(environ, expected):
    """Each launcher is known by its variables, the most trusted first."""
    assert expected == discover(environ)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[003-007,9],login1", "gpu003"),
        ("a[2,5]-ib,b1", "a2-ib"),
        ("host.example.org", "host.example.org"),
    ],
)
def test_first_host(nodes, expected):
    """The first host of a list as Slurm shortens it."""
    assert expected == first_host(nodes)


@given(st.integers(0, 99_999), st.integers(1, 100), st.integers(2, 6))
def test_first_host_keeps_leading_zeros(first, more, width):
    """The number is text: its zeros are part of the name."""
    assert f"n{first:0{width}}" == first_host(f"n[{first:0{width}}-{first + more:0{width}}]")


def test_no_list_of_hosts_is_an_error():
    """What cannot be read is said, with the remedy."""
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        first_host("[,")


def test_init_distributed_names_the_remedy(monkeypatch):
    """Several machines and no address of the first: it does not guess."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLUX_TASK_RANK", "1")
    monkeypatch.setenv("FLUX_JOB_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"under Flux with 2 processes.*Set MASTER_ADDR"):
        comm.init_distributed("gloo")


def test_init_distributed_alone(monkeypatch, tmp_path):
    """Without a launcher it makes a world of one, and a second call leaves that alone."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    # init_distributed sets these for the process; monkeypatch takes back what it knows of.
    monkeypatch.setenv("LOCAL_RANK", "0")
    comm.init_distributed("gloo", init_method=f"file://{tmp_path}/rendezvous")
    try:
        comm.init_distributed("gloo")
        assert comm.is_initialized()
        assert (0, 1, 0) == (comm.get_rank(), comm.get_world_size(), comm.get_local_rank())
        assert [0] == comm.get_all_ranks_from_group()
        assert 0 == comm.get_global_rank()
        assert plain.GroupMember.WORLD is comm.get_world_group()
    finally:
        comm.destroy_process_group()
    with pytest.raises(RuntimeError, match="call init_distributed first"):
        comm.get_world_group()


def test_queries_about_this_pytorch():
    """This PyTorch has what the queries ask for."""
    assert comm.has_all_gather_into_tensor()
    assert comm.has_reduce_scatter_tensor()
    assert comm.has_all_reduce_coalesced()
    assert comm.has_coalescing_manager()
    assert comm.is_available()
