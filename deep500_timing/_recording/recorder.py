"""Open regions: which region is open on which thread, and since when.

This module, ``intervals.py`` and ``timer.py`` are the hot path. They run as plain Python and, with the C types in the
``.pxd`` of the same name, compiled by Cython. Differences between the two forms are under ``cython.compiled``.

A :class:`Recorder` keeps one :class:`ThreadRegions` per thread, which keeps one :class:`Region` per key. A thread
writes only to its own regions, so recording takes no lock. Readers copy.

A finalizer, a callback of the garbage collector or a signal handler may use the timer in the middle of a call (a
*second entry*). Therefore a start opens the region in its last statement, and an end closes it in its first.
"""

from __future__ import annotations

from _thread import get_ident
from operator import index
from time import perf_counter_ns

from deep500_timing._base.names import BATCH, CPU, EPOCH, GPU, TimeType
from deep500_timing._recording import threads as _life
from deep500_timing._recording.intervals import Intervals, ProcessorTimes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, NoReturn, Self
    from weakref import ref

    import cython

    from deep500_timing._base.memory_usage import MemorySamples
    from deep500_timing._base.protocols import Clock
else:
    from deep500_timing._base import plain as cython

if not cython.compiled:
    keep = Intervals.append
    clock_ns = perf_counter_ns
    thread_id = get_ident

    def look_up(regions: ThreadRegions, key: Any) -> Region | None:
        """Return the region of a key, or None."""
        try:
            return regions.by_key[key]
        except (KeyError, TypeError):
            return None


COMPILED: bool = cython.compiled

_IGNORE_NEXT_END = 2**32 - 1
"""Generation value that makes the region's next unmatched ``end`` a no-op."""
SHARED = 1
"""Thread identity of regions that all threads share. No system gives a thread a small odd identity."""
_ASIDE = 2
"""Thread identity of regions during a recomputation, see :func:`begin_recomputation`."""
_MOST = 2**63 - 1


class Region:
    """One region on one thread: a context manager, and a handle that saves the look-up by key.

    ``timer.region(key)`` returns the same object each time. A handle used on another thread serves that thread's
    region of the same key.
    """

    __slots__ = (
        "_device_handle",
        "_device_intervals",
        "_end_has_more",
        "_generation",
        "_intervals",
        "_is_open",
        "_key",
        "_name",
        "_open_pair",
        "_pair",
        "_start_ns",
        "_suspended",
        "_thread",
        "_timer",
        "_watcher",
    )

    # Compiled, an object without set-up would be read as it is.
    if cython.compiled:

        def __cinit__(self, key: TimeType | str, name: str, thread: ThreadRegions, timer: Recorder) -> None:
            self._set_up(key, name, thread, timer)

    else:

        def __init__(self, key: TimeType | str, name: str, thread: ThreadRegions, timer: Recorder) -> None:
            """Returned by :meth:`Timer.region`; not for direct use."""
            self._set_up(key, name, thread, timer)

    def _set_up(self, key: TimeType | str, name: str, thread: ThreadRegions, timer: Recorder) -> None:
        if not isinstance(timer, Recorder):
            raise TypeError(f"Making a Region of {timer!r}: ask a timer for region(key).")
        self._key = key
        self._name = name
        self._thread = thread
        self._timer = timer
        self._generation = 0
        self._is_open = False
        self._start_ns = 0
        self._intervals = timer._new_intervals(self)
        self._device_intervals: Intervals | None = None
        self._device_handle: Any = None
        self._pair: Any = None
        """The device's event pair, while the region is closed."""
        self._open_pair: Any = None
        """The device's event pair, while the region is open on the device."""
        self._suspended: list[tuple[int, Any]] | None = None
        """Start and event pair of each stretch that a second entry interrupted, the outermost first."""
        self._watcher = timer._watcher if timer._watched is None or name in timer._watched else None
        """Called with the timer and the name after each end, see :meth:`Recorder._call_at_end`."""
        self._end_has_more = self._watcher is not None
        """Whether an end calls :meth:`Recorder._after_end`: a stretch is suspended, or there is a watcher."""

    @property
    def key(self) -> TimeType | str:
        """The key that the timer was given."""
        return self._key

    @property
    def name(self) -> str:
        """The key's name: ``"BATCH"``, or the user's own string."""
        return self._name

    @property
    def is_open(self) -> bool:
        """Whether the thread that made the handle has the region open."""
        return self._is_open

    def start(self) -> None:
        """Open the region.

        Raises:
            RegionOpenError: The calling thread has it open already.
        """
        timer = self._timer
        if not timer._enabled:
            return
        region = self if thread_id() == self._thread.ident else timer._find(self._key)
        region._open()

    def end(self) -> None:
        """Close the region and keep its interval.

        Raises:
            RegionNotOpenError: The calling thread does not have it open.
        """
        timer = self._timer
        if not timer._enabled:
            return
        now_ns = clock_ns() if timer._native else timer._read_clock()
        region = self if thread_id() == self._thread.ident else timer._find(self._key)
        region._close(now_ns)

    def _open(self) -> None:
        timer = self._timer
        if self._is_open:
            timer._start_of_open(self)
        # The clock is read last here and first in the end, so that an empty region reads as short as possible. The
        # region is opened after it, since the user's own clock may raise.
        self._start_ns, self._is_open = clock_ns() if timer._native else timer._read_clock(), True

    def _close(self, now_ns: int) -> None:
        if not self._is_open:
            self._timer._end_of_closed(self)
            return
        if self._open_pair is not None:
            self._timer._mismatch(self, False)
        start_ns, self._is_open = self._start_ns, False
        keep(self._intervals, start_ns, now_ns)
        if self._end_has_more:
            self._timer._after_end(self)

    def __enter__(self) -> Region:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the region. After an exception its interval is counted as failed and not kept."""
        if kind is not None:
            self._fail()
            return
        try:
            self.end()
        except BaseException:
            self._fail()  # A block that is over cannot end its region later.
            raise

    def _fail(self) -> bool:
        # See Recorder.fail.
        timer = self._timer
        region = self if thread_id() == self._thread.ident else timer._find(self._key)
        if not region._is_open:
            return False
        timer._forget_open(region, "failed")
        return True

    def _device_store(self) -> Intervals:
        # The region's intervals on the device, created at the first use.
        if self._device_intervals is None:
            self._device_intervals = self._timer._new_intervals(None)
        return self._device_intervals

    # Used by named timers, which measure the time themselves and keep it in a separate region.

    def _open_at(self, start_ns: int) -> None:
        self._start_ns, self._is_open = start_ns, True

    def _keep_until(self, end_ns: int) -> int:
        # Close it and return when it was opened.
        start_ns, self._is_open = self._start_ns, False
        self._intervals.append(start_ns, end_ns)
        return start_ns

    def _ignores_end(self) -> bool:
        # Whether to ignore, once, an end without a start.
        if self._generation == self._timer._generation:
            return False
        self._generation = self._timer._generation
        return True

    def __repr__(self) -> str:
        return f"<region {self._name!r}, {'open' if self.is_open else 'closed'}, {self._intervals.count} intervals>"

    def __reduce__(self) -> Any:
        """Refuse: a region belongs to a thread."""
        from deep500_timing._recording.misuse import error_of_handle

        raise error_of_handle(self._name)


class CachedMethod:
    """Descriptor for a method of :class:`Region` in the compiled form; each region caches its bound method.

    A ``with`` statement binds ``__enter__`` and ``__exit__`` each time, which costs more than two readings of the
    clock. The interpreter calls ``cached_method`` in the ``.pxd``. Plain Python binds methods faster than a descriptor.
    """

    def __init__(self, method: Any, is_exit: bool) -> None:
        self.method = method
        self.is_exit = is_exit

    def __get__(self, instance: Any, owner: Any) -> Any:
        """Return the method itself for the class; binding it to anything but a region raises ``TypeError``."""
        return self.method if instance is None else self.method.__get__(instance, owner)


class ThreadRegions:
    """The regions of one thread, by key.

    When the thread ends, its open regions are discarded and its store is free for another thread (``ident`` is 0).
    Thread ids are reused; a new thread must not inherit open regions.
    """

    def __init__(self) -> None:
        self.ident = 0
        self.by_key: dict[Any, Region] = {}
        self.watch: ref[Any] | None = None

    def release(self) -> None:
        """Discard the open regions and become free."""
        for region in list(self.by_key.values()):
            region._timer._discard_all(region)
        self.ident = 0


class Recorder:
    """Keeps the regions of every thread and does the rare work; :class:`Timer` does the frequent work."""

    __slots__ = (
        "__weakref__",
        "_all_threads",
        "_clock",
        "_current",
        "_enabled",
        "_generation",
        "_keep_last",
        "_logged",
        "_memory_at_ends",
        "_native",
        "_now",
        "_run",
        "_set_aside",
        "_skip_first",
        "_threads",
        "_watched",
        "_watcher",
    )

    # A subclass that never calls this class's __init__ has the default settings.
    if cython.compiled:

        def __cinit__(self, *_arguments: Any, **_settings: Any) -> None:
            self._set_up()

    else:

        def __new__(cls, *_arguments: Any, **_settings: Any) -> Self:
            """Create it with the default settings."""
            made = super().__new__(cls)
            made._set_up()
            return made

    def _set_up(self) -> None:
        # Imported here and not at the first use: a child that another thread forks during that import would wait for
        # the import lock for ever.
        from deep500_timing._recording import misuse as _misuse  # noqa: F401

        self._keep_last = -1
        self._skip_first = 0
        self._clock: Clock | None = None
        self._native = True
        self._now: Any = perf_counter_ns
        self._enabled = True
        self._generation = 0
        self._logged = False
        self._all_threads: list[ThreadRegions] = []
        """Every store, those of ended threads included."""
        self._threads: dict[int, ThreadRegions] = {}
        """The stores by thread id. An entry is out of date if its store has another ``ident``."""
        self._current = ThreadRegions()
        """The store of the thread that called last."""
        self._set_aside: dict[int, ThreadRegions | None] = {}
        """The stores of threads that are recomputing."""
        self._memory_at_ends: dict[str, MemorySamples] = {}
        """Memory sampled at the ends of regions, by name."""
        self._run: Any = None  # The attached RunLog.
        self._watcher: Callable[[Recorder, str], object] | None = None
        self._watched: frozenset[str] | None = None
        _life.all_recorders.add(self)

    def __init__(
        self, *, clock: Clock | None = None, enabled: bool = True, keep_last: int | None = None, skip_first: int = 0
    ) -> None:
        if keep_last is not None:
            self._keep_last = _checked_count("keep_last", keep_last, ", or None for all")
        self._skip_first = _checked_count("skip_first", skip_first, "")
        self._clock = clock
        if clock is not None:
            self._native = False
            self._now = clock.now_ns
        self._enabled = bool(enabled)

    @property
    def clock(self) -> Clock | None:
        """The user's own host clock, which may raise; None for the system's."""
        return self._clock

    @property
    def keep_last(self) -> int | None:
        """How many intervals are kept one by one, per region and thread; None for all."""
        return None if self._keep_last < 0 else self._keep_last

    @property
    def skip_first(self) -> int:
        """How many first intervals of each region, per thread, are left out of the statistics."""
        return self._skip_first

    def _new_intervals(self, region: Region | None) -> Intervals:
        # Of a region on the host; without one, on a device.
        intervals = Intervals(self._keep_last, self._skip_first, self._logged, region is None)
        if self._logged and region is not None:
            self._watch(region, intervals)
        return intervals

    def _watch(self, region: Region, intervals: Intervals) -> None:
        # A log has, for each step, the time that its thread had a processor, and waited for one. Times of another clock
        # than the system's have no place among its readings.
        if self._native and region._name in (BATCH, EPOCH):
            intervals.processor = ProcessorTimes(region._thread.ident)

    def _read_clock(self) -> int:
        # The user's own clock.
        now_ns = self._now()
        if type(now_ns) is not int:
            try:
                now_ns = index(now_ns)
            except TypeError:
                from deep500_timing._recording.misuse import error_of_clock

                raise error_of_clock(self._clock, now_ns) from None
        if not cython.compiled and not -_MOST <= now_ns <= _MOST:
            raise OverflowError(f"Reading the timer's clock {self._clock!r}: {now_ns} ns do not fit into 64 bits.")
        return now_ns

    def _find(self, key: TimeType | str) -> Region:
        # The calling thread's region of this key, created at the first use.
        regions = self._current
        if thread_id() != regions.ident:
            regions = self._enter_thread()
        region = look_up(regions, key)
        return self._new_region(key, regions) if region is None else region

    def record(self, key: TimeType | str, start_ns: int, end_ns: int) -> None:
        """Keep an interval that was measured by other means, on the timer's host clock.

        Args:
            key: The region.
            start_ns: When it began, in nanoseconds of :meth:`now_ns`.
            end_ns: When it ended.

        Raises:
            ValueError: It ends before it begins.
            TypeError: A time is not an integer.
            OverflowError: A time, or the time between them, does not fit into 64 bits.
        """
        if not (type(start_ns) is int and type(end_ns) is int and 0 <= start_ns <= end_ns <= _MOST):
            from deep500_timing._recording.misuse import checked_span

            start_ns, end_ns = checked_span(key, start_ns, end_ns)
        self._keep(key, start_ns, end_ns)

    def _keep(self, key: TimeType | str, start_ns: int, end_ns: int) -> None:
        # As record, for times of the timer's own clock, which may run backwards.
        if self._enabled:
            self._find(key)._intervals.append(start_ns, end_ns)

    def now_ns(self) -> int:
        """The timer's host clock, in nanoseconds since an arbitrary moment."""
        return clock_ns() if self._native else self._read_clock()

    def discard(self, key: TimeType | str) -> bool:
        """Forget the region ``key`` if the calling thread has it open; it is counted as discarded.

        The next ``end`` of it, such as the end of its ``with`` block, is ignored.

        Returns:
            Whether it was open.
        """
        return self._forget_with_end(self._find(key), "discarded")

    def cancel(self, key: TimeType | str) -> bool:
        """Forget the region ``key`` as :meth:`discard` does, without counting it: there was nothing to time.

        Returns:
            Whether it was open.
        """
        return self._forget_with_end(self._find(key), "")

    def fail(self, key: TimeType | str) -> bool:
        """Close the region ``key`` if the calling thread has it open; it is counted as failed and not kept.

        Call it in the ``except`` clause around ``start`` and ``end``. A ``with`` block does so itself.

        Returns:
            Whether it was open.
        """
        return self._find(key)._fail()

    def _forget_with_end(self, region: Region, counter: str) -> bool:
        if not region._is_open:
            return False
        self._forget_open(region, counter)
        region._generation = _IGNORE_NEXT_END
        return True

    def _discard_all(self, region: Region) -> None:
        # The open stretch, and the stretches that second entries interrupted.
        while region._is_open:
            self._forget_open(region, "discarded")

    def _forget_open(self, region: Region, counter: str) -> None:
        # Close a region without an interval, on host and device alike, and count it, unless the counter is "".
        pair = region._open_pair
        stores = [region._intervals] if pair is None else [region._intervals, region._device_store()]
        region._is_open, region._open_pair = False, None
        if counter:
            for store in stores:
                setattr(store, counter, getattr(store, counter) + 1)
        self._resume(region)
        if pair is not None:
            self._take_back(region, pair)

    def _take_back(self, region: Region, pair: Any) -> None:
        # For timers with a device.
        raise NotImplementedError

    @property
    def enabled(self) -> bool:
        """Whether the timer records. May be set at any time; an ``end`` without a recorded ``start`` is ignored."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if bool(value) == self._enabled:
            return
        self._close_all()
        self._enabled = bool(value)

    def _close_all(self) -> None:
        # Discard every open region, and ignore the end that each would have had.
        self._generation += 1
        for region in self._regions():
            self._discard_all(region)

    def _regions(self) -> list[Region]:
        # Every region of every thread, once each: a TimeType may be known under two keys.
        found: list[Region] = []
        for store in list(self._all_threads):
            found += dict.fromkeys(list(store.by_key.values()))
        return found

    def _regions_of(self, name: str) -> list[Region]:
        # The region of this name on every thread, by one look-up per thread.
        members: Any = TimeType.__members__
        key = members.get(name, name)
        found = [store.by_key.get(key) for store in list(self._all_threads)]
        return [region for region in found if region is not None]

    def _intervals(self) -> list[Intervals]:
        # Those of every region on host and device.
        return [of for one in self._regions() for of in (one._intervals, one._device_intervals) if of is not None]

    def _attach_log(self) -> None:
        # Intervals wait for a log from now on, see Intervals.since; new regions' as well.
        self._logged = True
        for store in self._intervals():
            store.attach()
        for region in self._regions():
            self._watch(region, region._intervals)

    def _detach_log(self) -> None:
        self._logged = False
        for store in self._intervals():
            store.detach()
            if store.processor is not None:
                store.processor.stop()

    def _shared_region(self, key: TimeType | str, number: int) -> Region:
        # A region shared by all threads, which no ending thread discards. ``number``, from 0, tells apart several
        # shared regions of one key.
        like = self._find(key)
        ident = SHARED + 2 * number
        with _life.claim_lock:
            regions = self._threads.get(ident)
            if regions is None:
                regions = self._threads[ident] = self._new_store(ident)
        region: Region = regions.by_key.setdefault(like._key, Region(like._key, like._name, regions, self))
        return region

    def _enter_thread(self) -> ThreadRegions:
        # The store of the calling thread. An ended thread leaves its store to the next new one, so that there are at
        # most as many as there were threads at once; with skip_first each thread has its own warm-up, and store.
        ident = get_ident()
        regions = self._threads.get(ident)
        if regions is None or regions.ident != ident:
            with _life.claim_lock:
                regions = self._threads.get(ident)
                if regions is None or regions.ident != ident:
                    free = [] if self._skip_first else [store for store in self._all_threads if store.ident == 0]
                    regions = self._threads[ident] = free[0] if free else self._new_store(0)
                    watch = _life.watch_thread(regions)
                    # A finalizer in an ending thread's local storage uses the store as it is: it stays free, since the
                    # next thread of this id would not be watched. A second entry may have claimed it meanwhile.
                    if regions.ident != ident and not (watch is None and _life.is_ending()):
                        regions.release()
                        regions.watch, regions.ident = watch, ident
        self._current = regions
        return regions

    def _new_store(self, ident: int) -> ThreadRegions:
        regions = ThreadRegions()
        regions.ident = ident
        self._all_threads.append(regions)
        return regions

    def _new_region(self, key: TimeType | str, regions: ThreadRegions) -> Region:
        if isinstance(key, TimeType):
            name, resolved = key.name, key
        else:
            name = name_of("Timing a region with the key", key)
            members: Any = TimeType.__members__
            resolved = members.get(name, name)
        region = regions.by_key.get(resolved)
        if region is None:
            # A second entry may have created it meanwhile.
            region = regions.by_key.setdefault(resolved, Region(resolved, name, regions, self))
        if type(key) is str:
            # Finds a TimeType by its name from now on. A subclass of str may compare in its own way.
            regions.by_key[key] = region
        return region

    def _start_of_open(self, region: Region) -> None:
        # Return if the start may go on, see misuse.py.
        from deep500_timing._recording import misuse

        if misuse.is_second_entry():
            if region._suspended is None:
                region._suspended = []
            region._suspended.append((region._start_ns, region._open_pair))
            region._end_has_more, region._is_open, region._open_pair = True, False, None
            return
        open_s = (self.now_ns() - region._start_ns) / 1e9
        if not misuse.exception_is_known():
            raise misuse.error_of_open(region._name, region._key, region._thread.ident, open_s)
        self._discard_all(region)
        region._generation = _IGNORE_NEXT_END
        misuse.warn_of_open(region._name, region._key, open_s)

    def _call_at_end(self, function: Callable[[Recorder, str], object], names: frozenset[str] | None) -> None:
        # Call the function with the timer and the region's name after each end of a region of these names (None: all)
        # that is created from now on. Other timers pay nothing.
        self._watcher, self._watched = function, names

    def _after_end(self, region: Region) -> None:
        # The rare part of an end, see Region._end_has_more.
        self._resume(region)
        if region._watcher is not None:
            region._watcher(self, region._name)

    def _resume(self, region: Region) -> None:
        # Reopen the stretch that a second entry interrupted, so that the code around it finds the region as it was.
        if region._suspended:
            region._start_ns, region._open_pair = region._suspended.pop()
            region._is_open = True
            region._end_has_more = bool(region._suspended) or region._watcher is not None

    def _end_of_closed(self, region: Region) -> None:
        if region._ignores_end():
            return
        from deep500_timing._recording.misuse import error_of_closed

        open_on = [other._thread.ident for other in self._regions_of(region._name) if other.is_open]
        raise error_of_closed(region._name, region._key, region._thread.ident, open_on)

    def _mismatch(self, region: Region, gpu: bool) -> NoReturn:
        from deep500_timing._recording.misuse import error_of_mismatch

        raise error_of_mismatch(region._name, region._thread.ident, gpu)

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def reset(self) -> None:
        """Forget every finished interval and every count. Open regions stay open."""
        for region in self._regions():
            host, device = region._intervals, region._device_intervals
            if self._run is not None:
                self._run.retire(self, region, CPU, host)
                if device is not None:
                    self._run.retire(self, region, GPU, device)
            region._intervals = self._new_intervals(region)
            if device is not None:
                region._device_intervals = self._new_intervals(None)
        self._memory_at_ends = {}

    def _after_fork(self) -> None:
        # The parent reports its own times. The child starts empty, with one thread.
        self._run, self._logged = None, False
        self._close_all()
        self.reset()
        ident = get_ident()
        self._all_threads = [store for store in self._all_threads if store.ident == ident]
        self._threads = {store.ident: store for store in self._all_threads}
        self._set_aside = {}
        self._current = ThreadRegions()

    def _begin_recomputation(self, ident: int) -> None:
        # The thread has a temporary store meanwhile, which readers do not see.
        regions = self._threads.get(ident)
        if regions is not None and regions.ident == ident:
            regions.ident = _ASIDE
        else:
            regions = None
        self._set_aside[ident] = regions
        self._threads[ident] = again = ThreadRegions()
        again.ident = ident

    def _end_recomputation(self, ident: int) -> None:
        # Count the repeated intervals, and drop them.
        if ident not in self._set_aside:  # The timer was created meanwhile; its intervals are no repetition.
            return
        regions = self._set_aside.pop(ident)
        again = self._threads.pop(ident)
        again.ident = 0
        if regions is not None:
            regions.ident = ident
            self._threads[ident] = regions
        for region in dict.fromkeys(again.by_key.values()):
            times = region._intervals.count + region._intervals.failed + region._intervals.discarded
            if region.is_open:
                times += 1
                self._forget_open(region, "")
            intervals = self._find(region.key)._intervals
            intervals.recomputed += times

    def _settings(self) -> dict[str, Any]:
        return {
            "clock": self._clock,
            "enabled": self._enabled,
            "keep_last": self.keep_last,
            "skip_first": self._skip_first,
        }

    def __reduce__(self) -> Any:
        """Copy and pickle the settings, not the times: the copy is an empty timer.

        So an object that holds a timer can be checkpointed, and a worker process starts with an empty timer, as after
        a fork. To keep the times, keep ``timer.snapshot()``.
        """
        return _rebuild, (type(self), self._settings()), getattr(self, "__dict__", None) or None


def _checked_count(what: str, value: Any, or_else: str) -> int:
    try:
        count = -1 if isinstance(value, bool) else index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(f"{what}={value!r} must be a number of intervals, 0 or more{or_else}.")
    return min(count, _MOST)


def _rebuild(kind: type[Recorder], settings: dict[str, Any]) -> Recorder:
    # The class that declares the settings takes them. A user's subclass may have another __init__; its attributes come
    # from the copied state.
    rebuilt: Recorder = kind.__new__(kind)
    declaring: Any = next(base for base in kind.__mro__ if "_settings" in base.__dict__)
    declaring.__init__(rebuilt, **settings)
    return rebuilt


def name_of(doing: str, key: object) -> str:
    """Return the region's name for a key. The name of a subclass of ``str`` is its value."""
    if isinstance(key, TimeType):
        return key.name
    if isinstance(key, str) and str.__len__(key):
        return str.__str__(key)
    from deep500_timing._recording.misuse import error_of_key

    raise error_of_key(doing, key)


_recomputing: dict[int, int] = {}


def begin_recomputation() -> None:
    """Count the calling thread's regions as recomputed, without their times, until :func:`end_recomputation`.

    For code that repeats work that was timed before, such as activation checkpointing. May be nested.
    """
    ident = get_ident()
    depth = _recomputing.get(ident, 0)
    _recomputing[ident] = depth + 1
    if depth == 0:
        for recorder in list(_life.all_recorders):
            recorder._begin_recomputation(ident)


def end_recomputation() -> None:
    """End :func:`begin_recomputation`. Regions that were left open since are closed."""
    ident = get_ident()
    depth = _recomputing.pop(ident, 0)
    if depth > 1:
        _recomputing[ident] = depth - 1
        return
    for recorder in list(_life.all_recorders):
        recorder._end_recomputation(ident)
