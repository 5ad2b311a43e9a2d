"""Every name of DeepSpeed's ``comm`` and its ways of calling, on one rank: each runs, and means as much as there."""

from __future__ import annotations

import io
import sys
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as plain

from deep500_timing_deepspeed import comm
from deep500_timing_deepspeed.comm._names import FROM_DEEPSPEED
from deep500_timing_torch.comm._ops import OPS
from deep500_timing_torch.comm._settings import SETTINGS

# The names of DeepSpeed's comm and of the outline that the project started from.
NAMES = [
    "timed_op",
    "configure",
    "configure_logging",
    "init_distributed",
    "initialize_backend",
    "init_deepspeed_backend",
    "is_initialized",
    "is_backend_initialized",
    "destroy_process_group",
    "new_group",
    "create_new_group",
    "is_available",
    "is_communication_package_available",
    "set_backend",
    "set_current_backend",
    "ProcessGroup",
    "CommsBackend",
    "CCLBackend",
    "TorchBackend",
    "CommsLogger",
    "comms_logger",
    "global_comms_logger",
    "TimerManager",
    "timers",
    "global_timers",
    "timer_summary",
    "cdb",
    "global_comm_backend",
    "broadcast",
    "broadcast_object_list",
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "send",
    "recv",
    "isend",
    "irecv",
    "P2POp",
    "batch_isend_irecv",
    "gather",
    "scatter",
    "barrier",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "reduce_scatter_fn",
    "inference_all_reduce",
    "all_reduce_coalesced",
    "allgather_fn",
    "all_gather_coalesced",
    "has_reduce_scatter_tensor",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "log_summary",
    "log_communication_summary",
    "reset_log",
    "has_comm_data",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "get_world_group",
    "get_world_size",
    "get_rank",
    "get_local_rank",
    "get_global_rank",
    "get_all_ranks_from_group",
    "default_pg_timeout",
    "mpi_discovery",
    "ReduceOp",
    "GradBucket",
    "NCCL_BACKEND",
    "GLOO_BACKEND",
    "MPI_BACKEND",
    "CCL_BACKEND",
    "HCCL_BACKEND",
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "main",
]


pytestmark = pytest.mark.usefixtures("world", "clean")


def _config(enabled=True, prof_all=False, prof_ops=("broadcast",)):
    logger = types.SimpleNamespace(verbose=False, debug=False, prof_ops=list(prof_ops), prof_all=prof_all)
    return types.SimpleNamespace(comms_config=types.SimpleNamespace(comms_logger_enabled=enabled, comms_logger=logger))


def _in_force():
    return SETTINGS.enabled, SETTINGS.prof_all, sorted(SETTINGS.prof_ops)


def _logged():
    return sorted({op.op for op in comm.summary().ops})


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    """Each name is there, for an import of it too."""
    assert hasattr(comm, name)
    assert name in dir(comm) or name in ("cdb", "global_comm_backend")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: comm.configure(deepspeed_config=_config()), (True, False, ["broadcast"])),
        (lambda: comm.configure(_config()), (True, False, ["broadcast"])),
        (lambda: comm.configure(_config(enabled=False)), (True, True, [])),
        (lambda: comm.configure(None, False), (False, True, [])),
        (lambda: comm.configure(None, True, False, ["broadcast"], False, False), (True, False, ["broadcast"])),
        (lambda: comm.configure(enabled=False), (False, True, [])),
        (lambda: comm.configure({"comms_logger": {"enabled": False}}), (False, True, [])),
        (lambda: comm.configure({"comms_logger": {"enabled": True, "prof_all": False}}), (True, False, [])),
        (lambda: comm.configure_logging(_config()), (True, False, ["broadcast"])),
    ],
)
def test_configure(call, expected):
    """A config, by position or by name, a dictionary, and the settings by position mean the same as there."""
    call()
    assert expected == _in_force()


def test_configure_with_what_is_no_config():
    """What once was ``enabled`` is no config: refused with the remedy, and nothing changed."""
    for wrong in (False, True, 3):
        with pytest.raises(TypeError, match=rf"say which setting is meant, as configure\(enabled={bool(wrong)}\)"):
            comm.configure(wrong)
    with pytest.raises(TypeError, match="enabled, prof_all, prof_ops"):
        comm.configure({"comms_logger": {"enable": True}})
    assert (True, True, []) == _in_force()


def _ones(count=4):
    return torch.ones(count)


FORMS = {
    "broadcast": ((_ones(), 0), {"tensor": _ones(), "src": 0}),
    "broadcast_object_list": (([1], 0), {"object_list": [1], "src": 0, "device": None}),
    "all_gather": (([_ones()], _ones()), {"tensor_list": [_ones()], "tensor": _ones()}),
    "all_gather_object": (([None], 1), {"object_list": [None], "obj": 1}),
    "all_gather_into_tensor": ((_ones(), _ones()), {"output_tensor": _ones(), "tensor": _ones()}),
    "allgather_fn": ((_ones(), _ones()), {"output_tensor": _ones(), "input_tensor": _ones()}),
    "reduce_scatter": ((_ones(), [_ones()]), {"output": _ones(), "input_list": [_ones()]}),
    "reduce_scatter_tensor": ((_ones(), _ones()), {"output_tensor": _ones(), "tensor": _ones()}),
    "reduce_scatter_fn": ((_ones(), _ones()), {"output_tensor": _ones(), "tensor": _ones()}),
    "all_to_all_single": ((_ones(), _ones()), {"output": _ones(), "tensor": _ones()}),
    "gather": ((_ones(), [_ones()], 0), {"tensor": _ones(), "gather_list": [_ones()], "dst": 0}),
    "scatter": ((_ones(), [_ones()], 0), {"tensor": _ones(), "scatter_list": [_ones()], "src": 0}),
    "reduce": ((_ones(), 0), {"tensor": _ones(), "dst": 0}),
    "all_reduce": ((_ones(),), {"tensor": _ones(), "op": plain.ReduceOp.SUM}),
    "inference_all_reduce": ((_ones(),), {"tensor": _ones(), "op": plain.ReduceOp.SUM}),
    "all_reduce_coalesced": (([_ones(3), _ones(2)],), {"tensors": [_ones(3), _ones(2)]}),
    "barrier": ((), {"device_ids": None}),
    "monitored_barrier": ((), {"timeout": timedelta(seconds=20), "wait_all_ranks": False}),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", FORMS)
def test_forms_of_each_operation(name):
    """By position, by DeepSpeed's names, and with ``prof``, ``log_name`` and ``debug``, which name it in the log."""
    args, kwargs = FORMS[name]
    operation = getattr(comm, name)
    operation(*args)
    operation(**kwargs)
    operation(*args, prof=True, log_name="mine", debug="caller")
    logged = OPS[name].name
    assert sorted({logged, "mine"}) == _logged()
    assert 2 == sum(op.count for op in comm.summary().ops if op.op == logged)


def test_positional_prof():
    """The fifth of ``all_reduce`` is ``prof``; where PyTorch has a rank at that place, only a bool is."""
    comm.configure(prof_all=False)
    comm.all_reduce(_ones(), plain.ReduceOp.SUM, None, False, True)
    comm.broadcast(_ones(), 0, None, False, True, "mine")
    comm.broadcast(_ones(), None, None, False, 0)
    assert ["all_reduce", "mine"] == _logged()


def test_prof_and_log_name_choose_what_is_logged():
    """With ``prof_all=False`` one call may ask for itself, by ``prof`` or by a name that is in ``prof_ops``."""
    comm.configure(prof_all=False, prof_ops=["mine"])
    comm.all_reduce(_ones())
    comm.all_reduce(_ones(), prof=True)
    comm.all_reduce(_ones(), log_name="mine")
    comm.all_reduce(_ones(), log_name="other")
    assert ["all_reduce", "mine"] == _logged()
    comm.configure(debug=True)
    comm.all_reduce(_ones(), log_name="mine", debug="step")
    assert "mine | step" in _logged()
    comm.configure(enabled=False)
    comm.all_reduce(_ones(), prof=True, log_name="off")
    assert "off" not in _logged()


def test_own_operations_with_deepspeed_s_parameters():
    """``log_name`` of a function's own names it, and chooses it from ``prof_ops``."""

    @comm.timed_op
    def ring(tensor, group=None, prof=False, log_name="twice", debug="f"):
        comm.all_reduce(tensor)

    ring(_ones())
    comm.configure(prof_all=False, prof_ops=["twice"])
    ring(_ones())
    ring(_ones(), log_name="other")
    found = {op.op: op.count for op in comm.summary().ops}
    assert {"twice": 2} == found


def test_all_gather_coalesced_in_both_forms():
    """DeepSpeed's flat outputs and PyTorch's lists of each rank's tensors hold the same."""
    flat = [torch.zeros(4), torch.zeros(2)]
    comm.all_gather_coalesced(flat, [torch.full((4,), 3.0), torch.full((2,), 5.0)])
    assert [3.0] * 4 == flat[0].tolist()
    assert [5.0] * 2 == flat[1].tolist()
    lists = [[torch.zeros(4)]]
    comm.all_gather_coalesced(lists, [torch.full((4,), 7.0)])
    assert [7.0] * 4 == lists[0][0].tolist()
    assert {"all_gather_coalesced": 2} == {name: sum(op.count for op in comm.summary().ops) for name in _logged()}


def test_summary_as_a_dictionary():
    """``log_summary(return_dict=True)`` has DeepSpeed's three parts, in its units."""
    comm.all_reduce(_ones())
    for found in (
        comm.log_summary(return_dict=True, file=io.StringIO()),
        comm.log_summary(False, True, file=io.StringIO()),
    ):
        assert ["metadata", "straggler_analysis", "summary"] == sorted(found)
        assert None is found["straggler_analysis"]
        entry = found["summary"]["all_reduce"][16]
        assert (1, 16, "16 B") == (entry["count"], entry["msg_size_bytes"], entry["msg_size_str"])
        expected = comm.summary().find("all_reduce").total_s * 1e3
        assert expected == pytest.approx(entry["total_latency_ms"])
    assert {} == comm.log_summary(True, True, file=io.StringIO())["straggler_analysis"]


def test_the_logger_of_this_process():
    """``comms_logger`` reads and sets what ``configure`` does, and has what ``summary`` has."""
    logger = comm.comms_logger
    assert not comm.has_comm_data()
    comm.all_reduce(_ones())
    comm.all_reduce(_ones())
    comm.barrier()
    assert (True, 3, ["all_reduce", "barrier"]) == (
        comm.has_comm_data(), comm.get_comm_operation_count(), sorted(comm.get_logged_comm_ops())
    )  # fmt: skip
    assert 2 == logger.get_raw_data()["all_reduce"][16][0]
    assert None is logger.get_operation_summary("broadcast")
    logger.stop_profiling_comms()
    logger.start_profiling_op(["broadcast", "reduce"])
    logger.stop_profiling_op(["reduce"])
    assert (True, False, ["broadcast"]) == _in_force()
    logger.start_profiling_comms()
    logger.configure(_config(prof_ops=("gather",)).comms_config)
    assert (True, False, ["gather"]) == _in_force()
    logger.reset_data()
    assert not logger.has_data()


def test_a_logger_of_one_s_own(capsys):
    """It is off at first, has the appended operations, and nothing of this process's log."""
    comm.all_reduce(_ones())
    logger = comm.CommsLogger()
    assert (False, True, [], False, {}) == (
        logger.enabled, logger.prof_all, logger.prof_ops, logger.has_data(), logger.comms_dict
    )  # fmt: skip
    logger.append("all_gather", "mine", 2.0, 1_000_000)
    logger.append("all_gather", "mine", 4.0, 1_000_000)
    count, latencies, algbw, busbw = logger.comms_dict["mine"][1_000_000]
    assert (2, [2.0, 4.0]) == (count, latencies)
    assert [4.0, 2.0] == pytest.approx(algbw)
    assert [0.0, 0.0] == busbw
    logger.log_all()
    assert "mine" in capsys.readouterr().out
    assert 3.0 == logger.log_all(print_log=False, return_dict=True)["summary"]["mine"][1_000_000]["avg_latency_ms"]


def test_records_that_are_set():
    """Records of another run are summarised unchanged, and later operations are added to them."""
    logger = comm.CommsLogger()
    given = {"all_reduce": {1024: [3, [3.0, 1.0, 2.0], [1.0, 3.0, 2.0], [0.0, 0.0, 0.0]]}}
    logger.comms_dict = given
    assert logger.has_data()
    assert 2.0 == logger.get_operation_summary("all_reduce")[1024]["avg_latency_ms"]
    assert given == logger.get_raw_data()
    logger.append("all_reduce", "all_reduce", 6.0, 1024)
    assert (4, [3.0, 1.0, 2.0, 6.0]) == tuple(logger.comms_dict["all_reduce"][1024][:2])
    assert 3 == given["all_reduce"][1024][0]
    logger.reset_data()
    assert {} == logger.comms_dict


def test_groups_and_reductions_of_both_kinds():
    """DeepSpeed's notes of groups and its ``UNUSED`` together with PyTorch's classes, under one name each."""
    assert 2 == comm.ProcessGroup(0, [0, 1]).size
    assert [0] == comm.ProcessGroup(comm_id=0, ranks=[0]).ranks
    assert isinstance(plain.group.WORLD, comm.ProcessGroup)
    for name in ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG", "UNUSED"]:
        assert hasattr(comm.ReduceOp, name)
    assert plain.ReduceOp.SUM == comm.ReduceOp.SUM
    assert isinstance(plain.ReduceOp(plain.ReduceOp.MAX), comm.ReduceOp)
    comm.all_reduce(_ones(), comm.ReduceOp.MAX)


def test_backends():
    """The current backend is the process group; unknown names are refused."""
    assert comm.cdb.is_initialized()
    assert (1, 0, False) == (comm.cdb.world_size, comm.cdb.world_rank, comm.cdb.using_mpi)
    comm.cdb.all_reduce(_ones())
    assert ["all_reduce"] == _logged()
    comm.set_backend()
    comm.set_backend("gloo")
    with pytest.raises(ValueError, match="this PyTorch has"):
        comm.set_backend("carrier_pigeon")
    comm.init_deepspeed_backend("gloo", None, None)
    assert "torch" == comm.TorchBackend("gloo").name


def test_init_distributed_a_second_time():
    """Where there is a process group every form is nothing but its config."""
    comm.init_distributed("gloo", True, 29500, False, timedelta(seconds=60), None, None, None, 0, 1)
    comm.init_distributed("gloo", verbose=False, dist_init_required=False, config=_config())
    assert (True, False, ["broadcast"]) == _in_force()


def test_what_launchers_say(monkeypatch):
    """What MPI says goes into the environment of PyTorch; without a launcher there is a clear error."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="no launcher has told this process its rank"):
        comm.mpi_discovery()
    for name, value in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    comm.mpi_discovery(verbose=False)
    import os

    assert ("3", "4", "1") == tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


@pytest.mark.parametrize("name", sorted(FROM_DEEPSPEED))
def test_a_helper_that_times_nothing_is_deepspeeds(name, monkeypatch):
    """It comes from an installed DeepSpeed; without one the error says how to get it."""
    monkeypatch.setitem(sys.modules, "deepspeed.comm", types.SimpleNamespace(**{name: name}))
    assert name == getattr(comm, name)
    monkeypatch.setitem(sys.modules, "deepspeed.comm", None)
    with pytest.raises(AttributeError, match=f"comm.{name} is a helper of DeepSpeed: pip install deepspeed"):
        getattr(comm, name)


def test_names_of_its_timers():
    """The lists and constants of DeepSpeed's timers, and a timer that does nothing with any argument."""
    from deep500_timing_deepspeed import wallclock

    every = [*wallclock.FORWARD_TIMERS, *wallclock.BACKWARD_TIMERS, *wallclock.STEP_TIMERS]
    assert 10 == len(set(every))
    assert 1e-6 == wallclock.TIME_EPSILON
    assert wallclock.PSUTILS_INSTALLED in (True, False)
    noop = wallclock.NoopTimer()
    assert noop.timer is noop("a")
    noop("a").stop(reset=True, record=True, other=1)
