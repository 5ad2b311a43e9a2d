"""What launchers tell their processes, read once for every part of the project."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing._distributed.launchers import Launch, discover_launch, first_host

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
        # Left over from another job: the launcher that is there is believed.
        ({"RANK": "5", "WORLD_SIZE": "4", **SLURM}, Launch("Slurm", 5, 8, 1, "gpu03")),
        ({"RANK": "-1", "WORLD_SIZE": "8", **SLURM}, Launch("Slurm", 5, 8, 1, "gpu03")),
        ({"RANK": "8", "WORLD_SIZE": "8"}, Launch("none", 0, 1, 0, "127.0.0.1")),
        ({"RANK": "3", "WORLD_SIZE": ""}, Launch("none", 0, 1, 0, "127.0.0.1")),
        ({"RANK": " 1", "WORLD_SIZE": " 2 ", "LOCAL_RANK": "1 "}, Launch("torchrun", 1, 2, 1, None)),
        ({"RANK": "\u00b2", "WORLD_SIZE": "8"}, Launch("none", 0, 1, 0, "127.0.0.1")),
    ],
)  # fmt: skip
def test_launchers(environ, expected):
    """Each launcher is known by its variables, the most trusted first."""
    assert expected == discover_launch(environ)


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
