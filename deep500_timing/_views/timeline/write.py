"""A timeline in a file."""

from __future__ import annotations

import os
from itertools import count
from typing import TYPE_CHECKING

from deep500_timing._base.files import whole_file
from deep500_timing._views.timeline._from_run import add_run, places_of
from deep500_timing._views.timeline._kineto import Trace
from deep500_timing._views.timeline._writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from deep500_timing.runs import Run


def write_timeline(
    run: Run,
    path: str | PathLike[str],
    *,
    steps: tuple[int, int] | None = None,
    ranks: Sequence[int] | None = None,
    profiles: Sequence[str | PathLike[str]] = (),
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Write a run as a timeline in Chrome's trace format, for https://ui.perfetto.dev and other viewers.

    A process has tracks for its steps, threads, device work, events, collectives and declared tables with a start and a
    length, and a counter for each metric. Arrows lead from launches to device work. Times are Unix time if known.

    Args:
        run: The run.
        path: The file. It is written completely or not at all.
        steps: Of these steps only, the first and the last.
        ranks: Of these ranks only.
        profiles: Traces of ``torch.profiler`` to add on the same clock.
        on_progress: Called with the number of finished processes and the number of all.

    Raises:
        LookupError: The run has no such rank, or none of the steps.
        OSError: The file cannot be written, or a trace cannot be read.
        ValueError: The clock of a trace is unknown.
    """
    traces = [Trace(profile) for profile in profiles]
    places = places_of(run, ranks)
    starts = [*(place.first_ns() for place in places.values()), *(trace.first_time_ns() for trace in traces)]
    with whole_file(os.fspath(path)) as file:
        writer = TraceWriter(file, min((start for start in starts if start), default=0))
        numbers = count(1)
        add_run(run, writer, places, numbers, steps=steps, ranks=ranks, on_progress=on_progress)
        for trace in traces:
            trace.add(writer, numbers)
        writer.close()
