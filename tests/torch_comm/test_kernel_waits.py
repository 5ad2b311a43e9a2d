"""Waits for operations that the kernel saw, and its memory of those for which no one does."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as plain
import torch.distributed._functional_collectives as functional

from deep500_timing_torch import comm
from deep500_timing_torch.comm import _build

pytestmark = pytest.mark.usefixtures("world", "clean")

DEADLINE_S = 300.0


@pytest.fixture(autouse=True)
def with_kernel(kernel, monkeypatch):
    """The kernel may be used."""
    monkeypatch.setenv(_build.SWITCH, "on")


def _is_gone(watched):
    # The backend's thread lets go of an operation a little after it has told of its end.
    until = time.monotonic() + DEADLINE_S
    while watched() is not None and time.monotonic() < until:
        time.sleep(0.001)
    return watched() is None


@pytest.mark.parametrize("how", ["nobody waits", "by the future", "wait"])
def test_the_kernel_keeps_no_tensor_alive(how):
    """Memory of an operation that is over is free again as it is without the timing, after a wait of any thread."""
    with comm.instrument(kernel=True):
        data = torch.ones(10)
        watched = weakref.ref(data)
        work = plain.all_reduce(data, async_op=True)
        if how == "wait":
            work.wait()
        elif how == "by the future":
            work.get_future().wait()
        del work, data
        assert _is_gone(watched)


def test_the_kernel_keeps_no_output_of_a_functional_collective_alive():
    """Nor of the ones that are waited for in C++."""
    with comm.instrument(kernel=True):
        result = functional.wait_tensor(functional.all_reduce(torch.ones(10), "sum", plain.group.WORLD))
        watched = weakref.ref(result)
        del result
        assert _is_gone(watched)


def _threads():
    return set(Path("/proc/self/task").iterdir())


def _gloo_threads():
    found = set()
    for thread in _threads():
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            if "gloo" in (thread / "comm").read_text():
                found.add(thread)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_the_kernel_keeps_no_destroyed_group_alive():
    """Nor its threads and connections; one that comes after it is another one."""
    with comm.instrument(kernel=True):
        for count in (1, 2):
            # By their numbers: one that has just begun has no name yet.
            before = _threads()
            group = plain.new_group([0], group_desc="short-lived")
            plain.all_reduce(torch.ones(10), group=group)
            its_own = _gloo_threads() - before
            assert its_own
            plain.destroy_process_group(group)
            del group
            until = time.monotonic() + DEADLINE_S
            while its_own & _threads() and time.monotonic() < until:
                time.sleep(0.001)
            assert set() == its_own & _threads()
            found = [op for op in comm.summary().ops if op.op == "all_reduce"]
            assert count == sum(op.count for op in found)


FUNCTIONAL = {
    "all_reduce": ("all_reduce", lambda x, group: functional.all_reduce(x, "sum", group)),
    "all_gather": ("all_gather_into_tensor", lambda x, group: functional.all_gather_single(x, 0, group)),
    "reduce_scatter": ("reduce_scatter_tensor", lambda x, group: functional.reduce_scatter_single(x, "sum", 0, group)),
    "all_to_all": ("all_to_all_single", lambda x, group: functional.all_to_all_single(x, None, None, group)),
    "broadcast": ("broadcast", lambda x, group: functional.broadcast(x, 0, group)),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collectives_tell_exposed_time(name):
    """A wait in ``wait_tensor`` is exposed time of the operation that it waits for, once."""
    logged, call = FUNCTIONAL[name]
    with comm.instrument(kernel=True):
        result = call(torch.ones(10), plain.group.WORLD)
        assert None is comm.summary().find(logged, 40).overlap
        functional.wait_tensor(result)
        functional.wait_tensor(result)
    (found,) = comm.summary().ops
    assert (logged, 1, 0) == (found.op, found.count, found.pending)
    assert None is not found.issue_s
    assert 0 < found.exposed_s
    # Gloo tells no one when a reduce-scatter is over but a waiting rank.
    assert (name == "reduce_scatter") == found.upper_bound == (found.overlap is None)


def test_exposed_time_in_a_compiled_function():
    """As in code that is not compiled."""
    with comm.instrument(kernel=True):

        @torch.compile(backend="aot_eager", fullgraph=True)
        def step(x):
            return functional.all_reduce(x * 2, "sum", plain.group.WORLD) + 1

        for _ in range(3):
            assert torch.equal(torch.full((10,), 3.0), step(torch.ones(10)))
    found = comm.summary().find("all_reduce", 40)
    assert (3, 0) == (found.count, found.pending)
    assert found.overlap is not None


def test_several_tensors_of_one_operation():
    """A coalesced one is waited for with each of its tensors, and counts once."""
    group = plain.group.WORLD
    with comm.instrument(kernel=True):
        results = functional.all_reduce_coalesced([torch.ones(10), torch.ones(20)], "sum", group)
        for result in results:
            functional.wait_tensor(result)
    found = comm.summary().find("all_reduce_coalesced", 120)
    assert (1, 0) == (found.count, found.pending)
    assert found.overlap is not None


def test_a_tensor_that_nothing_was_issued_for():
    """Waiting for it is waiting for nothing."""
    with comm.instrument(kernel=True):
        assert torch.equal(torch.ones(3), torch.ops._c10d_functional.wait_tensor(torch.ones(3)))
        assert () == tuple(comm.summary().ops)
