"""The exchange under a scheduler: requests that outlive their deadline spoil no later round."""

from __future__ import annotations

import collections
import functools

import pytest
from made_stores import Memory
from scheduled import schedule_exchanges

from deep500_timing._distributed import exchange
from deep500_timing.ranks import StoreTransport


class Requests(Memory):
    """A store of which every request takes virtual time; what it does it does in the middle."""

    def __init__(self, schedule):
        super().__init__()
        self.schedule = schedule

    def _in_the_middle(self, request, *arguments):
        self.schedule.request()
        found = request(*arguments)
        self.schedule.request()
        return found

    def set(self, key, value):
        """Put a value."""
        self._in_the_middle(super().set, key, value)

    def check(self, keys):
        """Whether all are there."""
        return self._in_the_middle(super().check, keys)

    def compare_set(self, key, expected, desired):
        """Get a value, or what is expected where there is none; nothing is put."""
        return self._in_the_middle(self.values.get, key, expected.encode())

    def add(self, key, amount):
        """Count."""
        return self._in_the_middle(super().add, key, amount)

    def delete_key(self, key):
        """Remove one, if it is there."""
        return self._in_the_middle(super().delete_key, key)


def combine(reports):
    """Every report, in the order of ranks."""
    return " ".join(reports[rank] for rank in sorted(reports))


def rounds_of(seed, monkeypatch, held_share, held_s, world_size=3):
    """Four rounds: a quiet one, one of two ranks with held-up requests and a short deadline, and two quiet ones."""
    schedule = schedule_exchanges(monkeypatch, seed)
    store = Requests(schedule)
    transports = [StoreTransport(store, rank, world_size) for rank in range(world_size)]
    ranks = [exchange.Exchange("trial", str, combine, str, transport=transport) for transport in transports]
    found = []
    for number, (present, deadline_s, held) in enumerate(
        ((range(world_size), 30.0, 0.0), ((0, 1), 1.0, held_share), *[(range(world_size), 30.0, 0.0)] * 2), start=1
    ):
        schedule.held_share, schedule.held_s = held, held_s

        def take_part(rank, number=number, deadline_s=deadline_s):
            begun = schedule.now_s
            answers = ranks[rank].round(f"{rank}.{number}", deadline_s)
            assert schedule.now_s - begun <= deadline_s + 1e-6
            return rank, answers

        found.append(dict(schedule.run_all(*[functools.partial(take_part, rank) for rank in present])))
    stuck = any(transport.connection._stuck for transport in transports)
    return found, stuck


def _judge(schedules, held_share, held_s, monkeypatch):
    counts = collections.Counter()
    for seed in range(schedules):
        found, _ = rounds_of(seed, monkeypatch, held_share, held_s)
        for number, answers in enumerate(found, start=1):
            for answer in answers.values():
                tags = {part.split(".")[1] for part in answer.result.split()}
                counts["mixed"] += len(tags) > 1 or not tags <= {str(number)}
                counts["both"] += len(answer.result.split()) > 1 and answer.fault is not None
        for number in (1, 3, 4):
            expected = " ".join(f"{rank}.{number}" for rank in range(3))
            counts[f"round {number} wrong"] += {a.result for a in found[number - 1].values()} != {expected}
        counts["given up"] += any(answer.fault is not None for answer in found[1].values())
    return {name: count for name, count in counts.items() if count}


@pytest.mark.slow
@pytest.mark.parametrize(("held_share", "held_s", "part"), [(0.2, 0.05, 0.5), (0.05, 0.6, 1), (0.05, 1.5, 0.5)])
def test_no_round_is_wrong_and_no_result_mixes_two(monkeypatch, request, held_share, held_s, part):
    """Whether or not requests outlive the deadline of a round, every later round has all reports of that round.

    In 60 schedules with requests that outlive the deadline, and in 2 000 with `make fuzz`.
    """
    found = _judge(int(10 * part * request.config.getoption("--fuzz-seeds")), held_share, held_s, monkeypatch)
    assert {} == {name: count for name, count in found.items() if name != "given up"}
    if held_s > 0.5:
        assert found["given up"] > 0
