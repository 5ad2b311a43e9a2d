"""Reports from every rank, through the store of the process group, in bounded time.

A collective would hang, or fail, when a rank is dead; keys in a store do neither. Rank 0 reads what the others have
left there, up to a deadline, and leaves the result for them, so that the store serves each rank a handful of requests
whatever the size of the world.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_S = 0.01
_GATHER_SHARE = 0.7
"""How much of the deadline rank 0 gives the others, so that what it makes of their reports reaches them within it."""


@dataclass(slots=True)
class Answers:
    """What came back."""

    combined: bytes | None
    """What rank 0 made of the reports; None if that did not come."""
    reports: dict[int, bytes]
    """The reports that this rank has itself seen."""
    fault: str | None = None
    """What went wrong with the store, if anything did."""


class Exchange:
    """Rounds of reports among the ranks of one store. Every rank takes part in every round, in the same order."""

    def __init__(
        self, store: Any, rank: int, world_size: int, *, prefix: str = "deep500_timing/comm", first: int = 0
    ) -> None:
        """Use a store.

        Args:
            store: Of ``torch.distributed``; its connection is used by nobody else if it can be cloned, since a
                request that waits for its answer keeps others on the same connection waiting.
            rank: This rank.
            world_size: Ranks in all.
            prefix: Put before the keys.
            first: Number of the first round.
        """
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._prefix = prefix
        self._round = first

    def round(self, report: bytes, combine: Callable[[dict[int, bytes]], bytes], deadline_s: float) -> Answers:
        """Leave a report and wait for what rank 0 makes of all of them.

        It returns within the deadline even if the store is gone and its requests never end.

        Args:
            report: Of this rank.
            combine: Called on rank 0 with the reports that came in time.
            deadline_s: Seconds that it may take.
        """
        number = self._round
        self._round += 1
        answers = Answers(None, {self._rank: report})
        until = time.monotonic() + deadline_s

        def exchange() -> None:
            try:
                self._exchange(number, report, combine, until, deadline_s, answers)
            except Exception as error:
                answers.fault = f"{type(error).__name__}: {error}".splitlines()[0]

        # A request to a machine that no longer answers ends when its connection does, which may be minutes.
        thread = threading.Thread(target=exchange, name="deep500-timing ranks", daemon=True)
        thread.start()
        thread.join(deadline_s)
        if thread.is_alive():
            answers = Answers(answers.combined, dict(answers.reports), "the store does not answer")
        return answers

    def _exchange(
        self,
        number: int,
        report: bytes,
        combine: Callable[[dict[int, bytes]], bytes],
        until: float,
        deadline_s: float,
        answers: Answers,
    ) -> None:
        store = _own_connection(self._store, deadline_s)
        store.set(self._key(number, self._rank), report)
        if number:
            store.delete_key(self._key(number - 1, self._rank))
        result = f"{self._prefix}/{number}/result"
        taken = f"{self._prefix}/{number}/taken"
        if self._rank == 0:
            self._gather(store, number, answers, until - (1 - _GATHER_SHARE) * deadline_s)
            answers.combined = combine(dict(answers.reports))
            store.set(result, answers.combined)
            if number:
                store.delete_key(f"{self._prefix}/{number - 1}/result")
                store.delete_key(f"{self._prefix}/{number - 1}/taken")
            # The store may live in this process, which may have nothing left to do after this.
            while store.add(taken, 0) < len(answers.reports) - 1 and time.monotonic() < until - _POLL_S:
                time.sleep(_POLL_S)
            return
        # Leave time to look for the others' reports, should rank 0 be the one that is dead.
        give_up = until - (1 - _GATHER_SHARE) / 2 * deadline_s
        while True:
            if store.check([result]):
                answers.combined = bytes(store.get(result))
                store.add(taken, 1)
                return
            if time.monotonic() >= give_up:
                break
            time.sleep(_POLL_S)
        self._gather(store, number, answers, 0.0)

    def _gather(self, store: Any, number: int, answers: Answers, until: float) -> None:
        waiting = [rank for rank in range(self._world_size) if rank not in answers.reports]
        while waiting:
            if len(waiting) > 1 and store.check([self._key(number, rank) for rank in waiting]):
                there = waiting
            else:
                there = [rank for rank in waiting if store.check([self._key(number, rank)])]
            for rank in there:
                answers.reports[rank] = bytes(store.get(self._key(number, rank)))
            waiting = [rank for rank in waiting if rank not in answers.reports]
            if not waiting or time.monotonic() >= until:
                return
            time.sleep(_POLL_S)

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"


def _own_connection(store: Any, timeout_s: float) -> Any:
    try:
        store = store.clone()
    except Exception:
        return store
    store.set_timeout(timedelta(seconds=max(timeout_s, 1.0)))
    return store
