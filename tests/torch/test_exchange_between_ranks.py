"""The exchange of reports through a real store: ranks as threads, and a store whose process is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as plain
from made_stores import Memory
from scheduled import schedule_exchanges

from deep500_timing._distributed import connection
from deep500_timing._distributed.exchange import Exchange
from deep500_timing._distributed.transport import StoreTransport

pytestmark = [pytest.mark.slow, pytest.mark.one_form]


def combine(reports):
    """What rank 0 makes of them: every report, in the order of ranks."""
    return " ".join(reports[rank] for rank in sorted(reports))


def exchange_of(transport, combine=combine):
    """An exchange of texts."""
    return Exchange("trial", str, combine, str, transport=transport)


class Ranks:
    """Ranks that are threads of this process, in virtual time, and take part in one exchange."""

    def __init__(self, schedule, store, world_size):
        self.schedule = schedule
        self.exchanges = [exchange_of(StoreTransport(store, rank, world_size)) for rank in range(world_size)]

    def call(self, rank, report, deadline_s=30.0):
        """A function that takes part as that rank, and returns its answers."""
        return lambda: self.exchanges[rank].round(f"{rank}.{report}", deadline_s)

    def round(self, report, present=None, deadline_s=30.0):
        """What each rank that is present gets."""
        present = range(len(self.exchanges)) if present is None else present
        calls = [self.call(rank, report, deadline_s) for rank in present]
        return dict(zip(present, self.schedule.run_all(*calls), strict=True))


@pytest.fixture
def schedule(monkeypatch):
    """The virtual time of the ranks. A request takes none of it."""
    return schedule_exchanges(monkeypatch)


@pytest.fixture
def ranks_of(schedule, store):
    """So many ranks that share the store."""
    return lambda world_size: Ranks(schedule, store, world_size)


@pytest.fixture(params=["hash", "tcp", "file"])
def store(request, tmp_path):
    """A store as a process group has it."""
    if request.param == "hash":
        yield plain.HashStore()
    elif request.param == "file":
        yield plain.PrefixStore("default", plain.FileStore(str(tmp_path / "store"), -1))
    else:
        server = plain.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield plain.PrefixStore("default", server)


def test_everybody_gets_the_same(ranks_of):
    """With every rank present each gets what rank 0 made of all reports, round after round."""
    ranks = ranks_of(4)
    for number in range(3):
        answers = ranks.round(number)
        assert {" ".join(f"{rank}.{number}" for rank in range(4))} == {a.result for a in answers.values()}
        assert [(None, [], {})] * 4 == [(a.fault, a.missing, a.ahead) for a in answers.values()]


@pytest.mark.parametrize("store", ["hash", "tcp"], indirect=True)  # The file of a FileStore only ever grows.
def test_rounds_leave_nothing_but_the_last_result(ranks_of, store):
    """However many rounds there were, the store holds three keys."""
    ranks = ranks_of(3)
    before = store.num_keys()
    for number in range(5):
        ranks.round(number)
    assert 3 == store.num_keys() - before


def test_absent_ranks_are_missing(ranks_of):
    """A rank that leaves no report is named, and the others get their result all the same."""
    answers = ranks_of(4).round(0, present=[0, 2], deadline_s=2.0)
    assert {"0.0 2.0"} == {answer.result for answer in answers.values()}
    assert [[1, 3], [1, 3]] == [answers[rank].missing for rank in (0, 2)]


def test_without_rank_0_there_is_no_result(ranks_of):
    """The ranks that wait return by the deadline, each with its own report."""
    answers = ranks_of(3).round(0, present=[1, 2], deadline_s=2.0)
    assert {1: ("1.0", [0, 2], None), 2: ("2.0", [0, 1], None)} == {
        rank: (answer.result, answer.missing, answer.fault) for rank, answer in answers.items()
    }


@pytest.mark.parametrize("eager", [0, 1])
def test_a_call_too_many_on_one_rank_spoils_nothing(ranks_of, eager):
    """Later rounds hold the reports of later rounds, and the next one says the rank with one more call."""
    ranks = ranks_of(2)
    ranks.round(1)
    alone = ranks.round("too many", present=[eager], deadline_s=2.0)[eager]
    assert [1 - eager] == alone.missing

    for number, ahead in ((2, {eager: 1}), (3, {}), (4, {})):
        answers = ranks.round(number)
        assert {f"0.{number} 1.{number}"} == {answer.result for answer in answers.values()}
        assert [(ahead, [], None)] * 2 == [(a.ahead, a.missing, a.fault) for a in answers.values()]


def test_a_rank_that_missed_a_round_is_heard_in_the_next(ranks_of):
    """Who was late, stuck or not asked once is not left behind."""
    ranks = ranks_of(3)
    ranks.round(1)
    assert [2] == ranks.round(2, present=[0, 1], deadline_s=2.0)[0].missing
    answers = ranks.round(3)
    assert {"0.3 1.3 2.3"} == {answer.result for answer in answers.values()}


def test_a_silent_rank_is_not_waited_for(ranks_of):
    """A rank that was silent in two rounds costs the others no deadline, and is heard when it comes back."""
    ranks = ranks_of(3)
    for number in range(2):
        assert [2] == ranks.round(number, present=[0, 1], deadline_s=2.0)[0].missing
    schedule = ranks.schedule
    begun_s = schedule.now_s
    assert [2] == ranks.round(2, present=[0, 1], deadline_s=60.0)[0].missing
    assert schedule.now_s - begun_s < 1.0

    answers = schedule.run_all(*(ranks.call(rank, 3) for rank in range(3)))
    assert {"0.3 1.3 2.3"} == {answer.result for answer in answers}


def test_a_result_that_comes_too_late_is_not_taken_for_the_next_one(ranks_of):
    """A rank gives up while rank 0 still works on the reports, its own among them."""
    ranks = ranks_of(2)
    ranks.round(1)
    given_up = []

    def combine_late(reports):
        ranks.schedule.wait_for(lambda: given_up, 300.0)
        return combine(reports)

    late = exchange_of(ranks.exchanges[0]._given, combine_late)

    def give_up():
        answers = ranks.call(1, 2, 0.5)()
        given_up.append(True)
        return answers

    assert "1.2" == ranks.schedule.run_all(lambda: late.round("0.2", 2.0), give_up)[1].result
    for number in (3, 4):
        answers = ranks.round(number)
        assert {f"0.{number} 1.{number}"} == {answer.result for answer in answers.values()}


class Slow:
    """A store as one rank sees it with its next request of a kind held up until ``go``."""

    def __init__(self, schedule, store, kind, word):
        self.schedule, self.store, self.kind, self.word = schedule, store, kind, word
        self.reached = self.go = False

    def __getattr__(self, name):
        request = getattr(self.store, name)

        def held(key, *values):
            if self.word in key and not self.reached:
                self.reached = True
                assert self.schedule.wait_for(lambda: self.go, 300.0)
            return request(key, *values)

        return held if name == self.kind else request

    def clone(self):
        """Another connection, which is held up as well."""
        return self


@pytest.mark.parametrize("store", ["tcp"], indirect=True)
@pytest.mark.parametrize(
    ("victim", "kind", "word"),
    [
        (0, "add", "rounds"),
        (0, "set", "open"),
        (0, "set", "result"),
        (0, "delete_key", "result"),
        (1, "set", "report"),
        (1, "compare_set", "open"),
        (1, "compare_set", "result"),
        (1, "delete_key", "report"),
    ],
)
def test_a_request_that_outlives_its_deadline_spoils_no_later_round(ranks_of, schedule, store, victim, kind, word):
    """For any held request on any rank, the next round waits for it, and holds its own reports alone."""
    slow, ranks = Slow(schedule, store, kind, word), ranks_of(3)
    ranks.round(1)
    ranks.exchanges[victim]._given.connection._own = slow
    answers = ranks.round(2, present=[0, 1], deadline_s=0.5)
    assert slow.reached
    assert answers[victim].fault == connection.NO_ANSWER or answers[victim].result == "0.2 1.2"

    def let_go():
        schedule.pause(0.2)
        slow.go = True

    for number in (3, 4):
        expected = f"0.{number} 1.{number} 2.{number}"
        found = schedule.run_all(*[ranks.call(rank, number) for rank in range(3)], let_go)[:3]
        assert [(expected, None)] * 3 == [(a.result, a.fault) for a in found]


def test_ranks_that_begin_again_in_a_used_store_meet_nothing_old(ranks_of):
    """As under torchrun, where the store outlives the process group: no result is old."""
    for beginning in ("first", "second"):
        ranks = ranks_of(2)
        for number in range(2):
            answers = ranks.round(f"{beginning}{number}")
            expected = f"0.{beginning}{number} 1.{beginning}{number}"
            assert [(expected, [], None)] * 2 == [(a.result, a.missing, a.fault) for a in answers.values()]


def test_the_time_out_of_a_store_is_the_users(ranks_of, store):
    """Our requests give up sooner on their own connection, which a store in memory does not have."""
    before = store.timeout
    ranks_of(2).round(0)
    assert before == store.timeout


STORE = """
import sys, torch.distributed as dist
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(server.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process as POSIX systems do")
def test_the_deadline_holds_while_the_stores_process_is_stopped(monkeypatch):
    """A request to a stopped store, which would never end here, is given up, and no rank is called dead."""
    monkeypatch.setattr(connection, "_TIMEOUT_S", 3600.0)
    holder = subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        store = plain.TCPStore("127.0.0.1", int(holder.stdout.readline()), is_master=False)
        transport = StoreTransport(store, 1, 3)
        exchange = exchange_of(transport)
        transport.connection._connected.wait()
        assert {} == transport.take("trial", 1, [0])
        os.kill(holder.pid, signal.SIGSTOP)
        for deadline_s in (0.1, 0.2, 0.2):
            answers = exchange.round("own", deadline_s)
            assert ("own", "the store does not answer", []) == (answers.result, answers.fault, answers.missing)
        os.kill(holder.pid, signal.SIGCONT)
    finally:
        holder.kill()
        holder.wait()


def test_a_store_that_hangs_is_given_up(schedule):
    """A request that never ends does not outlast the deadline, and a store that comes back is used again."""
    released = []

    class Hanging(Memory):
        def clone(self):
            schedule.wait_for(lambda: released, 300.0)
            return self

        def set_timeout(self, timeout):
            self.timeout = timeout

    exchange = exchange_of(StoreTransport(store := Hanging(), 1, 2))
    (answers,) = schedule.run_all(lambda: exchange.round("own", 0.05))
    assert ("own", connection.NOT_CONNECTED) == (answers.result, answers.fault)
    assert 0.05 == pytest.approx(schedule.now_s)
    released.append(store)
    (answers,) = schedule.run_all(lambda: exchange.round("again", 1.0))
    assert (None, [0]) == (answers.fault, answers.missing)


def test_a_store_that_has_closed_the_connection_is_not_asked_again_at_once(schedule):
    """Each request to it would print a stack of C++: the fault is repeated for a minute without one."""

    class Closed(Memory):
        def check(self, keys):
            self.asked += 1
            raise ConnectionResetError("closed by the peer")

    store = Closed()
    exchange = exchange_of(StoreTransport(store, 1, 2))
    faults = {schedule.run_all(lambda: exchange.round("own", 2.0))[0].fault for _ in range(5)}
    assert ({"ConnectionResetError: closed by the peer"}, 1) == (faults, store.asked)
