"""The timers: what a training script calls.

``start`` and ``end`` are the hot path, see ``_recording/recorder.py``. Everything else is a thin method over a
snapshot, whose parts are imported when they are asked for.

It is one long class because the interpreter calls the methods of C of a timer's own class faster than inherited ones,
and because these methods are what a user reads and completes in an editor.
"""

from __future__ import annotations

from _thread import get_ident
from os import environ
from time import perf_counter_ns

from deep500_timing._recording.recorder import Recorder, Region, name_of
from deep500_timing.devices._null import NULL_DEVICE
from deep500_timing.devices._queue import EventPair
from deep500_timing.exceptions import NoTimesError, RegionOpenError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from os import PathLike
    from types import TracebackType
    from typing import Any, Self, TypeVar

    import cython
    import numpy as np
    from numpy.typing import NDArray

    from deep500_timing._base.protocols import DeviceClock, Writable
    from deep500_timing._base.time_type import TimeType
    from deep500_timing._recording.decorators import TimedIterable
    from deep500_timing._recording.intervals import Intervals
    from deep500_timing._summary.device_use import DeviceUse
    from deep500_timing._summary.snapshot import Snapshot
    from deep500_timing._summary.stats import TimeStats
    from deep500_timing.devices._lazy import LazyDevice
    from deep500_timing.devices._null import Device
    from deep500_timing.exporters import Exporter
    from deep500_timing.runs import RunLog

    T = TypeVar("T")
    F = TypeVar("F", bound=Callable[..., Any])
    K = TypeVar("K", bound="Timer")
else:
    from deep500_timing._base import cython_stub as cython

if not cython.compiled:
    from deep500_timing._base.cython_stub import in_c
    from deep500_timing._recording.recorder import look_up

    keep = keep_methods = method_of = shorten_methods = in_c
    clock_ns = perf_counter_ns
    thread_id = get_ident


# Its methods know their annotations and defaults, but for those that are called too often to pay for it.
@cython.binding(True)  # type: ignore[untyped-decorator, unused-ignore]
class Timer(Recorder):
    """Times regions on the host and, where ``gpu=True`` asks for it, on a device, from any number of threads.

    Args:
        device_clock: The device clock, or a :func:`~deep500_timing.devices.lazy_device`. With None, ``gpu=True`` is
            accepted and records CPU times only. The adapters' ``CPUGPUTimer`` finds its clock itself.
        run: A folder in which every interval is written down, from a thread of its own, or a
            :class:`deep500_timing.runs.RunLog`. None asks ``DEEP500_TIMING_RUN`` in the environment.
        clock: A host clock of your own, with ``now_ns()``; the system's monotonic clock if None.
        enabled: False makes every call return at once; may be changed later.
        keep_last: How many intervals to keep one by one, for each region and thread; None keeps all. Count, total,
            minimum, maximum, mean and standard deviation stay exact for the whole run, percentiles within 1 %.
        skip_first: How many intervals of each region, on each thread, are warm-up and left out of the statistics.

    Raises:
        ValueError: ``keep_last`` or ``skip_first`` is negative.
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
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._device_clock = device_clock
        if device_clock is not None:
            from deep500_timing.devices._lazy import device_of

            self._device = device_of(device_clock)
        run = run or environ.get("DEEP500_TIMING_RUN")
        if run:
            from deep500_timing.runs import attach

            attach(self, run)

    @property
    def run(self) -> RunLog | None:
        """The log of the run that the timer writes into, None without one."""
        attached: RunLog | None = self._run
        return attached

    def step(self, number: int) -> None:
        """Say that the training step of that number begins, to the run if there is one.

        Without it the steps of a run are counted by BATCH. Say it where a run that is resumed must not begin at 0.
        """
        if self._run is not None and self._enabled:
            self._run.step(number)

    @cython.binding(False)  # type: ignore[untyped-decorator, unused-ignore]
    def start(self, key: TimeType | str, gpu: bool = False) -> None:
        """Open the region ``key`` on the calling thread, and on the device if ``gpu`` is true.

        A region that an exception has left open is discarded, with a warning, where the exception can be known: it is
        being handled, it has ended a notebook's cell or a block of the timer's around the start, or came out of the
        timer. Of one that was caught otherwise nothing remains to tell it from a missing end; use a ``with`` block, or
        call :meth:`fail` where it is caught.

        Raises:
            RegionOpenError: The thread has it open already.
            InvalidKeyError: The key is neither a ``TimeType`` nor a non-empty string.
        """
        if not self._enabled:
            return
        regions = self._current
        if thread_id() != regions.ident:
            regions = self._enter_thread()
        if cython.compiled:
            region = look_up(regions, key)
            if region is None:
                region = self._new_region(key, regions)
        else:
            try:
                region = regions.by_key[key]
            except (KeyError, TypeError):
                region = self._new_region(key, regions)
        if region._is_open:
            self._start_of_open(region, False)
        if gpu:
            self._start_on_device(region)
            return
        # The clock is read last here and first in the end, so that an empty region reads as little as can be; and the
        # region is opened after it, since a clock of the user's own may raise.
        region._start_ns, region._is_open = clock_ns() if self._native else self._read_clock(), True

    @cython.binding(False)  # type: ignore[untyped-decorator, unused-ignore]
    @cython.locals(now_ns=cython.longlong, start_ns=cython.longlong)  # type: ignore[untyped-decorator, unused-ignore]
    def end(self, key: TimeType | str, gpu: bool = False) -> None:
        """Close the region ``key`` on the calling thread and keep its interval. Never waits for the device.

        Args:
            key: The region.
            gpu: The same as at its start.

        Raises:
            RegionNotOpenError: The thread does not have it open.
            RegionMismatchError: It was started with another ``gpu``; it stays open.
            InvalidKeyError: The key is neither a ``TimeType`` nor a non-empty string.
        """
        if not self._enabled:
            return
        now_ns = clock_ns() if self._native else self._read_clock_at_end(key)
        regions = self._current
        if thread_id() != regions.ident:
            regions = self._enter_thread()
        if cython.compiled:
            region = look_up(regions, key)
            if region is None:
                region = self._new_region(key, regions)
        else:
            try:
                region = regions.by_key[key]
            except (KeyError, TypeError):
                region = self._new_region(key, regions)
        if not region._is_open and not self._resume(region):
            self._end_of_closed(region)
            return
        if gpu or region._open_pair is not None:
            self._end_on_device(region, gpu, now_ns)
            return
        start_ns, region._is_open = region._start_ns, False
        # Intervals.append, written out: the call would cost plain Python as much as a reading of the clock.
        if cython.compiled:
            keep(region._intervals, start_ns, now_ns)
        else:
            intervals = region._intervals
            buffer = intervals.buffer
            buffer += (start_ns, now_ns)
            if len(buffer) > intervals.limit:
                intervals.flush_block()
        if region._suspended is not None:
            self._after_end(region)

    def _start_on_device(self, region: Region) -> None:
        # The region is opened last, so that a second entry meanwhile finds it closed; and its pair is taken away, so
        # that the second entry makes one of its own.
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
        # Closed first, then the host's interval, then the device: whatever its clock raises, the rest is done.
        pair = region._open_pair
        if pair is None or not gpu:
            self._mismatch(region, bool(gpu))
        intervals = region._intervals
        try:
            if cython.compiled:
                start_ns, region._is_open, region._open_pair = region._start_ns, False, None
                intervals.append(start_ns, now_ns)
            else:
                # As in end: no call between the two, since an interrupt comes where something is called.
                buffer = intervals.buffer
                start_ns, region._is_open, region._open_pair = region._start_ns, False, None
                buffer += (start_ns, now_ns)
                if len(buffer) > intervals.limit:
                    intervals.flush_block()
            if region._suspended is not None:
                self._resume(region)
            self._end_pair(region, pair, start_ns, now_ns)
        except BaseException:
            if pair.start is not None:  # The pool counts by itself what it has taken over, and gives it back.
                store = region._device_store()
                store.failed += 1
                self._device.drop(pair)
            if region._pair is None:
                region._pair = pair
            raise
        if region._suspended is not None:
            self._tell_end(region)

    def _end_pair(self, region: Region, pair: Any, start_ns: int, end_ns: int) -> None:
        if not self._device.is_null:
            self._device.end(pair, region._device_store(), start_ns, end_ns)
        region._pair = pair

    def _take_back(self, region: Region, pair: Any) -> None:
        self._device.drop(pair)
        if region._pair is None:
            region._pair = pair

    @cython.binding(False)  # type: ignore[untyped-decorator, unused-ignore]
    def region(self, key: TimeType | str, gpu: bool = False) -> Region | DeviceRegion:
        """The region ``key`` of the calling thread, for ``with timer.region(key): ...``.

        It is the same object each time and may be kept: ``r = timer.region(key)``, then ``r.start()``, ``r.end()``.
        If the block raises, the interval is counted as failed and not kept. With ``gpu=True`` it is timed on the
        device as well.

        Raises:
            InvalidKeyError: The key is neither a ``TimeType`` nor a non-empty string.
        """
        if cython.compiled:
            region = self._find(key)
        else:
            # The same, written out: the call would cost as much as a reading of the clock.
            regions = self._current
            if thread_id() != regions.ident:
                regions = self._enter_thread()
            try:
                region = regions.by_key[key]
            except (KeyError, TypeError):
                region = self._new_region(key, regions)
        if not gpu:
            return region
        if region._device_handle is None:
            region._device_handle = DeviceRegion(self, region._key)
        handle: DeviceRegion = region._device_handle
        return handle

    @cython.binding(False)  # type: ignore[untyped-decorator, unused-ignore]
    def timed(self, key: TimeType | str, gpu: bool = False) -> Callable[[F], F]:
        """A decorator that times each call of a function, each resumption of a generator, each run of a coroutine.

        A function that calls itself is timed from the outermost call to its return. A coroutine is timed from its
        first step to its end, the time it waits included, and any number may run at once.

        Args:
            key: The region.
            gpu: Time it on the device as well; not for coroutines.

        Raises:
            TypeError: What is decorated is not callable, or is a coroutine function and ``gpu`` is true: which work on
                the stream is its own cannot be told.
            InvalidKeyError: The key is neither a ``TimeType`` nor a non-empty string.
        """
        from deep500_timing._recording.decorators import timed

        return timed(self, key, gpu)

    @cython.binding(False)  # type: ignore[untyped-decorator, unused-ignore]
    def iterate(self, iterable: Iterable[T], key: TimeType | str = "IO", gpu: bool = False) -> TimedIterable[T]:
        """Go through an iterable and time each wait for its next item.

        Args:
            iterable: What yields the items, such as a data loader.
            key: The region; ``TimeType.IO`` unless said otherwise.
            gpu: Time it on the device as well.

        Returns:
            An iterable over the same items that can be gone through as often as the original, with its ``len``.
        """
        from deep500_timing._recording.decorators import iterate

        return iterate(self, iterable, key, gpu)

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def _stores(self, key: TimeType | str, gpu: bool) -> list[Intervals]:
        # The intervals of a region on every thread, none if it was never used.
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

        With ``gpu=True`` the device's times, waiting for those on their way; each stands where the device ran it, to
        within ``timer.device.uncertainty_ns``.

        Returns:
            Shape ``(n, 2)``, in nanoseconds of :meth:`now_ns`, in the order in which they ended.
        """
        from deep500_timing._summary.reading import kept_intervals

        return kept_intervals(self._stores(key, gpu))

    def get_time(self, key: TimeType | str, gpu: bool = False) -> list[float]:
        """The times of a region in seconds, in the order in which they ended: a copy, empty for an unused region.

        With ``gpu=True`` the device's times, waiting for those on their way.
        """
        pairs = self.intervals(key, gpu)
        times: list[float] = ((pairs[:, 1] - pairs[:, 0]) / 1e9).tolist()
        return times

    def get_time_stats(self, key: TimeType | str, gpu: bool = False) -> TimeStats:
        """Summary statistics of the times of a region, in seconds.

        With ``gpu=True`` of the device's times, waiting for those on their way.

        Raises:
            NoTimesError: No time is recorded for it.
            InvalidKeyError: The key is neither a ``TimeType`` nor a non-empty string.
        """
        return _stats_or_error(self._stores(key, gpu), key, " on the device" if gpu else "")

    def snapshot(self, *, places: bool = False) -> Snapshot:
        """The times of every region at this moment, as plain frozen data.

        Open regions are counted as running. Never waits: device times that are on their way are counted as pending.

        Args:
            places: Also find out what lies in what, from every interval that is kept, which takes about a third of a
                second for a million. Tables ask for it.
        """
        from deep500_timing._summary.reading import take_snapshot

        self._device.collect(wait=False)
        return take_snapshot(self, self._device.pending(), places=places)

    def export(self, *exporters: Exporter, step: int | None = None) -> None:
        """Report to each exporter; one that fails costs a warning and none of the others.

        A report holds what was recorded since that exporter's last one of this timer, or the whole run where the
        exporter says so (``whole_run``, as tables do).

        Args:
            *exporters: The destinations.
            step: The training step that the report belongs to, an integer, if there is one.

        Raises:
            TypeError: One of them is no exporter, or the step no integer.
        """
        from deep500_timing.exporters import report

        report(self, exporters, step=step)

    def report_at_exit(self, *exporters: Exporter) -> None:
        """Leave one report when the program ends, whatever ends it.

        That is its end, an uncaught exception, Ctrl-C, or SIGTERM where the program does not handle it itself; the exit
        status stays what it was. Times that are on their way from a device are waited for. Only the process that calls
        this reports, and none that it forks. The timer lives until then.

        Args:
            *exporters: The destinations; the terminal if there is none.

        Raises:
            TypeError: One of them is no exporter.
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
        """For ``with Timer() as tmr: ...``."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close what the calling thread has open: discarded, or failed if an exception ends the block."""
        mine = [region for region in self._regions() if region.is_open and region._thread.ident == get_ident()]
        for region in sorted(mine, key=lambda region: -region._start_ns):  # the innermost first
            while region.is_open:  # A second entry may have interrupted a first.
                if kind is None:
                    self.discard(region.key)
                else:
                    self.fail(region.key)

    def print_all_time_stats(self, file: Writable | None = None) -> None:
        """Print a table of every region that was used, to ``file``, or to the standard output of rank 0."""
        from deep500_timing.exporters import TerminalExporter

        self.complete_all()
        TerminalExporter(file).export(self.snapshot(places=True))

    def save_all_time_stats(self, filename: str | PathLike[str], *, overwrite: bool = False) -> str:
        """Write the table of :meth:`print_all_time_stats` to a new file; missing folders are made.

        Args:
            filename: The file. If it exists, it is left as it is and the next free one of ``times-2.txt`` ... is taken.
            overwrite: Replace it instead.

        Returns:
            The path that was written.

        Raises:
            TypeError: It is no path.
            ValueError: The path is empty, or holds a NUL.
            OSError: The file cannot be made, for the reason that the system gives.
        """
        from deep500_timing.exporters import TextExporter

        self.complete_all()
        exporter = TextExporter(filename, overwrite=overwrite)
        exporter.export(self.snapshot(places=True))
        return exporter.path

    def log_wb_all(
        self, prefix: str = "", *, step: int | None = None, stats: Sequence[str] = ("mean",), **settings: Any
    ) -> None:
        """Log what came since the last call with the same prefix to Weights & Biases, to the run that is active.

        Args:
            prefix: Put before the keys: ``prefix/CPU/BATCH``.
            step: The training step of this report, if there is one.
            stats: Which fields of ``TimeStats`` to log; others than the mean are ``prefix/CPU/BATCH/p95``.
            **settings: As for ``WandbExporter``: ``whole_run``, ``by_rank``, ``strict``, ``timeout_s`` and so on.
        """
        from deep500_timing.exporters import WandbExporter, kept_exporter, report

        report(self, [kept_exporter(self, WandbExporter, prefix, {"stats": stats, **settings})], step=step)

    def log_mlflow_all(
        self, prefix: str = "", *, step: int | None = None, stats: Sequence[str] = ("mean",), **settings: Any
    ) -> None:
        """Log what came since the last call with the same prefix to MLflow, to the run that is active.

        Arguments as for :meth:`log_wb_all`; statistics other than the mean are ``prefix/CPU/BATCH.p95``, since MLflow's
        file store cannot hold a metric below another.
        """
        from deep500_timing.exporters import MlflowExporter, kept_exporter, report

        report(self, [kept_exporter(self, MlflowExporter, prefix, {"stats": stats, **settings})], step=step)

    def complete_all(self) -> None:
        """Wait until the device has passed every region that has ended. Allowed, never needed.

        The methods that print, save or return times do so by themselves; ``snapshot`` and the ``log`` methods, which
        a training loop may call at any time, do not wait.
        """
        self._device.collect(wait=True)

    def gpu_busy(self) -> DeviceUse:
        """The share of the wall time in which a timed region ran on the device, and how far the host ran ahead.

        Regions that overlap, on several streams or one within another, count once. Never waits: what the device has
        not passed yet is left out. Work outside of regions with ``gpu=True`` is not seen.
        """
        from deep500_timing._summary.device_use import device_use

        self._device.collect(wait=False)
        stores, leads = [], []
        for region in self._regions():
            pair = self._pair_of(region)
            if region._device_intervals is not None and pair is not None and pair.now_ns is not None:
                stores.append(region._device_intervals)
                leads.append((pair.lead_count, pair.lead_total_ns, pair.lead_max_ns))
        return device_use(stores, leads, self._device.uncertainty_ns)

    def _pair_of(self, region: Region) -> Any:
        return region._pair if region._open_pair is None else region._open_pair

    def device_sink(self, key: TimeType | str) -> Any:
        """Where the device times of the region ``key`` of the calling thread go; for adapters.

        What times on a device what is no region, as a collective is not, gives it to
        :meth:`deep500_timing.devices.EventPool.end` as the ``sink``.

        Raises:
            InvalidKeyError: The key is neither a ``TimeType`` nor a non-empty string.
        """
        return self._find(key)._device_store()

    @property
    def device(self) -> Device:
        """What times the device: a pool of events, or the null device (``is_null``). Asking searches for nothing."""
        return self._device

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        settings["device_clock"] = self._device_clock
        return settings

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def __repr__(self) -> str:
        """Show what was recorded."""
        count = 0
        for region in self._regions():
            count += region._intervals.count
        return f"<{type(self).__name__}: {count} intervals{'' if self.enabled else ', disabled'}>"


if cython.compiled:
    # From this module, so that all of them lie together in it.
    shorten_methods(Timer, Region)
    keep_methods(Region)

CPUGPUTimer = Timer
"""The name that users of the adapters know: one class, since the interpreter calls the methods of a subclass slower."""


def call_directly(kind: type[K]) -> type[K]:
    """Let the frequent methods of a timer's subclass cost what they cost :class:`Timer` itself; for adapters.

    Compiled, the interpreter calls a method of C at once if the object is exactly of the class that has it, else by a
    longer way (1.2 times a pair). So the subclass gets the methods that it inherits as its own. What overrides them
    in a class that stands between the two in some other class's order of resolution is then not asked.
    """
    if cython.compiled:
        for name in ("start", "end", "region"):
            if getattr(kind, name) is getattr(Timer, name):
                setattr(kind, name, method_of(kind, getattr(Timer, name)))
    return kind


class DeviceRegion:
    """A region that is timed on the device as well; what ``timer.region(key, gpu=True)`` hands out.

    As :class:`Region`, it is the same object each time, and on another thread serves that thread's region.
    """

    __slots__ = ("_key", "_timer")

    def __init__(self, timer: Timer, key: TimeType | str) -> None:
        """Handed out by :meth:`Timer.region`; not for direct use."""
        self._timer = timer
        self._key = key

    @property
    def key(self) -> TimeType | str:
        """What the timer was asked for."""
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
        """Open the region on the calling thread and on the device.

        Raises:
            RegionOpenError: The calling thread has it open already.
        """
        self._timer.start(self._key, True)

    def end(self) -> None:
        """Close the region and keep its intervals.

        Raises:
            RegionNotOpenError: The calling thread does not have it open.
            RegionMismatchError: It was started without the device; it stays open.
        """
        self._timer.end(self._key, True)

    def __enter__(self) -> DeviceRegion:
        """Open the region."""
        region = self._timer._find(self._key)
        try:
            self._timer.start(self._key, True)
            if not cython.compiled:
                region._block_ns = region._start_ns
            return self
        except RegionOpenError:
            raise
        except BaseException:
            region._interrupted_ns = region._start_ns
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the region; after an exception its intervals are counted as failed and not kept."""
        if kind is None:
            self._timer.end(self._key, True)
        else:
            # Its __exit__ does the same for both, but for the end.
            self._timer._find(self._key).__exit__(kind, error, traceback)
        if not cython.compiled:
            self._timer._find(self._key)._block_ns = -(2**63)

    def __repr__(self) -> str:
        """Show the key and the state."""
        return f"<region {self.name!r} on host and device, {'open' if self.is_open else 'closed'}>"

    def __reduce__(self) -> Any:
        """Refuse: a region belongs to a thread."""
        from deep500_timing._recording.misuse import error_of_handle

        raise error_of_handle(self.name)


def _stats_or_error(stores: list[Intervals], key: TimeType | str, where: str) -> TimeStats:
    from deep500_timing._summary.reading import summarize

    times, _ = summarize(stores)
    stats, warm_up = times.stats(), times.skipped
    if stats is None:
        name = name_of("Asking for the times of", key)
        skipped = f" ({warm_up} are warm-up that skip_first leaves out)" if warm_up else ""
        raise NoTimesError(
            f"Statistics of region {name!r}{where}: no time is recorded for it{skipped}. "
            f"Time it first, or ask get_time, which answers with an empty list."
        )
    return stats
