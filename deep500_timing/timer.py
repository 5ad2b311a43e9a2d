"""The timer that a training script calls.

``start`` and ``end`` are the hot path, see ``_recording/recorder.py``. Every other method is a thin layer over a
snapshot, and has its imports inside.

It is one class because the interpreter calls a class's own C methods faster than inherited ones, and because an editor
shows its methods to users.
"""

from __future__ import annotations

from _thread import get_ident
from time import perf_counter_ns

from deep500_timing._recording.recorder import Recorder, Region, name_of
from deep500_timing.devices._device import NULL_DEVICE, EventPair
from deep500_timing.exceptions import NoTimesError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from os import PathLike
    from types import TracebackType
    from typing import Any, Self, TypeVar

    import cython
    import numpy as np
    from numpy.typing import NDArray

    from deep500_timing._base.names import TimeType
    from deep500_timing._base.protocols import Clock, DeviceClock, Writable
    from deep500_timing._recording.decorators import TimedIterable, TimedSteps
    from deep500_timing._recording.intervals import Intervals
    from deep500_timing._summary.snapshot import Snapshot
    from deep500_timing._summary.stats import TimeStats
    from deep500_timing.devices._device import Device
    from deep500_timing.devices._lazy import LazyDevice
    from deep500_timing.exporters import Exporter
    from deep500_timing.runs import RunLog

    T = TypeVar("T")
    F = TypeVar("F", bound=Callable[..., Any])
    K = TypeVar("K", bound="Timer")
else:
    from deep500_timing._base import plain as cython

if not cython.compiled:
    from deep500_timing._base.plain import in_c
    from deep500_timing._recording.recorder import look_up

    add_fast_paths = cache_methods = method_of = in_c
    clock_ns = perf_counter_ns
    thread_id = get_ident


# Methods keep their annotations and defaults, except the frequent ones, which would be slower.
@cython.binding(True)  # type: ignore[untyped-decorator, unused-ignore]
class Timer(Recorder):
    """Times regions on the host and, where ``gpu=True`` asks for it, on a device, from any number of threads.

    Every method that takes a key raises ``InvalidKeyError`` for one that is neither a ``TimeType`` nor a non-empty
    string.

    Args:
        device_clock: The device clock, or a :func:`~deep500_timing.devices.lazy_device`. With None, ``gpu=True`` is
            accepted and records CPU times only. The adapters' ``CPUGPUTimer`` finds its clock itself.
        run: A folder into which a background thread writes every interval, or a
            :class:`deep500_timing.runs.RunLog`. None takes ``DEEP500_TIMING_RUN`` from the environment.
        clock: Your own host clock, with ``now_ns()``; None takes the system's monotonic clock.
        enabled: False makes every call return at once. May be changed later. ``DEEP500_TIMING_ENABLED=0`` does the same
            for every timer.
        keep_last: How many intervals to keep one by one, per region and thread; None keeps all. Count, total,
            minimum, maximum, mean and standard deviation stay exact for the whole run, percentiles within 1 %.
        skip_first: How many first intervals of each region, per thread, are warm-up and left out of the statistics.
            A thread that follows another one has its own warm-up, and keeps about 2 kB per region when it ends.

    Raises:
        ValueError: ``keep_last`` or ``skip_first`` is negative, or a setting has a wrong value
            (docs/configuration.md).
    """

    __slots__ = ("_device", "_device_clock")

    if cython.compiled:

        def __cinit__(self, *_arguments: Any, **_settings: Any) -> None:
            self._device: Device = NULL_DEVICE

    else:

        def _set_up(self) -> None:
            super()._set_up()
            self._device = NULL_DEVICE
            self._device_clock: Any = None

    def __init__(
        self,
        device_clock: DeviceClock | LazyDevice | None = None,
        *,
        run: RunLog | str | PathLike[str] | None = None,
        clock: Clock | None = None,
        enabled: bool = True,
        keep_last: int | None = None,
        skip_first: int = 0,
    ) -> None:
        from deep500_timing._base.settings import check_settings
        from deep500_timing.devices._lazy import device_of

        settings = check_settings()
        enabled = enabled and settings["enabled"]
        super().__init__(clock=clock, enabled=enabled, keep_last=keep_last, skip_first=skip_first)
        self._device_clock = device_clock
        self._device = device_of(device_clock)
        run = run or settings["run"]
        if run:
            from deep500_timing.runs import attach

            attach(self, run)

    @property
    def run(self) -> RunLog | None:
        """The run log that the timer writes to, or None."""
        attached: RunLog | None = self._run
        return attached

    def step(self, number: int, *, time_ns: int | None = None) -> None:
        """Note in the run, if there is one, that the training step of this number begins.

        Without it, a run counts steps by BATCH from 0. Call it, or pass ``start`` to :meth:`steps`, in a resumed run.

        Args:
            number: The step.
            time_ns: When it began, in nanoseconds of :meth:`now_ns`; None for now.
        """
        if self._run is not None and self._enabled:
            self._run.step(number, time_ns)

    @cython.binding(False)  # type: ignore[untyped-decorator, unused-ignore]
    def start(self, key: TimeType | str, gpu: bool = False) -> None:
        """Open the region ``key`` on the calling thread, and on the device if ``gpu`` is true.

        A ``with`` block closes its region even after an exception; ``start`` and ``end`` do not. A region that an
        exception left open is discarded with a warning while the exception is handled, and in the next cell of a
        notebook. Elsewhere the start raises ``RegionOpenError``: call :meth:`fail` in the ``except`` clause.

        Raises:
            RegionOpenError: The thread has it open already.
        """
        if not self._enabled:
            return
        # The look-up of _find and the body of Region._open: in plain Python each call of a method costs 0.1 us.
        regions = self._current
        if thread_id() != regions.ident:
            regions = self._enter_thread()
        region = look_up(regions, key)
        if region is None:
            region = self._new_region(key, regions)
        if gpu:
            self._start_on_device(region)
            return
        if region._is_open:
            self._start_of_open(region)
        region._start_ns, region._is_open = clock_ns() if self._native else self._read_clock(), True

    @cython.binding(False)  # type: ignore[untyped-decorator, unused-ignore]
    @cython.locals(now_ns=cython.longlong)  # type: ignore[untyped-decorator, unused-ignore]
    def end(self, key: TimeType | str, gpu: bool = False) -> None:
        """Close the region ``key`` on the calling thread and keep its interval. Never waits for the device.

        Args:
            key: The region.
            gpu: The same as at its start.

        Raises:
            RegionNotOpenError: The thread does not have it open.
            RegionMismatchError: It was started with another ``gpu``; it stays open.
        """
        if not self._enabled:
            return
        now_ns = clock_ns() if self._native else self._read_clock()
        regions = self._current
        if thread_id() != regions.ident:
            regions = self._enter_thread()
        region = look_up(regions, key)
        if region is None:
            region = self._new_region(key, regions)
        if gpu or region._open_pair is not None:
            self._end_on_device(region, gpu, now_ns)
        else:
            region._close(now_ns)

    def _start_on_device(self, region: Region) -> None:
        if region._is_open:
            self._start_of_open(region)
        # The pair is taken away first, so that a second entry meanwhile makes its own.
        if self._device.is_lazy:
            self._device = self._device.find_for_regions()
        pair, region._pair = region._pair, None
        if pair is None:
            pair = EventPair(region._name, self._now)
        try:
            self._device.begin(pair)
            start_ns = clock_ns() if self._native else self._read_clock()
            region._open_pair, region._start_ns, region._is_open = pair, start_ns, True
        except BaseException:
            if region._open_pair is not pair:
                self._take_back(region, pair)
            raise

    def _end_on_device(self, region: Region, gpu: bool, now_ns: int) -> None:
        # The region is closed and the host's interval kept before the device's clock is called, which may raise.
        if not region._is_open:
            self._end_of_closed(region)
            return
        pair = region._open_pair
        if pair is None or not gpu:
            self._mismatch(region, bool(gpu))
        start_ns, region._is_open, region._open_pair = region._start_ns, False, None
        try:
            intervals = region._intervals
            intervals.append(start_ns, now_ns)
            self._resume(region)
            if not self._device.is_null:
                self._device.end(pair, region._device_store(), start_ns, now_ns)
            region._pair = pair
        except BaseException:
            if pair.start is not None:  # Else the pool has counted it, and takes its events back.
                store = region._device_store()
                store.failed += 1
            self._take_back(region, pair)
            raise
        if region._watcher is not None:
            region._watcher(self, region._name)

    def _take_back(self, region: Region, pair: Any) -> None:
        self._device.drop(pair)
        if region._pair is None:
            region._pair = pair

    @cython.binding(False)  # type: ignore[untyped-decorator, unused-ignore]
    def region(self, key: TimeType | str, gpu: bool = False) -> Region | DeviceRegion:
        """Return the calling thread's region ``key``, for ``with timer.region(key): ...``.

        It is the same object each time and may be kept: ``r = timer.region(key)``, then ``r.start()``, ``r.end()``.
        If the block raises, the interval is counted as failed and not kept. With ``gpu=True`` the device times it as
        well.
        """
        region = self._find(key)
        if not gpu:
            return region
        if region._device_handle is None:
            region._device_handle = DeviceRegion(self, region._key)
        handle: DeviceRegion = region._device_handle
        return handle

    @cython.binding(False)  # type: ignore[untyped-decorator, unused-ignore]
    def timed(self, key: TimeType | str, gpu: bool = False) -> Callable[[F], F]:
        """A decorator that times each call of a function, each resumption of a generator, each run of a coroutine.

        A call while the thread has ``key`` open is part of that stretch, as in a recursion. A coroutine is timed from
        its first step to its end, waiting included, and any number may run at once.

        Args:
            key: The region.
            gpu: Time it on the device as well; not for coroutines.

        Raises:
            TypeError: The decorated object is not callable, or is a coroutine function and ``gpu`` is true: its work
                on the stream cannot be told from that of others.
        """
        from deep500_timing._recording.decorators import timed

        return timed(self, key, gpu)

    @cython.binding(False)  # type: ignore[untyped-decorator, unused-ignore]
    def iterate(self, iterable: Iterable[T], key: TimeType | str = "IO", gpu: bool = False) -> TimedIterable[T]:
        """Iterate and time each wait for the next item.

        A wait while the thread has ``key`` open is part of that stretch.

        Args:
            iterable: Yields the items, such as a data loader.
            key: The region.
            gpu: Time it on the device as well.

        Returns:
            An iterable over the same items, with the original's ``len``, that may be iterated as often as the original.
        """
        from deep500_timing._recording.decorators import iterate

        return iterate(self, iterable, key, gpu)

    def steps(
        self, iterable: Iterable[T], *, micro_batches: int = 1, start: int | None = None, gpu: bool = False
    ) -> TimedSteps[T]:
        """Iterate over the batches of a training loop: each is a BATCH, and the wait for it an IO inside that.

        ::

            for inputs, targets in tmr.steps(loader):
                with tmr.region("FORWARD", gpu=True):
                    ...

        BATCH ends when the loop asks for the next batch, on any thread, or is left by ``break`` or ``return``. An
        exception in the loop's body, Ctrl-C included, counts it as failed. The BATCH of an iterator that the program
        drops is counted as discarded. The wait for an item that does not come is not counted, nor is a last BATCH in
        whose body nothing was timed, unlike in the one before: ``zip`` with something shorter has fetched an item too
        many. Where nothing is timed in any body, it counts; ``tmr.steps(zip(loader, other))`` is exact there. Inside a
        BATCH that is open, as that of a loop around it, the items are a part of that, and a warning says so once.

        Args:
            iterable: Yields the batches, such as a data loader, with or without a length.
            micro_batches: How many items are one BATCH, for gradient accumulation. Items are yielded one by one.
            start: The number of the first step, for a resumed run; see :meth:`step`.
            gpu: Time BATCH on the device as well.

        Returns:
            An iterable over the same items, with the original's ``len``, that may be iterated as often as the original.

        Raises:
            TypeError: ``iterable`` cannot be iterated.
            ValueError: ``micro_batches`` is not an integer of 1 or more.
        """
        from deep500_timing._recording.decorators import steps

        return steps(self, iterable, micro_batches, start, gpu)

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def _stores(self, key: TimeType | str, gpu: bool) -> list[Intervals]:
        # The intervals of a region on every thread.
        name = name_of("Asking for the times of", key)
        if gpu:
            self.complete_all()
        found = []
        for region in self._regions_of(name):
            store = region._device_intervals if gpu else region._intervals
            if store is not None:
                found.append(store)
        return found

    def intervals(self, key: TimeType | str, gpu: bool = False) -> NDArray[np.int64]:
        """When each kept interval of a region began and ended.

        With ``gpu=True``, waits for pending device times and returns when the device ran them, to within
        ``timer.device.uncertainty_ns`` and a drift of at most 0.1 ms.

        Returns:
            Shape ``(n, 2)``, in nanoseconds of :meth:`now_ns`, in the order in which they ended.
        """
        from deep500_timing._summary.reading import kept_intervals

        return kept_intervals(self._stores(key, gpu))

    def get_time(self, key: TimeType | str, gpu: bool = False) -> list[float]:
        """The times of a region in seconds, in the order in which they ended: a copy, empty for an unused region.

        With ``gpu=True``, waits for pending device times and returns the device's times.
        """
        pairs = self.intervals(key, gpu)
        times: list[float] = ((pairs[:, 1] - pairs[:, 0]).clip(0) / 1e9).tolist()
        return times

    def get_time_stats(self, key: TimeType | str, gpu: bool = False) -> TimeStats:
        """Summary statistics of the times of a region, in seconds.

        With ``gpu=True``, waits for pending device times and summarizes the device's times.

        Raises:
            NoTimesError: No time is recorded for it.
        """
        from deep500_timing._summary.reading import summarize

        times = summarize(self._stores(key, gpu))
        stats = times.stats()
        if stats is None:
            name = name_of("Asking for the times of", key)
            where = " on the device" if gpu else ""
            skipped = f" ({times.skipped} are warm-up that skip_first leaves out)" if times.skipped else ""
            raise NoTimesError(
                f"Statistics of region {name!r}{where}: no time is recorded for it{skipped}. "
                f"Time it first, or ask get_time, which answers with an empty list."
            )
        return stats

    def snapshot(self, *, places: bool = False) -> Snapshot:
        """The times of every region now, as plain frozen data.

        Open regions are counted as running. Never waits: pending device times are counted as pending.

        Args:
            places: Also determine the nesting of regions from all kept intervals, in about 0.4 s per million. Tables
                need it.
        """
        from deep500_timing._summary.reading import take_snapshot

        self._device.collect(wait=False)
        return take_snapshot(self, self._device.pending(), places=places)

    def export(self, *exporters: Exporter, step: int | None = None) -> None:
        """Report to each exporter. An exporter that fails costs a warning; the others still report.

        A report covers the time since the exporter's last report of this timer, or the whole run if the exporter has
        ``whole_run``, as tables do. Files and servers are written to in the background; ``exporter.flush()`` waits for
        that, and so does the end of the program.

        Args:
            *exporters: The destinations.
            step: The training step of the report.

        Raises:
            TypeError: An argument is not an exporter, or the step not an integer.
        """
        from deep500_timing.exporters import report

        report(self, exporters, step=step)

    def report_at_exit(self, *exporters: Exporter) -> None:
        """Report once when the program ends: normally, by an exception, by Ctrl-C or by SIGTERM.

        SIGTERM counts if the program has no handler for it. The exit status does not change. Pending device times are
        waited for. Only this process reports, not its forked children. The timer lives until then.

        Args:
            *exporters: The destinations; the terminal by default.

        Raises:
            TypeError: An argument is not an exporter.
        """
        from deep500_timing._base.at_exit import report_at_exit
        from deep500_timing.exporters import BaseExporter, TerminalExporter
        from deep500_timing.exporters._base import check_exporter

        for exporter in exporters:
            check_exporter(exporter)
        destinations = exporters or (TerminalExporter(),)

        def report() -> None:
            self.complete_all()
            self.export(*destinations)
            for exporter in destinations:
                exporter.flush()

        def prepare() -> None:
            for exporter in destinations:
                if isinstance(exporter, BaseExporter):
                    exporter.note_destination()

        report_at_exit(report, prepare)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the calling thread's open regions: as discarded, or as failed if an exception ends the block."""
        mine = [region for region in self._regions() if region.is_open and region._thread.ident == get_ident()]
        for region in sorted(mine, key=lambda region: -region._start_ns):  # the innermost first
            while region.is_open:  # A second entry may have interrupted another stretch.
                if kind is None:
                    self.discard(region.key)
                else:
                    self.fail(region.key)

    def print_all_time_stats(self, file: Writable | None = None) -> None:
        """Print a table of all regions to ``file``, or to the standard output of rank 0."""
        from deep500_timing.exporters import TerminalExporter

        self.complete_all()
        TerminalExporter(file).export(self.snapshot(places=True))

    def save_all_time_stats(self, filename: str | PathLike[str], *, overwrite: bool = False) -> str:
        """Write the table of :meth:`print_all_time_stats` to a new file, and create missing folders.

        Args:
            filename: The file. If it exists, the next free name of ``times-2.txt``, ``times-3.txt`` ... is taken.
            overwrite: Replace an existing file instead.

        Returns:
            The written path.

        Raises:
            TypeError: ``filename`` is not a path.
            ValueError: The path is empty, or holds a NUL.
            OSError: The file cannot be created.
        """
        from deep500_timing.exporters import TextExporter

        self.complete_all()
        exporter = TextExporter(filename, overwrite=overwrite)
        exporter.export(self.snapshot(places=True))
        return exporter.path

    def log_wb_all(
        self, prefix: str = "", *, step: int | None = None, stats: Sequence[str] = ("mean",), **settings: Any
    ) -> None:
        """Log the times since the last call with the same prefix to the active run of Weights & Biases.

        Args:
            prefix: Begins the keys: ``prefix/CPU/BATCH``.
            step: The training step of this report.
            stats: The fields of ``TimeStats`` to log. Fields other than the mean are ``prefix/CPU/BATCH/p95``.
            **settings: As for ``WandbExporter``: ``whole_run``, ``by_rank``, ``strict``, ``timeout_s`` and so on.
        """
        from deep500_timing.exporters import WandbExporter, kept_exporter, report

        report(self, [kept_exporter(self, WandbExporter, prefix, {"stats": stats, **settings})], step=step)

    def log_mlflow_all(
        self, prefix: str = "", *, step: int | None = None, stats: Sequence[str] = ("mean",), **settings: Any
    ) -> None:
        """Log the times since the last call with the same prefix to the active run of MLflow.

        Arguments as for :meth:`log_wb_all`. Fields other than the mean are ``prefix/CPU/BATCH.p95``, since MLflow's
        file store cannot nest metrics.
        """
        from deep500_timing.exporters import MlflowExporter, kept_exporter, report

        report(self, [kept_exporter(self, MlflowExporter, prefix, {"stats": stats, **settings})], step=step)

    def complete_all(self) -> None:
        """Wait until the device has passed every region that has ended. Allowed, never needed.

        The methods that print, save or return times call it. ``snapshot`` and the ``log`` methods do not wait.
        """
        self._device.collect(wait=True)

    def device_sink(self, key: TimeType | str) -> Any:
        """The store of the device times of the calling thread's region ``key``; for adapters.

        An adapter that times something else than a region, such as a collective, passes it as the ``sink`` of
        :meth:`deep500_timing.devices.EventPool.end`.
        """
        return self._find(key)._device_store()

    @property
    def device(self) -> Device:
        """The event pool of the device, or the null device (``is_null``). Reading it does not search for a device."""
        return self._device

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        settings["device_clock"] = self._device_clock
        return settings

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def __repr__(self) -> str:
        count = 0
        for region in self._regions():
            count += region._intervals.count
        return f"<{type(self).__name__}: {count} intervals{'' if self.enabled else ', disabled'}>"


if cython.compiled:
    add_fast_paths(Timer)
    cache_methods(Region)

CPUGPUTimer = Timer
"""The adapters' name for it: the same class, since the interpreter calls methods of a subclass slower."""


def call_directly(kind: type[K]) -> type[K]:
    """Make the frequent methods of a timer's subclass as cheap as those of :class:`Timer`; for adapters.

    Compiled, the interpreter calls a C method directly only if the object's class defines it; an inherited one costs
    1.2 times as much. So the subclass gets its inherited methods as its own. They then precede an override in a class
    between the two in the method resolution order of a further subclass.
    """
    if cython.compiled:
        for name in ("start", "end", "region"):
            if getattr(kind, name) is getattr(Timer, name):
                setattr(kind, name, method_of(kind, getattr(Timer, name)))
    return kind


class DeviceRegion:
    """A region that the device times as well, returned by ``timer.region(key, gpu=True)``.

    Like :class:`Region`, it is the same object each time and serves the calling thread's region.
    """

    __slots__ = ("_key", "_timer")

    def __init__(self, timer: Timer, key: TimeType | str) -> None:
        self._timer = timer
        self._key = key

    @property
    def key(self) -> TimeType | str:
        """The key that the timer was given."""
        return self._key

    @property
    def name(self) -> str:
        """The key's name: ``"BATCH"``, or the user's own string."""
        return self._timer._find(self._key)._name

    @property
    def is_open(self) -> bool:
        """Whether the calling thread has it open."""
        return self._timer._find(self._key).is_open

    def start(self) -> None:
        """Open the region on the calling thread and on the device."""
        self._timer.start(self._key, True)

    def end(self) -> None:
        """Close the region and keep its intervals."""
        self._timer.end(self._key, True)

    def __enter__(self) -> DeviceRegion:
        self._timer.start(self._key, True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the region. After an exception its intervals are counted as failed and not kept."""
        if kind is not None:
            self._timer.fail(self._key)
            return
        try:
            self._timer.end(self._key, True)
        except BaseException:
            self._timer.fail(self._key)
            raise

    def __repr__(self) -> str:
        return f"<region {self.name!r} on host and device, {'open' if self.is_open else 'closed'}>"

    def __reduce__(self) -> Any:
        """Refuse: a region belongs to a thread."""
        from deep500_timing._recording.misuse import error_of_handle

        raise error_of_handle(self.name)
