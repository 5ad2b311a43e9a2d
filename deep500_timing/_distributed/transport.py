"""What carries messages between ranks: one contract, and the store of a job.

A transport never waits for another rank. It may wait for ever for a store, so it is used on a thread
that no caller waits for beyond its deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from deep500_timing._base.fork import after_fork
from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.connection import Connection
from deep500_timing._distributed.launchers import distributed, rank_and_world

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


def key_of(*parts: object) -> str:
    """The key of a message, which no key of the program's own is."""
    return "/".join(map(str, ("deep500_timing", "exchange", *parts)))


class Transport(Protocol):
    """Hands messages from rank to rank."""

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        ...

    def send(self, topic: str, to: int, message: bytes) -> None:
        """Leave a message for a rank, instead of an earlier one of the topic that it has not taken yet.

        A topic is some words with slashes between them.

        Raises:
            Exception: It could not be left. Any exception counts as a fault of the transport.
        """

    def take(self, topic: str, to: int, senders: Sequence[int]) -> dict[int, bytes]:
        """The messages of a topic that have arrived for this rank, by sender. Each is given once."""
        ...


class StoreTransport:
    """Messages as keys in the store of a job, as ``torch.distributed`` has it.

    Args:
        store: One with ``set``, ``get``, ``check``, ``add`` and ``delete_key``. Where it has them, ``multi_get`` reads
            many messages by one request, and with ``compare_set`` no request waits for a message that another rank has
            just deleted.
        rank: Of this process.
        world_size: How many ranks there are.
        keep: Keep the store alive. A job's own ends with its process group.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, keep: bool = True) -> None:
        self.rank, self.world_size = rank, world_size
        self._kept = store if keep else None
        self.connection = Connection(store)
        self.pasts: dict[str, Any] = {}
        """The history of each exchange over it, by its name."""

    def clone(self) -> StoreTransport:
        """The same over a connection that no other user of the store waits for."""
        return StoreTransport(self.connection.store.clone(), self.rank, self.world_size)

    def send(self, topic: str, to: int, message: bytes) -> None:
        self.connection.store.set(key_of(topic, to, self.rank), message)

    def take(self, topic: str, to: int, senders: Sequence[int]) -> dict[int, bytes]:
        """Get the messages that have arrived, and delete them."""
        store, keys = self.connection.store, {sender: key_of(topic, to, sender) for sender in senders}
        found = get_all(store, {sender: keys[sender] for sender in present(store, keys)})
        for sender in found:
            store.delete_key(keys[sender])
        return found


_lock = threading.Lock()
_of_job: StoreTransport | None = None


def find_transport() -> StoreTransport | None:
    """What connects the ranks of this job: the store of ``torch.distributed``; None where that is not initialised."""
    global _of_job
    dist = distributed()
    if dist is None:
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
    except Exception as error:
        warn_once(f"The job's store cannot be had; reports show this rank only: {error}", key="exchange store")
        return None
    place = rank_and_world()
    with _lock:
        known = _of_job
        if known is None or known.connection.shared() is not store or (known.rank, known.world_size) != place:
            known = _of_job = StoreTransport(store, *place, keep=False)
        return known


@after_fork
def _forget() -> None:
    # Sockets are the parent's, and the lock may be held by a thread that does not exist here.
    global _lock, _of_job
    _lock, _of_job = threading.Lock(), None
