"""The exchange of reports through a real store: ranks as threads, and a store whose process is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch.distributed as plain

from deep500_timing._distributed import connection
from deep500_timing._distributed.connection import Connection
from deep500_timing._distributed.exchange import Exchange

pytestmark = [pytest.mark.slow, pytest.mark.one_form]


def combine(reports):
    """What rank 0 makes of them: every report, in the order of ranks."""
    return b" ".join(reports[rank] for rank in sorted(reports))


class Ranks:
    """Ranks that are threads of this process and take part in one exchange."""

    def __init__(self, store, world_size):
        self.exchanges = [
            Exchange("trial", store=store, rank=rank, world_size=world_size) for rank in range(world_size)
        ]

    def round(self, report, present=None, deadline_s=30.0):
        """What each rank that is present gets."""
        answers = {}

        def take_part(rank):
            own = f"{rank}.{report}".encode()
            answers[rank] = self.exchanges[rank].round(own, combine, deadline_s)

        present = range(len(self.exchanges)) if present is None else present
        threads = [threading.Thread(target=take_part, args=(rank,)) for rank in present]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers


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


def test_everybody_gets_the_same(store):
    """With every rank present each gets what rank 0 made of all reports, round after round."""
    ranks = Ranks(store, 4)
    for number in range(3):
        answers = ranks.round(number)
        assert {" ".join(f"{rank}.{number}" for rank in range(4)).encode()} == {a.combined for a in answers.values()}
        assert [(None, [], {})] * 4 == [(a.fault, a.missing, a.ahead) for a in answers.values()]


@pytest.mark.parametrize("store", ["hash", "tcp"], indirect=True)  # The file of a FileStore only ever grows.
def test_rounds_leave_nothing_but_the_last_result(store):
    """However many rounds there were, the store holds a handful of keys, and one for each rank that has begun."""
    ranks = Ranks(store, 3)
    before = store.num_keys()
    for number in range(5):
        ranks.round(number)
    assert 3 + 3 >= store.num_keys() - before


def test_absent_ranks_are_missing(store):
    """A rank that leaves no report is named, and the others get their result all the same."""
    answers = Ranks(store, 4).round(0, present=[0, 2], deadline_s=1.0)
    assert {b"0.0 2.0"} == {answer.combined for answer in answers.values()}
    assert [[1, 3], [1, 3]] == [answers[rank].missing for rank in (0, 2)]


def test_without_rank_0_the_others_look_for_themselves(store):
    """They have no common result, but each has the reports of those that wait as well."""
    answers = Ranks(store, 3).round(0, present=[1, 2], deadline_s=1.0)
    for answer in answers.values():
        assert (None, [0], None) == (answer.combined, answer.missing, answer.fault)
        assert {1: b"1.0", 2: b"2.0"} == answer.reports


@pytest.mark.parametrize("eager", [0, 1])
def test_a_call_too_many_on_one_rank_spoils_nothing(store, eager):
    """Later rounds hold the reports of later rounds, and the next one says who has asked once more."""
    ranks = Ranks(store, 2)
    ranks.round(1)
    alone = ranks.round("too many", present=[eager], deadline_s=1.0)[eager]
    assert [1 - eager] == alone.missing

    for number, ahead in ((2, {eager: 1}), (3, {}), (4, {})):
        answers = ranks.round(number)
        assert {f"0.{number} 1.{number}".encode()} == {answer.combined for answer in answers.values()}
        assert [(ahead, [], None)] * 2 == [(a.ahead, a.missing, a.fault) for a in answers.values()]


def test_a_rank_that_missed_a_round_is_heard_in_the_next(store):
    """Who was late, stuck or not asked once is not left behind."""
    ranks = Ranks(store, 3)
    ranks.round(1)
    assert [2] == ranks.round(2, present=[0, 1], deadline_s=1.0)[0].missing
    answers = ranks.round(3)
    assert {b"0.3 1.3 2.3"} == {answer.combined for answer in answers.values()}


class Overtaken:
    """A store as one rank sees it that is held up just before it reads a key, until another rank has deleted that."""

    def __init__(self, store, ending):
        self.store, self.ending = store, ending
        self.held_up = 0

    def __getattr__(self, name):
        request = getattr(self.store, name)
        return request if name not in ("get", "multi_get", "compare_set") else partial(self._read, request)

    def _read(self, request, keys, *values):
        for key in [keys] if isinstance(keys, str) else keys:
            if key.endswith(self.ending):
                self.held_up += 1
                deadline = time.monotonic() + 30
                while self.store.check([key]):
                    assert time.monotonic() < deadline
        return request(keys, *values)

    def clone(self):
        """Another connection, which is held up as well."""
        return self


def test_a_result_that_is_replaced_while_it_is_read_is_not_waited_for(store):
    """Who missed a round finds its result, which rank 0 deletes for the next one before it is read."""
    ranks = Ranks(store, 3)
    slow = Overtaken(store, "result/2")
    ranks.exchanges[2] = Exchange("trial", store=slow, rank=2, world_size=3)
    ranks.round(1)
    ranks.round(2, present=[0, 1], deadline_s=0.5)
    answers = ranks.round(3)
    assert {b"0.3 1.3 2.3"} == {answer.combined for answer in answers.values()}
    assert 1 == slow.held_up


def test_a_report_that_is_withdrawn_while_it_is_read_is_not_waited_for(store):
    """Rank 0 goes on with those that are there, and the rank is heard in the next round."""
    ranks = Ranks(store, 3)
    slow = Overtaken(store, "waiting/1/2")
    ranks.exchanges[0] = Exchange("trial", store=slow, rank=0, world_size=3)
    ranks.round(1)
    leader = threading.Thread(target=ranks.exchanges[0].round, args=(b"0.2", combine, 4.0))
    leader.start()
    given_up = ranks.round(2, present=[1], deadline_s=1.0)[1]
    leader.join()
    assert (None, None) == (given_up.combined, given_up.fault)
    assert 1 <= slow.held_up
    slow.ending = "nothing"
    answers = ranks.round(3)
    assert {b"0.3 1.3 2.3"} == {answer.combined for answer in answers.values()}
    assert [(None, [])] * 3 == [(answer.fault, answer.missing) for answer in answers.values()]


def test_a_result_that_comes_too_late_is_not_taken_for_the_next_one(store):
    """A rank gives up while rank 0 still works on the reports, its own among them."""
    ranks = Ranks(store, 2)
    ranks.round(1)
    given_up = threading.Event()

    def combine_late(reports):
        given_up.wait(30)
        return combine(reports)

    leader = threading.Thread(target=ranks.exchanges[0].round, args=(b"0.2", combine_late, 2.0))
    leader.start()
    assert ranks.round(2, present=[1], deadline_s=0.5)[1].combined is None
    given_up.set()
    leader.join()
    for number in (3, 4):
        answers = ranks.round(number)
        assert {f"0.{number} 1.{number}".encode()} == {answer.combined for answer in answers.values()}


class Watched:
    """A store as one rank sees it that says when a report is left in it."""

    def __init__(self, store, left):
        self.store, self.left = store, left

    def __getattr__(self, name):
        return getattr(self.store, name)

    def set(self, key, value):
        """Leave it, then say so."""
        self.store.set(key, value)
        if "/waiting/" in key:
            self.left.set()

    def clone(self):
        """Another connection, which is watched as well."""
        return self


@pytest.mark.parametrize("store", ["tcp"], indirect=True)
def test_a_report_that_rank_0_has_read_before_is_not_taken_for_the_next_one(store):
    """A rank gives up and asks again before rank 0, which has read its first report, deletes that."""
    ranks = Ranks(store, 2)
    left, read, again = threading.Event(), threading.Event(), threading.Event()

    class Slow(Watched):
        def compare_set(self, key, *values):
            found = self.store.compare_set(key, *values)
            if key.endswith("waiting/1/2"):
                read.set()
                assert again.wait(30)
            return found

    ranks.exchanges[0] = Exchange("trial", store=(slow := Slow(store, left)), rank=0, world_size=2)
    ranks.exchanges[1] = Exchange("trial", store=(watched := Watched(store, left)), rank=1, world_size=2)
    ranks.round(1)
    left.clear()
    first = threading.Thread(target=ranks.round, args=("old", [1], 1.0))
    first.start()
    assert left.wait(30)
    leader = threading.Thread(target=ranks.exchanges[0].round, args=(b"0", combine, 1.0))
    leader.start()
    first.join()
    assert read.is_set()
    watched.left = again
    assert ranks.round("new", present=[1], deadline_s=0.5)[1].combined is None
    leader.join()
    slow.store = watched.store = store
    assert [b"0.3 1.3"] * 2 == [answer.combined for answer in ranks.round(3).values()]


def test_ranks_that_begin_anew_in_a_used_store_meet_nothing_old(store):
    """As under torchrun, where the store outlives the process group: neither a result nor a posted report is old."""
    for beginning in ("first", "second"):
        ranks = Ranks(store, 2)
        for number in range(2):
            answers = ranks.round(f"{beginning}{number}")
            expected = f"0.{beginning}{number} 1.{beginning}{number}".encode()
            assert [(expected, [], None)] * 2 == [(a.combined, a.missing, a.fault) for a in answers.values()]
        first, second = ranks.exchanges
        first.post(b"0")
        assert {0: b"0"} == first.gather(b"0", deadline_s=0.2).reports
        second.post(f"1 {beginning}".encode())
        assert {0: b"0", 1: f"1 {beginning}".encode()} == first.gather(b"0").reports


@pytest.mark.parametrize("renewed", [0, 1])
def test_another_exchange_of_the_same_name_goes_on_with_the_rounds(store, renewed, monkeypatch):
    """Such as that of a second pipeline timer in one job: each rank has both on one connection."""
    job = Connection(store)
    monkeypatch.setattr(connection, "store_connection", lambda: job)
    ranks = Ranks(store, 2)
    for number in range(3):
        ranks.exchanges[renewed] = Exchange("trial", rank=renewed, world_size=2)
        answers = ranks.round(number)
        expected = f"0.{number} 1.{number}".encode()
        assert [(expected, [], {})] * 2 == [(a.combined, a.missing, a.ahead) for a in answers.values()]


def test_a_request_to_an_earlier_process_group_changes_nothing_of_the_next(monkeypatch):
    """A thread that waits for an answer of the old store wakes when rounds in the new one have begun."""
    stores = [plain.HashStore(), plain.HashStore()]
    asked, answers = threading.Event(), threading.Event()

    class Stuck(Watched):
        def delete_key(self, key):
            if "/waiting/" in key:
                asked.set()
                assert answers.wait(30)
            return False

    old, new = Stuck(stores[0], threading.Event()), stores[1]
    jobs = [Connection(old), Connection(new)]
    monkeypatch.setattr(connection, "store_connection", lambda: jobs[0])
    ranks = Ranks(new, 2)
    ranks.exchanges[1] = Exchange("trial", rank=1, world_size=2)
    assert connection.NO_ANSWER == ranks.round(0, present=[1], deadline_s=0.2)[1].fault
    assert asked.wait(30)
    monkeypatch.setattr(connection, "store_connection", lambda: jobs[1])
    ranks.round(1)
    ranks.round(2)
    answers.set()
    deadline = time.monotonic() + 30
    while jobs[0].run(lambda store: None, 30.0) is not None:
        assert time.monotonic() < deadline
    assert [b"0.3 1.3"] * 2 == [answer.combined for answer in ranks.round(3).values()]


def test_the_time_out_of_a_store_is_the_users(store):
    """Our requests give up sooner on a connection of their own, which a store in memory does not have."""
    before = store.timeout
    Ranks(store, 2).round(0)
    assert before == store.timeout


def test_posted_reports_are_gathered_round_by_round(store):
    """Ranks that go on at once are read in the round of the rank that gathers, not in the one that they are in."""
    exchanges = [Exchange("trial", store=store, rank=rank, world_size=3) for rank in range(3)]
    for number in range(3):
        for rank in (0, 1):
            exchanges[rank].post(f"{rank}.{number}".encode())
    for number in range(3):
        exchanges[2].post(b"")
        answers = exchanges[2].gather(b"own")
        assert {0: f"0.{number}".encode(), 1: f"1.{number}".encode(), 2: b"own"} == answers.reports


STORE = """
import sys, torch.distributed as dist
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(server.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process as POSIX systems do")
def test_the_deadline_holds_while_the_stores_process_is_stopped():
    """Nothing that a rank asks of a stopped store keeps it longer than it would wait, and nobody is called dead."""
    holder = subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        store = plain.TCPStore("127.0.0.1", int(holder.stdout.readline()), is_master=False)
        exchange = Exchange("trial", store=store, rank=1, world_size=3)
        assert exchange.post(b"while it answers", 30.0) is None
        os.kill(holder.pid, signal.SIGSTOP)
        begun = time.monotonic()
        first = exchange.gather(b"own", 0.5)
        later = exchange.post(b"own", 30.0), exchange.gather(b"own", 30.0), exchange.round(b"own", combine, 30.0)
        assert time.monotonic() - begun < 15.0
        for answers in (first, *later[1:]):
            assert ("the store does not answer", []) == (answers.fault, answers.missing)
        assert "the store does not answer" == later[0]
        os.kill(holder.pid, signal.SIGCONT)
    finally:
        holder.kill()
        holder.wait()


class Memory:
    """The least that a store must do."""

    def __init__(self):
        self.values = {}
        self.set = self.values.__setitem__
        self.get = self.values.__getitem__

    def check(self, keys):
        """Whether all are there."""
        return all(key in self.values for key in keys)

    def add(self, key, amount):
        """Count."""
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def delete_key(self, key):
        """Remove one, if it is there."""
        return self.values.pop(key, None) is not None


def test_a_store_that_hangs_is_given_up():
    """A request that never ends does not outlast the deadline, and a store that comes back is used again."""
    release = threading.Event()

    class Hanging(Memory):
        def clone(self):
            release.wait()
            return self

        def set_timeout(self, timeout):
            self.timeout = timeout

    store = Hanging()
    exchange = Exchange("trial", store=store, rank=1, world_size=2)
    answers = exchange.round(b"own", combine, 0.05)
    assert (None, {1: b"own"}, "the store does not answer") == (answers.combined, answers.reports, answers.fault)
    release.set()
    deadline = time.monotonic() + 30
    while exchange.post(b"again") is not None:
        assert time.monotonic() < deadline
    assert b"again" in store.values.values()
