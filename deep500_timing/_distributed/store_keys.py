"""Many keys of a store by few requests: which of them are there, and their values.

A request for a key that is not there waits for it, and another rank may delete a key between a look and a get. So no
key is requested here in a way that waits for ever.
"""

from __future__ import annotations

from typing import Any

_CHUNK = 64
"""Up to this many values are requested one by one."""
_ABSENT = "\0deep500_timing: no such key"
"""Not a value that is ever stored. Comparing with it tells a missing key, and changes nothing."""


def present(store: Any, keys: dict[int, str]) -> list[int]:
    """Which keys are in a store: one request if all are, else by halves."""
    if not keys or store.check(list(keys.values())):
        return list(keys)
    if len(keys) == 1:
        return []
    items = list(keys.items())
    half = len(items) // 2
    return present(store, dict(items[:half])) + present(store, dict(items[half:]))


def get_if_there(store: Any, key: str) -> bytes | None:
    """The value of a key; None if it is not there. One request where the store can compare."""
    try:
        value = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    except (AttributeError, NotImplementedError, RuntimeError):
        return bytes(store.get(key)) if store.check([key]) else None
    return None if value == _ABSENT.encode() else value


def get_all(store: Any, keys: dict[int, str]) -> dict[int, bytes]:
    """The values of keys that were there a moment ago, by rank, without keys that have been deleted meanwhile.

    Many are requested at once where the store can: that waits for a deleted key until the store's timeout, which
    :class:`~deep500_timing._distributed.connection.Connection` makes short.
    """
    if len(keys) > _CHUNK:
        try:
            return dict(zip(keys, map(bytes, store.multi_get(list(keys.values()))), strict=True))
        except (AttributeError, LookupError, NotImplementedError, RuntimeError):
            pass  # It cannot, or one of them is gone.
    found = {rank: get_if_there(store, key) for rank, key in keys.items()}
    return {rank: value for rank, value in found.items() if value is not None}
