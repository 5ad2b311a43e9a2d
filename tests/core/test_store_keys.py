"""Many keys of a store by few requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing._distributed.transport import StoreTransport, get_all, key_of, present


class Counting:
    """A store that counts its requests."""

    def __init__(self, values):
        self.values = dict(values)
        self.requests = 0
        self.keys = 0

    def check(self, keys):
        """Whether all are there."""
        self.requests += 1
        self.keys += len(keys)
        return all(key in self.values for key in keys)

    def multi_get(self, keys):
        """Several values."""
        self.requests += 1
        return [self.values[key] for key in keys]

    def get(self, key):
        """One value."""
        self.requests += 1
        return self.values[key]

    def set(self, key, value):
        """Put one."""
        self.values[key] = value

    def add(self, key, amount):
        """Count."""
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def delete_key(self, key):
        """Remove one."""
        return self.values.pop(key, None) is not None

    def clone(self):
        """Another connection to it."""
        return self


class Comparing(Counting):
    """A store that can compare, as those of PyTorch: a missing value equals any expected one."""

    def compare_set(self, key, expected, desired):
        """Put a value where another one is; gives the value after it."""
        self.requests += 1
        if key in self.values and self.values[key] == expected.encode():
            self.values[key] = desired.encode()
        return self.values.get(key, expected.encode())


class Plain(Counting):
    """A store without requests for several keys' values."""

    multi_get = None  # type: ignore[assignment]

    def __getattribute__(self, name):
        """Everything but that."""
        if name == "multi_get":
            raise AttributeError(name)
        return super().__getattribute__(name)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=20))))
def test_the_keys_that_are_there_are_found(drawn):
    """By halves, whichever are missing."""
    number, absent = drawn
    keys = {rank: f"k{rank}" for rank in range(number)}
    store = Counting({f"k{rank}": b"" for rank in range(number) if rank not in absent})
    assert [rank for rank in range(number) if rank not in absent] == present(store, keys)


@pytest.mark.parametrize(("kind", "few", "many"), [(Counting, 4, 1), (Comparing, 2, 1), (Plain, 4, 200)])
def test_values_come_whatever_the_store_can_do(kind, few, many):
    """Few by a request each where it can compare, many by one where it has that."""
    store = kind({str(rank): b"%d" % rank for rank in range(100)})
    for number, requests in ((2, few), (100, many)):
        store.requests = 0
        assert {rank: b"%d" % rank for rank in range(number)} == get_all(store, {n: str(n) for n in range(number)})
        assert requests == store.requests


@given(st.dictionaries(st.integers(0, 99), st.binary(max_size=3)), st.sets(st.integers(0, 99)), st.booleans())
def test_what_is_gone_is_left_out(values, asked, everything):
    """Whichever of the keys, few or many, were deleted since someone looked, the others are read."""
    asked = set(range(100)) if everything else asked
    store = Comparing({str(rank): value for rank, value in values.items()})
    there = {rank: value for rank, value in values.items() if rank in asked}
    assert there == get_all(store, {rank: str(rank) for rank in asked})
    assert {str(rank): value for rank, value in values.items()} == store.values


@pytest.mark.parametrize("absent", [0, 1, 3])
def test_thousands_of_messages_cost_few_requests(absent):
    """Those of 5 000 ranks are read at once, and the missing ones found by halves: not by a request for each."""
    ranks = 5000
    silent = [1000 * (n + 1) for n in range(absent)]
    there = {rank: b"%d" % rank for rank in range(ranks) if rank not in silent}
    store = Comparing({key_of("topic", 0, rank): value for rank, value in there.items()})
    assert there == StoreTransport(store, 0, ranks).take("topic", 0, range(ranks))
    assert {} == store.values
    # A look costs a check and a request for values, or, for each missing rank, two checks for each halving.
    assert store.requests < 3 + absent * 30
