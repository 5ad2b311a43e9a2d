"""Times as scalars and histograms in TensorBoard's event files."""

from __future__ import annotations

import itertools
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from deep500_timing._summary.distribution import bin_bounds
from deep500_timing.exporters._files import encode
from deep500_timing.exporters._metrics import TrackerExporter, distinct, utf8_name

if TYPE_CHECKING:
    from deep500_timing._summary.distribution import Distribution
    from deep500_timing._summary.snapshot import Snapshot

_numbers = itertools.count()


class TensorBoardExporter(TrackerExporter):
    """Write each snapshot to an event file of TensorBoard, without torch or TensorFlow.

    Scalars are called ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH/p95`` and so on for other
    statistics. The histogram of each region is ``prefix/CPU/BATCH/times``, in seconds, from the timer's own bins. Of
    several ranks each writes to a folder of its own, ``folder/rank3``, which TensorBoard shows as a run.

    The file is written during ``export``, by the exporting thread: tensorboardX's queue has a thread that ends at a
    full disk, and the program would wait for it. After a fault the next report begins another file.
    """

    package = "tensorboardX"
    extra = "tensorboard"

    def __init__(
        self, folder: str | os.PathLike[str], prefix: str = "", *, histograms: bool = True, **settings: Any
    ) -> None:
        """Choose where to write. No file is made yet.

        Args:
            folder: The folder that TensorBoard is given; it is made if it does not exist.
            prefix: Put before the names, with one slash between.
            histograms: Write histograms.
            **settings: ``stats``, ``whole_run``, ``by_rank`` and ``strict``, as of every tracker's exporter.
        """
        super().__init__(prefix, **settings)
        self._folder = os.path.abspath(os.fsdecode(folder))
        self._histograms = histograms
        self._writer: Any = None
        self._pid = 0

    def _where(self) -> str:
        return self._folder

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        metrics = self._metrics(snapshot)
        number = self._number(None, step)
        values = [
            {"tag": tag, "simple_value": value, "metadata": {"summary_description": _unit(tag)}}
            for tag, value in distinct(metrics, utf8_name).items()
        ]
        for region in snapshot if self._histograms else ():
            if region.distribution is not None and region.distribution.count:
                tag = f"{self._prefix}{region.device}/{region.name}/times"
                values.append({"tag": encode(tag).decode(), "histo": _histogram(region.distribution)})
        if not values:
            return
        try:
            writer = self._open_writer(snapshot)
            event = import_module("tensorboardX.proto.event_pb2").Event
            writer.write_event(event(wall_time=snapshot.unix_time_s, step=number, summary={"value": values}))
            writer.flush()
        except Exception:
            self._writer = None  # A reader stops at a partial record.
            raise

    def _open_writer(self, snapshot: Snapshot) -> Any:
        if self._writer is None or self._pid != os.getpid():
            from tensorboardX.event_file_writer import EventsWriter

            folder = self._folder
            if snapshot.rank is not None and (snapshot.world_size or 1) > 1:
                folder = os.path.join(folder, f"rank{snapshot.rank}")
            os.makedirs(folder, exist_ok=True)
            self._pid = os.getpid()
            suffix = f".{self._pid}.{next(_numbers)}"
            self._writer = EventsWriter(os.path.join(folder, "events"), filename_suffix=suffix)
        return self._writer

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None and self._pid == os.getpid():
            writer.close()


def _unit(tag: str) -> str:
    return "bytes" if tag.endswith("_bytes") else "number" if tag.endswith(("/count", "/skipped")) else "seconds"


def _histogram(distribution: Distribution) -> dict[str, Any]:
    bins, counts = distribution.used_bins()
    limits_s: list[float] = []
    heights: list[int] = []
    for place, count in zip(bins.tolist(), counts.tolist(), strict=True):
        low_ns, width_ns = bin_bounds(place)
        # An empty bucket up to the lower bound: TensorBoard takes a bucket to begin where the one before it ends.
        if not limits_s or limits_s[-1] < low_ns / 1e9:
            limits_s.append(low_ns / 1e9)
            heights.append(0)
        limits_s.append((low_ns + width_ns) / 1e9)
        heights.append(count)
    total_s = distribution.total_ns / 1e9
    mean_s = total_s / distribution.count
    return {
        "min": distribution.min_ns / 1e9,
        "max": distribution.max_ns / 1e9,
        "num": distribution.count,
        "sum": total_s,
        "sum_squares": distribution.m2_ns2 / 1e18 + distribution.count * mean_s * mean_s,
        "bucket_limit": limits_s,
        "bucket": heights,
    }
