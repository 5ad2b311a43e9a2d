"""Many keys of a store by few requests: which of them are there, and what they hold.

Getting a key that is not there waits for it, and whoever else may delete a key can do so between a look and a get. So
nothing here gets a key without a way out.
"""

from __future__ import annotations

from typing import Any

_CHUNK = 64
"""Keys that are asked about by one request where who is missing need not be known yet."""
_ABSENT = "\0deep500_timing: no such key"
"""No value of ours. Comparing with it tells a missing key, and changes nothing."""


def present(store: Any, keys: dict[int, str]) -> list[int]:
    """Which keys are in a store: one request if all are, else by halves.

    Args:
        store: It can be asked whether all of several keys are there.
        keys: By rank.
    """
    if not keys or store.check(list(keys.values())):
        return list(keys)
    if len(keys) == 1:
        return []
    items = list(keys.items())
    half = len(items) // 2
    return present(store, dict(items[:half])) + present(store, dict(items[half:]))


def present_by_chunks(store: Any, keys: dict[int, str]) -> list[int]:
    """Keys that are in a store for certain; of many, neighbours of a missing one may be left out.

    A chunk costs one request however many of it are missing, so that it can be asked again and again. Few keys are
    looked for one by one.
    """
    if len(keys) <= _CHUNK:
        return present(store, keys)
    ranks = list(keys)
    chunks = [ranks[first : first + _CHUNK] for first in range(0, len(ranks), _CHUNK)]
    return [rank for chunk in chunks if store.check([keys[rank] for rank in chunk]) for rank in chunk]


def get_if_there(store: Any, key: str) -> bytes | None:
    """What a key holds; None if it is not there, by one request where the store can compare."""
    try:
        value = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    except (AttributeError, NotImplementedError, RuntimeError):
        return bytes(store.get(key)) if store.check([key]) else None
    return None if value == _ABSENT.encode() else value


def get_all(store: Any, keys: dict[int, str]) -> dict[int, bytes]:
    """What keys hold that were there a moment ago, by rank; one that has been deleted meanwhile is left out.

    Few are asked for one by one. Many are by one request where the store has it: that waits for what is not there any
    more, until the store's timeout, which :class:`~deep500_timing._distributed.connection.Connection` makes short.
    """
    if len(keys) > _CHUNK:
        try:
            return dict(zip(keys, map(bytes, store.multi_get(list(keys.values()))), strict=True))
        except (AttributeError, LookupError, NotImplementedError, RuntimeError):
            pass  # It cannot, or one of them is gone.
    found = {rank: get_if_there(store, key) for rank, key in keys.items()}
    return {rank: value for rank, value in found.items() if value is not None}
