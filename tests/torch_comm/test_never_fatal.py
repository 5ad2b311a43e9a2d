"""Bookkeeping that fails, and hooks called where no one expects them, cost a line of the report and never the run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as plain

import deep500_timing_torch as timer
from deep500_timing_torch import comm
from deep500_timing_torch.comm._settings import SETTINGS


class BrokenTimer(timer.Timer):
    """A timer with a broken clock."""

    def now_ns(self):
        """Fail."""
        raise OSError("the clock is gone")


pytestmark = pytest.mark.usefixtures("world", "clean")


@pytest.fixture(scope="module")
def model(world):
    """A DDP model with timed buckets, after its first step."""
    found = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    comm.instrument_ddp(found)
    found(torch.ones(2, 4)).sum().backward()
    return found


@pytest.fixture
def backward(model):
    """One step of DDP, and the gradients of it."""

    def run():
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        return model.module.weight.grad.clone()

    return run


def test_a_broken_clock_costs_the_time_and_not_the_operation(backward):
    """Blocking and asynchronous operations and DDP's backward pass run without a clock, which is said once each."""
    expected = backward()
    comm.reset_log()
    comm.configure(timer=BrokenTimer())
    data = torch.full((2,), 5.0)
    with pytest.warns(timer.TimingWarning, match="Timing all_reduce failed.*the clock is gone"):
        comm.all_reduce(data)
    with pytest.warns(timer.TimingWarning, match="Timing broadcast failed"):
        assert comm.broadcast(data, 0, async_op=True).wait()
    with pytest.warns(timer.TimingWarning, match="Timing ddp_all_reduce failed"):
        assert torch.equal(expected, backward())
    assert torch.equal(torch.full((2,), 5.0), data)


def test_the_thread_is_timed_again_when_the_clock_is_back():
    """A clock that failed during an operation does not leave its thread untimed for ever."""
    comm.configure(timer=BrokenTimer())
    with pytest.warns(timer.TimingWarning):
        comm.all_reduce(torch.ones(2))
    assert (0, 1) == ((found := comm.summary().find("all_reduce")).count, found.untimed)
    comm.configure(timer=None)
    comm.all_reduce(torch.ones(2))
    assert (1, 1) == ((found := comm.summary().find("all_reduce")).count, found.untimed)


def test_a_clock_that_breaks_during_an_operation():
    """The start was read and the end cannot be: the operation counts as untimed, and the next one is timed."""
    reads = []

    class Breaking(timer.Timer):
        def now_ns(self):
            reads.append(1)
            if len(reads) == 2:
                raise OSError("the clock is gone")
            return super().now_ns()

    comm.configure(timer=Breaking())
    with pytest.warns(timer.TimingWarning, match="the clock is gone"):
        comm.barrier()
    comm.barrier()
    found = comm.summary().find("barrier")
    assert (1, 1, 0) == (found.count, found.untimed, found.pending)


def test_a_closed_standard_error_ends_the_printing(backward, monkeypatch):
    """Lines of ``verbose=True`` that cannot be written are given up, said once; the operations go on, and are timed."""
    comm.reset_log()
    stream = Path(os.devnull).open("w")  # noqa: SIM115 (closed at once, which is the point)
    stream.close()
    comm.configure(verbose=True)
    with (
        monkeypatch.context() as patch,
        pytest.warns(timer.TimingWarning, match=r"verbose=True\) failed at all_reduce"),
    ):
        patch.setattr(sys, "stderr", stream)
        comm.all_reduce(torch.ones(4))
        backward()
    assert not SETTINGS.verbose
    counts = {op.op: op.count for op in comm.summary().ops}
    assert {"all_reduce": 1, "ddp_all_reduce": 1} == counts


def test_the_hook_outside_a_backward_pass(model, backward):
    """As ``Join`` calls it on a rank that has run out of data: counted and completed, exposed to no one."""
    comm.reset_log()
    model._match_all_reduce_for_bwd_pass()
    (found,) = comm.summary().ops
    assert ("ddp_all_reduce", 1, 0, None) == (found.op, found.count, found.pending, found.exposed_s)
    backward()
    (found,) = comm.summary().ops
    assert (2, 0) == (found.count, found.pending)
    assert found.exposed_s is not None


def test_a_failed_hook_is_the_run_s_own_failure():
    """A hook of the user's that raises is counted as failed, and its exception ends the backward pass as ever."""

    def broken(state, bucket):
        raise ValueError("no network")

    hooked = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    comm.instrument_ddp(hooked, hook=broken)
    with pytest.raises(ValueError, match="no network"):
        hooked(torch.ones(2, 4)).sum().backward()
    (found,) = comm.summary().ops
    assert ("ddp_hook", 0, 1, 0) == (found.op, found.count, found.failed, found.pending)


class Stuck(plain.Work):
    """An operation without its peer."""

    def wait(self, timeout=None):
        """As gloo's."""
        raise RuntimeError("Timed out waiting 2000ms for recv operation to complete")

    def get_future(self):
        """It tells of no end."""
        raise RuntimeError("no future")


def test_a_time_out_names_what_has_not_finished():
    """What this rank has issued and not finished, with sequence numbers, once; the error itself reaches the caller."""
    group = plain.GroupMember.WORLD

    def stuck(tensor, op=None, group=None, async_op=False):
        plain.barrier()  # which advances the group's number
        return Stuck()

    issue = comm.timed_op(stuck, name="all_reduce")
    before = group._get_sequence_number_for_group()
    first, second = issue(torch.ones(4)), issue(torch.ones(8))
    found = comm.summary()
    assert [("all_reduce", before + 1, 16), ("all_reduce", before + 2, 32)] == [
        (op.op, op.sequence, op.message_bytes) for op in found.unfinished
    ]
    assert f"Not finished: all_reduce #{before + 1} of group '0', 16 B, issued" in str(found)
    named = rf"all_reduce timed out on rank 0\. .*#{before + 1} of group '0', 16 B.*; all_reduce #{before + 2}"
    with pytest.warns(timer.TimingWarning, match=named), pytest.raises(RuntimeError, match="Timed out waiting 2000ms"):
        first.wait()
    assert [before + 2] == [op.sequence for op in comm.summary().unfinished]
    del second
