"""A report across the processes of a job that no process can hang."""

from __future__ import annotations

import time
from typing import Any

from deep500_timing._ground.warn import warn_once
from deep500_timing._ranks.place import distributed, rank_and_world

DEADLINE_S = 10.0
"""How long a report waits for ranks that do not answer, in seconds."""
_KEPT_ROUNDS = 16
"""Rounds that stay in the store: how far a rank may run ahead of one that reads, which training keeps close."""
_POLL_S = 0.002


class Exchange:
    """Hands short texts from every rank to those that ask, through the job's store rather than by a collective.

    A collective waits for every rank, each with the same shape of data; a rank that is dead, late, or timed other
    regions would hold up the others. Here each rank puts its text under a key, and only who reads waits, until a
    deadline.

    Args:
        name: Tells apart exchanges of one job; the same on every rank.
    """

    def __init__(self, name: str) -> None:
        """See the class."""
        self._name = name
        self._round = 0

    def _key(self, number: int, rank: int) -> str:
        return f"deep500_timing/{self._name}/{number}/{rank}"

    def post(self, text: str) -> None:
        """Put this rank's text of the next round. Every rank calls it equally often."""
        self._round += 1
        store = _store()
        if store is None:
            return
        rank = rank_and_world()[0]
        try:
            store.set(self._key(self._round, rank), text)
            if self._round > _KEPT_ROUNDS:
                store.delete_key(self._key(self._round - _KEPT_ROUNDS, rank))
        except Exception as error:
            warn_once(
                f"Handing times to the other ranks failed; their reports lack this rank's: {error}",
                about="exchange post",
            )

    def read(self, own: str, deadline_s: float = DEADLINE_S) -> dict[int, str]:
        """The texts of the round that was posted last, by rank; those that do not answer in time are absent.

        Args:
            own: What this rank posted.
            deadline_s: How long to wait for all others together, in seconds.
        """
        rank, world = rank_and_world()
        texts = {rank: own}
        store = _store()
        if store is None:
            return texts
        wanted = [other for other in range(world) if other != rank]
        end = time.monotonic() + deadline_s
        try:
            while wanted:
                arrived = [other for other in wanted if store.check([self._key(self._round, other)])]
                for other in arrived:
                    texts[other] = bytes(store.get(self._key(self._round, other))).decode()
                wanted = [other for other in wanted if other not in texts]
                if not wanted or time.monotonic() >= end:
                    break
                time.sleep(_POLL_S)
        except Exception as error:
            warn_once(
                f"Asking the other ranks for their times failed; the report lacks them: {error}", about="exchange read"
            )
        return texts


def _store() -> Any:
    dist = distributed()
    if dist is None:
        return None
    try:
        return dist.distributed_c10d._get_default_store()
    except Exception as error:
        warn_once(f"The job's store cannot be had; reports show this rank only: {error}", about="exchange store")
        return None
