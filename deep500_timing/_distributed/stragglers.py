"""Stragglers in a run or in plain steps: one judgement."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from deep500_timing._base.arrays import Floats
from deep500_timing._base.names import BACKWARD, BATCH, COMM, CPU, GPU
from deep500_timing._base.sql import array_of, codes_of, literal
from deep500_timing._distributed.late import REST, RankSteps, judge, steps_of_operations
from deep500_timing._distributed.verdict import Stragglers
from deep500_timing._summary.nesting import path_text, split_path

MEETING = ("all_", "allreduce", "allgather", "alltoall", "barrier", "ddp_", "inference_all_", "reduce_scatter")
IMPLIED = (COMM, BACKWARD)
"""Regions in which ranks meet if no operation is recorded: communication, or the one that sums the gradients."""
_WARM_UP = 2
_MOST_ROWS = 500_000
"""Steps times ranks that are judged, the newest ones: with ten regions, 40 MB an array."""
_LEAST_STEPS = 1000
"""Steps that are judged of any number of ranks: correlated noise needs that many."""
_MOST_TIMES, _LEAST_REGIONS = 8_000_000, 8
"""Steps times ranks times regions that are judged, 64 MB an array; smaller regions are part of the rest then."""
_READ = 2_000_000
_ALIKE = 0.5
"""Ranks that meet have steps of one length: their spread is below this share of that of the waits."""
_INSIDE = 0.6
"""Share of the operations' time that lies within their region, if both are of one clock. Counts of ends would not do:
gloo reports an end from a thread that waits for the GIL, on a busy machine after BACKWARD in every second step of a
DDP loop, by 4 % of the step."""


class NoStepsError(ValueError):
    """A judgement needs something that the run does not have; the text names it."""


class _Phases(NamedTuple):
    names: list[str]
    steps: list[int]
    times: Floats
    """Shape ``(steps, ranks, phases)``, in seconds."""
    periods: Floats
    """Shape ``(steps, ranks)``: from the beginning of a step to that of the next one."""
    on_device: tuple[bool, ...]


def steps_of_run(run: Any, *, session: int | None = None) -> RankSteps:
    logs = run.table("logs").rows()
    ranks = sorted({int(row["rank"]) for row in logs})
    if len(ranks) < 2:
        raise NoStepsError("the run has one rank")
    if session is None:
        session = min(max(int(row["session"]) for row in logs if row["rank"] == rank) for rank in ranks)
    hosts = {int(row["rank"]): row["host"] or "" for row in logs if row["session"] == session}
    if not hosts:
        there = sorted({int(row["session"]) for row in logs})
        raise NoStepsError(f"the run has no session {session}, but {', '.join(map(str, there))}")
    meetings = _operations(run, ranks, session)
    try:
        phases = _phases(run, ranks, session)
    except NoStepsError:
        if meetings is None:
            raise
        return steps_of_operations(tuple(ranks), meetings[1] / 1e9, met_at="collective operations")
    waits, lateness, met_at, one_clock = _meetings(run, ranks, session, phases, meetings)
    if met_at == "":
        waits, lateness, met_at = _implied(phases)
    own = np.maximum(phases.times - waits[:, :, :-1], 0.0)
    rest = np.maximum(phases.periods - phases.times.sum(axis=2) - waits[:, :, -1], 0.0)
    if any(phases.on_device):
        rest = np.zeros_like(rest)  # The host runs ahead of the device: their times do not add up.
    return RankSteps(
        ranks=tuple(ranks),
        hosts=tuple(hosts.get(rank, "") for rank in ranks),
        numbers=tuple(phases.steps),
        regions=(*phases.names, REST),
        lateness=lateness,
        own=np.concatenate((own, rest[:, :, None]), axis=2),
        step_s=float(np.median(phases.periods)),
        met_at=met_at,
        one_clock=one_clock,
    )


def _phases(run: Any, ranks: list[int], session: int) -> _Phases:
    # The parts of a step: the regions directly inside BATCH, and the regions around which BATCH is; without any BATCH
    # the outermost regions.
    begun = run.steps(session=session).arrow()
    begun_rank, begun_step, begun_ns = (array_of(begun[name]) for name in ("rank", "step", "start_ns"))
    of_rank = []
    for rank in ranks:
        own = slice(*np.searchsorted(begun_rank, (rank, rank + 1)))  # Steps are ordered by rank.
        numbers, first = np.unique(begun_step[own], return_index=True)
        of_rank.append((numbers, begun_ns[own][first]))
    common = of_rank[0][0]
    for numbers, _ in of_rank[1:]:
        common = np.intersect1d(common, numbers, assume_unique=True)
    # The length of the last step is unknown, and that of a step before a gap.
    following = common[_WARM_UP:][-max(_MOST_ROWS // len(ranks), _LEAST_STEPS) :]
    steps = following[np.isin(following + 1, common)]
    if not len(steps):
        raise NoStepsError(
            "the ranks have no steps in common; time each as TimeType.BATCH, or number them with timer.step(n)"
        )
    judged = f"from intervals where session = {session} and step between {int(steps[0])} and {int(steps[-1])}"
    paths = [split_path(row["path"]) for row in run.sql(f"select distinct path {judged}").rows()]
    batches = {tuple(parts) for parts in paths if parts[-1] == BATCH}
    around = {*batches, *(parts[:-1] for parts in batches)} if batches else {()}
    phases = [parts for parts in paths if tuple(parts[:-1]) in around and parts[-1] != BATCH]
    by_name: dict[str, list[str]] = {}
    for parts in phases:
        by_name.setdefault(parts[-1], []).append(literal(path_text(tuple(parts))))
    names, each = sorted(by_name), len(steps) * len(ranks)
    most = max(_MOST_TIMES // each, _LEAST_REGIONS)
    if len(names) > most:
        in_any = ", ".join(path for of in by_name.values() for path in of)
        largest = run.sql(f"select region, sum(dur_ns) as total {judged} and path in ({in_any}) group by region").rows()
        largest.sort(key=lambda row: (-row["total"], row["region"]))
        names = sorted(row["region"] for row in largest[:most])
    times = np.zeros((2, len(steps), len(ranks), len(names)))
    together = max(_READ // each, 1)
    for first_name in range(0, len(names), together):
        chosen = names[first_name : first_name + together]
        in_these = ", ".join(path for name in chosen for path in by_name[name])
        table = run.sql(
            f"select rank, region, step, device, cast(sum(dur_ns) as bigint) as total {judged} "
            f"and path in ({in_these}) group by rank, region, step, device"
        ).arrow()
        # Columns, not rows: a row in Python takes hundreds of bytes.
        name_of, known = codes_of(table["region"])
        name_at = np.array([names.index(name) for name in known], dtype=np.int64)[name_of]
        rank_at, _ = places_in(np.array(ranks), array_of(table["rank"]))
        step_at, here = places_in(steps, array_of(table["step"]))
        device_at, devices = codes_of(table["device"])
        on_gpu = np.array([int(device == GPU) for device in devices], dtype=np.int64)[device_at]
        taken_s = array_of(table["total"])[here] / 1e9
        np.add.at(times, (on_gpu[here], step_at[here], rank_at[here], name_at[here]), taken_s)
    # Times of the device where every rank has them in most steps.
    on_device = np.asarray((np.median(times[1], axis=0) > 0).all(axis=0))
    times = np.where(on_device, times[1], times[0])
    # A region that only some ranks have is part of the rest on all: as a region it would make the ranks look unlike.
    has = np.median(times, axis=0) > 0
    shared = np.asarray(has.all(axis=0) | ~has.any(axis=0))
    names, times = [name for name, kept in zip(names, shared, strict=True) if kept], times[:, :, shared]
    periods = np.empty((len(steps), len(ranks)))
    for place, (numbers, started_ns) in enumerate(of_rank):
        periods[:, place] = (
            started_ns[np.searchsorted(numbers, steps + 1)] - started_ns[np.searchsorted(numbers, steps)]
        )
    periods /= 1e9
    return _Phases(names, steps.tolist(), times, periods, tuple(on_device[shared].tolist()))


def places_in(values: Any, asked: Any) -> tuple[Any, Any]:
    """The index of each number among rising values, and whether it is one of them."""
    has_gaps = values[-1] - values[0] != len(values) - 1
    at = np.clip(np.searchsorted(values, asked) if has_gaps else asked - values[0], 0, len(values) - 1)
    return at, values[at] == asked


def _operations(run: Any, ranks: list[int], session: int) -> tuple[Any, Any] | None:
    # Starts and lengths in ns of the operations in which all ranks met, each of shape (operations, ranks), in the
    # order of time; None if there are none.
    meets = " or ".join(f"substr(op, 1, {len(prefix)}) = '{prefix}'" for prefix in MEETING)
    # `c.group`: alone, the name is a keyword.
    table = run.sql(
        "select coalesce(c.group, '') as of_group, sequence, rank, start_ns, dur_ns from collectives c "
        f"where session = {session} and sequence >= 0 and ({meets})"
    ).arrow()
    if not len(table):
        return None
    groups, _ = codes_of(table["of_group"])
    sequences, of_rank, starts, lengths = (array_of(table[name]) for name in table.column_names[1:])
    order = np.lexsort((of_rank, sequences, groups))
    which = np.stack((groups, sequences), axis=1)[order]
    firsts = np.flatnonzero(np.r_[True, (which[1:] != which[:-1]).any(axis=1)])
    # Groups of all ranks: in a smaller group, a late rank is late for some ranks only.
    firsts = firsts[np.diff(np.r_[firsts, len(which)]) == len(ranks)]
    rows = order[firsts[:, None] + np.arange(len(ranks))]
    rows = rows[(of_rank[rows] == np.array(ranks)).all(axis=1)]
    if not len(rows):
        return None
    rows = rows[np.argsort(starts[rows[:, 0]], kind="stable")]
    return starts[rows], lengths[rows]


def _meetings(
    run: Any, ranks: list[int], session: int, phases: _Phases, meetings: tuple[Any, Any] | None
) -> tuple[Floats, Floats, str, bool]:
    # Waits by step, rank and phase (the last is outside of all), and how late each came; where they meet in words, ""
    # if nothing tells; whether the waits are of one clock with the phases.
    waits = np.zeros((len(phases.steps), len(ranks), len(phases.names) + 1))
    lateness = np.zeros(waits.shape[:2])
    if meetings is None:
        return waits, lateness, "", True
    starts, lengths = meetings
    steps, places, within = _where(run, ranks[0], session, phases, starts[:, 0], lengths[:, 0])
    # A rank that is late itself hardly waits, so that another one is asked as well.
    within = within + _where(run, ranks[-1], session, phases, starts[:, -1], lengths[:, -1])[2]
    inside = np.where(within[1] > 0, within[0] / np.maximum(within[1], 1), 1.0)
    waited = (lengths - lengths.min(axis=1, keepdims=True)) / 1e9
    ends = starts + lengths
    last = len(starts) - 1
    for place in range(len(starts)):
        if steps[place] < 0:
            continue
        # Operations under way at the same time are one meeting. Its last one shows how late each rank was by then.
        following = min(place + 1, last)
        alike = steps[following] == steps[place] and places[following] == places[place]
        if place < last and alike and (starts[following] < ends[place]).any():
            continue
        waits[steps[place], :, places[place]] += waited[place]
        lateness[steps[place]] -= waited[place]
    fits = (waits[:, :, :-1] <= phases.times).mean(axis=(0, 1)) >= _INSIDE
    one_clock = all(
        bool(fits[place]) if phases.on_device[place] else bool(inside[place] >= _INSIDE)
        for place in range(len(phases.names))
        if waits[:, :, place].any()
    )
    return waits, lateness, "collective operations", one_clock


def _where(run: Any, rank: int, session: int, phases: _Phases, times: Any, lengths: Any) -> tuple[Any, Any, Any]:
    # The step and the phase of each operation of a rank, as indices, -1 for a step that is not judged; for each phase
    # the operations' time within it on the host's clock, and all of their time.
    step_at = {step: place for place, step in enumerate(phases.steps)}
    begins = sorted((int(row["start_ns"]), int(row["step"])) for row in run.steps(rank=rank, session=session).rows())
    at = np.searchsorted([begin for begin, _ in begins], times, side="right") - 1
    steps = np.array([step_at.get(begins[place][1], -1) if place >= 0 else -1 for place in at.tolist()])
    places = np.full(len(times), len(phases.names))
    within = np.zeros((2, len(phases.names)))
    table = run.sql(
        f"select region, start_ns, dur_ns from intervals where rank = {rank} and session = {session} "
        f"and device = '{CPU}' and step between {phases.steps[0]} and {phases.steps[-1]} order by start_ns"
    ).arrow()
    region_at, regions = codes_of(table["region"])
    all_starts, all_lengths = array_of(table["start_ns"]), array_of(table["dur_ns"])
    for place, name in enumerate(phases.names):
        if name not in regions:
            continue
        own = region_at == regions.index(name)
        starts = all_starts[own]
        ends = starts + all_lengths[own]
        which = np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)
        inside = (times >= starts[which]) & (times < ends[which])
        places[inside] = place
        within[:, place] = np.minimum(lengths, ends[which] - times)[inside].sum(), lengths[inside].sum()
    return steps, places, within


def _implied(phases: _Phases) -> tuple[Floats, Floats, str]:
    shape = (len(phases.steps), phases.times.shape[1], len(phases.names) + 1)
    for name in IMPLIED:
        if name not in phases.names:
            continue
        place = phases.names.index(name)
        column = phases.times[:, :, place]
        waited = column - column.min(axis=1, keepdims=True)
        if np.median(phases.periods.std(axis=1)) > _ALIKE * np.median(waited.std(axis=1)):
            continue
        waits = np.zeros(shape)
        waits[:, :, place] = waited
        return waits, -waited, name
    raise NoStepsError(
        "nothing says where the ranks meet: no collective operation is recorded (deep500_timing_torch.comm), and no "
        f"region {' or '.join(IMPLIED)} is shorter on ranks that come late"
    )


def find_stragglers(source: Any, *, session: int | None = None) -> Stragglers:
    """Which rank is late, or which machine, and why; or that no rank is, or that the data do not say.

    Args:
        source: A :class:`~deep500_timing.runs.Run`, with or without recorded collectives, also one that is still being
            written; or :class:`RankSteps`. Steps without regions are operations of which nothing else is known.
        session: Of a run, which start of its ranks; the last that all have if None.
    """
    try:
        steps = source if isinstance(source, RankSteps) else steps_of_run(source, session=session)
    except NoStepsError as error:
        return Stragglers("unknown", reason=str(error))
    return judge(steps)
