"""A timeline in a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from deep500_timing._base.files import whole_file
from deep500_timing._views.timeline._formats import ChromeWriter, PerfettoWriter, Writer
from deep500_timing._views.timeline._from_run import add_run, first_time_ns
from deep500_timing._views.timeline._kineto import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from deep500_timing.runs import Run

Format = Literal["perfetto", "chrome"]
_WRITERS: dict[str, type[Writer]] = {"perfetto": PerfettoWriter, "chrome": ChromeWriter}


def write_timeline(
    run: Run,
    path: str | PathLike[str],
    *,
    format: Format | None = None,  # noqa: A002 (the usual name)
    steps: tuple[int, int] | None = None,
    ranks: Sequence[int] | None = None,
    profiles: Sequence[str | PathLike[str]] = (),
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Write a run as a timeline, for https://ui.perfetto.dev or any viewer of Chrome's trace format.

    A process has tracks for its steps, threads, device work, events, collectives and declared tables with a start and a
    length, and a counter for each metric. Arrows lead from launches to device work. Times are Unix time if known.

    Args:
        run: The run.
        path: The file. It is written completely or not at all.
        format: ``"perfetto"`` (TrackEvent) or ``"chrome"`` (JSON); by the file's name if None: JSON for ``.json``.
        steps: Of these steps only, the first and the last.
        ranks: Of these ranks only.
        profiles: Traces of ``torch.profiler`` to add on the same clock.
        on_progress: Called with the number of finished processes and the number of all.

    Raises:
        LookupError: The run has no such rank, or none of the steps.
        OSError: The file cannot be written, or a trace cannot be read.
        ValueError: The format is unknown, or the clock of a trace is unknown.
        MissingPackageError: The format is ``perfetto`` and the package is not installed.
    """
    path = os.fspath(path)
    kind = format or ("chrome" if path.endswith(".json") else "perfetto")
    if kind not in _WRITERS:
        raise ValueError(f"Writing a timeline as {kind!r}: use 'perfetto' or 'chrome'.")
    traces = [Trace(profile) for profile in profiles]
    starts = [time for time in (first_time_ns(run), *(trace.first_time_ns() for trace in traces)) if time]
    with whole_file(path) as file:
        writer = _WRITERS[kind](file, min(starts, default=0))
        add_run(run, writer, steps=steps, ranks=ranks, on_progress=on_progress)
        flow = 1
        for trace in traces:
            flow = trace.add(writer, flow)
        writer.close()
