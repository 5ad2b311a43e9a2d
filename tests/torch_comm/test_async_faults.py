"""Asynchronous operations that fail, that return something odd, or never report their end: the counts."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as plain

from deep500_timing._base.warn import forget_warnings
from deep500_timing.devices import EventPool
from deep500_timing.testing import ManualDeviceClock
from deep500_timing_torch import comm
from deep500_timing_torch.comm import _device, _log, _report
from deep500_timing_torch.comm._log import LOG

pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def device(monkeypatch):
    """A simulated device that holds tensors of PyTorch's ``meta`` device."""
    clock = ManualDeviceClock()
    monkeypatch.setitem(_device._pools, torch.device("meta"), EventPool(clock))
    return clock


class Work(plain.Work):
    """An operation with a future or without one, with a wait that succeeds or fails."""

    def __init__(self, future=None, error=None):
        super().__init__()
        self.future, self.error = future, error

    def wait(self, timeout=None):
        """Succeed or fail."""
        if self.error is not None:
            raise self.error
        return True

    def get_future(self):
        """Some backends have none."""
        if self.future is None:
            raise RuntimeError("no future")
        return self.future


def _issue(result, where="cpu"):
    """Call a timed ``all_reduce`` of four bytes that returns this."""
    return comm.timed_op(lambda tensor, op=None, group=None, async_op=False: result, name="all_reduce")(
        torch.empty(1, device=where), async_op=True
    )


def _counts():
    op = comm.summary().find("all_reduce", 4)
    return {"count": op.count, "failed": op.failed, "untimed": op.untimed, "pending": op.pending}


def _failed_future():
    future = torch.futures.Future()
    future.set_exception(ValueError("the peer is gone"))
    return future


FAILED_ONCE = {"count": 0, "failed": 1, "untimed": 0, "pending": 0}


@pytest.mark.parametrize("late", [False, True])
def test_a_future_that_fails(late):
    """However early its failure is known, the operation counts as failed, once, and not as one that took a time."""
    future = torch.futures.Future() if late else _failed_future()
    work = _issue(Work(future, ValueError("the peer is gone")))
    if late:
        assert {"count": 0, "failed": 0, "untimed": 0, "pending": 1} == _counts()
        future.set_exception(ValueError("the peer is gone"))
    assert FAILED_ONCE == _counts()
    with pytest.raises(ValueError, match="the peer is gone"):
        work.wait()
    assert FAILED_ONCE == _counts()


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_wait_that_fails(device, where, recwarn):
    """Its own error comes out, it counts as failed, on a device its events serve again, and nothing else is said."""
    forget_warnings()
    for i in range(1, 21):
        work = _issue(Work(error=ValueError("timed out")), where)
        with pytest.raises(ValueError, match="timed out"):
            work.wait()
        assert {"count": 0, "failed": i, "untimed": 0, "pending": 0} == _counts()
    assert device.calls["new_event"] <= (0 if where == "cpu" else 3)
    assert [] == [str(warning.message) for warning in recwarn]


def test_a_future_of_device_values(device):
    """It is handed on as it is, since its callback makes streams wait; the operation counts as not timed."""
    future = torch.futures.Future()
    for i in range(1, 11):
        assert future is _issue(future, "meta")
        assert {"count": 0, "failed": 0, "untimed": i, "pending": 0} == _counts()
    assert "GPU" == comm.summary().find("all_reduce", 4).device
    assert device.calls["new_event"] <= 2


def test_a_future_that_is_waited_for_twice():
    """A second wait is not counted."""
    original = torch.futures.Future()
    future = _issue(original)
    original.set_result(3)
    assert [3, 3] == [future.wait(), future.wait()]
    (record,) = LOG.records()
    assert (1, 1) == (record.latency.count, record.counts[_log.EXPOSED])


def test_a_callback_that_comes_late(monkeypatch):
    """An operation has ended after its wait. Without a wait, a waiting reader sees the time of its callback."""
    future = torch.futures.Future()
    _issue(Work(future)).wait()
    assert {"count": 1, "failed": 0, "untimed": 0, "pending": 0} == _counts()
    future.set_result(None)
    assert 1 == _counts()["count"]
    comm.reset_log()
    future = torch.futures.Future()
    work = _issue(Work(future))
    assert 1 == _counts()["pending"]
    monkeypatch.setattr(_log.time, "sleep", lambda seconds: future.done() or future.set_result(None))
    op = comm.summary(wait=True).find("all_reduce", 4)
    assert (1, 0) == (op.count, op.pending)
    del work


def test_an_operation_that_returns_an_empty_list():
    """A batch of nothing is over when the call is, and nothing of it is under way."""
    empty: list = []
    assert empty is _issue(empty)
    assert {"count": 1, "failed": 0, "untimed": 0, "pending": 0} == _counts()
    assert None is comm.summary().find("all_reduce", 4).issue_s


class TestWhoPrints:
    def test_one_process_is_rank_0_of_1(self, monkeypatch):
        """Without a launcher or a process group the summary is that of the only rank, which prints it."""
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        found = comm.log_summary(file=(printed := io.StringIO()))
        assert (0, 1) == (found.rank, found.world_size)
        assert f"{found}\n" == printed.getvalue()

    @pytest.mark.parametrize(
        ("missing", "fault", "prints"),
        [([], None, [0]), ([2], None, [0]), ([0], None, [1]), ([0, 1], None, [2]), ([], "the store is gone", [0, 1])],
    )
    def test_the_first_of_those_that_live(self, monkeypatch, missing, fault, prints):
        """One rank prints; where the store went with rank 0, no one knows who lives, and rank 1 does as well."""

        def told(found, deadline_s):
            found.missing_ranks, found.fault = missing, fault

        monkeypatch.setattr(_report, "add_stragglers", told)
        printed = {rank: io.StringIO() for rank in range(3)}
        for rank, file in printed.items():
            monkeypatch.setattr(_report, "rank_and_world", lambda rank=rank: (rank, 3))
            comm.log_summary(show_straggler=True, file=file)
        assert prints == [rank for rank, file in printed.items() if file.getvalue()]
