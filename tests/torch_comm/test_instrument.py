"""How ``comm.instrument`` is held: plainly, as a block, as a decorator; its sentence on unseen operations."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as plain
from torch.distributed import all_reduce as bound_early

import deep500_timing_torch as timer
from deep500_timing._base import settings
from deep500_timing._command.doctor import examine
from deep500_timing.testing import ManualClock
from deep500_timing_torch import comm
from deep500_timing_torch.comm import _build, _functions
from deep500_timing_torch.comm._settings import SETTINGS

SWITCH = _build.SWITCH


pytestmark = pytest.mark.usefixtures("world", "clean")


@pytest.fixture(params=["patched functions", "the compiled kernel"])
def by(request, monkeypatch):
    """The timing part, as named to ``instrument``."""
    if request.param == "patched functions":
        return False
    request.getfixturevalue("kernel")
    monkeypatch.setenv(SWITCH, "on")
    return True


@pytest.fixture
def with_kernel(kernel, monkeypatch):
    """The kernel may be used."""
    monkeypatch.setenv(SWITCH, "on")


def _counts():
    counts: Counter[str] = Counter()
    for op in comm.summary().ops:
        counts[op.op] += op.count
    return dict(counts)


def _three():
    for _ in range(3):
        plain.all_reduce(torch.ones(10))


# --- how it is held -----------------------------------------------------------------------------------------------


def test_called_plainly(by):
    """It takes effect when it is called, and ``undo`` ends that."""
    timing = comm.instrument(kernel=by)
    _three()
    assert {"all_reduce": 3} == _counts()
    assert by == timing.kernel
    timing.undo()
    timing.undo()
    _three()
    assert {"all_reduce": 3} == _counts()
    assert "<Instrument, undone>" == repr(timing)


def test_dropped_it_stays(by):
    """Without a reference to its result it is in force all the same."""
    comm.instrument(kernel=by)
    gc.collect()
    _three()
    assert {"all_reduce": 3} == _counts()
    assert 1 == SETTINGS.instruments
    SETTINGS.instruments = 0
    _functions._take_out()


def test_as_a_block(by):
    """In force until the end of the block, again in a second one, and once in nested ones."""
    timing = comm.instrument(kernel=by)
    with timing, comm.instrument(kernel=by):
        _three()
    _three()
    with timing:
        _three()
    assert {"all_reduce": 6} == _counts()


def test_as_a_decorator(by):
    """In force in each call of the function, its exceptions included, and not in between."""

    @comm.instrument(kernel=by)
    def train(fails=False):
        """Train."""
        _three()
        if fails:
            raise KeyError

    assert 0 == SETTINGS.instruments
    assert "Train." == train.__doc__
    _three()
    train()
    _three()
    with pytest.raises(KeyError):
        train(fails=True)
    _three()
    assert {"all_reduce": 6} == _counts()


def test_left_without_being_entered(by):
    """Leaving a block twice, or one that was undone, does not undo anyone else's."""
    timing = comm.instrument(kernel=by)
    timing.__exit__(None, None, None)
    timing.__exit__(None, None, None)
    with comm.instrument(kernel=by):
        timing.__exit__(None, None, None)
        _three()
    assert {"all_reduce": 3} == _counts()


def test_the_kernel_inside_patched_functions(with_kernel):
    """A missing part says why; a present one serves smaller requests."""
    with comm.instrument(kernel=False), pytest.raises(RuntimeError, match="undo that one first"):
        comm.instrument(kernel=True)
    with comm.instrument(kernel=True), comm.instrument(kernel=False) as inner:
        assert inner.kernel


def test_without_a_kernel():
    """Switched off by the environment, ``instrument`` patches, and ``kernel=True`` is refused with the reason."""
    with comm.instrument() as timing:
        assert not timing.kernel
        assert SETTINGS.why_no_kernel.startswith(f"it is switched off by {SWITCH}")
    with pytest.raises(RuntimeError, match=f"there is no kernel: it is switched off by {SWITCH}"):
        comm.instrument(kernel=True)


# --- its sentences -------------------------------------------------------------------------------------------------


def _hints():
    return " ".join(comm.summary().hints)


def test_nothing_recorded_says_why():
    """Off by configuration, only some operations, never asked for, nothing issued: each with its remedy."""
    assert "call comm.instrument() before the training" in _hints()
    assert "nothing recorded" in str(comm.summary())
    with comm.instrument():
        assert "no process group has issued an operation since" in _hints()
        comm.configure(enabled=False)
        _three()
        assert "comm.configure(enabled=True) switches it on" in _hints()
        comm.configure(enabled=True, prof_all=False, prof_ops=["barrier"])
        assert "Only barrier is timed" in _hints()


def test_unseen_operations_are_counted():
    """Names bound before and methods of the group go past patched functions; the group's own number tells of them."""
    with comm.instrument(kernel=False):
        bound_early(torch.ones(10))
        plain.group.WORLD.allreduce([torch.ones(10)]).wait()
        _three()
        found = comm.summary()
    assert [2] == list(found.unseen.values())
    assert "2 operations of group '0' were issued by code that is not timed." in str(found)
    assert "names that were imported before" in str(found)
    bound_early(torch.ones(10))
    assert [2] == list(comm.summary().unseen.values())
    comm.reset_log()
    assert {} == comm.summary().unseen


# --- the kernel ---------------------------------------------------------------------------------------------------


def test_the_kernel_sees_what_patched_functions_do_not(with_kernel):
    """Names bound before, the group's own methods, inference mode, a compiled function; and this project's once."""
    with comm.instrument(kernel=True):
        bound_early(torch.ones(10))
        plain.group.WORLD.allreduce([torch.ones(10)]).wait()
        with torch.inference_mode():
            plain.all_reduce(torch.ones(10))
        comm.all_reduce(torch.ones(10))
        (found,) = comm.summary().ops
        assert ("all_reduce", 40, 4, 0, 0) == (found.op, found.message_bytes, found.count, found.pending, found.untimed)
        assert {} == comm.summary().unseen


def test_the_kernel_tells_exposed_time(with_kernel):
    """Of an asynchronous operation the call, the completion and the wait are known; of a blocking one the time."""
    with comm.instrument(kernel=True):
        work = plain.all_reduce(torch.ones(10), async_op=True)
        assert type(work) is type(plain.all_reduce(torch.ones(20), async_op=True))
        assert not isinstance(work, comm.TimedWork)
        work.wait()
        work.wait()
        plain.barrier()
    found = comm.summary().find("all_reduce", 40)
    assert (1, 0) == (found.count, found.pending)
    assert None not in (found.issue_s, found.exposed_s, found.overlap)
    assert (1, None) == (comm.summary().find("barrier").count, comm.summary().find("barrier").exposed_s)


def test_the_kernel_knows_ddp_s_exposed_time(with_kernel):
    """DDP waits from C++ at the end of the backward pass, which needs no hook to be seen."""
    with comm.instrument(kernel=True):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
        comm.reset_log()
        for _ in range(3):
            model(torch.ones(2, 100)).sum().backward()
        found = comm.summary().find("all_reduce", 40_400)
    assert (3, 0) == (found.count, found.pending)
    assert found.overlap is not None


def test_a_sparse_tensor_has_a_size(by):
    """What travels are its indices and its values."""
    data = torch.sparse_coo_tensor([[1, 3]], [2.0, 4.0], (1000,))
    with comm.instrument(kernel=by):
        plain.all_reduce(data)
    assert [2 * 8 + 2 * 4] == [op.message_bytes for op in comm.summary().ops]


def test_the_kernel_heeds_what_is_configured(with_kernel):
    """Switched off, restricted to some operations, and told to keep callers apart."""

    def sync_gradients():
        plain.all_reduce(torch.ones(1))

    with comm.instrument(kernel=True):
        comm.configure(enabled=False)
        _three()
        comm.configure(enabled=True, prof_all=False, prof_ops=["all_gather_into_tensor"])
        plain.all_gather_into_tensor(torch.ones(2), torch.ones(2))
        _three()
        assert {"all_gather_into_tensor": 1} == _counts()
        comm.configure(prof_all=True, debug=True)
        sync_gradients()
        assert 1 == _counts()["all_reduce | sync_gradients"]


def test_the_kernel_gives_a_timer_its_regions(with_kernel):
    """A timer gets the time of the call and of the wait, by its own clock."""
    clock = ManualClock()
    comm.configure(timer=(tmr := timer.Timer(clock=clock)))
    with comm.instrument(kernel=True):
        plain.all_reduce(torch.ones(10))
        work = plain.all_reduce(torch.ones(10), async_op=True)
        clock.advance(2)
        work.wait()
    found = comm.summary().find("all_reduce", 40)
    assert (2, 0) == (found.count, found.pending)
    assert [0, 0, 0, 0] == tmr.get_time(timer.TimeType.COMM)


def test_a_broken_timer_under_the_kernel(with_kernel):
    """A timer that fails costs its regions; the operations run and are counted."""

    class Broken(timer.Timer):
        def record(self, key, start_ns, end_ns):
            raise OSError("disk full")

    comm.configure(timer=Broken())
    with comm.instrument(kernel=True), pytest.warns(timer.TimingWarning, match="disk full"):
        plain.all_reduce(torch.ones(10))
        assert plain.all_reduce(torch.ones(10), async_op=True).wait()
    assert {"all_reduce": 2} == _counts()


def test_a_failed_operation_under_the_kernel(with_kernel):
    """Its exception reaches the caller, and it is counted as failed."""
    with comm.instrument(kernel=True):
        for _ in range(2):
            with pytest.raises(RuntimeError):
                plain.group.WORLD.allgather([[torch.ones(3)]], [torch.ones(4)]).wait()
        found = comm.summary().find("all_gather")
    assert (0, 2, 0) == (found.count, found.failed, found.pending)


def test_own_operations_beside_the_kernel(with_kernel):
    """A message of the user's own operation is part of it, and not counted by the kernel as well."""

    @comm.timed_op
    def ring_exchange():
        _three()

    with comm.instrument(kernel=True):
        ring_exchange()
        _three()
    assert {"ring_exchange": 1, "all_reduce": 3} == _counts()


def test_a_forked_child_starts_anew(with_kernel):
    """The child of a fork has nothing of the parent's, and neither locks nor threads of it."""
    with comm.instrument(kernel=True):
        _three()
        child = os.fork()
        if child == 0:
            os._exit(len(comm.summary().ops))
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert {"all_reduce": 3} == _counts()


# --- how it is built ----------------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A cache in which nothing was built."""
    monkeypatch.setenv(SWITCH, "on")
    monkeypatch.setenv(_build.CACHE, str(tmp_path))
    if lacks := _build.why_not_buildable():
        pytest.skip(lacks)
    return tmp_path


def test_settings_in_pyproject(tmp_path, monkeypatch):
    """The kernel's switch and folder may stand there, as every setting may."""
    for name in (SWITCH, _build.CACHE):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pyproject.toml").write_text('[tool.deep500-timing]\ncomm-kernel = false\ncache = "kept"\n')
    monkeypatch.chdir(tmp_path)
    settings._table.cache_clear()
    try:
        assert tmp_path / "kept" in _build.library_path().parents
        with pytest.raises(_build.KernelUnavailableError, match=r"switched off by .*, or by comm-kernel"):
            _build.load()
        monkeypatch.setenv(SWITCH, "perhaps")
        with pytest.raises(_build.KernelUnavailableError, match=f"{SWITCH}='perhaps' is wrong"):
            _build.load()
    finally:
        settings._table.cache_clear()


def test_a_killed_build_is_not_waited_for(empty_cache):
    """While a build runs no one starts another; once it was killed, the next one starts at once."""
    first = _build.start_build()
    assert _build.start_build() is None
    with pytest.raises(_build.KernelUnavailableError, match="another process has been building it"):
        _build.build(limit_s=0.01)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    second = _build.start_build()
    assert second is not None
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate()


def test_a_build_that_does_not_end(empty_cache):
    """It is ended at its limit, and the program goes on without."""
    began = time.monotonic()
    with pytest.raises(_build.KernelUnavailableError, match=r"its build was not done within 0\.2 s"):
        _build.build(limit_s=0.2)
    assert time.monotonic() - began < 60
    with comm.instrument(kernel=None) as timing:
        assert not timing.kernel
    for process in _functions._building:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    _functions._building.clear()


def test_a_compiler_that_refuses(empty_cache, monkeypatch):
    """Its error is handed on, and no later run tries again in the background."""
    refuses = empty_cache / "c++"
    refuses.write_text('#!/bin/sh\ntest "$1" = --version && exec c++ --version\necho no such standard >&2; exit 1\n')
    refuses.chmod(0o755)
    monkeypatch.setenv("CXX", str(refuses))
    with pytest.raises(_build.KernelUnavailableError, match=r"its build failed: .*no such standard"):
        _build.build(limit_s=60)
    with comm.instrument():
        assert "its build failed" in SETTINGS.why_no_kernel
    assert [] == _functions._building


def test_no_compiler(empty_cache, monkeypatch):
    """The missing part is named, with the remedy."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(_build.KernelUnavailableError, match=r"no C\+\+ compiler 'no-such-compiler'; install one"):
        _build.build(limit_s=1)


def test_doctor_says_whether_it_is_there(empty_cache):
    """A kernel that is not built is no fault; the row has the command that builds it."""
    assert "not been built; `python -m deep500_timing_torch.comm build`" in examine()["parts"]["comm kernel"]


def test_a_library_that_others_can_write(kernel, empty_cache):
    """Code that anyone may have put there is not run."""
    library = _build.library_path()
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    library.chmod(0o777)
    with pytest.raises(_build.KernelUnavailableError, match="can be written by others"):
        _build.load()


@pytest.mark.parametrize("kept", [4, 4096, 100_000, None], ids=lambda kept: f"{kept} bytes")
def test_a_truncated_library_is_not_loaded(kernel, empty_cache, kept):
    """A library that is cut off, or has no digest, is refused by name; loading it would end the program (SIGBUS)."""
    library = _build.library_path()
    library.parent.mkdir(parents=True, mode=0o700)
    content = Path(kernel).read_bytes()
    library.write_bytes(content if kept is None else content[:kept])
    library.chmod(0o700)
    if kept is not None:
        shutil.copy(Path(kernel).with_name("digest.txt"), library.parent)
    with comm.instrument() as timing:
        assert not timing.kernel
        why = "cannot be checked" if kept is None else "is damaged"
        assert f"{library} {why}" in SETTINGS.why_no_kernel
        assert "comm build`" in SETTINGS.why_no_kernel
