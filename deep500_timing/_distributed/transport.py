"""What carries messages between ranks: one contract, and the transports.

A transport never waits for another rank. It may wait for ever for a store or a file system, so it is used on a thread
that no caller waits for beyond its deadline.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from typing import IO, TYPE_CHECKING, Any, Protocol

from deep500_timing._base.fork import after_fork
from deep500_timing._base.require import require
from deep500_timing._distributed.connection import job_store, pauses
from deep500_timing._distributed.launchers import rank_and_world

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike


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


_TRIES = 100
"""How often a folder may be removed before this rank has written its file into it."""
PREFIX = "deep500_timing"


class Transport(Protocol):
    """Hands messages from rank to rank. Your own one must pass :func:`deep500_timing.ranks.check_transport`."""

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
        """The messages of a topic that have arrived for this rank, by sender. Each is given once, the newest first."""
        ...

    def withdraw(self, topic: str, to: int) -> None:
        """Take back this rank's message, if it is still there."""


class AloneTransport:
    """A world of one process."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._left: dict[tuple[str, int], bytes] = {}

    def send(self, topic: str, to: int, message: bytes) -> None:
        self._left[topic, to] = message

    def take(self, topic: str, to: int, senders: Sequence[int]) -> dict[int, bytes]:
        found = self._left.pop((topic, to), None) if 0 in senders else None
        return {} if found is None else {0: found}

    def withdraw(self, topic: str, to: int) -> None:
        self._left.pop((topic, to), None)


class FolderTransport:
    """Messages as files in a folder that all ranks see, such as one on NFS or Lustre.

    A file is written under another name and renamed, so that no rank reads half a file. The folder must be the job's
    own: messages that an earlier job left in it would be read as this job's.

    Args:
        folder: Made if need be.
        rank: Of this process; as torch.distributed or the launcher says if None.
        world_size: Likewise.
    """

    def __init__(self, folder: str | PathLike[str], *, rank: int | None = None, world_size: int | None = None) -> None:
        found = rank_and_world() if rank is None or world_size is None else (rank, world_size)
        self.rank = found[0] if rank is None else rank
        self.world_size = found[1] if world_size is None else world_size
        self._folder = os.path.abspath(os.fspath(folder))

    def send(self, topic: str, to: int, message: bytes) -> None:
        mailbox = self._mailbox(topic, to)
        path = os.path.join(mailbox, f".{self.rank}")
        with self._open_in(mailbox, path) as file:
            file.write(message)
        os.replace(path, os.path.join(mailbox, str(self.rank)))

    def _open_in(self, mailbox: str, path: str) -> IO[bytes]:
        # The rank that takes the last message removes the mailbox, perhaps before our file is in it.
        for left in range(_TRIES, -1, -1):
            try:
                os.makedirs(mailbox, exist_ok=True)
                return open(path, "wb")
            except (FileNotFoundError, FileExistsError):
                if not left:
                    raise
        raise AssertionError

    def take(self, topic: str, to: int, senders: Sequence[int]) -> dict[int, bytes]:
        """Read and remove files; the folder is listed once, however many ranks there are."""
        mailbox = self._mailbox(topic, to)
        wanted = {str(sender): sender for sender in senders}
        try:
            names = sorted(os.listdir(mailbox))
        except FileNotFoundError:
            return {}
        found = {}
        for name in names:
            if name in wanted:
                path, taken = os.path.join(mailbox, name), os.path.join(mailbox, f".taken-{name}")
                with contextlib.suppress(FileNotFoundError):  # It was withdrawn.
                    # By a name of our own, since the sender may replace it while it is read.
                    os.replace(path, taken)
                    with open(taken, "rb") as file:
                        found[wanted[name]] = file.read()
                    os.unlink(taken)
        if not set(names) - set(wanted):
            with contextlib.suppress(OSError):
                os.rmdir(mailbox)
        return found

    def withdraw(self, topic: str, to: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._mailbox(topic, to), str(self.rank)))

    def _mailbox(self, topic: str, to: int) -> str:
        return os.path.join(self._folder, *topic.split("/"), str(to))


class StoreTransport:
    """Messages as keys in the store of a job, as ``torch.distributed`` has it.

    Args:
        store: One with ``set``, ``get``, ``check`` and ``delete_key``. Where it has them, ``multi_get`` reads many
            messages by one request, and with ``compare_set`` no request waits for a message that another rank has just
            deleted.
        rank: Of this process.
        world_size: How many ranks there are.
        keep: Keep the store alive. A job's own ends with its process group.
        restarts: The store may hold messages of an earlier transport, as that of a process group that was begun again
            does; all ranks begin equally often.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, keep: bool = True, restarts: bool = False) -> None:
        self.rank, self.world_size = rank, world_size
        self._kept = store if keep else None
        self._found = weakref.ref(store)
        self._restarts = restarts and hasattr(store, "add")

    @property
    def _store(self) -> Any:
        store = self._found()
        if store is None:
            raise RuntimeError("the process group has been destroyed")
        return store

    @property
    def underlying_store(self) -> Any:
        return self._store

    def clone(self) -> StoreTransport:
        """The same over a connection that no other user of the store waits for."""
        return StoreTransport(self._store.clone(), self.rank, self.world_size, restarts=self._restarts)

    def set_timeout(self, timeout: Any) -> None:
        self._store.set_timeout(timeout)

    def begin(self, name: str) -> int:
        """How often this rank has begun an exchange of that name in this store."""
        return int(self._store.add(self._key("begun", name, self.rank), 1)) if self._restarts else 0

    def send(self, topic: str, to: int, message: bytes) -> None:
        self._store.set(self._key(topic, to, self.rank), message)

    def take(self, topic: str, to: int, senders: Sequence[int]) -> dict[int, bytes]:
        """Get the messages that have arrived, and delete them."""
        found = self.read(topic, to, senders)
        for sender in found:
            self._store.delete_key(self._key(topic, to, sender))
        return found

    def read(self, topic: str, to: int, senders: Sequence[int]) -> dict[int, bytes]:
        """Get the messages that have arrived, and leave them there for other ranks."""
        keys = {sender: self._key(topic, to, sender) for sender in senders}
        return get_all(self._store, {sender: keys[sender] for sender in present(self._store, keys)})

    def withdraw(self, topic: str, to: int) -> None:
        self._store.delete_key(self._key(topic, to, self.rank))

    @staticmethod
    def _key(*parts: object) -> str:
        return "/".join(map(str, (PREFIX, "gather", *parts)))


_TAG = 0x0D5
_NAME_BYTES = 2


class MpiTransport:
    """Messages between the ranks of an MPI communicator, by mpi4py.

    All its ranks make it, once, as a collective operation: it works on a duplicate of the communicator, which no
    message of the program uses. After that no call waits for another rank. MPI must allow calls from any
    thread (``MPI_THREAD_MULTIPLE``, what mpi4py asks for), since the program may call MPI at the same time.

    MPI does not report ranks that do not answer: one that sends nothing within the deadline is missing. A message to a
    rank that never takes it stays in the sender's memory.

    Args:
        comm: ``MPI.COMM_WORLD`` if None.

    Raises:
        MissingPackageError: mpi4py is not installed.
        RuntimeError: MPI was started without support for threads.
    """

    def __init__(self, comm: Any = None) -> None:
        self._mpi: Any = require("mpi4py.MPI", extra="mpi", caller="MpiTransport")
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise RuntimeError(
                "MpiTransport: MPI was started without MPI_THREAD_MULTIPLE, so it cannot be used along with "
                "the program's own calls. Import mpi4py.MPI before anything else starts MPI, or pass "
                "FolderTransport to gather."
            )
        self._comm = (self._mpi.COMM_WORLD if comm is None else comm).Dup()
        self.rank: int = self._comm.Get_rank()
        self.world_size: int = self._comm.Get_size()
        self._sent: list[tuple[Any, bytes]] = []
        self._mailbox: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()

    def send(self, topic: str, to: int, message: bytes) -> None:
        """Begin to send; the bytes are kept until they have left."""
        name = topic.encode()
        framed = len(name).to_bytes(_NAME_BYTES, "little") + name + message
        with self._lock:
            self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
            self._sent.append((self._comm.Isend([framed, self._mpi.BYTE], dest=to, tag=_TAG), framed))

    def take(self, topic: str, to: int, senders: Sequence[int]) -> dict[int, bytes]:
        """Receive all messages that have arrived, and give those asked for."""
        if to != self.rank:
            return {}
        with self._lock:
            status = self._mpi.Status()
            while self._comm.Iprobe(source=self._mpi.ANY_SOURCE, tag=_TAG, status=status):
                framed = bytearray(status.Get_count(self._mpi.BYTE))
                source = status.Get_source()
                self._comm.Recv([framed, self._mpi.BYTE], source=source, tag=_TAG)
                end = _NAME_BYTES + int.from_bytes(framed[:_NAME_BYTES], "little")
                self._mailbox[framed[_NAME_BYTES:end].decode(), source] = bytes(framed[end:])
            there = [sender for sender in senders if (topic, sender) in self._mailbox]
            return {sender: self._mailbox.pop((topic, sender)) for sender in there}

    def withdraw(self, topic: str, to: int) -> None:
        """Forget messages that came for this rank too late; a sent message cannot be taken back."""
        if to == self.rank:
            with self._lock:
                for key in [key for key in self._mailbox if key[0] == topic]:
                    del self._mailbox[key]


_lock = threading.Lock()
_of_job: tuple[weakref.ref[Any], StoreTransport] | None = None
"""The job's store, and its transport."""


def job_transport() -> StoreTransport | None:
    """What goes over the store of ``torch.distributed`` as it is now; None where that is not initialised."""
    global _of_job
    store = job_store()
    if store is None:
        return None
    place = rank_and_world()
    with _lock:
        if _of_job is None or _of_job[0]() is not store or (_of_job[1].rank, _of_job[1].world_size) != place:
            _of_job = (weakref.ref(store), StoreTransport(store, *place, keep=False, restarts=True))
        return _of_job[1]


@after_fork
def _forget() -> None:
    # Sockets are the parent's, and the lock may be held by a thread that does not exist here.
    global _lock, _of_job
    _lock, _of_job = threading.Lock(), None


_PATIENCE_S = 30.0


def check_transport(transport: Transport) -> None:
    """Every rank of the transport calls it at the same time, as processes or as threads with a transport each.

    Args:
        transport: One that nothing was sent over yet.

    Raises:
        AssertionError: It does not do what :class:`Transport` says.
    """
    rank, world_size = transport.rank, transport.world_size
    everyone = range(world_size)
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"

    # A message that was not sent is not there, and is not waited for.
    begun = time.monotonic()
    assert transport.take("contract/nothing", rank, everyone) == {}
    assert time.monotonic() - begun < _PATIENCE_S / 2, "take waited for a message that no rank has sent"

    # Every byte, and more of them than a packet holds, from each to the next one.
    message = bytes(range(256)) * 1024 + str(rank).encode()
    following, before = (rank + 1) % world_size, (rank - 1) % world_size
    transport.send("contract/ring", following, message)
    found = _take(transport, "contract/ring", [before])
    assert found == {before: bytes(range(256)) * 1024 + str(before).encode()}, "a message is not as it was sent"
    assert transport.take("contract/ring", rank, everyone) == {}, "a message was given twice"

    # Topics and receivers are kept apart, and only those senders are heard that were asked for.
    for topic in ("contract/a", "contract/a/b"):
        transport.send(topic, 0, f"{topic} {rank}".encode())
    if rank == 0:
        for topic in ("contract/a/b", "contract/a"):
            last = _take(transport, topic, [world_size - 1])
            assert last == {world_size - 1: f"{topic} {world_size - 1}".encode()}, f"{topic}: {last}"
            rest = list(everyone)[:-1]
            assert _take(transport, topic, rest) == {one: f"{topic} {one}".encode() for one in rest}, topic
    else:
        assert transport.take("contract/a", rank, everyone) == {}, "a message for rank 0 was given to another"

    # A message that was withdrawn may arrive or not; neither that nor withdrawing nothing is an error.
    transport.send("contract/gone", rank, b"taken back")
    transport.withdraw("contract/gone", rank)
    transport.withdraw("contract/never", rank)


def _take(transport: Transport, topic: str, senders: Sequence[int]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for pause_s in pauses(time.monotonic() + _PATIENCE_S):
        left = [sender for sender in senders if sender not in found]
        found |= transport.take(topic, transport.rank, left)
        if len(found) == len(senders):
            break
        time.sleep(pause_s)
    return found
