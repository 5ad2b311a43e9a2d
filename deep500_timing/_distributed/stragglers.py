"""Stragglers in a run, in gathered reports, or in plain steps: one judgement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.names import BACKWARD, BATCH, COMM, CPU, FORWARD, GPU, IO
from deep500_timing._distributed.late import REST, Steps, judge
from deep500_timing._distributed.late_of_run import NoStepsError, steps_of_run
from deep500_timing._distributed.verdict import Stragglers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from deep500_timing._distributed.gathered import Gathered
    from deep500_timing.runs import Run

    Floats = NDArray[np.float64]

PHASES = (IO, FORWARD, BACKWARD, "OPTIMIZER", "optimizer", COMM)
"""The parts of a step. A snapshot does not say how regions nest, so other regions are not used."""
MEETING = (COMM, BACKWARD)
LEAST_WINDOWS = 6
"""Windows that a verdict needs; each is the mean of many steps."""


def find_stragglers(source: Run | Sequence[Gathered] | Steps, *, session: int | None = None) -> Stragglers:
    """Which rank is late, or which machine, and why; or that no rank is, or that the data do not say.

    Args:
        source: A run, with or without recorded collectives; or the reports of a training that goes on, each of what
            came since the one before (``LiveReport``, in order); or steps. Steps without regions are operations of
            which nothing else is known.
        session: Of a run, which start of its ranks; the last that all have if None.
    """
    try:
        if isinstance(source, Steps):
            steps = source
        elif hasattr(source, "intervals"):
            run: Any = source
            steps = steps_of_run(run, session=session)
        else:
            reports: Any = source
            steps = windows_of(reports)
    except NoStepsError as error:
        return Stragglers("unknown", reason=str(error))
    return judge(steps)


def windows_of(reports: Sequence[Gathered]) -> Steps:
    """Reports of one window each (differences of snapshots), in the order of time; ranks that are in all of them."""
    reports = [report for report in reports if report.values is not None and report.get(BATCH) is not None]
    ranks = sorted(set.intersection(*(set(report.ranks) for report in reports))) if reports else []
    if len(ranks) < 2:
        raise NoStepsError("fewer than two ranks have times of BATCH in all of the reports")
    names = [name for name in PHASES if any(report.get(name) for report in reports)]
    meeting = next((name for name in MEETING if name in names), None)
    if meeting is None:
        raise NoStepsError(f"no region says where the ranks meet: {' or '.join(MEETING)}")
    # Times of the device where every rank has them.
    on_device = [all(report.get(name, GPU) and len(report.of_ranks(name, "mean", GPU).keys() & set(ranks)) == len(ranks)
                     for report in reports) for name in names]  # fmt: skip
    devices = [GPU if there else CPU for there in on_device]
    times = np.array(
        [[_mean_of_step(report, *of, ranks) for of in zip(names, devices, strict=True)] for report in reports]
    ).transpose(0, 2, 1)
    batch = np.array([_mean_of_step(report, BATCH, CPU, ranks) for report in reports])
    # Whether IO lies inside BATCH is not said; where all of it fits in, it is taken to.
    rest = batch - times.sum(axis=2)
    if (rest < 0).any() and IO in names:
        rest += times[:, :, names.index(IO)]
    if any(on_device):
        rest = np.zeros_like(rest)  # The host runs ahead of the device: their times do not add up.
    place = names.index(meeting)
    waited = times[:, :, place] - times[:, :, place].min(axis=1, keepdims=True)
    own = times.copy()
    own[:, :, place] -= waited
    first = reports[0]
    host_of = dict(zip(first.ranks, first.hosts, strict=True))
    return Steps(
        ranks=tuple(ranks),
        hosts=tuple(host_of[rank] for rank in ranks),
        numbers=tuple(place if report.step is None else report.step for place, report in enumerate(reports)),
        regions=(*names, REST),
        lateness=-waited,
        own=np.concatenate((own, np.maximum(rest, 0.0)[:, :, None]), axis=2),
        step_s=float(np.median(batch)),
        met_at=meeting,
        least=LEAST_WINDOWS,
        one_clock=on_device[place] or not any(on_device),
    )


def _mean_of_step(report: Gathered, name: str, device: str, ranks: list[int]) -> Floats:
    # A region's time for each BATCH, of the ranks in order; 0 where it has none.
    assert report.values is not None
    columns = {(region.name, region.device): place for place, region in enumerate(report.regions)}
    rows = np.searchsorted(np.array(report.ranks), ranks)
    batches = report.values["count"][rows, columns[BATCH, CPU]]
    place = columns.get((name, device))
    if place is None:
        return np.zeros(len(ranks))
    total = np.nan_to_num(report.values["count"][rows, place] * report.values["mean"][rows, place])
    return np.asarray(total / np.maximum(np.nan_to_num(batches), 1))
