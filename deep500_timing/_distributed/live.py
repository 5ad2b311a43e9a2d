"""The report of all ranks while they train: every so many steps, in the background."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any

from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.exchange import DEADLINE_S
from deep500_timing._distributed.gather import Gatherer, find_transport
from deep500_timing._distributed.launchers import discover_launch
from deep500_timing._distributed.transport import AloneTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from deep500_timing._distributed.gathered import Gathered
    from deep500_timing._distributed.transport import Transport
    from deep500_timing._summary.snapshot import Snapshot

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
        self._due: int | None = None
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
            line = json.dumps(plain_line(report), separators=(",", ":"))
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


def plain_line(report: Gathered) -> dict[str, Any]:
    """A report without histograms, for a line of a file."""
    plain = report.to_dict()
    for region in plain["regions"]:
        del region["distribution"]
    return plain


def ranks_of_node() -> list[int]:
    """The ranks of this machine, as the launcher tells."""
    launch = discover_launch()
    if launch.local_world_size is None:
        raise ValueError(
            f"Gathering by node: the launcher ({launch.launcher}) does not tell how many ranks this machine has; "
            "pass ranks= as a list."
        )
    first = launch.rank - launch.local_rank
    return list(range(first, first + launch.local_world_size))
