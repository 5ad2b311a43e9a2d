"""Operations on a GPU, with a world of one: times from events, and nothing that synchronizes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as plain

from deep500_timing_torch import comm

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def world():
    """An NCCL world of one."""
    torch.cuda.set_device(0)
    plain.init_process_group("nccl", store=plain.HashStore(), rank=0, world_size=1)
    plain.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    yield
    plain.destroy_process_group()


def test_times_come_from_the_device():
    """Blocking and asynchronous operations behind queued work are timed without waiting for it."""
    comm.reset_log()
    data = torch.ones(1 << 22, device="cuda")
    work = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            work = work @ work
            comm.all_reduce(data)
            handle = comm.all_gather_into_tensor(torch.empty_like(data), data, async_op=True)
            work = work @ work
            handle.wait()
        before = comm.summary()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {"GPU"} == {op.device for op in before.ops}
    torch.cuda.synchronize()
    found = comm.summary(wait=True)
    for name in ("all_reduce", "all_gather_into_tensor"):
        op = found.find(name, data.nbytes)
        assert (20, 0) == (op.count, op.pending)
        assert op.mean_s > 0
        assert 0.0 == op.busbw_gb_per_s
    assert found.find("all_gather_into_tensor").exposed_s >= 0
