"""Tests without a second rank: arguments, settings, regions, failures, the patch and its undoing."""

from __future__ import annotations

import gc
import io
import warnings
from types import ModuleType

import pytest
import torch
import torch.distributed as plain
from hypothesis import given
from hypothesis import strategies as st

import deep500_timing_torch as timer
from deep500_timing._base.warn import forget_warnings
from deep500_timing.testing import ManualClock
from deep500_timing_torch import comm
from deep500_timing_torch.comm import _log, _settings
from deep500_timing_torch.comm._functions import original_of
from deep500_timing_torch.comm._ops import OPS

pytestmark = pytest.mark.usefixtures("world", "clean")


@pytest.fixture
def clock():
    """A clock that moves when told to, through a timer that is configured."""
    manual = ManualClock()
    comm.configure(timer=timer.Timer(clock=manual))
    return manual


def _counts():
    return {op.op: op.count for op in comm.summary().ops}


# --- what passes through ------------------------------------------------------------------------------------------


def test_every_public_name_of_torch_distributed_is_there():
    """``comm`` has what ``torch.distributed`` has: its operations timed, all else as it is."""
    own = {"P2POp", "get_global_rank", "ProcessGroup", "ReduceOp"}
    for name in vars(plain):
        if name.startswith("_"):
            continue
        assert name in dir(comm)
        if isinstance(vars(plain)[name], ModuleType):
            # A submodule is there from its first import on, by whomever.
            assert getattr(comm, name) is vars(plain)[name]
            continue
        assert name in comm.__all__
        theirs, ours = getattr(plain, name), getattr(comm, name)
        if name in OPS:
            assert original_of(ours) is theirs
            assert ours is not theirs
        elif name not in own:
            assert ours is theirs


def test_private_names_pass_through():
    """Code that reaches for private names of ``torch.distributed`` finds them."""
    assert plain.distributed_c10d is comm.distributed_c10d
    assert plain._DEFAULT_FIRST_BUCKET_BYTES == comm._DEFAULT_FIRST_BUCKET_BYTES


def test_unknown_name():
    """A name that neither has is an AttributeError that says so."""
    with pytest.raises(AttributeError, match=r"no attribute 'all_redcue', and neither has torch\.distributed"):
        comm.all_redcue  # noqa: B018 (the look-up is the test)


def test_all_names_exist():
    """Every name that is exported is there, once."""
    assert len(comm.__all__) == len(set(comm.__all__))
    for name in comm.__all__:
        assert hasattr(comm, name)


# --- settings -------------------------------------------------------------------------------------------


def test_off():
    """``enabled=False`` records nothing, and the operation still happens."""
    comm.configure(enabled=False)
    out = torch.zeros(3)
    comm.all_gather([out], torch.ones(3))
    assert torch.equal(torch.ones(3), out)
    assert {} == _counts()


def test_prof_ops():
    """With ``prof_all=False`` only the operations of ``prof_ops`` are recorded."""
    comm.configure(prof_all=False, prof_ops=["barrier"])
    comm.all_reduce(torch.ones(1))
    comm.barrier()
    assert {"barrier": 1} == _counts()
    with pytest.raises(TypeError, match=r"prof_ops=\['barrier'\]"):
        comm.configure(prof_ops="barrier")


def test_debug_keeps_callers_apart():
    """``debug=True`` names the function that called."""

    def sync_gradients():
        comm.all_reduce(torch.ones(1))

    comm.configure(debug=True)
    sync_gradients()
    comm.all_reduce(torch.ones(1))
    expected = {"all_reduce | sync_gradients", "all_reduce | test_debug_keeps_callers_apart"}
    assert expected == set(_counts())


def test_verbose_prints_each_operation(clock, capsys):
    """``verbose=True`` prints a line for each operation on rank 0."""
    comm.configure(verbose=True)
    operation = comm.timed_op(lambda tensor, group=None: clock.advance(0.002), name="all_reduce")
    operation(torch.ones(500_000))
    comm.barrier()
    lines = capsys.readouterr().err.splitlines()
    assert "comm: all_reduce, 2000000 B, 1 ranks: 2.000 ms, algbw 1.000 GB/s, busbw 0.000 GB/s" == lines[0]
    assert "comm: barrier, 1 ranks: 0.000 ms" == lines[1]


def test_regions_of_a_timer(clock):
    """A blocking operation is a COMM region; of an asynchronous one the call and the wait are."""
    comm.configure(timer=(tmr := timer.Timer(clock=clock)))
    comm.timed_op(lambda: clock.advance(0.25), name="blocking")()

    class Work(plain.Work):
        def wait(self, timeout=None):
            clock.advance(0.5)
            return True

    def issue():
        clock.advance(0.125)
        return Work()

    work = comm.timed_op(issue, name="own")()
    clock.advance(10)
    work.wait()
    work.wait()  # a second wait is not counted
    assert [0.25, 0.125, 0.5] == tmr.get_time(timer.TimeType.COMM)
    own = comm.summary().find("own")
    assert (0.125, 0.5, 10.625, True) == (own.issue_s, own.exposed_s, own.total_s, own.upper_bound)


# --- one's own operations -----------------------------------------------------------------------------------------


def test_own_operation_has_latency_only(clock):
    """An operation that no one knows gets its time, and no bandwidth."""

    @comm.timed_op
    def ring_exchange(tensor):
        """Do as it says."""
        clock.advance(0.004)
        return tensor

    tensor = torch.ones(3)
    assert tensor is ring_exchange(tensor)
    assert "Do as it says." == ring_exchange.__doc__
    (op,) = comm.summary().ops
    assert ("ring_exchange", None, None, None) == (op.op, op.message_bytes, op.algbw_gb_per_s, op.busbw_gb_per_s)
    assert (1, 0.004, 0.004) == (op.count, op.mean_s, op.p95_s)


def test_own_operation_with_a_size(clock):
    """Told its size and by which factor, it gets both bandwidths."""
    halves = comm.timed_op(name="halves", size=lambda tensor: tensor.nbytes, busbw=lambda ranks: ranks / 2)(
        lambda tensor: clock.advance(0.001)
    )
    halves(torch.ones(250_000))
    op = comm.summary().find("halves", 1_000_000)
    assert (pytest.approx(1.0), pytest.approx(0.5)) == (op.algbw_gb_per_s, op.busbw_gb_per_s)


def test_what_an_operation_calls_is_part_of_it():
    """Operations inside an operation are not counted again, also not after one of them has failed."""

    @comm.timed_op
    def compound():
        comm.all_reduce(torch.ones(1))
        comm.barrier()

    compound()
    assert {"compound": 1} == _counts()
    comm.barrier()
    assert {"compound": 1, "barrier": 1} == _counts()


def test_only_callables_are_timed():
    """Anything else is refused by name."""
    with pytest.raises(TypeError, match="must be callable, not int"):
        comm.timed_op(3)


# --- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_failed_operation_is_counted_as_failed():
    """Its exception reaches the caller, its time does not count, and the next one is timed."""
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            comm.all_reduce("no tensor")
    comm.all_reduce(torch.ones(1))
    failed = comm.summary().find("all_reduce")
    assert (0, 2, None, None) == (failed.count, failed.failed, failed.mean_s, failed.algbw_gb_per_s)
    assert 1 == comm.summary().find("all_reduce", 4).count
    assert "all_reduce, –: 2 failed" in str(comm.summary())


def test_a_fault_in_timing_costs_a_warning():
    """A size that is unknown, or a timer that fails, never keeps an operation from running."""
    forget_warnings()

    def broken(tensor):
        raise OSError("disk full")

    class Broken(timer.Timer):
        def record(self, key, start_ns, end_ns):
            raise OSError("disk full")

    unsized = comm.timed_op(name="unsized", size=broken)(lambda tensor: 3)
    assert 3 == unsized(torch.ones(1))
    assert None is comm.summary().find("unsized").message_bytes
    odd = comm.timed_op(name="odd", size=lambda tensor: [])(lambda tensor: 4)
    with pytest.warns(timer.TimingWarning, match="Timing odd failed; it runs all the same"):
        assert 4 == odd(torch.ones(1))
    comm.configure(timer=Broken())
    data = torch.full((2,), 5.0)
    with pytest.warns(timer.TimingWarning, match="Timing all_reduce failed"):
        comm.all_reduce(data)
    with pytest.warns(timer.TimingWarning, match="Timing broadcast failed"):
        assert comm.broadcast(data, 0, async_op=True).wait()
    comm.configure(timer=None)
    handle = comm.barrier(async_op=True)
    comm.configure(timer=Broken())
    with pytest.warns(timer.TimingWarning, match="Timing barrier failed"):
        assert handle.wait()
    assert torch.equal(torch.full((2,), 5.0), data)


def test_summaries_across_ranks_follow_the_process_group():
    """A summary with stragglers of a world of one finds no one to compare with, as often as it is asked for."""
    comm.barrier()
    for _ in range(3):
        found = comm.log_summary(show_straggler=True, file=io.StringIO())
        assert ([], [], None, None) == (found.stragglers, found.missing_ranks, found.late_rank, found.fault)


def test_wrong_arguments_are_the_operation_s_own_error():
    """The message is that of ``torch.distributed``, not of the timing."""
    with pytest.raises(TypeError, match="all_reduce"):
        comm.all_reduce()


def test_groups_of_others_are_not_recorded():
    """On a rank that is not in the group, which does nothing there, nothing is recorded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        comm.all_reduce(torch.ones(1), group=plain.GroupMember.NON_GROUP_MEMBER)
    assert {} == _counts()


def test_coalesced_calls_are_counted_not_timed():
    """In a coalescing block the calls only take notes; what takes time is the end of the block."""
    tensor = torch.ones(4)
    with plain.distributed_c10d._coalescing_manager():
        comm.all_reduce(tensor)
        comm.all_reduce(tensor)
    op = comm.summary().find("all_reduce")
    assert (0, 2, None) == (op.count, op.untimed, op.algbw_gb_per_s)


def test_handles_pass_for_the_original(world):
    """A timed handle is a ``Work``, and answers as the one that it stands for."""
    work = comm.all_reduce(torch.full((2,), 3.0), async_op=True)
    assert isinstance(work, plain.Work)
    assert isinstance(work, comm.TimedWork)
    assert work.wait()
    assert work.is_completed()
    assert torch.equal(torch.full((2,), 3.0), work.get_future().wait()[0])
    assert torch.equal(torch.full((2,), 3.0), work.result()[0])


def test_futures_pass_for_the_original():
    """What returns a future still does: it completes, chains, and times its wait."""
    tensors = [torch.full((2,), 3.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        future = comm.all_reduce_coalesced(tensors, async_op=True)
        other = comm.all_reduce_coalesced(tensors, async_op=True)
    assert isinstance(future, torch._C.Future)
    assert torch.equal(torch.full((2,), 6.0), other.then(lambda done: done.value()[0] * 2).wait())
    assert torch.equal(torch.full((2,), 3.0), future.wait()[0])
    assert future.done()
    assert comm.summary().find("all_reduce_coalesced").exposed_s > 0


def test_a_handle_that_nobody_waits_for_is_complete_all_the_same():
    """Its completion is known; its exposed part is not."""
    work = comm.barrier(async_op=True)
    while not work.is_completed():
        pass
    comm.barrier()
    del work
    op = comm.summary().find("barrier")
    assert (None, None) == (op.exposed_s, op.overlap)


# --- memory -------------------------------------------------------------------------------------------------------


def test_a_group_that_is_destroyed_is_not_kept_alive():
    """The ledger remembers a group by name only; its times stay in the summary."""
    group = plain.new_group([0])
    comm.all_reduce(torch.ones(1), group=group)
    assert gc.get_referrers(group)
    holders = [holder for holder in gc.get_referrers(group) if isinstance(holder, (_log.Group, _log.Record))]
    assert [] == holders
    plain.destroy_process_group(group)
    assert {"all_reduce": 1} == _counts()


@given(st.integers(1, 2**40), st.integers(1, 2**20), st.integers(1, 600), st.lists(st.integers(1, 2**40), max_size=20))
def test_sizes_without_end_share_records(first, step, count, more):
    """Beyond so many sizes they share a record for each power of two, which knows the mean of its sizes."""
    sizes = [*range(first, first + step * count, step), *more]
    group = _log.Group(None, "test", 2, 0, [0, 1])
    for nbytes in sizes:
        group.record(OPS["all_reduce"], "all_reduce", nbytes)
    assert len(group.records) <= _log.MAX_SIZES + 41
    assert len(sizes) == sum(record.calls for record in group.records.values())
    exact = {record.nbytes for record in group.records.values() if not record.size_is_mean}
    shared = [record for record in group.records.values() if record.size_is_mean]
    assert min(len(set(sizes)), _log.MAX_SIZES) == len(exact)
    assert set(dict.fromkeys(sizes)) >= exact
    beyond = [nbytes for nbytes in sizes if nbytes not in exact]
    assert (not beyond) == (not shared)
    assert sum(beyond) == sum(record.bytes_total for record in shared)
    for record in shared:
        assert record.nbytes <= record.message_bytes < 2 * record.nbytes
        own = [nbytes for nbytes in beyond if record.nbytes <= nbytes < 2 * record.nbytes]
        assert pytest.approx(sum(own) / len(own)) == record.message_bytes


def test_times_without_end_are_folded():
    """However often an operation runs, its count and total stay exact, and few times are kept."""
    ledger = _log.CommLog()
    group = _log.Group(None, "test", 2, 0, [0, 1])
    record = group.record(OPS["all_reduce"], "all_reduce", 8)
    for i in range(5000):
        ledger.put(record, _log.DONE, i, 2 * i, i)
        assert len(ledger.inbox) < _log.BATCH
    ledger.drain(wait=True)
    assert 5000 == record.latency.count
    assert sum(map(len, record.latency.kept()[0])) // 16 < 2 * _log.KEEP_LAST
    assert _log.WINDOW == len(group.ring)


# --- instrument ---------------------------------------------------------------------------------------------------


def _everything():
    return {
        (owner.__name__, name): value
        for owner in (plain, plain.distributed_c10d, plain.P2POp)
        for name, value in vars(owner).items()
    }


def test_instrument_undoes_itself():
    """Blocks may be nested and left by an exception; then everything is the same object as before."""
    before = _everything()
    with pytest.raises(KeyError), comm.instrument(), comm.instrument():
        plain.all_reduce(torch.ones(1))
        plain.distributed_c10d.barrier()
        raise KeyError
    after = _everything()
    assert before.keys() == after.keys()
    assert [] == [name for name in before if before[name] is not after[name]]
    assert {"all_reduce": 1, "barrier": 1} == _counts()


def test_instrument_times_what_others_have_patched(monkeypatch):
    """A patch that was there before is called as before, timed, and is there afterwards."""
    calls = []

    def theirs(tensor, *args, **kwargs):
        calls.append(tensor)

    monkeypatch.setattr(plain, "all_reduce", theirs)
    with comm.instrument():
        plain.all_reduce(torch.ones(2))
    assert theirs is plain.all_reduce
    assert 1 == len(calls)
    assert 1 == comm.summary().find("all_reduce", 8).count


def test_instrument_leaves_later_patches_alone(monkeypatch):
    """Who patches inside the block and stays is not undone, which is said."""

    def theirs(tensor):
        return None

    original = plain.broadcast
    try:
        said = r"torch\.distributed\.broadcast was patched by other code"
        with pytest.warns(timer.TimingWarning, match=said), comm.instrument():
            plain.broadcast = theirs
        assert theirs is plain.broadcast
    finally:
        plain.broadcast = original


def test_compiled_code_is_left_alone():
    """Inside ``torch.compile`` an operation is the original one, with no graph break on account of the timing."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(tensor):
        out = torch.empty(4)
        comm.all_gather_single(out, tensor + 1)
        return out * 2

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    assert torch.equal(torch.full((4,), 4.0), compiled(torch.ones(4)))
    assert 1 == len(graphs)
    assert {} == _counts()


def test_settings_have_no_leftovers():
    """The fixture has put back the tests' settings."""
    assert _settings.SETTINGS.timer is None
    assert _settings.SETTINGS.enabled
