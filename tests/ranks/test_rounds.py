"""Rounds among ranks that are threads of one process: broken messages, and what the store holds."""

from __future__ import annotations

import functools
import zlib

import pytest
from made_stores import Able, Memory
from scheduled import schedule_exchanges

from deep500_timing._distributed import exchange
from deep500_timing._distributed.exchange import Exchange, pack, unpack
from deep500_timing._distributed.launchers import rank_and_world
from deep500_timing.ranks import StoreTransport, find_transport


@pytest.fixture
def schedule(monkeypatch):
    """The ranks' virtual time."""
    return schedule_exchanges(monkeypatch)


def read(report):
    """A report says for each name a number."""
    return {str(name): int(number) for name, number in report.items()}


def exchange_of(store, rank, world_size=2):
    """A rank's exchange of such reports; the result lists them by rank."""
    transport = StoreTransport(store, rank, world_size)
    return Exchange("x", read, lambda found: sorted(found.items()), dict, transport=transport)


def rounds(schedule, ranks, reports):
    """What each rank gets of a round of all."""
    calls = [functools.partial(rank.round, report, 60.0) for rank, report in zip(ranks, reports, strict=True)]
    return schedule.run_all(*calls)


def said(report, **changes):
    """A rank's message in the first round."""
    return pack({"round": "1", "call": 1, "report": report} | changes)


REPORTS = {
    "nothing": b"",
    "bytes": b"\xff\xfe\x00",
    "no zlib": b"abc",
    "zlib that is cut short": said({"a": 1})[:-3],
    "no JSON": zlib.compress(b"{"),
    "no text": zlib.compress(b"\xff\xfe"),
    "brackets": zlib.compress(b"[" * 200_000),
    "a list": pack([]),
    "a number": pack(7),
    "no round": pack({"call": 1, "report": {"a": 1}}),
    "no call": pack({"round": "1", "report": {"a": 1}}),
    "a text for a call": said({"a": 1}, call="1"),
    "a truth for a call": said({"a": 1}, call=True),
    "a call of Infinity": said({"a": 1}, call=float("inf")),
    "no report": pack({"round": "1", "call": 1}),
    "a list for a report": said([]),
    "null for a report": said(None),
    "a text for a number": said({"a": "x"}),
    "null for a number": said({"a": None}),
    "NaN for a number": said({"a": float("nan")}),
    "Infinity for a number": said({"a": float("inf")}),
    "a list for a number": said({"a": [1]}),
}


@pytest.mark.parametrize("message", REPORTS.values(), ids=REPORTS)
def test_nonsense_costs_the_row_of_its_rank_and_a_sentence(message, schedule):
    """Rank 0 goes on with the other ranks' reports, at once, and in the next round hears the rank again."""
    store = Memory()
    leader, other = exchange_of(store, 0, 3), exchange_of(store, 2, 3)
    store.set("deep500_timing/exchange/x/report/1", message)
    answers, _ = rounds(schedule, [leader, other], [{"a": 0}, {"a": 2}])
    assert schedule.now_s < 10.0
    assert ({0: {"a": 0}, 2: {"a": 2}}, [1], None) == (answers.result, answers.missing, answers.fault)
    assert [1] == list(answers.unreadable)
    assert answers.unreadable[1].isascii()
    assert len(answers.unreadable[1]) <= 200
    ranks = [leader, *(exchange_of(store, rank, 3) for rank in (1, 2))]
    again = rounds(schedule, ranks, [{"a": rank} for rank in range(3)])
    assert {rank: {"a": rank} for rank in range(3)} == again[0].result


RESULTS = {
    "bytes": b"\xff",
    "a list": pack([]),
    "no calls": pack({"ahead": {}, "result": []}),
    "calls that are a list": pack({"calls": [1], "ahead": {}, "result": []}),
    "nobody ahead": pack({"calls": {"1": 1}, "result": []}),
    "ranks that are no numbers": pack({"calls": {"1": 1, "x": 1}, "ahead": {}, "result": []}),
    "no result": pack({"calls": {"1": 1}, "ahead": {}}),
    "a number for a result": pack({"calls": {"1": 1}, "ahead": {}, "result": 7}),
}


@pytest.mark.parametrize("message", RESULTS.values(), ids=RESULTS)
def test_nonsense_from_rank_0_is_no_result(message, schedule):
    """The rank has its own report, by the deadline, and says that it could not read the answer."""

    class Done(Memory):
        def set(self, key, value):
            """A report ends the round."""
            super().set(key, value)
            if key.endswith("report/1"):
                super().set("deep500_timing/exchange/x/open", "1 is done")

    store = Done()
    follower = exchange_of(store, 1)
    store.set("deep500_timing/exchange/x/open", "1")
    store.set("deep500_timing/exchange/x/result/1", message)
    (answers,) = rounds(schedule, [follower], [{"a": 1}])
    assert ({1: {"a": 1}}, [0], None) == (answers.result, answers.missing, answers.fault)
    assert [0] == list(answers.unreadable)


@pytest.mark.parametrize(("ranks", "limit_mb"), [(1, 16), (3, 48), (1000, 64)])
def test_what_unpacks_to_more_than_it_may_is_refused(ranks, limit_mb, monkeypatch):
    """A kilobyte may stand for a megabyte of blanks: no more is unpacked than so many ranks may report."""
    monkeypatch.setattr(exchange, "_MOST_BYTES", 64 << 20)  # A gigabyte of blanks would take 20 seconds.
    packer = zlib.compressobj(9)
    block = b" " * (1 << 20)
    bomb = b"".join([*(packer.compress(block) for _ in range(limit_mb + 1)), packer.flush()])
    with pytest.raises(ValueError, match=f"unpacks to more than {limit_mb} MB"):
        unpack(bomb, ranks)
    assert {"a": [1]} == unpack(pack({"a": [1]}), ranks)


@pytest.mark.parametrize("kind", [Memory, Able])
def test_messages_do_not_pile_up(kind, schedule):
    """However many rounds there were, the store holds the number of them, that the last is done, and its result."""
    store = kind()
    ranks = [exchange_of(store, rank, 4) for rank in range(4)]
    for number in range(5):
        answers = rounds(schedule, ranks, [{"a": number}] * 4)
        assert {rank: {"a": number} for rank in range(4)} == answers[0].result
    assert len(store.values) == 3


def test_a_message_is_given_once():
    """To the rank and in the topic that it was sent to."""
    store = Memory()
    one, other = StoreTransport(store, 0, 2), StoreTransport(store, 1, 2)
    for topic in ("t", "t/u"):
        other.send(topic, 0, topic.encode())
    assert [{}, {1: b"t/u"}, {1: b"t"}, {}] == [one.take(topic, 0, [1]) for topic in ("gone", "t/u", "t", "t")]


def test_a_single_process_is_a_world_of_its_own(monkeypatch):
    """Nothing is sent, and its own report is the result; as JSON would hand it on."""
    monkeypatch.delenv("RANK", raising=False)
    assert (None, (0, 1)) == (find_transport(), rank_and_world())
    answers = Exchange("x", read, lambda found: sorted(found.items()), dict).round({"a": 7})
    assert ({0: {"a": 7}}, [], {}, None) == (answers.result, answers.missing, answers.unreadable, answers.fault)
