"""A snapshot as named numbers, and the trackers that take them as they are: TensorBoard, Comet and Trackio."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields
from hashlib import blake2b
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing._base.memory_usage import MAXIMA
from deep500_timing._base.names import outside_name
from deep500_timing._base.require import require
from deep500_timing._summary.distribution import Distribution, bin_bounds
from deep500_timing._summary.stats import TimeStats
from deep500_timing.exceptions import ExportError
from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._delivery import BackgroundExporter

if TYPE_CHECKING:
    from deep500_timing._summary.snapshot import Snapshot

VALID_STATS = tuple(field.name for field in fields(TimeStats))


class Metric(NamedTuple):
    """One number."""

    identity: tuple[str, str, str]
    """Device, region and statistic, which no two metrics of a snapshot share."""
    name: str
    """Its name, unless two metrics share it."""
    value: float
    region_at: int = 0
    """Where the region's own name begins in ``name``."""


def distinct(
    metrics: Iterable[Metric],
    clean: Callable[[Metric], str],
    *,
    limit: int | None = None,
    fold: Callable[[str], str] = str,
) -> dict[str, float]:
    """Name metrics as a tracker can take them, no two alike.

    Args:
        metrics: What to name.
        clean: Makes a name that the tracker can take.
        limit: How many characters it can have.
        fold: Makes names equal that the tracker may not tell apart, such as by their case.

    Returns:
        The values by name. If several metrics would share a name, the one whose name needed no change keeps it; the
        others get a suffix computed from their identity.
    """
    cleaned = [(metric, clean(metric)) for metric in metrics]
    bearers = Counter(fold(name) for _, name in cleaned)
    named: dict[str, float] = {}
    taken: set[str] = set()
    # Unchanged names first; then sorted, so that a name does not depend on which metric comes first.
    for metric, name in sorted(cleaned, key=lambda pair: (pair[0].name != pair[1], pair[0].identity)):
        is_shared = fold(name) in taken or (name != metric.name and bearers[fold(name)] > 1)
        if is_shared or (limit is not None and len(name) > limit):
            name = _with_suffix(name, metric.identity, limit, taken, fold)
        named[name] = metric.value
        taken.add(fold(name))
    return named


def _with_suffix(
    name: str, identity: tuple[str, str, str], limit: int | None, taken: set[str], fold: Callable[[str], str]
) -> str:
    text = "\0".join(identity).encode("utf-8", "surrogatepass")
    for attempt in itertools.count():
        suffix = "_" + blake2b(text, digest_size=4, salt=str(attempt).encode()).hexdigest()
        candidate = (name if limit is None else name[: limit - len(suffix)]) + suffix
        if fold(candidate) not in taken:
            break
    return candidate


def tracker_name(metric: Metric) -> str:
    return outside_name(metric.name)


class TrackerExporter(BaseExporter):
    """An exporter of chosen statistics under a prefix, each report with a step. A subclass names its ``package``."""

    extra = ""
    """The extra of this distribution that installs the package; its own name if empty."""

    def __init__(
        self,
        prefix: str = "",
        *,
        stats: Sequence[str] = ("mean",),
        whole_run: bool = False,
        by_rank: bool = False,
        strict: bool = False,
    ) -> None:
        """Choose what to log.

        Args:
            prefix: Put before the names, with one slash between.
            stats: Fields of ``TimeStats`` to log; ``median_ci`` gives two names, its low and high end.
            whole_run: Report the times of the whole run each time, as ``run_mean`` and so on, instead of the times
                since this exporter's last report.
            by_rank: Put the rank, where known, into the names: ``prefix/rank3/CPU/BATCH``.
            strict: Raise ``ExportError`` if logging fails, instead of warning once.

        Raises:
            MissingPackageError: The package is not installed.
            ValueError: A statistic is unknown.
        """
        super().__init__(strict=strict, whole_run=whole_run)
        caller = type(self).__name__
        if not isinstance(prefix, str):
            raise TypeError(f"{caller} was given prefix={prefix!r}; give a string, such as 'train'.")
        if isinstance(stats, str):
            raise TypeError(f"{caller} was given stats={stats!r}; give a tuple, such as stats=({stats!r},).")
        self._stats = tuple(dict.fromkeys(stats))
        unknown = [name for name in self._stats if name not in VALID_STATS]
        if unknown or not self._stats:
            what = f"{', '.join(map(repr, unknown))}, which TimeStats does not have" if unknown else "no statistic"
            raise ValueError(f"{caller} was asked to log {what}; choose from {', '.join(VALID_STATS)}.")
        bare = prefix.strip("/")
        self._prefix = f"{bare}/" if bare else ""
        self._by_rank = by_rank
        self._numbers: dict[Hashable, int] = {}
        package = self.package or ""
        self._library: Any = require(package, extra=self.extra or package, caller=caller)

    def _metrics(self, snapshot: Snapshot, separator: str = "/") -> list[Metric]:
        """The chosen statistics of each region that has times.

        The mean has the name ``prefix/CPU/BATCH``, other statistics that name with ``separator`` and theirs added;
        ``median_ci`` gives two, ``median_ci_low`` and ``median_ci_high``. Unknown and infinite values are left out. The
        memory at a region's ends follows where it was read: ``prefix/CPU/BATCH`` with ``max_host_rss_bytes`` added.
        Statistics of the whole run are called ``run_mean`` and so on, so that they are not taken for those since the
        last report.
        """
        prefix = self._prefix
        if self._by_rank and snapshot.rank is not None:
            prefix += f"rank{snapshot.rank}/"
        metrics = []
        for region in snapshot:
            if region.stats is None:
                continue
            before = f"{prefix}{region.device}/"
            name = before + region.name
            values = {stat: getattr(region.stats, stat) for stat in self._stats}
            if "median_ci" in values:
                low, high = values.pop("median_ci") or (None, None)
                values |= {"median_ci_low": low, "median_ci_high": high}
            for stat, value in values.items():
                if value is not None and math.isfinite(value):
                    ending = f"{separator}run_{stat}" if self.whole_run else "" if stat == "mean" else separator + stat
                    metrics.append(Metric((region.device, region.name, stat), name + ending, value, len(before)))
            for what in MAXIMA:
                size_bytes = getattr(region.memory, what, None)
                if size_bytes is not None:
                    identity = region.device, region.name, what
                    metrics.append(Metric(identity, name + separator + what, float(size_bytes), len(before)))
        return metrics

    def _number(self, where: Hashable, step: int | None) -> int:
        # Trackers need a step: a report without one gets the next.
        self._numbers[where] = number = self._numbers.get(where, -1) + 1 if step is None else step
        return number


class CometExporter(TrackerExporter):
    """Log each snapshot to a Comet experiment, online or offline.

    Names are ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH/p95`` and so on for other
    statistics. They have the step that ``export`` is given, or Comet's current one. Comet's own thread sends them.

    It is given them on the exporting thread: an experiment has one current step and one context, those of its user. The
    exporter starts no experiment; without one it warns once.
    """

    package = "comet_ml"
    extra = "comet"

    def __init__(self, prefix: str = "", *, experiment: Any = None, **settings: Any) -> None:
        """Choose what to log and where.

        Args:
            prefix: Put before the names, with one slash between.
            experiment: A Comet experiment; None is the running one.
            **settings: ``stats``, ``whole_run``, ``by_rank`` and ``strict``, as of every tracker's exporter.
        """
        super().__init__(prefix, **settings)
        self._experiment = experiment

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        experiment = self._experiment or self._library.get_running_experiment()
        if experiment is None:
            raise ExportError("no Comet experiment is running; call comet_ml.start() first, or pass experiment=")
        if metrics := self._metrics(snapshot):
            experiment.log_metrics(distinct(metrics, tracker_name), step=step)


class TrackioExporter(TrackerExporter):
    """Log each snapshot to a Trackio run, as a row.

    Keys are ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH/p95`` and so on for other statistics.
    A row has the step that ``export`` is given, or the next number. Trackio's own thread writes or sends it, and is
    given it on the exporting thread: in order with the user's rows, and before the run is finished.

    The exporter starts no run; without one it warns once.
    """

    package = "trackio"

    def __init__(self, prefix: str = "", *, run: Any = None, **settings: Any) -> None:
        """Choose what to log and where.

        Args:
            prefix: Put before the keys, with one slash between.
            run: What ``trackio.init`` returned; None is the run of the exporting thread.
            **settings: ``stats``, ``whole_run``, ``by_rank`` and ``strict``, as of every tracker's exporter.
        """
        super().__init__(prefix, **settings)
        self._run = run
        self._noted: Any = None

    def note_destination(self) -> None:
        self._noted = self._active()

    def _active(self) -> Any:
        return self._run or self._library.context_vars.current_run.get() or self._noted

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        run = self._active()
        if run is None:
            raise ExportError("no Trackio run is active; call trackio.init() first, or pass run=")
        if metrics := self._metrics(snapshot):
            run.log(distinct(metrics, tracker_name), step=self._number(id(run), step))


_files = itertools.count()


class TensorBoardExporter(BackgroundExporter, TrackerExporter):
    """Write each snapshot to an event file of TensorBoard, without torch or TensorFlow.

    Scalars are called ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH/p95`` and so on for other
    statistics. The histogram of each region is ``prefix/CPU/BATCH/times``, in seconds, from the timer's own bins. Of
    several ranks each writes to a separate folder, ``folder/rank3``, which TensorBoard shows as a run.

    tensorboardX's queue is not used: its thread ends at a full disk, and the program would wait for it. After a fault
    the next report begins another file.
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

    def _destination(self, step: int | None) -> int:
        return self._number(None, step)

    def _send(self, snapshot: Snapshot, destination: int, timeout_s: float | None) -> None:
        metrics = self._metrics(snapshot)
        values = [
            {"tag": tag, "simple_value": value, "metadata": {"summary_description": _unit(tag)}}
            for tag, value in distinct(metrics, tracker_name).items()
        ]
        for region in snapshot if self._histograms else ():
            if region.distribution is not None and region.distribution.count:
                tag = f"{self._prefix}{region.device}/{region.name}/times"
                values.append({"tag": outside_name(tag), "histo": _histogram(region.distribution)})
        if not values:
            return
        try:
            writer = self._open_writer(snapshot)
            event = import_module("tensorboardX.proto.event_pb2").Event
            writer.write_event(event(wall_time=snapshot.unix_time_s, step=destination, summary={"value": values}))
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
            suffix = f".{self._pid}.{next(_files)}"
            self._writer = EventsWriter(os.path.join(folder, "events"), filename_suffix=suffix)
        return self._writer

    def _close(self) -> None:
        super()._close()
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
