"""What carries messages between ranks: one contract, and what needs no package.

A transport never waits for another rank. It may wait for what it is made of, a store or a file system, for ever; so it
is asked on a thread of its own, which nobody waits for longer than a deadline.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import IO, TYPE_CHECKING, Any, Protocol

from deep500_timing._distributed.store_keys import get_all, get_if_there, present

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

_TRIES = 100
"""So often a folder may be removed under a rank that is about to write into it."""


class Transport(Protocol):
    """Hands messages from rank to rank. One of your own must pass :func:`deep500_timing.ranks.check_transport`."""

    @property
    def rank(self) -> int:
        """Of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def overhears(self) -> bool:
        """Whether a rank can take messages that were sent to another one."""
        ...

    def send(self, topic: str, to: int, message: bytes) -> None:
        """Leave a message for a rank: one for each topic, whose name is some words with slashes between them.

        Raises:
            Exception: It could not be left. Whoever calls this takes any exception as a fault of the transport.
        """

    def take(self, topic: str, to: int, senders: Sequence[int]) -> dict[int, bytes]:
        """The messages of a topic that have arrived for a rank; each is given once.

        Raises:
            Exception: As :meth:`send`.
        """
        ...

    def withdraw(self, topic: str, to: int) -> None:
        """Take back what this rank has left, if it is still there.

        Raises:
            Exception: As :meth:`send`.
        """


class AloneTransport:
    """A world of one process."""

    rank = 0
    world_size = 1
    overhears = True

    def __init__(self) -> None:
        """Nothing is left yet."""
        self._left: dict[tuple[str, int], bytes] = {}

    def send(self, topic: str, to: int, message: bytes) -> None:
        """Leave a message for oneself."""
        self._left[topic, to] = message

    def take(self, topic: str, to: int, senders: Sequence[int]) -> dict[int, bytes]:
        """What was left."""
        found = self._left.pop((topic, to), None) if 0 in senders else None
        return {} if found is None else {0: found}

    def withdraw(self, topic: str, to: int) -> None:
        """Forget it."""
        self._left.pop((topic, to), None)


class FolderTransport:
    """Messages as files in a folder that all ranks see, such as one on NFS or Lustre.

    A file is written beside its place and renamed into it, so that nobody reads half of one. The folder must be the
    job's own: what an earlier job has left in it would be taken for this one's.

    Args:
        folder: Made if need be.
        rank: Of this process; what torch.distributed or the launcher says if None.
        world_size: Likewise.
    """

    overhears = True

    def __init__(self, folder: str | PathLike[str], *, rank: int | None = None, world_size: int | None = None) -> None:
        from deep500_timing._distributed.identity import rank_and_world

        found = rank_and_world() if rank is None or world_size is None else (rank, world_size)
        self.rank = found[0] if rank is None else rank
        self.world_size = found[1] if world_size is None else world_size
        self._folder = os.path.abspath(os.fspath(folder))

    def send(self, topic: str, to: int, message: bytes) -> None:
        """Write a file."""
        mailbox = self._mailbox(topic, to)
        path = os.path.join(mailbox, f".{self.rank}")
        with self._open_in(mailbox, path) as file:
            file.write(message)
        os.replace(path, os.path.join(mailbox, str(self.rank)))

    def _open_in(self, mailbox: str, path: str) -> IO[bytes]:
        # Who takes the last message removes the mailbox, perhaps between our making it and our file's being in it.
        for left in range(_TRIES, -1, -1):
            try:
                os.makedirs(mailbox, exist_ok=True)
                return open(path, "wb")
            except (FileNotFoundError, FileExistsError):
                if not left:
                    raise
        raise AssertionError

    def take(self, topic: str, to: int, senders: Sequence[int]) -> dict[int, bytes]:
        """Read and remove files; the folder is looked through once, however many ranks there are."""
        mailbox = self._mailbox(topic, to)
        wanted = {str(sender): sender for sender in senders}
        try:
            names = sorted(os.listdir(mailbox))
        except FileNotFoundError:
            return {}
        found = {}
        for name in names:
            if name in wanted:
                # Another one that was asked for the same messages may be faster.
                with contextlib.suppress(FileNotFoundError):
                    path = os.path.join(mailbox, name)
                    with open(path, "rb") as file:
                        message = file.read()
                    os.unlink(path)
                    found[wanted[name]] = message
        if not set(names) - set(wanted):
            with contextlib.suppress(OSError):
                os.rmdir(mailbox)
        return found

    def withdraw(self, topic: str, to: int) -> None:
        """Remove the file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._mailbox(topic, to), str(self.rank)))

    def _mailbox(self, topic: str, to: int) -> str:
        return os.path.join(self._folder, *topic.split("/"), str(to))


class StoreTransport:
    """Messages as keys in the store of a job, as ``torch.distributed`` has it.

    Args:
        store: One with ``set``, ``get``, ``check`` and ``delete_key``. Where it has them, ``append`` tells who has
            arrived by one request, ``multi_get`` reads many messages by one, and with ``compare_set`` no request waits
            for what another rank has just deleted.
        rank: Of this process.
        world_size: How many ranks there are.
        keep: Keep the store alive. A job's own ends with its process group.
    """

    overhears = True

    def __init__(self, store: Any, rank: int, world_size: int, *, keep: bool = True) -> None:
        self.rank, self.world_size = rank, world_size
        self._kept = store if keep else None
        self._found = weakref.ref(store)
        self._appends = hasattr(store, "append")

    @property
    def _store(self) -> Any:
        store = self._found()
        if store is None:
            raise RuntimeError("the process group has been destroyed")
        return store

    @property
    def underlying_store(self) -> Any:
        """What carries the messages."""
        return self._store

    def clone(self) -> StoreTransport:
        """The same over a connection of its own, which nobody else waits on."""
        return StoreTransport(self._store.clone(), self.rank, self.world_size)

    def set_timeout(self, timeout: Any) -> None:
        """After how long a request gives up by itself."""
        self._store.set_timeout(timeout)

    def send(self, topic: str, to: int, message: bytes) -> None:
        """Set a key, and add this rank to the list of those that have arrived."""
        store = self._store
        store.set(self._key(topic, to, self.rank), message)
        if self._appends:
            try:
                store.append(self._key(topic, to, "arrived"), f"{self.rank} ")
            except (NotImplementedError, RuntimeError):
                self._appends = False

    def take(self, topic: str, to: int, senders: Sequence[int]) -> dict[int, bytes]:
        """Get what has arrived, and delete it."""
        keys = {sender: self._key(topic, to, sender) for sender in self._arrived(topic, to, senders)}
        found = get_all(self._store, keys)
        # Another one that was asked for the same messages may be faster, or the sender has withdrawn its own.
        return {sender: message for sender, message in found.items() if self._store.delete_key(keys[sender])}

    def _arrived(self, topic: str, to: int, senders: Sequence[int]) -> list[int]:
        keys = {sender: self._key(topic, to, sender) for sender in senders}
        if keys and self._store.check(list(keys.values())):
            return list(keys)
        listed = self._key(topic, to, "arrived")
        if not self._appends:
            return present(self._store, keys)
        # One that was taken is still in the list, and so is one that was taken back.
        text = get_if_there(self._store, listed) or b""
        said = set(map(int, text.split()))
        arrived = present(self._store, {sender: key for sender, key in keys.items() if sender in said})
        if text and said <= keys.keys():
            # Who has come is known now. Where a topic is used again and again the list would grow for ever.
            with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
                self._store.compare_set(listed, text.decode(), "")
        return arrived

    def withdraw(self, topic: str, to: int) -> None:
        """Delete the key, and the list of arrivals if no other rank is in it."""
        store, listed = self._store, self._key(topic, to, "arrived")
        store.delete_key(self._key(topic, to, self.rank))
        found = get_if_there(store, listed) if self._appends else None
        if found is not None and (to == self.rank or {int(text) for text in found.split()} <= {self.rank}):
            store.delete_key(listed)

    def _key(self, *parts: object) -> str:
        from deep500_timing._distributed.exchange import PREFIX

        return "/".join(map(str, (PREFIX, "gather", *parts)))
