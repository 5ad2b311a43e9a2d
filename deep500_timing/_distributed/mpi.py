"""Messages by MPI, for jobs that have no store."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from deep500_timing._base.require import require

if TYPE_CHECKING:
    from collections.abc import Sequence

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
