"""Megatron's reports across real ranks, where its own would hang."""

from __future__ import annotations

import pytest
from suite_ranks import Job

pytestmark = [pytest.mark.slow, pytest.mark.one_form, pytest.mark.real_time]

PREAMBLE = """
import json, os, sys, time
import torch.distributed as dist
from deep500_timing.testing import ManualClock
from deep500_timing_torch.megatron import Timers
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
clock, lines = ManualClock(), []
def spend(timer, seconds):
    timer.start(); clock.advance(seconds); timer.stop()
def tell(found):
    with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
        json.dump(found, file)
"""


@pytest.fixture
def run(forks, tmp_path):
    """Run a program on each rank; gives what each has told."""

    def start(program, ranks):
        return Job(tmp_path, forks.start, ["-c", PREAMBLE + program, str(tmp_path)], ranks).results(100)

    return start


def test_ranks_with_different_names_report_all_of_them(run):
    """Each name is reported for the ranks that have it, on the last rank alone; nobody hangs."""
    program = """
timers = Timers(2, "minmax", device="cpu", clock=clock, logging_fn=lines.append)
spend(timers("both"), 0.010 * (rank + 1))
spend(timers(f"only{rank}"), 0.100)
for round in range(40):   # more than are kept
    if round % 8 == 0:
        dist.barrier()
    timers.log(["both", "only0", "only1"], reset=False)
text = timers.get_all_timers_string(reset=False)
timers("both").start(barrier=True); timers("both").stop(barrier=True)
tell([lines, text])
dist.barrier()
"""
    first, last = run(program, 2)
    assert first[0] == []
    assert len(last[0]) == 40
    assert set(last[0]) == {
        "(min, max) time across ranks (ms):\n"
        f"    both {'.' * 43}: (10.00, 20.00)\n"
        f"    only0 {'.' * 42}: (100.00, 100.00)\n"
        f"    only1 {'.' * 42}: (100.00, 100.00)"
    }
    # Without names each rank hears of those that only others have.
    assert first[1] == last[1] == last[0][0]


def test_each_rank_on_a_line_and_the_longest_to_a_writer(run):
    """``all`` lists the ranks; ``write`` has the longest, on the rank that has a writer."""
    program = """
class Board:
    def __init__(self): self.scalars = []
    def add_scalar(self, *scalar): self.scalars.append(scalar)
board = Board() if rank == 0 else None
timers = Timers(2, "all", device="cpu", clock=clock, logging_fn=lines.append)
spend(timers("forward"), 0.5 * (rank + 1))
timers.write(["forward"], board, 7, reset=False, barrier=True)
timers.log(["forward"], rank=0)
tell([lines, board and board.scalars])
dist.barrier()
"""
    first, last = run(program, 2)
    assert first[0] == ["times across ranks (ms):\n  forward:\n     rank  0: 500.00\n     rank  1: 1000.00"]
    assert first[1] == [["forward-time", pytest.approx(1.0), 7]]
    assert last == [[], None]


def test_a_dead_rank_is_named_within_the_deadline(run):
    """A rank that died costs the report a line."""
    program = """
timers = Timers(2, "max", device="cpu", clock=clock, logging_fn=lines.append, deadline_s=0.5)
spend(timers("forward"), 0.010)
dist.barrier()
if rank == 1:
    tell(None)
    os._exit(0)
timers.log(["forward"], rank=0)
tell(lines)
os._exit(0)
"""
    lines = run(program, 2)[0]
    assert lines[0].splitlines()[1].endswith(": 10.00")
    assert lines[0].endswith("no times from rank 1 within 0.5 s")


def test_a_report_too_many_on_one_rank_spoils_no_later_one(run):
    """Each report has the times of its own step on both ranks, and the next one says who has asked once more."""
    program = """
timers = Timers(2, "all", device="cpu", clock=clock, deadline_s=20.0)
texts = []
for step in (1, 2, 3, 4):
    spend(timers("it"), step + rank / 10)
    if step == 2 and rank == 1:
        timers._deadline_s = 0.3
        texts.append(timers.get_all_timers_string(["it"], reset=False))
        timers._deadline_s = 20.0
    dist.barrier()
    texts.append(timers.get_all_timers_string(["it"]))
tell(texts)
dist.barrier()
"""
    first, second = run(program, 2)
    report = "times across ranks (ms):\n  it:\n     rank  0: {0}000.00\n     rank  1: {0}100.00".format
    ahead = "\n  rank 1 is a round ahead: it has asked for so many more"
    assert [report(1), report(2) + ahead, report(3), report(4)] == first
    alone = "times across ranks (ms):\n  it:\n     rank  1: 2100.00\n  no times from rank 0 within 0.3 s"
    assert [report(1), alone, report(2) + ahead, report(3), report(4)] == second
