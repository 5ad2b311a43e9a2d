"""A report of all ranks, in bounded time and bytes, without a collective operation.

Every rank leaves a message of at most 8 KB for rank 0 and goes on; rank 0 takes what arrives within a deadline.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from deep500_timing._base.fork import after_fork
from deep500_timing._base.settings import setting
from deep500_timing._distributed.exchange import DEADLINE_S, Exchange
from deep500_timing._distributed.identity import known_rank_and_world
from deep500_timing._distributed.merge import Merger
from deep500_timing._distributed.message import pack_snapshot
from deep500_timing._distributed.transport import AloneTransport, FolderTransport, job_transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._distributed.gathered import Gathered
    from deep500_timing._distributed.transport import Transport
    from deep500_timing._summary.snapshot import Snapshot

FOLDER_VARIABLE = "DEEP500_TIMING_GATHER"
"""Names the shared folder for ranks that nothing else connects."""
_MERGE_S = 1.5e-3
"""The time that merging may take for each rank."""
NOTHING = (
    "nothing connects the {} ranks: pass transport= to gather, or name a shared folder in {}; torch.distributed "
    "serves once it is initialised"
)


class Gatherer:
    """Gathers the snapshots of ranks, again and again.

    Args:
        transport: What connects them.
        name: Tells apart gatherers over one transport; the same on every rank.
        ranks: The participants, this rank among them, such as those of one machine; all if None. The smallest of
            them gets the report.

    Raises:
        ValueError: This rank is not among ``ranks``.
    """

    def __init__(self, transport: Transport, name: str = "snapshots", *, ranks: Sequence[int] | None = None) -> None:
        self.transport = transport
        self.ranks = tuple(range(transport.world_size)) if ranks is None else tuple(sorted(set(ranks)))
        if transport.rank not in self.ranks:
            raise ValueError(f"Gatherer(ranks={list(self.ranks)}): this is rank {transport.rank}, not one of them.")
        self.root = self.ranks[0]
        # Ranks of several machines may gather by themselves over one transport.
        self._exchange = Exchange(name if ranks is None else f"{name}-{self.root}", transport=transport)

    @property
    def is_root(self) -> bool:
        """Whether this rank gets the report."""
        return self.transport.rank == self.root

    def gather(self, snapshot: Snapshot, *, deadline_s: float = DEADLINE_S, step: int | None = None) -> Gathered | None:
        """Leave this rank's snapshot; on the smallest rank, wait for those of the others. See :func:`gather`."""
        if not self.is_root:
            self._exchange.post(lambda: pack_snapshot(snapshot), deadline_s, to=self.root, step=step)
            return None
        merger = Merger()
        merge_s = min(_MERGE_S * len(self.ranks), deadline_s / 2)
        answers = self._exchange.gather(b"", deadline_s - merge_s, to=self.root, step=step, senders=self.ranks)
        answers.reports[self.root] = pack_snapshot(snapshot)
        merger.add(answers.reports)
        return merger.gathered(self.ranks, fault=answers.fault, step=step, ahead=answers.ahead)

    def flush(self, timeout_s: float) -> bool:
        """Wait until this rank's snapshots are sent, and say whether they are."""
        return self._exchange.flush(timeout_s)


_lock = threading.Lock()
_found: dict[str, Transport] = {}


def find_transport() -> Transport | None:
    """What connects the ranks of this job, None if nothing does.

    The store of ``torch.distributed`` where it is initialised; the folder that ``DEEP500_TIMING_GATHER`` names; a
    process that is the only one is a world of one. MPI is used if an ``MpiTransport`` is passed, as all ranks must
    make it together.
    """
    transport = job_transport()
    if transport is not None:
        return transport
    rank, world_size = known_rank_and_world()
    folder = setting("gather")
    with _lock:
        if folder and rank is not None and world_size is not None:
            key = f"{folder} {rank} {world_size}"
            return _found.setdefault(key, FolderTransport(folder, rank=rank, world_size=world_size))
        if world_size in (None, 1):
            return _found.setdefault("alone", AloneTransport())
    return None


def gather(
    snapshot: Snapshot,
    *,
    transport: Transport | None = None,
    deadline_s: float = DEADLINE_S,
    step: int | None = None,
) -> Gathered | None:
    """Put the snapshots of all ranks together, on rank 0.

    Every rank calls it. Ranks other than 0 leave at most 8 KB, on another thread, and go on at once. Rank 0 waits for
    them, at most until the deadline, and says which ranks are missing. It is no collective operation: a rank that is
    dead, stopped, or never calls it costs rank 0 the deadline in two rounds, and the other ranks nothing.

    Args:
        snapshot: This rank's, whole or a difference (``snapshot.since(earlier)``).
        transport: What connects the ranks: found out if None, see :func:`find_transport`.
        deadline_s: Seconds that it may take.
        step: The step that this is about. With it, ranks are matched by step. Without it, each rank's snapshots
            are used in their order, one made for an earlier report is passed over, and ``ahead`` says which ranks have
            called more or less often than the others.

    Returns:
        The report on rank 0, None on the others.
    """
    if transport is None:
        transport = find_transport()
    if transport is None:
        rank, world_size = known_rank_and_world()
        merger = Merger()
        merger.add({rank or 0: pack_snapshot(snapshot)})
        fault = NOTHING.format(world_size, FOLDER_VARIABLE)
        return merger.gathered(range(world_size or 1), fault=fault, step=step)
    return Gatherer(transport).gather(snapshot, deadline_s=deadline_s, step=step)


@after_fork
def _forget() -> None:
    # The lock may be held by a thread that does not exist here.
    global _lock
    _lock = threading.Lock()
    _found.clear()
