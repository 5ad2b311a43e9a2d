"""The exchange of reports through a store, ranks as threads of this process."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as plain

from deep500_timing_torch.comm._ranks import Exchange


def _combine(reports):
    return b" ".join(reports[rank] for rank in sorted(reports))


def _rounds(store, present, world_size, deadline_s, rounds=1):
    """What each rank that is present gets from the last round."""
    answers = {}

    def rank_of(rank):
        exchange = Exchange(store, rank, world_size)
        for number in range(rounds):
            answers[rank] = exchange.round(f"{rank}.{number}".encode(), _combine, deadline_s)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.fixture(params=["hash", "tcp"])
def store(request):
    """A store as a process group has it."""
    if request.param == "hash":
        yield plain.HashStore()
    else:
        server = plain.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield plain.PrefixStore("default", server)


def test_everybody_gets_the_same(store):
    """With every rank present each gets what rank 0 made of all reports, round after round."""
    answers = _rounds(store, range(4), 4, deadline_s=30, rounds=3)
    assert {b"0.2 1.2 2.2 3.2"} == {answer.combined for answer in answers.values()}
    assert {None} == {answer.fault for answer in answers.values()}


def test_rounds_leave_no_keys_behind(store):
    """Only the last round is in the store, however many there were."""
    _rounds(store, range(3), 3, deadline_s=30, rounds=1)
    after_one = store.num_keys()
    _rounds(plain.PrefixStore("again", store), range(3), 3, deadline_s=30, rounds=6)
    assert after_one * 2 + 1 >= store.num_keys()


def test_absent_ranks_are_left_out(store):
    """A rank that leaves no report is not in the result, which the others get all the same."""
    answers = _rounds(store, [0, 2], 4, deadline_s=1.0)
    assert {b"0.0 2.0"} == {answer.combined for answer in answers.values()}


def test_without_rank_0_the_others_look_for_themselves(store):
    """They have no common result, but each has the reports of those that are there."""
    answers = _rounds(store, [1, 2], 3, deadline_s=1.0)
    for answer in answers.values():
        assert answer.combined is None
        assert {1: b"1.0", 2: b"2.0"} == answer.reports


def test_a_store_that_fails_is_reported():
    """The store's host is gone: the error is in the answer, beside this rank's own report."""

    class Gone:
        def clone(self):
            raise RuntimeError("no")

        def set(self, key, value):
            raise ConnectionError("connection reset by peer\nand more")

    answers = Exchange(Gone(), 0, 2).round(b"own", _combine, 5.0)
    assert {0: b"own"} == answers.reports
    assert "ConnectionError: connection reset by peer" == answers.fault


def test_a_store_that_hangs_is_given_up():
    """A request that never ends does not outlast the deadline."""
    release = threading.Event()

    class Hanging:
        def clone(self):
            release.wait()
            return self

    answers = Exchange(Hanging(), 0, 2).round(b"own", _combine, 0.05)
    release.set()
    assert (None, {0: b"own"}, "the store does not answer") == (answers.combined, answers.reports, answers.fault)
