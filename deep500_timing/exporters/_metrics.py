"""A snapshot as named numbers, and what exporters to trackers share."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing._base.memory_usage import MAXIMA
from deep500_timing._base.require import require
from deep500_timing._summary.stats import TimeStats
from deep500_timing.exporters._base import BaseExporter
from deep500_timing.exporters._files import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

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


def check_stats(stats: Sequence[str], caller: str) -> tuple[str, ...]:
    if isinstance(stats, str):
        raise TypeError(f"{caller} was given stats={stats!r}; give a tuple, such as stats=({stats!r},).")
    chosen = tuple(dict.fromkeys(stats))
    unknown = [name for name in chosen if name not in VALID_STATS]
    if unknown or not chosen:
        what = f"{', '.join(map(repr, unknown))}, which TimeStats does not have" if unknown else "no statistic"
        raise ValueError(f"{caller} was asked to log {what}; choose from {', '.join(VALID_STATS)}.")
    return chosen


def check_prefix(prefix: str, caller: str) -> str:
    """A user's prefix with exactly one slash at its end, or nothing."""
    if not isinstance(prefix, str):
        raise TypeError(f"{caller} was given prefix={prefix!r}; give a string, such as 'train'.")
    bare = prefix.strip("/")
    return f"{bare}/" if bare else ""


def metrics_of(
    snapshot: Snapshot, stats: Sequence[str], *, prefix: str, separator: str, whole_run: bool = False
) -> Iterator[Metric]:
    """The chosen statistics of each region that has times.

    The mean has the name ``prefix + "CPU/BATCH"``, other statistics that name with ``separator`` and theirs added;
    ``median_ci`` gives two, ``median_ci_low`` and ``median_ci_high``. Unknown and infinite values are left out. The
    memory at a region's ends follows where it was read: ``prefix + "CPU/BATCH"`` with
    ``max_host_rss_bytes`` added. Statistics of the whole run are called ``run_mean`` and so on, so that they are not
    taken for those since the last report.
    """
    for region in snapshot:
        if region.stats is None:
            continue
        before = f"{prefix}{region.device}/"
        name = before + region.name
        for stat, value in _numbers(region.stats, stats):
            if value is not None and math.isfinite(value):
                if whole_run:
                    own = f"{name}{separator}run_{stat}"
                else:
                    own = name if stat == "mean" else name + separator + stat
                yield Metric((region.device, region.name, stat), own, value, len(before))
        for what in MAXIMA if region.memory is not None else ():
            size_bytes = getattr(region.memory, what)
            if size_bytes is not None:
                own = name + separator + what
                yield Metric((region.device, region.name, what), own, float(size_bytes), len(before))


def _numbers(stats: TimeStats, chosen: Sequence[str]) -> Iterator[tuple[str, float | None]]:
    for name in chosen:
        value = getattr(stats, name)
        if name == "median_ci":
            low, high = value or (None, None)
            yield "median_ci_low", low
            yield "median_ci_high", high
        else:
            yield name, value


def distinct(
    metrics: Sequence[Metric],
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
    cleaned = [clean(metric) for metric in metrics]
    bearers = Counter(map(fold, cleaned))
    owners: dict[str, int] = {}
    # Sorted, so that a name does not depend on which metric comes first.
    for place in sorted(range(len(metrics)), key=lambda place: metrics[place].identity):
        name = cleaned[place]
        fits = limit is None or len(name) <= limit
        if fits and (bearers[fold(name)] == 1 or metrics[place].name == name):
            owners.setdefault(fold(name), place)
    named = {cleaned[place]: metrics[place].value for place in owners.values()}
    taken = set(owners)
    for place, metric in enumerate(metrics):
        if owners.get(fold(cleaned[place])) != place:
            name = _with_suffix(cleaned[place], metric.identity, limit, taken, fold)
            named[name] = metric.value
            taken.add(fold(name))
    return named


def utf8_name(metric: Metric) -> str:
    return encode(metric.name).decode()


def _with_suffix(
    name: str, identity: tuple[str, str, str], limit: int | None, taken: set[str], fold: Callable[[str], str]
) -> str:
    text = "\0".join(identity).encode("utf-8", "surrogatepass")
    for attempt in range(1000):
        suffix = "_" + blake2b(text, digest_size=4, salt=str(attempt).encode()).hexdigest()
        candidate = (name if limit is None else name[: limit - len(suffix)]) + suffix
        if fold(candidate) not in taken:
            return candidate
    raise AssertionError("unreachable: a thousand hashes are taken")


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
        name = type(self).__name__
        self._prefix = check_prefix(prefix, name)
        self._stats = check_stats(stats, name)
        self._by_rank = by_rank
        self._numbers: dict[Hashable, int] = {}
        package = self.package or ""
        self._library: Any = require(package, extra=self.extra or package, caller=name)

    def _metrics(self, snapshot: Snapshot, separator: str = "/") -> list[Metric]:
        prefix = self._prefix
        if self._by_rank and snapshot.rank is not None:
            prefix += f"rank{snapshot.rank}/"
        return list(metrics_of(snapshot, self._stats, prefix=prefix, separator=separator, whole_run=self.whole_run))

    def _number(self, where: Hashable, step: int | None) -> int:
        # Trackers need a step: a report without one gets the next.
        number = self._numbers.get(where, -1) + 1 if step is None else step
        self._numbers[where] = number
        return number
