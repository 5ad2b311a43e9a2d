"""The reports of several ranks as one text, from reports that are made: no ranks run."""

from __future__ import annotations

import json

import pytest

from deep500_timing._distributed.exchange import Answers, join_plain
from deep500_timing.megatron import Timers
from deep500_timing.megatron import _by_name as by_name

TIMES = {1: {"forward": 0.004, "optimizer": 0.002}, 0: {"forward": 0.001}, 10: {"forward": 0.0025}}
REPORTS = {rank: json.dumps(times).encode() for rank, times in TIMES.items()}


def answers(**known):
    """What three ranks answered."""
    return Answers(REPORTS, **known)


def told(option, names=None, normalizer=1.0, **known):
    """The report of three ranks."""
    return Timers(2, option)._text_of(answers(**known), names, normalizer)


def test_joined_reports_read_as_they_are_one_by_one():
    """What rank 0 hands on holds each rank's times, in the order of the ranks."""
    expected = {0: {"forward": 0.001}, 1: {"forward": 0.004, "optimizer": 0.002}, 10: {"forward": 0.0025}}
    for found in (answers(), answers(combined=join_plain(REPORTS))):
        assert [*expected.items()] == [*found.plain().items()]


@pytest.mark.parametrize(
    ("names", "expected"),
    [(None, ["forward", "optimizer"]), (["optimizer", "absent", "forward"], ["optimizer", "forward"]), ([], [])],
)
def test_timers_are_shown_in_the_order_that_was_asked_for(names, expected):
    """All of them where none is named, and never one that no rank has."""
    assert expected == [*by_name(answers(), names)]


def test_the_longest_of_each():
    """The slowest rank's time, in ms."""
    dots = "." * 40
    assert f"max time across ranks (ms):\n    forward {dots}: 4.00\n    optimizer {dots[2:]}: 2.00" == told("max")


def test_the_shortest_and_the_longest():
    """Divided by the normalizer."""
    expected = f"(min, max) time across ranks (ms):\n    forward {'.' * 40}: (0.50, 2.00)"
    assert expected == told("minmax", ["forward"], normalizer=2.0)


def test_each_rank_by_itself():
    """A rank without the timer has no line."""
    expected = (
        "times across ranks (ms):\n"
        "  forward:\n     rank  0: 1.00\n     rank  1: 4.00\n     rank 10: 2.50\n"
        "  optimizer:\n     rank  1: 2.00"
    )
    assert expected == told("all")


def test_who_did_not_answer_is_said():
    """Beneath the times, or alone if there are none; without times and trouble there is nothing to say."""
    known = {"missing": [2, 3], "ahead": {1: 1, 4: 2}}
    notes = [
        "no times from rank 2, 3 within 10 s",
        "rank 1 is a round ahead: it has asked for so many more",
        "rank 4 is 2 rounds ahead: it has asked for so many more",
    ]
    assert notes == [line.strip() for line in told("max", ["forward"], **known).splitlines()[2:]]
    assert "\n  ".join(notes) == told("max", [], **known)
    assert told("max", []) is None
    assert "the other ranks could not be asked: it is gone" == told("max", [], fault="it is gone")
