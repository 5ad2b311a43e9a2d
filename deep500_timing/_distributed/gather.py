"""A report of all ranks, in bounded time and bytes, without a collective.

Every rank leaves a message of some 2 KB for rank 0 and goes on; rank 0 takes what arrives within a deadline. Above
:data:`TREE_FROM` ranks, every :data:`FAN`-th is an aggregator: it takes in its group on a thread of its own and sends
rank 0 what it has made of it. If an aggregator is dead, rank 0 takes in the group itself where the transport lets it.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any
from weakref import ref

from deep500_timing._base.fork import after_fork
from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.connection import Connection
from deep500_timing._distributed.exchange import DEADLINE_S, pauses, time_to_ask
from deep500_timing._distributed.identity import distributed, known_rank_and_world
from deep500_timing._distributed.merge import Merger
from deep500_timing._distributed.packed import pack_snapshot
from deep500_timing._distributed.transport import AloneTransport, FolderTransport, StoreTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._distributed.gathered import Gathered
    from deep500_timing._distributed.transport import Transport
    from deep500_timing._summary.snapshot import Snapshot

FOLDER_VARIABLE = "DEEP500_TIMING_GATHER"
"""Names the shared folder for ranks that nothing else connects."""
FAN = 1024
"""Ranks that one aggregator takes in."""
TREE_FROM = 4096
"""Above so many ranks there are aggregators."""
_KEPT = 4
"""Messages of a rank that nobody has taken are left for so many rounds."""
_PART_SHARE = 0.6
"""How much of the deadline an aggregator gives its group."""
_OWN_SHARE = 0.85
"""How much of it rank 0 gives the aggregators before it takes in a group itself."""
_MERGE_S = 1e-4
"""What merging may take for each rank, twice what it does."""
NOTHING = (
    "nothing connects the {} ranks: pass transport= to gather, or name a shared folder in {}; torch.distributed "
    "serves once it is initialised"
)


class Gatherer:
    """Gathers the snapshots of ranks, again and again.

    Args:
        transport: What connects them.
        name: Tells apart gatherers over one transport; the same on every rank.
        ranks: Those that take part, this one among them, such as those of one machine; all if None. The smallest of
            them gets the report.
        fan: Ranks that one aggregator takes in.
        tree_from: Above so many ranks there are aggregators.

    Raises:
        ValueError: This rank is not among ``ranks``.
    """

    def __init__(
        self,
        transport: Transport,
        name: str = "snapshots",
        *,
        ranks: Sequence[int] | None = None,
        fan: int = FAN,
        tree_from: int = TREE_FROM,
    ) -> None:
        self.transport = transport
        self._name = name
        self.ranks = tuple(range(transport.world_size)) if ranks is None else tuple(sorted(set(ranks)))
        if transport.rank not in self.ranks:
            raise ValueError(f"Gatherer(ranks={list(self.ranks)}): this is rank {transport.rank}, not one of them.")
        self.root = self.ranks[0]
        step = fan if len(self.ranks) > tree_from else len(self.ranks)
        self._groups = [self.ranks[first : first + step] for first in range(0, len(self.ranks), step)]
        self._line = Connection(transport)
        self._calls = 0
        self._left: list[tuple[str, int]] = []
        # A thread of an aggregator has the requests to itself.
        self._aside = Connection(transport)

    @property
    def is_root(self) -> bool:
        """Whether this rank gets the report."""
        return self.transport.rank == self.root

    def gather(self, snapshot: Snapshot, *, deadline_s: float = DEADLINE_S, step: int | None = None) -> Gathered | None:
        """Leave this rank's snapshot; on the smallest rank, wait for those of the others. See :func:`gather`."""
        self._calls += 1
        topic = f"{self._name}/{self._calls if step is None else f'step-{step}'}"
        message = pack_snapshot(snapshot)
        rank = self.transport.rank
        group = next(group for group in self._groups if rank in group)
        self._left.append((topic, group[0]))
        old = [self._left.pop(0) for _ in range(len(self._left) - _KEPT)]
        if rank == self.root:
            return self._take_all(topic, message, deadline_s, step, old)

        def leave(line: Any) -> None:
            if rank != group[0]:
                line.send(topic, group[0], message)
            for old_topic, to in old:
                line.withdraw(old_topic, to)

        if rank == group[0]:
            work = (topic, message, group, deadline_s)
            threading.Thread(target=self._aggregate, args=work, name="deep500-timing gather", daemon=True).start()
        fault = self._line.run(leave, deadline_s)
        if fault is not None:
            warn_once(
                f"This rank's times are not in the report of all ranks: {fault}. The training goes on.",
                key="gather fault",
            )
        return None

    def _take_all(
        self, topic: str, message: bytes, deadline_s: float, step: int | None, old: list[tuple[str, int]]
    ) -> Gathered:
        begun = time.monotonic()
        merger = Merger()
        merger.add({self.root: message})
        found: dict[int, bytes] = {}
        fault = None
        if len(self.ranks) > 1:
            own = max(time_to_ask(deadline_s) - _MERGE_S * min(len(self.ranks), TREE_FROM), deadline_s / 2)
            fault = self._line.run(lambda line: self._take(line, topic, found, begun, own, old), deadline_s)
        # What the thread may still add, after the deadline, is not looked at.
        merger.add(dict(found))
        return merger.gathered(self.ranks, fault=fault, step=step)

    def _take(
        self, line: Any, topic: str, found: dict[int, bytes], begun: float, own_s: float, old: list[tuple[str, int]]
    ) -> None:
        until = begun + own_s
        heads = [group[0] for group in self._groups[1:]]
        waiting = {(topic, self.root): list(self._groups[0][1:])}
        if heads:
            waiting[_part(topic), self.root] = heads
        _collect(line, waiting, found, begun + _OWN_SHARE * own_s if heads else until)
        if heads and line.overhears:
            dead = [group for group in self._groups[1:] if group[0] not in found]
            _collect(line, {(topic, group[0]): list(group[1:]) for group in dead}, found, until)
        for old_topic, to in old:
            line.withdraw(old_topic, to)

    def _aggregate(self, topic: str, message: bytes, group: tuple[int, ...], deadline_s: float) -> None:
        begun = time.monotonic()
        found: dict[int, bytes] = {}

        def work(line: Any) -> None:
            _collect(line, {(topic, group[0]): list(group[1:])}, found, begun + _PART_SHARE * deadline_s)
            merger = Merger()
            merger.add({group[0]: message, **found})
            line.send(_part(topic), self.root, merger.to_bytes())

        fault = self._aside.run(work, deadline_s)
        if fault is not None:
            warn_once(f"A group of ranks is not in the report of all: {fault}.", key="gather fault")


def _part(topic: str) -> str:
    return f"{topic}/part"


def _collect(line: Any, waiting: dict[tuple[str, int], list[int]], found: dict[int, bytes], until: float) -> None:
    # By mailbox, those that have not come; until all are there, or a moment of `time.monotonic`.
    for pause_s in pauses(until):
        for (topic, to), senders in list(waiting.items()):
            taken = line.take(topic, to, senders) if senders else {}
            found.update(taken)
            left = [sender for sender in senders if sender not in taken]
            if left:
                waiting[topic, to] = left
            else:
                del waiting[topic, to]
        if not waiting:
            return
        time.sleep(pause_s)


_lock = threading.Lock()
_gatherers: dict[Transport, Gatherer] = {}
_of_store: tuple[Any, StoreTransport] | None = None
"""A weak reference to the job's store, and what goes over it."""
_others: dict[str, Transport] = {}


def find_transport() -> Transport | None:
    """What connects the ranks of this job, None if nothing does.

    The store of ``torch.distributed`` where it is initialised; the folder that ``DEEP500_TIMING_GATHER`` names; a
    process that is the only one is a world of one. MPI is used if an ``MpiTransport`` is passed, as all ranks must
    make it together.
    """
    global _of_store
    dist = distributed()
    if dist is not None:
        try:
            store = dist.distributed_c10d._get_default_store()
            place = int(dist.get_rank()), int(dist.get_world_size())
        except Exception as error:
            warn_once(f"The job's store cannot be had; reports show this rank only: {error}", key="gather store")
        else:
            with _lock:
                if _of_store is None or _of_store[0]() is not store:
                    if _of_store is not None:
                        _gatherers.pop(_of_store[1], None)
                    _of_store = (ref(store), StoreTransport(store, *place, keep=False))
                return _of_store[1]
    rank, world_size = known_rank_and_world()
    folder = os.environ.get(FOLDER_VARIABLE)
    with _lock:
        if folder and rank is not None and world_size is not None:
            key = f"{folder} {rank} {world_size}"
            return _others.setdefault(key, FolderTransport(folder, rank=rank, world_size=world_size))
        if world_size in (None, 1):
            return _others.setdefault("alone", AloneTransport())
    return None


def gather(
    snapshot: Snapshot,
    *,
    transport: Transport | None = None,
    deadline_s: float = DEADLINE_S,
    step: int | None = None,
) -> Gathered | None:
    """Put the snapshots of all ranks together, on rank 0.

    Every rank calls it. Ranks other than 0 leave some 2 KB and go on, whatever becomes of the others; rank 0 waits for
    them, at most until the deadline, and says who is missing. It is no collective operation: a rank that is dead,
    stopped, or never calls it costs rank 0 the deadline and the others nothing.

    Args:
        snapshot: This rank's, whole or a difference (``snapshot.since(earlier)``).
        transport: What connects the ranks: found out if None, see :func:`find_transport`.
        deadline_s: Seconds that it may take. Other ranks are kept that long only if the store does not answer them.
        step: The step that this is about. With it ranks are matched by step; without it by how often they have called,
            which must then be alike on all.

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
    with _lock:
        gatherer = _gatherers.get(transport)
        if gatherer is None:
            gatherer = _gatherers[transport] = Gatherer(transport)
    return gatherer.gather(snapshot, deadline_s=deadline_s, step=step)


@after_fork
def _forget() -> None:
    # Sockets are the parent's, and the lock may be held by a thread that does not exist here.
    global _lock, _of_store
    _lock, _of_store = threading.Lock(), None
    _gatherers.clear()
    _others.clear()
