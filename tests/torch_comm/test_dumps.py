"""Dumps of PyTorch's flight recorder: written by PyTorch, read by us and by PyTorch's own reader."""

from __future__ import annotations

import json
import pickle

import pytest
from click.testing import CliRunner

from deep500_timing_torch import comm

pytestmark = pytest.mark.slow

RANKS = (0, 1, 2)
MS = 1_000_000
CONFIG = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}, "1": {"name": "1", "desc": "undefined",
                                                                               "ranks": "[0, 1]"}}  # fmt: skip


@pytest.fixture(scope="module")
def dumped(torchrun, tmp_path_factory):
    """The folder of the dumps of three ranks, of which rank 1 left out the last operation."""
    found = torchrun("flight.py", 3, TORCH_FR_BUFFER_SIZE="2000")
    assert [True, False, True] == [one["waits"] for one in found]
    return max(tmp_path_factory.getbasetemp().glob("flight-3*"), key=lambda path: path.stat().st_mtime)


@pytest.fixture
def edit(dumped, tmp_path):
    """Write PyTorch's dumps with a change: called with the rank and the dump."""

    def edit(change, ranks=RANKS):
        for rank in ranks:
            dump = pickle.loads((dumped / "pickle" / f"trace_{rank}").read_bytes())
            change(rank, dump)
            (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump))
        return tmp_path

    return edit


def configure(rank, dump):
    """Name the groups' ranks, as NCCL does and gloo does not."""
    dump["pg_config"] = CONFIG


@pytest.mark.parametrize("kind", ["pickle", "json"])
def test_the_rank_that_did_not_join_is_named(dumped, kind):
    """The operation, who called it, and what the missing rank did last."""
    found = comm.read_flight_recorder(dumped / kind)
    (hang,) = found.hangs

    assert ("all_reduce 31 (3.91 KiB)", "default_pg", (0, 2), (0, 2)) == (
        hang.op, hang.group, hang.joined, hang.unfinished,
    )  # fmt: skip
    assert {1: "has ended broadcast 1 (3.91 KiB) of group 1, and called none since"} == hang.missing
    assert [("all_reduce", 30, None), ("broadcast", 1, None)] == [
        (row.op, row.count, row.transfer_s) for row in found.comparison.rows
    ]
    assert [] == found.mismatches


def test_pytorchs_reader_says_the_same(edit, capfd):
    """It names the same operation and rank. It needs the groups' ranks, which gloo's dumps lack."""
    fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    folder = edit(configure)
    fr_trace.main([str(folder)])
    printed = "".join(capfd.readouterr())

    assert "sequence number: 31" in printed
    assert "missing ranks: {1}" in printed
    assert {1} == comm.read_flight_recorder(folder).hangs[0].missing.keys()


def test_the_command_prints_hang_and_late_rank(edit):
    """Rank 2 calls each operation 20 ms after the others: one report has the hang and the late rank."""

    def late(rank, dump):
        for entry in dump["entries"]:
            entry["time_created_ns"] = entry["collective_seq_id"] * 100 * MS + (20 * MS if rank == 2 else rank * 1000)

    from deep500_timing_torch.comm.__main__ import main

    done = CliRunner().invoke(main, ["flight", str(edit(late))])

    assert 0 == done.exit_code
    assert (
        "all_reduce 31 (3.91 KiB) of group default_pg: called by ranks 0, 2, not by rank 1, unfinished on ranks 0, 2.\n"
        "  Rank 1 has ended broadcast 1" in done.output
    )
    assert "Rank 2 is late: it came last in 100 % of 30 operations" in done.output
    assert "clocks must agree" in done.output


def test_durations_of_nccl_are_the_waits(edit):
    """A duration includes the wait: the rank with the shortest is the late one, whatever the clocks say."""

    def timed(rank, dump):
        for entry in dump["entries"]:
            entry["duration_ms"] = 1.0 if rank == 0 else 21.0

    found = comm.read_flight_recorder(edit(timed))
    (row,) = [row for row in found.comparison.rows if row.op == "all_reduce"]

    assert (0, pytest.approx(0.03), False) == (row.late_rank, row.transfer_s, found.by_arrival)


def test_what_no_dump_tells_is_unknown(edit):
    """A rank without a dump, and one whose ring has lost the group's operations, are not said to be missing."""

    def overwritten(rank, dump):
        configure(rank, dump)
        if rank == 1:
            dump["entries"] = [{**one, "record_id": 99} for one in dump["entries"] if one["process_group"][0] == "1"]

    (hang,) = comm.read_flight_recorder(edit(overwritten, ranks=(0, 1))).hangs

    assert ((0,), {}, (1, 2)) == (hang.joined, hang.missing, hang.unknown)
    assert "It is unknown whether ranks 1-2 called it" in str(hang)


def test_different_operations_are_named(edit):
    """The first number at which the ranks of a group call different operations."""

    def other(rank, dump):
        if rank == 1:
            dump["entries"][4]["profiling_name"] = "gloo:barrier"

    assert [
        "The ranks of group default_pg call different operations: all_reduce 5 (3.91 KiB) on ranks 0, 2, barrier 5 on "
        "rank 1."
    ] == comm.read_flight_recorder(edit(other)).mismatches


def test_a_rank_that_hangs_elsewhere(edit):
    """The missing rank waits in a message of its own: that is the cause; a block of NCCL's is not compared."""

    def receives(rank, dump):
        entry = {**dump["entries"][-1], "is_p2p": True, "retired": False, "profiling_name": "nccl:recv 1<-0"}
        if rank == 1:
            dump["entries"].append(entry)
        block = {**dump["entries"][0], "profiling_name": "nccl:coalesced"}
        dump["entries"].insert(1, block)

    found = comm.read_flight_recorder(edit(receives))

    assert {1: "is in recv 1<-0 (3.91 KiB) of group 1"} == found.hangs[0].missing
    assert ("recv 1<-0 (3.91 KiB)", (1,)) == (found.hangs[1].op, found.hangs[1].unfinished)
    assert 29 == found.comparison.rows[0].count


def test_faults_of_the_folder(tmp_path):
    """No dump, and a pickle that would run code, are errors that name what to do."""
    with pytest.raises(FileNotFoundError, match="Set TORCH_FR_DUMP_TEMP_FILE"):
        comm.read_flight_recorder(tmp_path)
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"entries": [print]}))
    with pytest.raises(ValueError, match=r"trace_0'.*print, and a dump is plain data. Remove the file"):
        comm.read_flight_recorder(tmp_path)
    (tmp_path / "trace_0").write_text(json.dumps({"entries": []}))
    assert "Every operation has been called" in str(comm.read_flight_recorder(tmp_path))
