"""Reports from every rank of a job, through its store, in bounded time.

A collective would hang, or fail, when a rank is dead, late or timed other regions; keys in a store do neither. There
are two ways to take part, and an exchange may be used in both:

- :meth:`Exchange.post` leaves a report and goes on; the rank that wants the reports calls :meth:`Exchange.gather`.
- :meth:`Exchange.round` leaves a report and waits for what rank 0 makes of all of them, so that the store serves each
  rank a handful of requests whatever the size of the world.

A round is known by what it holds and not by how often a rank has asked: rank 0 takes the reports of ranks that wait
now, and a rank that has given up takes its report back. So a call too many on one rank costs that rank its deadline,
is told in the next round (``Answers.ahead``), and spoils nothing. Exchanges of one name are one on each connection.
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deep500_timing._distributed import connection as _connection
from deep500_timing._distributed.identity import rank_and_world
from deep500_timing._distributed.store_keys import get_all, get_if_there, present, present_by_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deep500_timing._distributed.connection import Connection

DEADLINE_S = 10.0
"""How long a report waits for ranks that do not answer, in seconds. Every such deadline has this default."""
PREFIX = "deep500_timing"
"""Put before every key in the store."""
_KEPT_ROUNDS = 16
"""Posted reports that stay in the store: how far a rank may run ahead of one that gathers."""
_POLL_S = 0.002
_LONGEST_POLL_S = 0.1
"""Pauses between looks grow by half each time, up to this, so that many ranks do not overrun the store."""
_SEARCH_S = 1e-4
"""What looking for one rank among many may take: two requests."""
_GATHER_SHARE = 0.7
"""How much of the deadline rank 0 gives the others, so that what it makes of their reports reaches them within it."""
_SLACK, _SLACK_S = 0.05, 0.5
"""Share of a deadline, and seconds, of which the longer is kept for ending in time; of a short deadline a quarter."""
_CALLS = struct.Struct("<q")
_LENGTH = struct.Struct("<q")


@dataclass(slots=True)
class Answers:
    """What came back."""

    reports: dict[int, bytes]
    """The reports that this rank has itself seen, its own included, by rank."""
    combined: bytes | None = None
    """What rank 0 made of the reports of a round; None if that did not come, or was not asked for."""
    missing: list[int] = field(default_factory=list)
    """Ranks that did not answer within the deadline: dead, stuck, or not asked for a report. Empty if there is a
    fault, since then nobody could be asked."""
    ahead: dict[int, int] = field(default_factory=dict)
    """Ranks that have asked for so many more rounds than most others since the round before."""
    fault: str | None = None
    """What went wrong with the store, if anything did."""


class Exchange:
    """Hands reports among the ranks of a job.

    Args:
        name: Tells apart exchanges of one job; the same on every rank.
        store: A store of ``torch.distributed``; that of the job's default process group if None, asked for anew each
            time.
        rank: This rank; what :func:`rank_and_world` says if None.
        world_size: Ranks in all; what :func:`rank_and_world` says if None.
    """

    def __init__(self, name: str, *, store: Any = None, rank: int | None = None, world_size: int | None = None) -> None:
        self._name = name
        self._given = None if store is None else (store, _connection.Connection(store))
        self._rank, self._world_size = rank, world_size

    def __reduce__(self) -> Any:
        """A copy takes part in the job that it is in, over its default process group."""
        return Exchange, (self._name,)

    def _connect(self) -> tuple[Connection, _Past] | None:
        found = _connection.store_connection() if self._given is None else self._given[1]
        # Another exchange of this name goes on where this one is; over another connection each begins anew.
        return None if found is None else (found, found.kept.setdefault((self._name, self._place()[0]), _Past()))

    def _place(self) -> tuple[int, int]:
        rank, world_size = rank_and_world() if None in (self._rank, self._world_size) else (0, 1)
        return (
            rank if self._rank is None else self._rank,
            world_size if self._world_size is None else self._world_size,
        )

    def _begin(self, store: Any, past: _Past) -> Callable[..., str]:
        # Gives the names of keys: of their own for each beginning, since the store may have been that of an earlier
        # process group, whose reports are still in it. All ranks have begun equally often.
        def key(*parts: object) -> str:
            return "/".join(map(str, (PREFIX, self._name, past.beginning, *parts)))

        if not past.beginning:
            past.beginning = int(store.add(key("begun", self._place()[0]), 1))
        return key

    # --- posted reports -----------------------------------------------------------------------------------------------

    def post(self, report: bytes, deadline_s: float = DEADLINE_S) -> str | None:
        """Leave this rank's next report for the rank that gathers. Every rank posts equally often.

        It waits for no rank; only for the store, and at most until the deadline.

        Returns:
            What went wrong with the store, if anything did.
        """
        connected = self._connect()
        if connected is None:
            return None
        connection, past = connected
        past.posted += 1
        number, rank = past.posted, self._place()[0]

        def put(store: Any) -> None:
            key = self._begin(store, past)
            store.set(key("posted", number, rank), report)
            if number > _KEPT_ROUNDS:
                store.delete_key(key("posted", number - _KEPT_ROUNDS, rank))

        return connection.run(put, deadline_s)

    def gather(self, own: bytes, deadline_s: float = DEADLINE_S) -> Answers:
        """The reports that each rank posted in the round of this rank's latest post.

        Args:
            own: What this rank posted.
            deadline_s: Seconds that it may take.
        """
        rank, world_size = self._place()
        connected = self._connect()
        found = {rank: own}
        fault = None
        if connected is not None and world_size > 1:
            connection, past = connected
            number = past.posted
            until = time.monotonic() + time_to_ask(deadline_s)

            def read(store: Any) -> None:
                key = self._begin(store, past)
                others = (other for other in range(world_size) if other != rank)
                _collect(store, {other: key("posted", number, other) for other in others}, found, until)

            fault = connection.run(read, deadline_s)
        return _answers(dict(found), None, world_size, (), {}, fault)

    # --- rounds -------------------------------------------------------------------------------------------------------

    def round(self, report: bytes, combine: Callable[[dict[int, bytes]], bytes], deadline_s: float) -> Answers:
        """Leave a report and wait for what rank 0 makes of all of them. Every rank calls it.

        It returns within the deadline even if the store is gone and its requests never end. If rank 0 does not come,
        ``combined`` is None and ``reports`` has those of the ranks that wait as well.

        Args:
            report: Of this rank.
            combine: Called on rank 0 with the reports that came in time.
            deadline_s: Seconds that it may take.
        """
        rank, world_size = self._place()
        connected = self._connect()
        if connected is None or world_size == 1:
            return _answers({rank: report}, combine({rank: report}), world_size, (), {}, None)
        connection, past = connected
        past.calls += 1
        until = time.monotonic() + time_to_ask(deadline_s)
        progress = _Round(rank, world_size, report, combine, past.calls, until, deadline_s)
        work = self._lead if rank == 0 else self._follow
        fault = connection.run(lambda store: work(store, past, progress), deadline_s)
        return _answers(
            dict(progress.reports), progress.combined, world_size, progress.held, dict(progress.ahead), fault
        )

    def _lead(self, store: Any, past: _Past, progress: _Round) -> None:
        # Rank 0: take the reports of those that wait, and leave what is made of them.
        key = self._begin(store, past)
        serials = {other: past.serials.get(other, 0) + 1 for other in range(1, progress.world_size)}
        keys = {other: key("waiting", other, serial) for other, serial in serials.items()}
        packed: dict[int, bytes] = {}
        _collect(store, keys, packed, progress.until - (1 - _GATHER_SHARE) * progress.deadline_s)
        # A report is part of the round if it is rank 0 that deletes it. Else the rank has given up meanwhile, and will
        # use this serial again.
        calls = {other: int(_CALLS.unpack_from(raw)[0]) for other, raw in sorted(packed.items())}
        calls = {other: number for other, number in calls.items() if past.delete(store, keys[other], number)}
        for other in calls:
            past.serials[other] = serials[other]
            progress.reports[other] = packed[other][_CALLS.size :]
        progress.ahead = past.ahead({0: 0, **{other: number - progress.calls for other, number in calls.items()}})
        progress.combined = progress.combine(dict(progress.reports))
        past.results = number = past.results + 1
        head = json.dumps({"calls": calls, "ahead": progress.ahead}).encode()
        store.set(key("result", number), _LENGTH.pack(len(head)) + head + progress.combined)
        store.set(key("latest"), str(number))
        store.delete_key(key("result", number - 1))
        store.delete_key(key("taken", number - 1))
        # The store may live in this process, which may have nothing left to do after this.
        for pause_s in pauses(progress.until):
            if store.add(key("taken", number), 0) >= len(calls):
                break
            time.sleep(pause_s)

    def _follow(self, store: Any, past: _Past, progress: _Round) -> None:
        # Any other rank: wait for a result that holds this report.
        key = self._begin(store, past)
        rank, serial = progress.rank, past.serial + 1
        own = key("waiting", rank, serial)
        store.set(own, _CALLS.pack(progress.calls) + progress.reports[rank])
        # Leave time to look for the others' reports, should rank 0 be the one that is dead.
        for pause_s in pauses(progress.until - (1 - _GATHER_SHARE) / 2 * progress.deadline_s):
            head, combined = past.newest_result(store, key)
            # By the call, since rank 0 may have read what was here under this serial before, and was taken back.
            if head is not None and head["calls"].get(str(rank)) == progress.calls:
                past.serial = serial
                progress.held = {0, *map(int, head["calls"])}
                progress.ahead = {int(other): calls for other, calls in head["ahead"].items()}
                progress.combined = combined
                store.add(key("taken", past.seen), 1)
                return
            time.sleep(pause_s)
        others = (other for other in range(1, progress.world_size) if other != rank)
        packed: dict[int, bytes] = {}
        _collect(store, {other: key("waiting", other, serial) for other in others}, packed, 0.0)
        progress.reports.update((other, raw[_CALLS.size :]) for other, raw in packed.items())
        # The others look for a moment longer; then nobody may take this report for one of a later round.
        time.sleep(max(progress.until - time.monotonic(), 0.0))
        if not past.delete(store, own, progress.calls):
            past.serial = serial  # Rank 0 has taken it meanwhile.


@dataclass(slots=True)
class _Past:
    # What a rank has done in an exchange over one connection, with which it ends: a request that goes on for ever, on
    # the connection of an earlier process group, changes nothing of a later one.
    posted: int = 0
    calls: int = 0
    # What follows belongs to the thread that has the connection.
    beginning: int = 0
    deleting_tells: bool | None = None  # which of two that delete a key has deleted it; None if not known yet
    serial: int = 0  # of this rank's report in the latest round that held it
    seen: int = 0  # the latest result that was looked at
    # On rank 0:
    results: int = 0
    serials: dict[int, int] = field(default_factory=dict)
    excess: dict[int, int] = field(default_factory=dict)  # calls of each more than rank 0's, as of the latest round

    def delete(self, store: Any, key: str, call: int) -> bool:
        # Delete the report of a call, unless another rank has; of two that do so at once one is told that it has.
        if self.deleting_tells is None:
            self.deleting_tells = not store.delete_key(f"{key}/nothing")
        if self.deleting_tells:
            return bool(store.delete_key(key))
        # A FileStore says so to both, but it counts them.
        return store.add(f"{key}/{call}", 1) == 1 and bool(store.delete_key(key))

    def ahead(self, excess: dict[int, int]) -> dict[int, int]:
        # Who has called more often than most since the round before; of two ranks, the one that has.
        gained = {rank: calls - self.excess.get(rank, 0) for rank, calls in excess.items()}
        self.excess.update(excess)
        usual = min(gained.values(), key=lambda gain: (-list(gained.values()).count(gain), gain))
        return {rank: gain - usual for rank, gain in sorted(gained.items()) if gain > usual}

    def newest_result(self, store: Any, key: Callable[..., str]) -> tuple[dict[str, Any] | None, bytes]:
        latest = get_if_there(store, key("latest"))
        number = 0 if latest is None else int(latest)
        # The result of a round that this rank was not part of may be replaced by the next one at any moment.
        raw = get_if_there(store, key("result", number)) if number > self.seen else None
        if raw is None:
            return None, b""
        self.seen = number
        end = _LENGTH.size + _LENGTH.unpack_from(raw)[0]
        return json.loads(raw[_LENGTH.size : end]), raw[end:]


@dataclass(slots=True)
class _Round:
    # What a round needs and what has become of it so far; written by another thread while the caller waits.
    rank: int
    world_size: int
    report: bytes
    combine: Callable[[dict[int, bytes]], bytes]
    calls: int
    until: float
    deadline_s: float
    reports: dict[int, bytes] = field(default_factory=dict)
    combined: bytes | None = None
    held: Iterable[int] = ()
    ahead: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reports[self.rank] = self.report


def _answers(
    reports: dict[int, bytes],
    combined: bytes | None,
    world_size: int,
    held: Iterable[int],
    ahead: dict[int, int],
    fault: str | None,
) -> Answers:
    known = {*reports, *held}
    missing = [] if fault else [rank for rank in range(world_size) if rank not in known]
    return Answers(reports, combined, missing, ahead, fault)


def time_to_ask(deadline_s: float) -> float:
    """How much of a deadline may be spent on asking, in seconds.

    A store that answers must not pass for one that does not, because a busy machine runs the thread late that asks.
    """
    return deadline_s - max(_SLACK * deadline_s, min(_SLACK_S, deadline_s / 4))


def pauses(until: float) -> Iterable[float]:
    """Pauses that grow, in seconds, one at least; the last ends at a moment of ``time.monotonic``."""
    pause_s = _POLL_S
    while True:
        left_s = until - time.monotonic()
        yield max(min(pause_s, left_s), 0.0)
        if left_s <= 0:
            return
        pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)


def _collect(store: Any, keys: dict[int, str], found: dict[int, bytes], until: float) -> None:
    """Read keys by rank into ``found`` as they arrive, until all are there or a moment of ``time.monotonic``."""
    waiting = dict(keys)
    # Who of many is there is found out once, at the end; the search takes its time from the waiting.
    until = max(until - _SEARCH_S * len(waiting), (time.monotonic() + until) / 2)
    for pause_s in pauses(until):
        arrived = present_by_chunks(store, waiting) if pause_s > 0 else present(store, waiting)
        if arrived:
            values = get_all(store, {rank: waiting[rank] for rank in arrived})
            found.update(values)
            for rank in values:
                del waiting[rank]
        if not waiting:
            return
        time.sleep(pause_s)
