"""A round among the ranks of a job, over its store: each reports, rank 0 combines, all get the result, by a deadline.

No collective operation is involved: that would hang, or fail, when a rank is dead or late. Messages that are sent and
taken do neither. Rank 0 asks every rank that waits to confirm its report for this very round, so no result mixes two
rounds: a rank confirms while its caller waits, and accepts a result only if that holds the report of this call.

A rank that has called once too often or too rarely is noticed in the next round (``Answers.ahead``), and spoils none.
A rank that was silent in :data:`SILENT_ROUNDS` rounds is looked at, and not waited for, until it is heard again.

A message is data of another process. One that cannot be read costs its rank's place in the round and a sentence.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deep500_timing._distributed.connection import Connection, pauses
from deep500_timing._distributed.launchers import rank_and_world
from deep500_timing._distributed.transport import Transport, find_transport
from deep500_timing._summary.text import safe_name

DEADLINE_S = 10.0
"""How long a report waits for ranks that do not answer, in seconds. Every such deadline has this default."""
SILENT_ROUNDS = 2
"""After this many rounds without a report, a rank is no longer waited for."""
LIMIT_BYTES = 16 << 20
"""The largest report of a rank when unpacked: a few kilobytes may else unpack to more than the memory."""
_MOST_BYTES = 1 << 30
"""The largest result of all ranks."""
_HEAD_BYTES = 1 << 20
"""The longest first line of a message: it numbers the calls of all ranks."""
_AGAIN_S = 0.25
"""After how long a rank that waits in a round says so again; twice as long after each further time."""
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
    """Rounds among the ranks of a job. Exchanges of one name over one transport are one.

    Reports and results are plain data for JSON. The functions below may raise anything where the data are not as
    they should be: they come from another process.

    Args:
        name: Tells apart exchanges of one job; the same on every rank.
        read: Makes of a rank's report what ``combine`` uses of it.
        combine: Makes the result of the reports that were read, by rank, on rank 0; plain data again.
        opened: Makes of such a result what :attr:`Answers.result` is, on every rank.
        transport: Connects the ranks; the store of the job's default process group, as it is at each call, if None.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[Any], Any],
        combine: Callable[[dict[int, Any]], Any],
        opened: Callable[[Any], Any],
        *,
        transport: Transport | None = None,
    ) -> None:
        self._name, self._read, self._combine, self._opened = name, read, combine, opened
        self._given = transport
        if transport is not None and transport.world_size > 1:
            line_of(transport).connection.connect()

    def __reduce__(self) -> Any:
        """A copy takes part in the job that it is in, over its default process group."""
        return Exchange, (self._name, self._read, self._combine, self._opened)

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
        line = line_of(transport)
        past = line.past(self._name)
        past.calls += 1
        call = _Call(transport.rank, transport.world_size, report, past.calls, deadline_s)

        def work(channel: Any) -> None:
            if transport.rank == 0:
                self._lead(channel, past, call)
            else:
                self._follow(channel, past, call)

        fault = line.connection.run(work, deadline_s)
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

    def _lead(self, channel: Any, past: _Past, call: _Call) -> None:
        # Take the reports of the ranks that wait now, and give them the result.
        inbox, outbox = (self._topic(channel, past, what) for what in ("to-leader", "to-follower"))
        number, others = call.number, [rank for rank in range(call.world_size) if rank != call.rank]
        waiting = {rank for rank in others if past.silent.get(rank, 0) < SILENT_ROUNDS}
        reports = {call.rank: self._read(json.loads(json.dumps(call.report)))}
        calls: dict[int, int] = {}
        for pause_s in pauses(call.begun_s + _GATHER_SHARE * (call.until_s - call.begun_s)):
            # An earlier call that had given up may have taken messages that it could not use.
            past.unread.update(channel.take(inbox, 0, others))
            if call.given_up:
                return
            for rank, raw in past.unread.items():
                try:
                    head, payload = unframe(raw)
                    if head.get("confirms") == number:
                        calls[rank], reports[rank] = head["call"], past.reports[rank]
                        continue
                    if "waits" not in head:
                        continue
                    past.reports[rank] = self._read(unpack(payload))
                except Exception as error:
                    call.note_unreadable(rank, error)
                    waiting.discard(rank)
                    continue
                waiting.add(rank)
                channel.send(outbox, rank, frame({"ask": number, "call": head["call"]}))
                if call.given_up:
                    return
            past.unread.clear()
            if waiting <= calls.keys():
                break
            time.sleep(pause_s)
        for rank in others:
            past.silent[rank] = 0 if rank in calls else past.silent.get(rank, 0) + 1
        call.ahead = past.changed({0: 0, **{rank: n - number for rank, n in sorted(calls.items())}})
        combined = pack(self._combine({rank: reports[rank] for rank in sorted(reports)}))
        call.result = self._opened(unpack(combined, call.world_size))
        call.held = {0, *calls}
        result = frame({"call": number, "calls": calls, "ahead": call.ahead}, combined)
        for rank in calls:
            if call.given_up:
                return
            channel.send(outbox, rank, result)
        past.reports.clear()
        # The store may live in this process, which may end after this.
        left = set(calls)
        for pause_s in pauses(call.until_s):
            for rank, raw in channel.take(inbox, 0, sorted(left)).items():
                with contextlib.suppress(Exception):  # It is no message.
                    head, _ = unframe(raw)
                    if head.get("confirms") == number and not call.given_up:
                        channel.send(outbox, rank, result)  # It was overwritten while it was taken.
                        continue
                    past.unread |= {rank: raw} if "waits" in head else {}
                left.discard(rank)
            if not left or call.given_up:
                return
            time.sleep(pause_s)

    def _follow(self, channel: Any, past: _Past, call: _Call) -> None:
        inbox, outbox = (self._topic(channel, past, what) for what in ("to-follower", "to-leader"))
        here, number = call.rank, call.number
        # Sent repeatedly: a message may be overwritten while another one is taken.
        message = frame({"call": number, "waits": True}, pack(call.report))
        tell_s, again_s = call.begun_s, _AGAIN_S
        for pause_s in pauses(call.until_s):
            if call.given_up:
                return
            if time.monotonic() >= tell_s:
                channel.send(outbox, 0, message)
                tell_s, again_s = time.monotonic() + again_s, 2 * again_s
            for raw in channel.take(inbox, here, [0]).values():
                if call.given_up:
                    return
                try:
                    head, payload = unframe(raw)
                    answered = "ask" not in head and head["calls"].get(str(here)) == number
                    if answered:
                        ahead = {int(rank): int(calls) for rank, calls in head["ahead"].items()}
                        held = {0, *map(int, head["calls"])}
                        call.result = self._opened(unpack(payload, call.world_size))
                except Exception as error:
                    call.note_unreadable(0, error)
                    continue
                if answered:
                    call.held, call.ahead = held, ahead
                    channel.send(outbox, 0, frame({"call": number, "has": head["call"]}))
                    return
                if "ask" in head and head["call"] == number:
                    message = frame({"call": number, "confirms": head["ask"]})
                    channel.send(outbox, 0, message)
            time.sleep(pause_s)
        if not call.given_up:
            channel.withdraw(outbox, 0)

    @staticmethod
    def _topic(channel: Any, past: _Past, what: str) -> str:
        # The store may hold messages of an earlier process group, so that each beginning has its own names. All ranks
        # have begun equally often.
        if past.beginning is None:
            begin = getattr(channel, "begin", None)
            past.beginning = 0 if begin is None else begin(past.name)
        return f"{past.name}/{past.beginning}/{what}"


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
    # The history of a rank in one exchange over one transport.
    name: str
    calls: int = 0
    beginning: int | None = None
    silent: dict[int, int] = field(default_factory=dict)
    excess: dict[int, int] = field(default_factory=dict)
    """Calls of each rank more than this one's, as of the latest round."""
    unread: dict[int, bytes] = field(default_factory=dict)
    """Messages that were taken and not used yet."""
    reports: dict[int, Any] = field(default_factory=dict)
    """The report of each rank that has not confirmed it yet."""

    def changed(self, excess: dict[int, int]) -> dict[int, int]:
        """Ranks with more or fewer new calls than most ranks."""
        gained = {rank: calls - self.excess.get(rank, 0) for rank, calls in excess.items()}
        self.excess.update(excess)
        counts = list(gained.values())
        usual = min(counts, key=lambda gain: (-counts.count(gain), gain))
        return {rank: gain - usual for rank, gain in sorted(gained.items()) if gain != usual}


class _Line:
    # The state of one transport.
    def __init__(self, transport: Transport) -> None:
        self.connection = Connection(transport)
        self._past: dict[str, _Past] = {}

    def past(self, name: str) -> _Past:
        return self._past.setdefault(name, _Past(name))


_lines: weakref.WeakKeyDictionary[Transport, _Line] = weakref.WeakKeyDictionary()


def line_of(transport: Transport) -> _Line:
    line = _lines.get(transport)
    if line is None:
        line = _lines.setdefault(transport, _Line(transport))
    return line


def store_connection() -> Connection | None:
    """The connection over the store of the job's default process group, as a transport; None where there is none."""
    transport = find_transport()
    return None if transport is None else line_of(transport).connection


def frame(head: dict[str, Any], payload: bytes = b"") -> bytes:
    """A message: a line of JSON, and what follows it."""
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + payload


def unframe(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The inverse of :func:`frame`; an exception of any kind if it is no such message."""
    line, _, payload = raw.partition(b"\n")
    if len(line) > _HEAD_BYTES:
        raise ValueError("its first line is too long")
    head = json.loads(line)
    if not isinstance(head, dict) or type(head.get("call")) is not int:
        raise ValueError("it has no number of a call")
    return head, payload


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
