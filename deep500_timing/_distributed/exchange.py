"""Reports from every rank of a job in bounded time, over a transport. No collective operation is involved.

A collective would hang, or fail, when a rank is dead, late or timed other regions. Messages that are sent and taken do
neither. There are two ways to take part:

- :meth:`Exchange.post` leaves a report and goes on; the rank that wants the reports calls :meth:`Exchange.gather`. Each
  rank's reports form a queue, since a rank may post several before one is read. Each report carries the number of its
  call and its time. A report that was made for an earlier round is passed over. With ``step=`` reports are matched by
  step.
- :meth:`Exchange.round` leaves a report and waits for what rank 0 makes of all of them. Rank 0 asks every rank that
  waits to confirm its report for this very round, so no result mixes two rounds: a rank confirms while its caller
  waits, and accepts a result only if that holds the report of this call.

A rank that has called once too often or too rarely is noticed in the next round (``Answers.ahead``), and spoils none.
A rank that was silent in :data:`SILENT_ROUNDS` rounds is looked at, and not waited for, until it is heard again.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.connection import Connection, pauses
from deep500_timing._distributed.launchers import rank_and_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deep500_timing._distributed.transport import Transport

DEADLINE_S = 10.0
"""How long a report waits for ranks that do not answer, in seconds. Every such deadline has this default."""
SILENT_ROUNDS = 2
"""After this many rounds without a report, a rank is no longer waited for."""
ANY = -1
"""The mailbox of reports for the ranks that gather, whichever they are. Only a store has it."""
_KEPT = 4
"""Reports of steps that a rank leaves for the rank that gathers; older ones are withdrawn."""
_AGAIN_S = 0.25
"""After how long a rank that waits in a round says so again; twice as long after each further time."""
_GATHER_SHARE = 0.7
"""Share of the deadline in which rank 0 takes reports, so that its result reaches the others within the deadline."""
_SLACK, _SLACK_S = 0.05, 0.5
"""Share of a deadline, and seconds, of which the longer is kept for ending in time; of a short deadline a quarter."""
_PATIENCE_SHARE, _PATIENCE_S = 0.1, 1.0
"""How long a newer report is waited for where a rank's newest one was made long before: a share of the time since the
round before, at most some seconds."""
_QUEUE = 16
"""Reports of a rank that wait to be read; older ones are dropped."""
_QUEUE_S = 10.0
"""A report is sent again with later ones for so long. Ranks that report more rarely send each report once."""
_TOGETHER_S = 0.5
"""Reports made within this time are used in their order: the jitter of ranks that report in a tight loop."""


@dataclass(slots=True)
class Answers:
    """The outcome of one round."""

    reports: dict[int, bytes]
    """The reports that this rank has itself seen, its own included, by rank."""
    combined: bytes | None = None
    """The result that one rank made of the reports of a round; None if it did not come, or was not asked for."""
    missing: list[int] = field(default_factory=list)
    """Ranks that did not answer within the deadline: dead, stuck, or not asked for a report. Empty if there is a
    fault, since then no rank could be asked."""
    ahead: dict[int, int] = field(default_factory=dict)
    """Ranks that have called more often than most others since the round before, and how many times more; below 0 for
    ranks that have called less often. A rank that posts does not wait, so it may be ahead for a while."""
    fault: str | None = None

    def plain(self) -> dict[int, Any]:
        """The reports in JSON, by rank: as :func:`join_plain` joined them, else those that this rank has seen."""
        if self.combined is None:
            return {rank: json.loads(report) for rank, report in sorted(self.reports.items())}
        joined: dict[str, Any] = json.loads(self.combined)
        return {rank: joined[str(rank)] for rank in sorted(map(int, joined))}


class Exchange:
    """Hands reports among the ranks of a job. Exchanges of one name over one transport are one.

    Args:
        name: Tells apart exchanges of one job; the same on every rank.
        transport: Connects the ranks; the store of the job's default process group, as it is at each call, if None.
    """

    def __init__(self, name: str, *, transport: Transport | None = None) -> None:
        self._name = name
        self._given = transport
        if transport is not None and transport.world_size > 1:
            line_of(transport).connection.connect()

    def __reduce__(self) -> Any:
        """A copy takes part in the job that it is in, over its default process group."""
        return Exchange, (self._name,)

    def _find(self) -> Transport | None:
        if self._given is not None:
            return self._given
        from deep500_timing._distributed.transport import job_transport

        return job_transport()

    # --- posted reports -----------------------------------------------------------------------------------------------

    def post(
        self,
        report: bytes | Callable[[], bytes],
        deadline_s: float = DEADLINE_S,
        *,
        to: int = ANY,
        step: int | None = None,
    ) -> None:
        """Leave this rank's next report for the rank that gathers. It never waits; a fault is a warning.

        Args:
            report: The report, or a function that makes it on another thread.
            deadline_s: Seconds after which it is given up.
            to: The rank that gathers; any of them if not given.
            step: The step of the report. Without it, reports are used in their order.
        """
        transport = self._find()
        if transport is None or transport.world_size == 1:
            return
        line = line_of(transport)
        past = line.past(f"{self._name}/posted")
        past.calls += 1
        call, unix = past.calls, time.time()

        def send(channel: Any) -> None:
            made = Report(call, unix, report if isinstance(report, bytes) else report())
            topic = self._topic(channel, past, "report", step)
            if step is None:
                past.recent.append(made)
                while past.recent[0].unix < unix - _QUEUE_S:
                    past.recent.popleft()
                channel.send(topic, to, pack_reports(past.recent))
                return
            channel.send(topic, to, pack_reports([made]))
            past.left.append((topic, to))
            while len(past.left) > _KEPT:
                channel.withdraw(*past.left.popleft())

        def failed(fault: str) -> None:
            warn_once(
                f"This rank's times are not in the report of all ranks: {fault}. The training goes on.",
                key=f"post {self._name}",
            )

        line.connection.post(send, deadline_s, failed)

    def gather(
        self,
        own: bytes,
        deadline_s: float = DEADLINE_S,
        *,
        to: int = ANY,
        step: int | None = None,
        senders: Iterable[int] | None = None,
    ) -> Answers:
        """A report of each other rank, of those that it has posted since the round before.

        Args:
            own: This rank's report.
            deadline_s: Seconds that it may take.
            to: As for :meth:`post`, which this rank has called as well if it is any.
            step: As for :meth:`post`.
            senders: The ranks that report; all if None.
        """
        transport = self._find()
        if transport is None or transport.world_size == 1:
            return _alone(transport, own)
        line = line_of(transport)
        past = line.past(f"{self._name}/posted")
        past.calls += to != ANY
        asked = set(range(transport.world_size) if senders is None else senders)
        call = _Call(transport.rank, own, past.calls, deadline_s, frozenset(asked - {transport.rank}))

        def collect(channel: Any) -> None:
            topic = self._topic(channel, past, "report", step)
            look = channel.read if to == ANY else channel.take
            _collect(lambda ranks: look(topic, to, ranks), past, call, step)

        fault = line.connection.run(collect, deadline_s)
        call.given_up = True
        return _answers(call, sorted(asked), fault)

    def flush(self, timeout_s: float) -> bool:
        """Wait until this rank's posted reports are sent, and say whether they are."""
        transport = self._find()
        return transport is None or line_of(transport).connection.flush(timeout_s)

    # --- rounds -------------------------------------------------------------------------------------------------------

    def round(self, report: bytes, combine: Callable[[dict[int, bytes]], bytes] | None, deadline_s: float) -> Answers:
        """Leave a report and wait for the result that rank 0 makes of all of them. Every rank calls it.

        It returns within the deadline even if the store is gone and its requests never end, and then without a result.

        Args:
            report: Of this rank.
            combine: Called on rank 0 with the reports that came in time; None joins reports in JSON.
            deadline_s: Seconds that it may take.
        """
        combine = combine or join_plain
        transport = self._find()
        if transport is None or transport.world_size == 1:
            return _alone(transport, report, combine)
        line = line_of(transport)
        past = line.past(f"{self._name}/rounds")
        past.calls += 1
        others = frozenset(range(transport.world_size)) - {transport.rank}
        call = _Call(transport.rank, report, past.calls, deadline_s, others)

        def work(channel: Any) -> None:
            if transport.rank == 0:
                self._lead(channel, past, call, combine)
            else:
                self._follow(channel, past, call)

        fault = line.connection.run(work, deadline_s)
        call.given_up = True
        return _answers(call, range(transport.world_size), fault)

    def _lead(self, channel: Any, past: _Past, call: _Call, combine: Callable[[dict[int, bytes]], bytes]) -> None:
        # Take the reports of the ranks that wait now, and give them the result.
        inbox, outbox = (self._topic(channel, past, what) for what in ("to-leader", "to-follower"))
        number, others = call.number, sorted(call.others)
        waiting = {rank for rank in others if past.silent.get(rank, 0) < SILENT_ROUNDS}
        calls: dict[int, int] = {}
        for pause_s in pauses(call.begun_s + _GATHER_SHARE * (call.until_s - call.begun_s)):
            # An earlier call that had given up may have taken messages that it could not use.
            past.unread.update(channel.take(inbox, 0, others))
            if call.given_up:
                return
            for rank, raw in past.unread.items():
                head, payload = unframe(raw)
                if head.get("confirms") == number:
                    calls[rank] = int(head["call"])
                    call.reports[rank] = past.payloads[rank]
                elif "waits" in head:
                    past.payloads[rank] = payload
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
        combined = combine({rank: call.reports[rank] for rank in sorted(call.reports)})
        call.held = {0, *calls}
        call.combined = combined
        result = frame({"calls": calls, "round": number, "ahead": call.ahead}, combined)
        for rank in calls:
            if call.given_up:
                return
            channel.send(outbox, rank, result)
        past.payloads.clear()
        # The store may live in this process, which may end after this.
        left = set(calls)
        for pause_s in pauses(call.until_s):
            for rank, raw in channel.take(inbox, 0, sorted(left)).items():
                head, _ = unframe(raw)
                if head.get("confirms") == number and not call.given_up:
                    channel.send(outbox, rank, result)  # It was overwritten while it was taken.
                else:
                    left.discard(rank)
                    past.unread |= {rank: raw} if "waits" in head else {}
            if not left or call.given_up:
                return
            time.sleep(pause_s)

    def _follow(self, channel: Any, past: _Past, call: _Call) -> None:
        inbox, outbox = (self._topic(channel, past, what) for what in ("to-follower", "to-leader"))
        here, number = call.rank, call.number
        # Sent repeatedly: a message may be overwritten while another one is taken.
        message = frame({"call": number, "waits": True}, call.report)
        tell_s, again_s = call.begun_s, _AGAIN_S
        for pause_s in pauses(call.until_s):
            if call.given_up:
                return
            if time.monotonic() >= tell_s:
                channel.send(outbox, 0, message)
                tell_s, again_s = time.monotonic() + again_s, 2 * again_s
            for raw in channel.take(inbox, here, [0]).values():
                head, payload = unframe(raw)
                if call.given_up:
                    return
                if "ask" in head and head["call"] == number:
                    message = frame({"call": number, "confirms": head["ask"]})
                    channel.send(outbox, 0, message)
                elif head.get("calls", {}).get(str(here)) == number:
                    call.held = {0, *map(int, head["calls"])}
                    call.ahead = {int(rank): calls for rank, calls in head["ahead"].items()}
                    call.combined = payload
                    channel.send(outbox, 0, frame({"call": number, "has": head["round"]}))
                    return
            time.sleep(pause_s)
        if not call.given_up:
            channel.withdraw(outbox, 0)

    @staticmethod
    def _topic(channel: Any, past: _Past, what: str, step: int | None = None) -> str:
        # The store may hold messages of an earlier process group, so that each beginning has its own names. All ranks
        # have begun equally often.
        if past.beginning is None:
            begin = getattr(channel, "begin", None)
            past.beginning = 0 if begin is None else begin(past.name)
        end = "" if step is None else f"/step-{step}"
        return f"{past.name}/{past.beginning}/{what}{end}"


@dataclass(slots=True)
class _Call:
    # One call, and its outcome so far: written by another thread while the caller waits.
    rank: int
    report: bytes
    number: int
    deadline_s: float
    others: frozenset[int]
    begun_s: float = 0.0
    until_s: float = 0.0
    given_up: bool = False
    reports: dict[int, bytes] = field(default_factory=dict)
    combined: bytes | None = None
    held: Iterable[int] = ()
    ahead: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reports[self.rank] = self.report
        self.begun_s = time.monotonic()
        self.until_s = self.begun_s + time_to_ask(self.deadline_s)


@dataclass(slots=True)
class _Past:
    # The history of a rank in one exchange over one transport, by posted reports or by rounds.
    name: str
    calls: int = 0
    beginning: int | None = None
    silent: dict[int, int] = field(default_factory=dict)
    excess: dict[int, int] = field(default_factory=dict)
    """Calls of each rank more than this one's, as of the latest round."""
    # Of rounds:
    unread: dict[int, bytes] = field(default_factory=dict)
    """Messages that were taken and not used yet."""
    payloads: dict[int, bytes] = field(default_factory=dict)
    """The report of each rank that has not confirmed it yet."""
    # Of posted reports:
    recent: deque[Report] = field(default_factory=lambda: deque(maxlen=_QUEUE))
    """This rank's own."""
    left: deque[tuple[str, int]] = field(default_factory=deque)
    """Mailboxes of steps in which this rank's report may still be."""
    queues: dict[int, deque[Report]] = field(default_factory=dict)
    """Reports of each rank that have arrived and were not used."""
    newest: dict[int, int] = field(default_factory=dict)
    """The latest call of each rank that has arrived."""
    early: set[int] = field(default_factory=set)
    """Ranks that always post long before this one gathers."""
    gathered_s: float | None = None
    """When the latest call of gather began, in Unix time."""

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
    from deep500_timing._distributed.transport import job_transport

    transport = job_transport()
    return None if transport is None else line_of(transport).connection


def _collect(look: Callable[[list[int]], dict[int, bytes]], past: _Past, call: _Call, step: int | None) -> None:
    now_s, before_s = time.time(), past.gathered_s
    past.gathered_s = now_s
    interval_s = 0.0 if before_s is None or step is not None else now_s - before_s
    patient_until_s = call.begun_s + min(_PATIENCE_SHARE * interval_s, _PATIENCE_S)
    expected = {rank for rank in call.others if past.silent.get(rank, 0) < SILENT_ROUNDS}
    excess: dict[int, int] = {}

    def age(report: Report) -> int:
        # 0: made for this round. 1: perhaps for this round, by a rank that posts early. 2: for an earlier round, by a
        # call too many.
        if before_s is None or report.unix >= now_s - max(interval_s / 2, _TOGETHER_S):
            return 0
        return 1 if report.unix >= before_s - _TOGETHER_S else 2

    for pause_s in pauses(call.until_s):
        left = sorted(call.others - excess.keys())
        arrived = {rank: unpack_reports(raw) for rank, raw in look(left).items()}
        if call.given_up:
            return
        patient = time.monotonic() < patient_until_s
        for rank, reports in arrived.items():
            if step is not None:
                call.reports[rank], excess[rank] = reports[-1].payload, 0
                continue
            queue = past.queues.setdefault(rank, deque(maxlen=_QUEUE))
            queue.extend(report for report in reports if report.call > past.newest.get(rank, 0))
            past.newest[rank] = max(reports[-1].call, past.newest.get(rank, 0))
        for rank in left if step is None else ():
            queue = past.queues.get(rank, deque())
            youngest = min(map(age, queue), default=2)
            # Made long before this round, perhaps by a call too many after the round before. A newer one may follow.
            if not queue or (youngest > 0 and patient and rank not in past.early):
                continue
            if youngest > 0:
                past.early.add(rank)
            while age(queue[0]) > youngest:
                queue.popleft()
            call.reports[rank] = queue.popleft().payload
            excess[rank] = past.newest[rank] - call.number
        if expected <= excess.keys():
            break
        time.sleep(pause_s)
    for rank in call.others:
        past.silent[rank] = 0 if rank in excess else past.silent.get(rank, 0) + 1
    if step is None:
        call.ahead = past.changed({call.rank: 0, **excess})


def join_plain(reports: dict[int, bytes]) -> bytes:
    """The reports of ranks in JSON as one, see :meth:`Answers.plain`."""
    return json.dumps({rank: json.loads(report) for rank, report in reports.items()}).encode()


class Report(NamedTuple):
    """A posted report."""

    call: int
    """The number of the call that posted it, from 1."""
    unix: float
    """When it was posted, in seconds since 1970."""
    payload: bytes


def pack_reports(reports: Iterable[Report]) -> bytes:
    reports = list(reports)
    head = {"reports": [(report.call, report.unix, len(report.payload)) for report in reports]}
    return frame(head, b"".join(report.payload for report in reports))


def unpack_reports(raw: bytes) -> list[Report]:
    head, payloads = unframe(raw)
    found, begin = [], 0
    for call, unix, size in head["reports"]:
        found.append(Report(call, unix, payloads[begin : begin + size]))
        begin += size
    return found


def frame(head: dict[str, Any], payload: bytes = b"") -> bytes:
    """A message: a line of JSON, and what follows it."""
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + payload


def unframe(raw: bytes) -> tuple[dict[str, Any], bytes]:
    line, _, payload = raw.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    return head, payload


def _alone(
    transport: Transport | None, own: bytes, combine: Callable[[dict[int, bytes]], bytes] | None = None
) -> Answers:
    # The other ranks of a job that nothing connects are missing.
    rank, world_size = rank_and_world() if transport is None else (transport.rank, 1)
    missing = [other for other in range(world_size) if other != rank]
    return Answers({rank: own}, None if combine is None else combine({rank: own}), missing)


def _answers(call: _Call, asked: Iterable[int], fault: str | None) -> Answers:
    combined, known = call.combined, {*call.reports, *call.held}
    # A result that has arrived counts, even if a request failed afterwards.
    fault = fault if combined is None else None
    missing = [] if fault else [rank for rank in asked if rank not in known]
    return Answers(dict(call.reports), combined, missing, call.ahead, fault)


def time_to_ask(deadline_s: float) -> float:
    """How much of a deadline may be spent on asking, in seconds.

    The rest is for a busy machine that runs the asking thread late, so that its store does not pass for a dead one.
    """
    return deadline_s - max(_SLACK * deadline_s, min(_SLACK_S, deadline_s / 4))
