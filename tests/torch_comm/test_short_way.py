"""Asynchronous operations on the CPU: who sees their ends, and when nobody has to be asked for them."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch
import torch.distributed as plain

from deep500_timing.testing import ManualClock
from deep500_timing_torch import comm
from deep500_timing_torch.comm import _short_call, _short_way, _timed
from deep500_timing_torch.comm._log import LOG
from deep500_timing_torch.comm._records import SYNC
from deep500_timing_torch.comm._settings import SETTINGS

pytestmark = pytest.mark.usefixtures("world", "clean")

MS = 1_000_000


class Work(plain.Work):
    """An operation that ends when it is told to, or when somebody waits for it, after so many ms."""

    def __init__(self, clock, wait_ms, *, has_future=True):
        super().__init__()
        self.clock, self.wait_ms, self.has_future = clock, wait_ms, has_future
        self.future, self.asked = torch.futures.Future(), 0
        self.output = torch.ones(1)

    def end(self, error=None):
        """End now."""
        if error is None:
            self.future.set_result([self.output])
        else:
            self.future.set_exception(error)

    def is_completed(self):
        """Whether it has ended."""
        return self.future.done()

    def wait(self, timeout=None):
        """Let it end."""
        if not self.future.done():
            self.clock.advance_ns(self.wait_ms * MS)
            self.end()
        self.future.value()
        return True

    def get_future(self):
        """What ends with it."""
        if not self.has_future:
            raise RuntimeError("no future")
        self.asked += 1
        return self.future


@pytest.fixture
def clock(monkeypatch):
    """What the operations read."""
    manual = ManualClock()
    monkeypatch.setattr(_short_call, "perf_counter_ns", manual.now_ns)
    monkeypatch.setattr(_short_way, "perf_counter_ns", manual.now_ns)
    monkeypatch.setattr(SETTINGS, "now_ns", manual.now_ns)
    return manual


@pytest.fixture
def issue(clock):
    """Issue an asynchronous ``all_reduce`` whose call takes 1 ms; gives its handle and what that stands for."""
    made: list = []

    def all_reduce(tensor, op=None, group=None, async_op=False):
        if not async_op:
            return None
        clock.advance_ns(MS)
        return made.pop()

    timed = _timed.timed_operation("all_reduce", all_reduce)
    data = torch.ones(1)
    timed(data)  # the first one of a group is looked at closely
    assert 1 == comm.summary().find("all_reduce", 4).count

    def call(wait_ms=5, **kwargs):
        work = Work(clock, wait_ms, **kwargs)
        made.append(work)
        return timed(data, async_op=True), work

    return call


def _found():
    op = comm.summary().find("all_reduce", 4)
    # The first was a blocking one.
    return {"count": op.count - 1, "pending": op.pending, "failed": op.failed, "untimed": op.untimed}


ONE = {"count": 1, "pending": 0, "failed": 0, "untimed": 0}
UNDER_WAY = {"count": 0, "pending": 1, "failed": 0, "untimed": 0}


def _total_ms():
    return round(comm.summary().find("all_reduce", 4).total_s * 1e3)


@pytest.fixture
def settled(issue):
    """As ``issue``, after so many ended while somebody waited that no callback is asked for."""
    for _ in range(_short_way.SETTLED):
        handle, work = issue()
        assert isinstance(handle, _short_way.ShortWork)
        handle.wait()
        assert 1 == work.asked
    (group,) = [group for group in LOG.groups() if group.records]
    LOG.drain(wait=True)
    for record in group.records.values():
        record._clear()
        record.take(SYNC, 0, 0, None, None)
    return issue


def test_waited_for_when_it_ends(issue, clock):
    """Its call took 1 ms, the wait 5, and so it took 6, 5 of them exposed; a second wait is not counted."""
    handle, _ = issue()
    assert UNDER_WAY == _found()
    assert handle.wait()
    assert handle.wait()
    assert ONE == _found()
    op = comm.summary().find("all_reduce", 4)
    assert (6e-3, 1e-3, 5e-3, 1 / 6) == pytest.approx((op.total_s, op.issue_s, op.exposed_s, op.overlap))
    assert not op.upper_bound


def test_ended_unseen_tells_the_callback(issue, clock):
    """While somebody computes it ends after 3 ms, which a callback has seen; the wait later costs nothing."""
    handle, work = issue()
    clock.advance_ns(2 * MS)
    work.end()
    clock.advance_ns(10 * MS)
    handle.wait()
    assert ONE == _found()
    op = comm.summary().find("all_reduce", 4)
    assert (3e-3, 0.0, 1.0) == pytest.approx((op.total_s, op.exposed_s, op.overlap))
    assert not op.upper_bound


def test_without_a_callback_where_somebody_always_waited(settled, clock):
    """Nothing is asked of the operation, and its times are as right as before."""
    handle, work = settled()
    handle.wait()
    assert 0 == work.asked
    assert (ONE, 6) == (_found(), _total_ms())
    assert not comm.summary().find("all_reduce", 4).upper_bound


def test_ended_unseen_without_a_callback_is_an_upper_bound(settled, clock):
    """It had ended before the wait began, and is said to have taken that long at most; the next one has a callback."""
    handle, work = settled()
    work.end()
    clock.advance_ns(10 * MS)
    handle.wait()
    assert (ONE, 11) == (_found(), _total_ms())
    assert comm.summary().find("all_reduce", 4).upper_bound
    for _ in range(2 * _short_way.SETTLED):
        handle, work = settled()
        handle.wait()
        assert 1 == work.asked


@pytest.mark.parametrize("how", ["issue", "settled"])
def test_a_wait_that_raises(request, how):
    """What failed counts as failed, once, whether a callback was asked for or not."""
    handle, work = request.getfixturevalue(how)()
    work.end(ValueError("the peer is gone"))
    for _ in range(2):
        with pytest.raises(ValueError, match="the peer is gone"):
            handle.wait()
        assert {**UNDER_WAY, "pending": 0, "failed": 1} == _found()


@pytest.mark.parametrize("how", ["issue", "settled"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_summary_before_the_wait(request, clock, how, fails):
    """What is over is counted although nobody has waited, once; the wait is added when it comes."""
    handle, work = request.getfixturevalue(how)()
    assert UNDER_WAY == _found()
    work.end(ValueError("gone") if fails else None)
    expected = {**ONE, "count": 0, "failed": 1} if fails else ONE
    assert expected == _found()
    if not fails:
        assert 1 == _total_ms()
        assert None is comm.summary().find("all_reduce", 4).overlap
        handle.wait()
        assert 1.0 == comm.summary().find("all_reduce", 4).overlap
    assert expected == _found()
    del handle
    gc.collect()
    assert expected == _found()


@pytest.mark.parametrize("how", ["issue", "settled"])
@pytest.mark.parametrize("when", ["before", "after", "fails"])
def test_nobody_waits(request, clock, how, when):
    """A handle that is dropped keeps neither operation nor output alive, and its end is known all the same."""
    handle, work = request.getfixturevalue(how)()
    future, watched = work.future, weakref.ref(work)
    if when == "before":
        work.end()
    del handle
    del work
    gc.collect()
    assert None is watched()
    if when == "before":
        assert (ONE, 1) == (_found(), _total_ms())
        return
    assert UNDER_WAY == _found()
    clock.advance_ns(4 * MS)
    if when == "after":
        future.set_result([])
        assert (ONE, 5) == (_found(), _total_ms())
    else:
        future.set_exception(ValueError("gone"))
        assert {**ONE, "count": 0, "failed": 1} == _found()


def test_a_handle_in_a_cycle_is_collected(issue):
    """An operation that knows its own handle keeps neither alive."""
    handle, work = issue()
    work.handle, watched = handle, weakref.ref(work)
    work.end()
    del handle, work
    gc.collect()
    assert None is watched()
    assert ONE == _found()


def test_whoever_asks_for_the_future_has_the_end_known(settled, clock):
    """Waiting for the future is not seen, but it ends when it ends."""
    handle, work = settled()
    assert work.future is handle.get_future()
    clock.advance_ns(2 * MS)
    work.end()
    clock.advance_ns(20 * MS)
    assert (ONE, 3) == (_found(), _total_ms())
    assert not comm.summary().find("all_reduce", 4).upper_bound


def test_without_a_future(issue):
    """Of a backend without futures only the end of the wait is known, and the long way is taken."""
    for _ in range(3):
        handle, _ = issue(has_future=False)
        assert not isinstance(handle, _short_way.ShortWork)
        handle.wait()
    assert {**ONE, "count": 3} == _found()
    assert comm.summary().find("all_reduce", 4).upper_bound


def test_on_a_real_group():
    """Gloo's own operations, waited for at once, late, and never: all are counted, none is left under way."""
    data = torch.ones(4)
    for _ in range(3):
        comm.all_reduce(data)
        comm.all_reduce(data, async_op=True).wait()
    handle = comm.all_reduce(data, async_op=True)
    assert isinstance(handle, _short_way.ShortWork)
    future = handle.get_future()
    future.wait()
    comm.all_reduce(data, async_op=True)
    comm.barrier()  # one thread does them all, in order
    op = comm.summary().find("all_reduce", 16)
    assert (8, 0, 0, 0) == (op.count, op.pending, op.failed, op.untimed)


def test_left_alone_in_a_non_strict_export(monkeypatch):
    """Tracing that runs the code with a flag up, rather than read it, is no operation, on the short way either."""
    data = torch.ones(1)
    for _ in range(2):
        comm.all_reduce(data)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    comm.all_reduce(data)
    monkeypatch.undo()
    comm.all_reduce(data)
    assert 3 == comm.summary().find("all_reduce", 4).count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_has_no_thread_that_is_in_an_operation():
    """A number of a thread that only the parent has may be that of a thread of the child's, which is timed."""
    inside, forked = threading.Event(), threading.Event()

    @comm.timed_op
    def exchange():
        inside.set()
        return forked.wait(20)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        assert inside.wait(20)
        assert {thread.ident} == _short_call.inside
        child = os.fork()
        if child == 0:
            os._exit(len(_short_call.inside))
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        forked.set()
        thread.join()
    assert set() == _short_call.inside
