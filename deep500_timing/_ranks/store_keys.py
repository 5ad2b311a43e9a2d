"""Many keys of a store by few requests: which of them are there, and what they hold."""

from __future__ import annotations

from typing import Any

_CHUNK = 64
"""Keys that are asked about by one request where who is missing need not be known yet."""


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


def get_all(store: Any, keys: list[str]) -> list[bytes]:
    """The values of keys that are in a store: by one request where it has it, since a missing one would block."""
    try:
        values = store.multi_get(keys)
    except (AttributeError, NotImplementedError, RuntimeError):
        values = [store.get(key) for key in keys]
    return [bytes(value) for value in values]
