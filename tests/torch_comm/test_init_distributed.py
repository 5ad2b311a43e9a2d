"""A process group from the launcher's variables."""

from __future__ import annotations

import pytest
import torch.distributed as plain

from deep500_timing_deepspeed import comm


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
    # init_distributed sets these for the process; monkeypatch restores the variables that it set.
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
    """This PyTorch has all the queried operations."""
    assert comm.has_all_gather_into_tensor()
    assert comm.has_reduce_scatter_tensor()
    assert comm.has_all_reduce_coalesced()
    assert comm.has_coalescing_manager()
    assert comm.is_available()
