"""A round among the ranks of a job, over its store: each reports, rank 0 combines, all get the result, by a deadline.

No collective operation is involved: that would hang, or fail, when a rank is dead or late. Keys of a store do neither.
Rank 0 opens a round under a new number. Every rank that waits meanwhile leaves its report with that number, so no
report of an earlier call is in the result, and deletes it when it has the result of that round.

A rank that has called once too often or too rarely is noticed in the next round (``Answers.ahead``), and spoils none.
A rank that was silent in :data:`SILENT_ROUNDS` rounds is listened for, and not waited for, until it is heard again.

A message is data of another process. One that cannot be read costs its rank's place in the round and a sentence.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deep500_timing._distributed.connection import Connection, pauses
from deep500_timing._distributed.launchers import rank_and_world
from deep500_timing._distributed.transport import StoreTransport, find_transport, get_all, get_if_there, key_of, present
from deep500_timing._summary.text import safe_name

DEADLINE_S = 10.0
"""How long a report waits for ranks that do not answer, in seconds. Every such deadline has this default."""
SILENT_ROUNDS = 2
"""After this many rounds without a report, a rank is no longer waited for."""
LIMIT_BYTES = 16 << 20
"""The largest report of a rank when unpacked: a few kilobytes may else unpack to more than the memory."""
_MOST_BYTES = 1 << 30
"""The largest result of all ranks."""
_LISTEN_S = 0.25
"""How long a silent rank is listened for: a rank that waits looks for a round ten times a second."""
_DONE = " is done"
"""What follows the number of the newest round once its result is there."""
_GATHER_SHARE = 0.7
"""Share of the deadline in which rank 0 takes reports, so that its result reaches the others within the deadline."""
_SLACK, _SLACK_S = 0.05, 0.5
"""Share of a deadline, and seconds, of which the longer is kept for ending in time; of a short deadline a quarter."""


@dataclass(slots=True)
class Answers:
    """The outcome of one round."""

    result: Any
    """What was made of the reports of all ranks that answered; of this rank's alone if rank 0's answer did not come."""
    missing: list[int] = field(default_factory=list)
    """Ranks whose report is not in the result: dead, stuck, not asked for one, or not understood. Empty if there is a
    fault, since then no rank could be asked."""
    ahead: dict[int, int] = field(default_factory=dict)
    """Ranks that have called more often than most others since the round before, and how many times more; below 0 for
    ranks that have called less often."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Ranks with a message that this rank could not read, and the reason."""
    fault: str | None = None
    """The error of the store, None if there was none."""


class Exchange:
    """Rounds among the ranks of a job. Exchanges of one name over one store are one.

    Reports and results are plain data for JSON. The functions below may raise anything where the data are not as
    they should be: they come from another process.

    Args:
        name: Tells apart exchanges of one job; the same on every rank.
        read: Makes of a rank's report what ``combine`` uses of it.
        combine: Makes the result of the reports that were read, by rank, on rank 0; plain data again.
        opened: Makes of such a result what :attr:`Answers.result` is, on every rank.
        transport: Over the store of the ranks; that of the job's default process group, as it is at each call, if None.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[Any], Any],
        combine: Callable[[dict[int, Any]], Any],
        opened: Callable[[Any], Any],
        *,
        transport: StoreTransport | None = None,
    ) -> None:
        self._name, self._read, self._combine, self._opened = name, read, combine, opened
        self._given = transport
        if transport is not None and transport.world_size > 1:
            transport.connection.connect()

    def round(self, report: Any, deadline_s: float = DEADLINE_S) -> Answers:
        """Leave a report and wait for the result that rank 0 makes of all of them. Every rank calls it.

        It returns within the deadline even if the store is gone and its requests never end.

        Args:
            report: Of this rank: plain data for JSON.
            deadline_s: Seconds that it may take.
        """
        transport = find_transport() if self._given is None else self._given
        if transport is None or transport.world_size == 1:
            # The other ranks of a job that nothing connects are missing.
            rank, world_size = rank_and_world() if transport is None else (transport.rank, 1)
            return Answers(self._alone(rank, report), [other for other in range(world_size) if other != rank])
        past = transport.pasts.setdefault(self._name, _Past(self._name))
        past.calls += 1
        call = _Call(transport.rank, transport.world_size, report, past.calls, deadline_s)

        def work(store: Any) -> None:
            (self._lead if transport.rank == 0 else self._follow)(store, past, call)

        fault = transport.connection.run(work, deadline_s)
        call.given_up = True
        if call.held is None:
            result, held = self._alone(call.rank, report), {call.rank}
        else:
            # A result that has arrived counts, even if a request failed afterwards.
            result, held, fault = call.result, call.held, None
        missing = [] if fault else [rank for rank in range(call.world_size) if rank not in held]
        return Answers(result, missing, call.ahead, dict(call.unreadable), fault)

    def _alone(self, rank: int, report: Any) -> Any:
        # As if it had been sent: JSON knows neither tuples nor keys that are numbers.
        own = self._read(json.loads(json.dumps(report)))
        return self._opened(json.loads(json.dumps(self._combine({rank: own}))))

    def _lead(self, store: Any, past: _Past, call: _Call) -> None:
        # Open a round, take the reports of the ranks that wait, and leave the result.
        reports = {call.rank: self._read(json.loads(json.dumps(call.report)))}
        if past.newest:
            store.delete_key(past.key("result", past.newest))
        number = past.newest = str(store.add(past.key("rounds"), 1))
        if call.given_up:
            return
        store.set(past.key("open"), number)
        names = {rank: past.key("report", rank) for rank in range(call.world_size) if rank != call.rank}
        waiting = {rank for rank in names if past.silent.get(rank, 0) < SILENT_ROUNDS}
        listens_until_s = time.monotonic() + (_LISTEN_S if len(waiting) < len(names) else 0.0)
        calls: dict[int, int] = {}
        for pause_s in pauses(call.begun_s + _GATHER_SHARE * (call.until_s - call.begun_s)):
            there = present(store, {rank: name for rank, name in names.items() if rank not in calls})
            for rank, raw in get_all(store, {rank: names[rank] for rank in there}).items():
                if raw == past.seen.get(rank):
                    continue
                past.seen[rank] = raw
                try:
                    said = unpack(raw)
                    if said["round"] != number:
                        waiting.add(rank)  # It waited when the round before had ended.
                        continue
                    report, of_rank = self._read(said["report"]), said["call"]
                    if type(of_rank) is not int:
                        raise ValueError("it has no number of a call")
                except Exception as error:
                    call.note_unreadable(rank, error)
                    waiting.discard(rank)
                    continue
                calls[rank], reports[rank] = of_rank, report
            if call.given_up:
                return
            if waiting <= calls.keys() and time.monotonic() >= listens_until_s:
                break
            time.sleep(pause_s)
        store.set(past.key("open"), "")
        for rank in names:
            past.silent[rank] = 0 if rank in calls else past.silent.get(rank, 0) + 1
        call.ahead = past.changed({0: 0, **{rank: of_rank - call.number for rank, of_rank in sorted(calls.items())}})
        combined = self._combine({rank: reports[rank] for rank in sorted(reports)})
        result = pack({"calls": calls, "ahead": call.ahead, "result": combined})
        call.result = self._opened(unpack(result, call.world_size)["result"])
        call.held = {0, *calls}
        if call.given_up:
            return
        store.set(past.key("result", number), result)
        store.set(past.key("open"), number + _DONE)
        # The store may live in this process, which may end after this.
        left = {rank: names[rank] for rank in calls}
        for pause_s in pauses(call.until_s):
            left = {rank: left[rank] for rank in present(store, left)}
            if not left or call.given_up:
                return
            time.sleep(pause_s)

    def _follow(self, store: Any, past: _Past, call: _Call) -> None:
        # Report in each round that is open, until one has a result of this report.
        own, number, has_reported = past.key("report", call.rank), "", False
        for pause_s in pauses(call.until_s):
            found = (get_if_there(store, past.key("open")) or b"").decode(errors="replace")
            raw = get_if_there(store, past.key("result", number)) if number and found == number + _DONE else None
            if call.given_up:
                return
            if found.isdecimal() and found != number:
                number, has_reported = found, True
                store.set(own, pack({"round": number, "call": call.number, "report": call.report}))
            if raw is not None:
                number = ""
                try:
                    made = unpack(raw, call.world_size)
                    if made["calls"].get(str(call.rank)) == call.number:
                        ahead = {int(rank): int(calls) for rank, calls in made["ahead"].items()}
                        call.result, held = self._opened(made["result"]), {0, *map(int, made["calls"])}
                        call.ahead, call.held = ahead, held
                        break
                except Exception as error:
                    call.note_unreadable(0, error)
            time.sleep(pause_s)
        if has_reported and not call.given_up:
            store.delete_key(own)


@dataclass(slots=True)
class _Call:
    # One call, and its outcome so far: written by another thread while the caller waits.
    rank: int
    world_size: int
    report: Any
    number: int
    deadline_s: float
    begun_s: float = 0.0
    until_s: float = 0.0
    given_up: bool = False
    result: Any = None
    held: set[int] | None = None
    """Ranks whose reports are in the result; None as long as there is none."""
    ahead: dict[int, int] = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begun_s = time.monotonic()
        self.until_s = self.begun_s + time_to_ask(self.deadline_s)

    def note_unreadable(self, rank: int, error: Exception) -> None:
        self.unreadable[rank] = safe_name(f"{type(error).__name__}: {error}")[:200]


@dataclass(slots=True)
class _Past:
    # The history of a rank in one exchange over one store.
    name: str
    calls: int = 0
    newest: str = ""
    """The number of the newest round, on rank 0."""
    silent: dict[int, int] = field(default_factory=dict)
    excess: dict[int, int] = field(default_factory=dict)
    """Calls of each rank more than this one's, as of the latest round."""
    seen: dict[int, bytes] = field(default_factory=dict)
    """The newest report of each rank that was looked at."""

    def key(self, *what: object) -> str:
        return key_of(self.name, *what)

    def changed(self, excess: dict[int, int]) -> dict[int, int]:
        """Ranks with more or fewer new calls than most ranks."""
        gained = {rank: calls - self.excess.get(rank, 0) for rank, calls in excess.items()}
        self.excess.update(excess)
        counts = list(gained.values())
        usual = min(counts, key=lambda gain: (-counts.count(gain), gain))
        return {rank: gain - usual for rank, gain in sorted(gained.items()) if gain != usual}


def store_connection() -> Connection | None:
    """The connection to the store of the job's default process group; None where there is none."""
    transport = find_transport()
    return None if transport is None else transport.connection


def pack(plain: Any) -> bytes:
    return zlib.compress(json.dumps(plain, separators=(",", ":")).encode())


def unpack(payload: bytes, ranks: int = 1) -> Any:
    """Plain data as :func:`pack` packed them, of so many ranks; an exception of any kind if they are no such data."""
    limit = min(LIMIT_BYTES * ranks, _MOST_BYTES)
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(payload, limit)
    if not unpacker.eof:
        raise ValueError(f"it is cut short, or unpacks to more than {limit >> 20} MB")
    return json.loads(raw)


def time_to_ask(deadline_s: float) -> float:
    """How much of a deadline may be spent on asking, in seconds.

    The rest is for a busy machine that runs the asking thread late, so that its store does not pass for a dead one.
    """
    return deadline_s - max(_SLACK * deadline_s, min(_SLACK_S, deadline_s / 4))
