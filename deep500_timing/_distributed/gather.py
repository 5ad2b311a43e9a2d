"""A report of all ranks, in bounded time and bytes, without a collective operation.

Every rank leaves a message of at most 8 KB for rank 0 and goes on; rank 0 takes what arrives within a deadline.
"""

from __future__ import annotations

import json
import os
import threading
from functools import cache
from typing import TYPE_CHECKING

from deep500_timing._base.fork import after_fork
from deep500_timing._base.settings import setting
from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.exchange import DEADLINE_S, Exchange
from deep500_timing._distributed.gathered import merge_snapshots, pack_snapshot
from deep500_timing._distributed.launchers import discover_launch, known_rank_and_world
from deep500_timing._distributed.transport import AloneTransport, FolderTransport, job_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from deep500_timing._distributed.gathered import Gathered
    from deep500_timing._distributed.transport import Transport
    from deep500_timing._summary.snapshot import Snapshot


FOLDER_VARIABLE = "DEEP500_TIMING_GATHER"
"""Names the shared folder for ranks that nothing else connects."""
_MERGE_S = 1.5e-3
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
        merge_s = min(_MERGE_S * len(self.ranks), deadline_s / 2)
        answers = self._exchange.gather(b"", deadline_s - merge_s, to=self.root, step=step, senders=self.ranks)
        answers.reports[self.root] = pack_snapshot(snapshot)
        return merge_snapshots(answers.reports, self.ranks, fault=answers.fault, step=step, ahead=answers.ahead)

    def flush(self, timeout_s: float) -> bool:
        """Wait until this rank's snapshots are sent, and say whether they are."""
        return self._exchange.flush(timeout_s)


_alone = cache(AloneTransport)
_by_folder = cache(FolderTransport)


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
    if folder and rank is not None and world_size is not None:
        return _by_folder(folder, rank=rank, world_size=world_size)
    return _alone() if world_size in (None, 1) else None


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
        own = {rank or 0: pack_snapshot(snapshot)}
        fault = NOTHING.format(world_size, FOLDER_VARIABLE)
        return merge_snapshots(own, range(world_size or 1), fault=fault, step=step)
    return Gatherer(transport).gather(snapshot, deadline_s=deadline_s, step=step)


@after_fork
def _forget() -> None:
    # Their connections may be in use by a thread that does not exist here.
    _alone.cache_clear()
    _by_folder.cache_clear()


FILE = "gathered-{}.jsonl"


class LiveReport:
    """Gathers what came since the last time every so many steps, and writes it down on the smallest rank.

    Every rank makes one and calls :meth:`step` in its loop, which costs a comparison: snapshots, messages and waiting
    are a background thread's. A round that is due while the one before is still under way is left out and counted.

    Args:
        snapshot: Gives this rank's snapshot: ``timer.snapshot``.
        every: Steps between reports; the same on all ranks.
        folder: Where ``gathered-RANK.jsonl`` is appended to, a line for each report; nowhere if None.
        on_report: Called with each report, on the thread of the reports.
        transport: What connects the ranks; found at each report if None.
        ranks: Which ranks are in the report: all if None, ``"node"`` for those of each machine, or some.
        deadline_s: How long a report waits for ranks that do not answer.

    Raises:
        ValueError: ``every`` is below 1, or the launcher does not tell the ranks of this machine.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        *,
        every: int,
        folder: str | PathLike[str] | None = None,
        on_report: Callable[[Gathered], object] | None = None,
        transport: Transport | None = None,
        ranks: Sequence[int] | str | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if every < 1:
            raise ValueError(f"LiveReport(every={every}): the steps between two reports are 1 or more.")
        self._snapshot, self._every, self._deadline_s = snapshot, every, deadline_s
        self._folder = None if folder is None else os.path.abspath(os.fspath(folder))
        self._on_report = on_report
        self._transport = transport
        self._ranks = ranks_of_node() if isinstance(ranks, str) else ranks
        self._gatherer: Gatherer | None = None
        self._earlier: Snapshot | None = None
        self._busy = threading.Lock()
        self.skipped = 0
        """Reports that were left out because the one before was under way."""

    def step(self, number: int) -> None:
        """Say that a step has ended. Never waits."""
        if number % self._every:
            return
        if not self._busy.acquire(blocking=False):
            self.skipped += 1
            return
        try:
            threading.Thread(target=self._work, args=(number,), name="deep500-timing live", daemon=True).start()
        except RuntimeError:  # no more threads, or the interpreter is about to end
            self._busy.release()
            self.skipped += 1

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the report that is under way is written, and say whether it is; True if there is none."""
        done = self._busy.acquire(timeout=-1 if timeout_s is None else timeout_s)
        if done:
            self._busy.release()
        return done

    def _work(self, number: int) -> None:
        try:
            self._report(number)
        except Exception as error:
            warn_once(
                f"A report of all ranks was not made: {type(error).__name__}: {error}. The training goes on.",
                key=f"live report {type(error).__name__}",
            )
        finally:
            self._busy.release()

    def _report(self, number: int) -> None:
        now = self._snapshot()
        window, self._earlier = now.since(self._earlier), now
        gatherer = self._gatherer = self._find_gatherer()
        report = gatherer.gather(window, deadline_s=self._deadline_s, step=number)
        if report is None:
            return
        if self._folder is not None:
            os.makedirs(self._folder, exist_ok=True)
            plain = report.to_dict()
            for region in plain["regions"]:
                del region["distribution"]  # A line of a file has no histograms.
            line = json.dumps(plain, separators=(",", ":"))
            path = os.path.join(self._folder, FILE.format(gatherer.root))
            with open(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        if self._on_report is not None:
            self._on_report(report)

    def _find_gatherer(self) -> Gatherer:
        # Over the current transport: a restarted process group may have another store.
        known, transport = self._gatherer, self._transport or find_transport()
        # Between two process groups nothing is found, or a world of one. The store that is gone is then the fault.
        if known is not None and (transport in (None, known.transport) or isinstance(transport, AloneTransport)):
            return known
        if transport is None:
            raise RuntimeError("nothing connects the ranks; pass transport=")
        return Gatherer(transport, "live", ranks=self._ranks)


def ranks_of_node() -> list[int]:
    launch = discover_launch()
    if launch.local_world_size is None:
        raise ValueError(
            f"Gathering by node: the launcher ({launch.launcher}) does not tell how many ranks this machine has; "
            "pass ranks= as a list."
        )
    first = launch.rank - launch.local_rank
    return list(range(first, first + launch.local_world_size))
