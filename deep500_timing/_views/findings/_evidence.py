"""The data that rules read: a tree and, of a run, its steps, samples, collectives and ranks. Each is read once."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deep500_timing._base.arrays import Floats
from deep500_timing._base.names import BATCH, COMM, CPU, IO
from deep500_timing._base.sql import array_of, codes_of, literal, where
from deep500_timing._distributed.stragglers import NoStepsError, find_stragglers, steps_of_run
from deep500_timing._summary.nesting import distinct, path_text, split_path
from deep500_timing._summary.text import safe_name
from deep500_timing._summary.tree import Node, Tree
from deep500_timing._views.about import About, about_run
from deep500_timing.runs._processor import ClockParts, Machine, ThreadTimes, machine_of
from deep500_timing.runs._stacks import HotPlace, parts_of, places_of, said_of, samples_between, samples_in
from deep500_timing.runs._tree import tree_of_run

if TYPE_CHECKING:
    from deep500_timing._distributed.late import RankSteps
    from deep500_timing._distributed.verdict import Stragglers
    from deep500_timing.runs import Run
    from deep500_timing.runs._run import Relation

_STACKS_LEAST = 20
"""Sampled stacks that name the lines of the program."""
_WARM_UP_RATIO, _WARM_UP_CALM, _WARM_UP_OF = 1.5, 0.7, 10
"""The steady state begins with a step within so many medians, if this share of so many steps from there on are."""


class StepSeries(NamedTuple):
    """Steps in the order of time, in seconds: starts on the rank that is looked at, lengths on the slowest rank."""

    sessions: NDArray[np.int64]
    numbers: NDArray[np.int64]
    starts_s: Floats
    durations_s: Floats

    def since(self, first: int) -> StepSeries:
        """The steps from one of them on."""
        return StepSeries(self.sessions[first:], self.numbers[first:], self.starts_s[first:], self.durations_s[first:])

    def slowest(self, places: NDArray[np.intp]) -> list[int]:
        """The numbers of the steps at some places, the slowest first."""
        numbers: list[int] = self.numbers[places[np.argsort(-self.durations_s[places], kind="stable")]].tolist()
        return numbers


WAIT = "wait for device"
"""A wait for a result of JAX."""
INTERPRETER = "the time before Python"
"""Until the sampling starts: the interpreter starts, and a shell may have run that ended with `exec`."""
_NEVER = 1 << 62
_BY_ITSELF = "region in ('GC', 'compile')"
"""Regions that come where they come: before and after the training they are a part of what is done there."""
_MENTIONED = 0.01
"""The share of a start-up in the run from which on it is left out of the whole."""


class Operation(NamedTuple):
    """The operations of one name on one rank."""

    calls: int
    total_s: float
    transfer_s: float
    """In each operation the shortest time over the ranks; the rest is waiting for the last rank."""
    is_compared: bool
    """Whether the other ranks' times are known."""
    size_bytes: float
    """The mean; negative if unknown."""


EDGE = -1


class Evidence:
    """The evidence of a run, or of a tree alone (``run`` is None then)."""

    def __init__(self, tree: Tree, run: Run | None, rank: int | None, session: int | None) -> None:
        self.tree = tree
        self.run = run
        self.rank = rank
        self.session = session
        self.failed: dict[str, str] = {}
        """Rules that failed, with the error."""
        self.only = "" if session is None else f"and session = {session} "
        """A condition in SQL, behind others."""
        self.mine = f"device = '{CPU}' and rank = {rank} {self.only}"
        """The condition for this rank's intervals on the CPU."""

    def rows(self, query: str, table: str = "logs") -> Sequence[dict[str, Any]]:
        """The rows of a query over the run's tables; none without a run, or where no plug-in has made the table."""
        return () if self.run is None or table not in self.run.tables else self.run.sql(query).rows()

    @cached_property
    def whole_s(self) -> float:
        """The time from the first region's start to the last one's end, without the time between sessions."""
        rows = self.rows(
            "select cast(sum(ended - begun) as double) as ns from (select min(first_unix_ns) as begun, "
            f"max(last_unix_ns) as ended from logs where rank = {self.rank} {self.only}group by session) as each"
        )
        if rows and rows[0]["ns"] is not None:
            return float(rows[0]["ns"]) / 1e9
        total = sum(root.total_s or 0.0 for root in self.tree.roots)
        if self.tree.span_s is not None:
            return max(total if len(self.tree.roots) == 1 else 0.0, self.tree.span_s[1] - self.tree.span_s[0])
        return total

    @property
    def start_up_s(self) -> float:
        """The time before the first step, 0 if unknown."""
        return self._around[0]

    @property
    def after_s(self) -> float:
        """The time after the last step, without that of regions that come between the steps as well.

        0 if unknown, as in a run that has no end: its next step may have begun.
        """
        return self._around[1]

    @cached_property
    def _around(self) -> tuple[float, float]:
        if self.run is None or self.step_node is None:
            return 0.0, 0.0
        rows = self.rows(
            f"with {self._edges} select coalesce(cast(any_value(first) - any_value(begun) as double), 0) as before, "
            "coalesce(cast(greatest(any_value(ended) - any_value(last) - "
            f"coalesce(sum(case when earliest < last and not {_BY_ITSELF} then "
            "greatest(start_ns + dur_ns - greatest(start_ns, last), 0) end), 0), 0) as double), 0) as after "
            f"from ends left join edges on own = session and thread = {self.thread} and depth = 0 "
            "where first is not null and top = 0 group by own"
        )
        after = sum(row["after"] for row in rows) / 1e9 if self.about.ended else 0.0
        return sum(row["before"] for row in rows) / 1e9, after

    @cached_property
    def _ends(self) -> str:
        # A table for queries: by session when it began, when the first step did, when the last one ended, and when it
        # ended. The first step may be preceded by the wait for its data; around the last one regions may go on.
        assert self.step_node is not None
        path = self.step_node.path
        firsts, steps = (  # of an epoch that is left without its end, BATCH is a root
            is_at((BATCH,), *((*path[:-1], name) for name in (BATCH, IO))),
            is_at((BATCH,), *(path[:end] for end in range(1, len(path) + 1))),
        )
        rows = self.rows(
            "select * from (select session as own, "
            f"min(case when {firsts} then start_ns end) as first, "
            f"max(case when {steps} then start_ns + dur_ns end) as last, min(depth) as top from intervals "
            f"where {self.mine}and thread = {self.thread} group by session) as of_steps join (select session as its, "
            "min(first_unix_ns - unix_offset_ns) as begun, max(last_unix_ns - unix_offset_ns) as ended "
            f"from logs where rank = {self.rank} {self.only}group by session) as of_logs on own = its"
        )
        # Its few rows are written into the queries, as each would read every interval for them again.
        names = ("own", "first", "last", "top", "begun", "ended")
        each = ("(" + ", ".join(f"cast({row.get(name)} as bigint)" for name in names) + ")" for row in [*rows] or [{}])
        values = ", ".join(each).replace("None", "null")
        return f"ends as (select * from (values {values}) as known({', '.join(names)}))"

    @cached_property
    def _edges(self) -> str:
        # Tables for queries: the same, and the intervals that reach beyond the first step or the last, or are of other
        # threads, with when the first of their path and thread began.
        return (
            f"{self._ends}, beginnings as (select session as its, path as place, thread as whose, "
            f"min(start_ns) as earliest from intervals where {self.mine}group by session, path, thread), "
            "edges as (select * from (select session, path, region, thread, depth, start_ns, dur_ns, "
            "first as first_ns, last as last_ns from intervals left join ends on session = own "
            f"where {self.mine}and (thread <> {self.thread} or start_ns < first "
            "or coalesce(start_ns + dur_ns > last, true))) as beyond "
            "left join beginnings on session = its and path = place and thread = whose)"
        )

    @cached_property
    def start_up(self) -> list[tuple[str, float]]:
        """The parts of the time before the first step, with seconds, the longest first; empty if it was not sampled."""
        if self.run is None or self.step_node is None or not self.start_up_s:
            return []
        rows = self.rows(
            f"with {self._ends} select session, any_value(first) as first, min(time_ns) - any_value(begun) as unseen "
            f"from stacks join ends on session = own where rank = {self.rank} and time_ns < first group by session"
        )
        spans = [(row["session"], -_NEVER, row["first"]) for row in rows]
        samples = samples_between(self.run, spans, rank=self.rank, by_time=True)
        unseen_s = max(sum(row["unseen"] for row in rows) / 1e9, 0.0)
        parts = [(name, share * (self.start_up_s - unseen_s)) for name, share in parts_of(samples)]
        return sorted([*parts, (INTERPRETER, unseen_s)], key=lambda part: -part[1]) if parts else []

    @cached_property
    def after(self) -> list[Node]:
        """The regions that only come after the last step, and by no other thread; the longest first."""
        if self.run is None or self.step_node is None or not self.about.ended:
            return []
        rows = self.rows(
            f"with {self._ends} select path from intervals join ends on session = own where {self.mine}and depth = 0 "
            f"and not {_BY_ITSELF} group by path having bool_and(start_ns >= last and thread = {self.thread})"
        )
        paths = {row["path"] for row in rows}
        return [root for root in self.tree.roots if path_text(root.path) in paths]

    def lines_after(self) -> str:
        """A clause on the lines of the program that run after the last step; empty if too few samples say so."""
        if self.step_node is None:
            return ""
        rows = self.rows(f"with {self._ends} select own, last from ends where own is not null")
        return self.lines_between([(row["own"], row["last"], _NEVER) for row in rows])

    @property
    def whole(self) -> str:
        """A name for :attr:`whole_s`. A tree alone does not know the time outside all regions."""
        return "the run" if self.run is not None or self.tree.span_s is not None else "the timed time"

    def loop_of(self, whole_s: float) -> tuple[float, str]:
        """What of a time lies between the first step and the last, and its name: a longer run has no longer start."""
        around_s = self.start_up_s + self.after_s
        return (whole_s, self.whole) if around_s < _MENTIONED * whole_s else (whole_s - around_s, "the training loop")

    @cached_property
    def step_node(self) -> Node | None:
        """The place in the tree with most of the BATCHes."""
        return max((node for node in self.tree.named(BATCH) if node.total_s), key=lambda node: node.count, default=None)

    @cached_property
    def idle_s(self) -> float | None:
        """The time in the steps in which nothing that is timed on the device runs there; None if unknown.

        A region's own device time includes idle time, so only regions inside the step tell.
        """
        step = self.step_node
        busy = [child.gpu.total_s for child in step.children if child.gpu is not None] if step is not None else []
        if step is None or step.gpu is None or not busy:
            return None
        return max(max(step.total_s or 0.0, step.gpu.total_s) - sum(busy), 0.0)

    @cached_property
    def about(self) -> About:
        """The facts of the run."""
        assert self.run is not None
        return about_run(self.run)

    @cached_property
    def steps(self) -> StepSeries | None:
        """The steps; None without a run or without a timed step."""
        if self.run is None:
            return None
        if self.step_node is None:
            return _steps(self.run.steps(rank=self.rank, session=self.session))
        query = (
            f"select session, step, max(dur_ns) as dur_ns, "
            f"coalesce(min(case when rank = {self.rank} then start_ns end), min(start_ns)) as start_ns from "
            "(select rank, session, step, min(start_ns) as start_ns, max(start_ns + dur_ns) - min(start_ns) as dur_ns "
            f"from intervals where {is_at(self.step_node.path)} and device = '{CPU}' and step is not null {self.only}"
            "group by rank, session, step) as of_rank group by session, step order by session, start_ns"
        )
        return _steps(self.run.sql(query))

    @cached_property
    def thread(self) -> int:
        """The thread of this rank with most of the BATCHes; the main thread without any."""
        if self.step_node is None:
            return 0
        rows = self.rows(
            f"select thread from intervals where {is_at(self.step_node.path)} and {self.mine}"
            "group by thread order by count(*) desc, thread limit 1"
        )
        return rows[0]["thread"] if rows else 0

    def apart_of(self, path: tuple[str, ...]) -> tuple[float, int]:
        """The seconds and intervals of a path on other threads than that of the steps, or before the first step.

        Regions that only come after the last step are apart as well, and collections and compilations there: they are
        part of what is done then.
        """
        return self._apart.get(path, (0.0, 0))

    @cached_property
    def _apart(self) -> dict[tuple[str, ...], tuple[float, int]]:
        found: dict[tuple[str, ...], tuple[float, int]] = {}
        if self.run is None or self.step_node is None:
            return found
        rows = self.rows(
            f"with {self._edges}, parts as (select session, path, dur_ns, "
            f"case when thread <> {self.thread} then dur_ns "
            "when start_ns < first_ns then least(dur_ns, first_ns - start_ns) "
            f"when {not self.about.ended} then 0 when {_BY_ITSELF} then least(dur_ns, start_ns + dur_ns - last_ns) "
            "when earliest >= last_ns then dur_ns else 0 end as ns from edges) "
            "select path, cast(sum(ns) as double) as ns, "
            "cast(sum(case when ns = dur_ns then 1 else 0 end) as bigint) as n from parts where ns > 0 group by path"
        )
        for row in rows:
            found[tuple(split_path(row["path"]))] = row["ns"] / 1e9, row["n"]
        return found

    def series(self, path: tuple[str, ...]) -> StepSeries | None:
        """A region's time in each step of this rank; None without a run."""
        query = (
            "select session, step, min(start_ns) as start_ns, cast(sum(dur_ns) as bigint) as dur_ns from intervals "
            f"where {is_at(path)} and step is not null and {self.mine}group by session, step order by session, start_ns"
        )
        return None if self.run is None else _steps(self.run.sql(query))

    def spans(self, *paths: tuple[str, ...]) -> dict[tuple[str, ...], NDArray[np.int64]]:
        """The intervals of regions on the thread of the steps, for each path in the order of time.

        Columns: session, step (or -1), start and end in ns.
        """
        assert self.run is not None
        table = self.run.sql(
            "select path, session, coalesce(step, -1) as step, start_ns, start_ns + dur_ns as end_ns from intervals "
            f"where {is_at(*paths)} and thread = {self.thread} and {self.mine}"
            "order by path, session, start_ns"
        ).arrow()
        names = ("session", "step", "start_ns", "end_ns")
        rows = np.stack([np.asarray(array_of(table[name]), np.int64) for name in names], axis=1)
        codes, known = codes_of(table["path"])
        bounds = np.searchsorted(codes, np.arange(len(known) + 1))
        found = {text: rows[low:high] for text, low, high in zip(known, bounds, bounds[1:], strict=False)}
        return {path: found.get(path_text(path), rows[:0]) for path in paths}

    def gaps(self, node: Node) -> tuple[list[tuple[str, ...]], NDArray[np.int64]]:
        """The stretches within the intervals of a node in which none of the regions inside it runs, in order.

        Returns:
            The paths of the regions inside; and an array with the columns session, step of what runs before (or -1),
            start and end in ns, and the places in these paths of the regions before and after. :data:`EDGE` stands for
            the start and the end of the node's interval.
        """
        inside = self.spans(node.path, *(child.path for child in node.children if not child.is_rest))
        around = inside.pop(node.path)
        parts = [around[:, (0, 1, 3, 3)], around[:, (0, 1, 2, 2)], *inside.values()]
        places = np.repeat(np.arange(len(parts)), [len(part) for part in parts]) - 2
        # Where an interval of the node ends when the next one starts, the end comes first.
        rows = np.column_stack((np.concatenate(parts), places))
        rows = rows[np.lexsort((places, rows[:, 2], rows[:, 0]))]
        for session in distinct(rows[:, 0]):
            own = rows[:, 0] == session
            rows[own, 3] = np.maximum.accumulate(rows[own, 3])
        before, after = rows[:-1], rows[1:]
        found = np.column_stack(
            (before[:, (0, 1, 3)], np.maximum(after[:, 2], before[:, 3]), before[:, 4], after[:, 4])
        )
        found = found[(found[:, 4] != -2) & (before[:, 0] == after[:, 0])]
        found[:, 4:] = np.maximum(found[:, 4:], EDGE)
        return list(inside), found

    @cached_property
    def steady(self) -> StepSeries | None:
        """The steps after the warm-up."""
        return None if self.steps is None else self.steps.since(self.warm_up_steps)

    @cached_property
    def warm_up_steps(self) -> int:
        """The number of steps before the steady state."""
        if self.steps is None:
            return 0
        durations = self.steps.durations_s
        calm = durations <= _WARM_UP_RATIO * float(np.median(durations[len(durations) // 2 :]))
        many = min(_WARM_UP_OF, len(calm) // 2)
        if many < _WARM_UP_OF // 2 or not calm.any():
            return 0
        # Seven of ten are enough: on a busy machine, the program is not why a step is slow.
        settled = np.convolve(calm, np.ones(many), mode="valid") >= _WARM_UP_CALM * many
        begins = calm[: len(settled)] & settled
        count = int(begins.argmax()) if begins.any() else 0
        # Slow steps among usual ones are pauses: a start is slow from the first step on.
        return count if count and calm[:count].mean() < 0.5 else int(calm.argmax())

    @cached_property
    def thread_times(self) -> ThreadTimes | None:
        """The readings of that thread's time on a processor; None without any."""
        if self.run is None or self.rank is None:
            return None
        return ThreadTimes(self.run, self.rank, self.thread, self.session) or None

    @cached_property
    def processor(self) -> ClockParts | None:
        """The use of time by the thread of the steps, from its first reading to its last; None if unknown."""
        return None if self.thread_times is None else self.thread_times.whole

    @cached_property
    def machine(self) -> Machine | None:
        """The work of this rank's machine in the time of ``processor``; None without a run."""
        span_ns = None if self.thread_times is None else self.thread_times.longest[1:]
        return None if self.run is None or self.rank is None else machine_of(self.run, self.rank, span_ns, self.session)

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks with intervals, rising; none without a run."""
        rows = self.rows(f"select distinct rank from intervals where true {self.only}order by rank")
        return [row["rank"] for row in rows]

    @cached_property
    def stragglers(self) -> Stragglers | None:
        """The rank that the others wait for, and why; None without a run."""
        return None if self.run is None else find_stragglers(self.run, session=self.session)

    @cached_property
    def rank_steps(self) -> RankSteps | None:
        """How late each rank came and its own times, by step; None where the ranks do not meet."""
        try:
            found = None if self.run is None else steps_of_run(self.run, session=self.session)
        except NoStepsError:
            return None
        return found if found is not None and found.regions else None

    @cached_property
    def operations(self) -> dict[int, dict[str, Operation]]:
        """The recorded collective operations, by rank and name."""
        rows = self.rows(
            "with each as (select rank, op, dur_ns, bytes, min(dur_ns) over same as low, count(*) over same as n, "
            f"sequence from collectives c{where(session=self.session)} "
            "window same as (partition by session, c.group, op, sequence)) "
            "select rank, op, count(*) as n, cast(sum(dur_ns) as double) as total, cast(sum(case when n > 1 and "
            "sequence >= 0 then low else dur_ns end) as double) as transfer, max(case when sequence >= 0 then n else 1 "
            "end) as ranks, avg(coalesce(bytes, -1)) as size from each where op is not null group by rank, op"
        )
        found: dict[int, dict[str, Operation]] = defaultdict(dict)
        for row in rows:
            found[row["rank"]][row["op"]] = Operation(
                row["n"], row["total"] / 1e9, row["transfer"] / 1e9, row["ranks"] > 1, float(row["size"])
            )
        return found

    @cached_property
    def waits(self) -> frozenset[str]:
        """The names of regions in which ranks wait for each other."""
        return frozenset({COMM, *(op for of in self.operations.values() for op in of)})

    @cached_property
    def samples(self) -> dict[tuple[int, str, str], tuple[Floats, Floats]]:
        """For rank, metric and region the times (s, the timers' clock) and the values; NaN left out."""
        found: dict[tuple[int, str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for row in self.rows(
            f"select rank, metric, coalesce(region, '') as region, time_ns, value from samples where value is not null "
            f"{self.only}order by session, time_ns"
        ):
            at, values = found[row["rank"], row["metric"], row["region"]]
            at.append(row["time_ns"] / 1e9)
            values.append(row["value"])
        return {key: (np.array(at), np.array(values)) for key, (at, values) in found.items()}

    def on_rank(self, rank: int) -> str:
        """``" of rank 3"``; empty in a run of one rank."""
        return f" of rank {rank}" if len(self.ranks) > 1 else ""

    def lines_in(self, path: tuple[str, ...], steps: Iterable[int] | None = None, *, table: str = "stacks") -> str:
        """A clause on the lines of the program that a region's own time goes to; empty if too few samples say so.

        The empty path is the time in no region. With ``steps`` only samples in these count. The table
        ``"maker_stacks"`` has the threads that make data meanwhile.
        """
        return said_of(self.places_in(path, steps, table))

    def places_in(
        self, path: tuple[str, ...], steps: Iterable[int] | None = None, table: str = "stacks"
    ) -> list[HotPlace]:
        """The same as plain data, the place with most of the time first."""
        if self.run is None:
            return []
        text, rank = path_text(path), self.rank
        samples = samples_in(self.run, text, rank=rank, session=self.session, steps=steps, table=table)
        return places_of(samples, _STACKS_LEAST)

    def has(self, *packages: str) -> bool:
        """Whether the program has imported one of these packages."""
        return self.run is not None and not self.about.versions.keys().isdisjoint(packages)

    @cached_property
    def fit(self) -> dict[str, Any] | None:
        """Of the newest fit of Keras ``backend`` and ``data``, and whether it is ``eager`` or XLA is off; or None."""
        query = f"select * from fits where rank = {self.rank} {self.only}order by unix_us desc limit 1"
        return next(iter(self.rows(query, "fits")), None)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """What trains, behind what its data come from if that is known: the keys of remedies."""
        if self.fit is not None:
            return self.fit["data"], "keras"
        names = [node.name for node in self.tree.walk()]
        if {"FIT", "CALLBACKS"} <= {*names}:
            return ("keras",)
        if "tf.function" in names:
            return ("tensorflow",)
        if any(name.startswith(("jit(", "gradient (not")) for name in names):
            return ("jax",)
        # Libraries of one framework import others: PyTorch is imported by the fewest.
        return tuple(name for name in ("torch", "tensorflow", "jax") if self.has(name))[:1]

    def may_queue(self, cause: str) -> bool:
        """Whether steps may be slow as JAX's queue fills and empties: a call returns before the device has computed."""
        return self.kinds == ("jax",) and (not cause or cause.startswith(("jit(", "the rest of jit(", WAIT)))

    def more_calls(self, slow: Iterable[int], usual: Iterable[int]) -> float:
        """How many times as many regions slow steps hold as usual ones, in the median: a step may be an episode."""
        if self.run is None or self.step_node is None:
            return 1.0
        rows = self.rows(
            f"select step, count(*) as n from intervals where {self.mine}and step is not null and thread = "
            f"{self.thread} and depth >= {len(self.step_node.path)} and region not in ('GC', 'compile') group by step"
        )
        counts = {row["step"]: row["n"] for row in rows}
        of_slow, of_usual = ([counts.get(step, 0) for step in steps] for steps in (slow, usual))
        if not of_slow or not of_usual or not np.median(of_usual):
            return 1.0
        return float(np.median(of_slow) / np.median(of_usual))

    def lines_between(self, spans: Iterable[tuple[int, int, int]]) -> str:
        """The same of spans of time: session, start and end in ns of the clock of this rank."""
        return said_of(places_of(self._samples_between(spans), _STACKS_LEAST))

    def stops_workers(self, spans: Iterable[tuple[int, int, int]]) -> bool:
        """Whether what a program waits for in such spans may be a loader's workers: if samples say nothing else."""
        samples = self._samples_between(spans)
        stops = sum(count for text, count in samples.items() if "_shutdown_workers" in text)
        return 2 * stops >= samples.total()

    def _samples_between(self, spans: Iterable[tuple[int, int, int]]) -> Counter[str]:
        if self.run is None or self.thread:  # of the main thread are the samples
            return Counter()
        return samples_between(self.run, spans, rank=self.rank)

    def command(self, name: str, *more: object) -> str:
        """A command to type next, empty without a run."""
        if self.run is None:
            return ""
        return " ".join(("deep500-timing", name, shlex.quote(safe_name(self.run.folders[0])), *map(str, more)))


def is_at(*paths: tuple[str, ...]) -> str:
    """The condition in SQL for intervals at one of these places."""
    return f"path in ({', '.join(literal(path_text(path)) for path in paths)})"


def _steps(relation: Relation) -> StepSeries | None:
    table = relation.arrow()
    if table["dur_ns"].null_count:
        table = table.filter(table["dur_ns"].is_valid())
    if not len(table):
        return None
    numbers = (array_of(table[name]) for name in ("session", "step"))
    return StepSeries(*numbers, *(array_of(table[name]) / 1e9 for name in ("start_ns", "dur_ns")))


def evidence_of(source: Run | Tree, rank: int | None = None, session: int | None = None) -> Evidence:
    """The evidence of a run or of a tree."""
    if isinstance(source, Tree):
        return Evidence(source, None, source.rank, None)
    if rank is None:
        ranks = source.sql("select min(rank) as lowest from logs").rows()
        rank = ranks[0]["lowest"] if ranks else None
    return Evidence(tree_of_run(source, rank=rank, session=session), source, rank, session)
