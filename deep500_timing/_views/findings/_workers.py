"""Why the workers of a data loader do not keep up, from the times that they take themselves."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deep500_timing._views.findings._finding import percent, took

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from deep500_timing._summary.tree import Node
    from deep500_timing._views.findings._evidence import Evidence

TABLE = "loader_workers"
KEEP_WORKERS = "keep the workers (persistent_workers=True), fill a smaller shuffle buffer"
_BUSY, _IDLE = 0.75, 0.5
"""A worker is busy if it works for this share of the steps, and idle if it works for less than the other."""
_LEAST = 20
"""Batches of a loader that are judged by."""
_MOST = 64
"""More workers than that are no remedy."""


class Why(NamedTuple):
    """A cause of a wait for data, and the remedy."""

    text: str
    remedy: str


class _Workers(NamedTuple):
    """The workers of one loader, in seconds, each over all iterations."""

    fetch_s: NDArray[np.float64]
    collate_s: NDArray[np.float64]
    put_s: NDArray[np.float64]
    batches: NDArray[np.float64]
    samples: NDArray[np.float64]
    idle_s: NDArray[np.float64]
    start_s: float
    """The median of one start."""
    cpus: int

    @property
    def work_s(self) -> NDArray[np.float64]:
        return self.fetch_s + self.collate_s + self.put_s


def has_workers(evidence: Evidence) -> bool:
    """Whether workers load the data of the training."""
    found = _workers_of(evidence)
    return found is not None and len(found.batches) > 0


def start_of_workers_s(evidence: Evidence) -> float | None:
    """How long a worker takes to start; None if it is not known."""
    found = _workers_of(evidence)
    return None if found is None or not len(found.batches) else found.start_s


def why_of_workers(evidence: Evidence, io: Node, step: Node) -> Why | None:
    """Why the loop waits for data in most steps; None if the workers do not say.

    Args:
        evidence: Of the run.
        io: The waits for data.
        step: BATCH.
    """
    found = _workers_of(evidence)
    if found is None or not io.count or step.total_s is None or io.total_s is None:
        return None
    work_s = step.total_s - (io.total_s if step.path == io.parent else 0.0)
    whole_s, between_s = work_s + io.total_s, work_s / io.count
    if not len(found.batches):
        enough = _enough(io.total_s / io.count, between_s, 0, found.cpus)
        return Why(f"the loop loads the data itself (num_workers=0){enough}", "num_workers above 0")
    total = float(found.batches.sum())
    if total < _LEAST:
        return None
    # Each is too low for a reason of its own: workers are idle while the loop validates, and start while it waits.
    count = len(found.batches)
    busy = np.maximum(found.work_s / whole_s, found.work_s / np.maximum(found.work_s + found.idle_s, 1e-9))
    idle = int((busy < _IDLE).sum())
    if idle == count:
        return Why(
            f"{'the worker is' if count == 1 else f'all {count} workers are'} idle for {percent(1 - busy.mean())} of "
            "the time, so the main process is the limit",
            "a faster sampler, smaller objects in a batch, pin_memory",
        )
    each_s = found.work_s / np.maximum(found.batches, 1)
    slowest = int(busy.argmax())
    if idle and busy[slowest] >= _BUSY:
        others = np.delete(each_s, slowest)[np.delete(found.batches, slowest) > 0]
        than = f", the others {took(float(np.median(others)))}" if len(others) else ""
        return Why(
            f"{idle} of {count} workers are idle: they wait for worker {slowest}, which takes {took(each_s[slowest])} "
            f"a batch{than}, as batches keep their order",
            "give each worker the same amount of work",
        )
    if busy.mean() < _BUSY:
        return None
    parts = {"fetch": found.fetch_s, "collate": found.collate_s, "put": found.put_s}
    part = max(parts, key=lambda name: float(parts[name].sum()))
    per = ("sample", float(found.samples.sum())) if part == "fetch" else ("batch", total)
    enough = _enough(float(found.work_s.sum()) / total, between_s, count, found.cpus)
    return Why(
        f"{part} takes {took(float(parts[part].sum()) / per[1])} a {per[0]}{enough}", "more workers (num_workers)"
    )


def _enough(work_s: float, between_s: float, count: int, cpus: int) -> str:
    # The workers that make a batch in the time that the loop takes for one.
    needed = ceil(work_s / between_s) if between_s > 0 else _MOST + 1
    if needed > _MOST:
        return f"; more than {_MOST} workers would be needed"
    if needed <= count:
        return ""
    there = f", {count} {'is' if count == 1 else 'are'} there" if count else ""
    cores = f", on {cpus} {'core' if cpus == 1 else 'cores'}" if 0 < cpus < needed else ""
    return f"; {needed} {'worker' if needed == 1 else 'workers'} would keep up{there}{cores}"


def rows_of_workers(evidence: Evidence) -> list[dict[str, Any]]:
    """What each worker did, in us over all iterations of the loader that training takes most batches from.

    ``start`` is the median of one start, ``started`` the sum of all. Worker -1 stands for a loader without workers.
    """
    if evidence.run is None or TABLE not in evidence.run.tables:
        return []
    return evidence.run.sql(
        f"with last as (select * from {TABLE} where rank = {evidence.rank} and is_training = 1 {evidence.only}"
        "qualify row_number() over (partition by session, loader, iteration, worker order by time_ns desc) = 1), "
        "chosen as (select loader from last group by loader order by sum(batches) desc, loader limit 1) "
        "select worker, sum(fetch_us) as fetch, sum(collate_us) as collate, sum(put_us) as put, "
        "sum(batches) as batches, sum(samples) as samples, sum(idle_us) as idle, median(start_us) as start, "
        "sum(start_us) as started, any_value(cpus) as cpus from last semi join chosen using (loader) "
        "group by worker order by worker"
    ).rows()


def _workers_of(evidence: Evidence) -> _Workers | None:
    rows = rows_of_workers(evidence)
    if not rows:
        return None
    own = [row for row in rows if row["worker"] >= 0]
    names = ("fetch", "collate", "put", "idle", "batches", "samples")
    fetch, collate, put, idle, batches, samples = (np.array([float(row[name]) for row in own]) for name in names)
    start_s = float(np.median([row["start"] for row in own])) / 1e6 if own else 0.0
    cpus = int(rows[0]["cpus"])
    return _Workers(fetch / 1e6, collate / 1e6, put / 1e6, batches, samples, idle / 1e6, start_s, cpus)
