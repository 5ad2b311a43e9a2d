"""Open regions: who has which one open, since when, on which thread.

This file, ``intervals.py`` and ``timer.py`` are the hot path. They run as plain Python and, with the C types in
the ``.pxd`` beside each, compiled by Cython. What differs between the two forms stands under ``cython.compiled``.

How it works. A :class:`Recorder` keeps one :class:`ThreadRegions` per thread, and that one :class:`Region` per key. A
thread only ever writes to its own, so that recording needs no lock; readers copy.

Anything may run between two lines of ours on the same thread, and raise (see ``intervals.py``). So a region is opened
by the last statement of a start and closed by the first of an end, several attributes that belong together are set in
one statement, and what a start has prepared is in local variables until then.

The file is long because its three classes are one thing to the compiler: they hold each other by C types, and what a
start or an end runs through lies side by side in one module, in few lines of the processor's cache.
"""

from __future__ import annotations

from _thread import get_ident
from operator import index
from time import perf_counter_ns

from deep500_timing._base.time_type import TimeType
from deep500_timing._recording import threads as _life
from deep500_timing._recording.intervals import Intervals
from deep500_timing.exceptions import RegionOpenError

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
    from deep500_timing._base import cython_stub as cython

if not cython.compiled:
    from deep500_timing._base.cython_stub import in_c

    forget_regions = keep = known_regions_of = remember_regions = in_c
    clock_ns = perf_counter_ns
    thread_id = get_ident

    def look_up(regions: ThreadRegions, key: Any) -> Region | None:
        """The region of that key, None if there is none or the key cannot be one."""
        try:
            return regions.by_key[key]
        except (KeyError, TypeError):
            return None


COMPILED: bool = cython.compiled

_IGNORE_NEXT_END = 2**32 - 1
"""Generation value that makes the region's next unmatched ``end`` a no-op."""
SHARED = 1
"""Stands for a thread where regions are shared by all threads; no system gives a thread this identity, or any other odd
one below some thousands."""
_ASIDE = 2
"""Identity of regions whose thread is recomputing, see :func:`begin_recomputation`."""
_MOST = 2**63 - 1
_NEVER = -_MOST - 1
_NOT_COUNTED, _FAILED, _DISCARDED = 0, 1, 2
"""What becomes of a region that is closed without an interval."""


class Region:
    """One region on one thread: a context manager, and a handle that saves the look-up by key.

    ``timer.region(key)`` hands out the same object each time. A handle that reaches another thread serves that
    thread's region of the same key.
    """

    __slots__ = (
        "_block_ns",
        "_device_handle",
        "_device_intervals",
        "_generation",
        "_interrupted_ns",
        "_intervals",
        "_is_open",
        "_key",
        "_name",
        "_open_pair",
        "_pair",
        "_start_ns",
        "_suspended",
        "_thread",
        "_timed_depth",
        "_timer",
    )

    # Compiled, an object that was never set up would be read as it is.
    if cython.compiled:

        def __cinit__(self, key: TimeType | str, name: str, thread: ThreadRegions, timer: Recorder) -> None:
            self._set_up(key, name, thread, timer)

    else:

        def __init__(self, key: TimeType | str, name: str, thread: ThreadRegions, timer: Recorder) -> None:
            """Handed out by :meth:`Timer.region`; not for direct use."""
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
        self._intervals = timer._new_intervals()
        self._device_intervals: Intervals | None = None
        self._device_handle: Any = None
        self._pair: Any = None
        """What the device needs to know of a stretch, between two of them, if there ever was one."""
        self._open_pair: Any = None
        """The same of the stretch that is open, if it is open on the device as well."""
        self._suspended: tuple[int, Any, Any] | tuple[()] | None = () if timer._is_watched(name) else None
        """What an end has to do besides: start and pair of the stretch that a second entry has interrupted, and the
        same of the one before it; or nothing of the kind, but to tell that it has ended: empty."""
        self._timed_depth = 0
        """Calls of a function that is timed under this key, within one another, on this thread."""
        if not cython.compiled:
            self._block_ns = _NEVER
            """The start of the stretch that a ``with`` block has opened last."""
        self._interrupted_ns = _NEVER
        """The start of the stretch in which an exception is known to have come, see ``misuse.py``."""

    @property
    def key(self) -> TimeType | str:
        """What the timer was asked for."""
        return self._key

    @property
    def name(self) -> str:
        """The key's name: ``"BATCH"``, or the user's own string."""
        return self._name

    @property
    def is_open(self) -> bool:
        """Whether it was started, on the thread that the handle was made on, and not ended yet."""
        return self._is_open or bool(self._suspended)

    def start(self) -> None:
        """Open the region.

        Raises:
            RegionOpenError: The calling thread has it open already.
        """
        timer = self._timer
        if not timer._enabled:
            return
        region = self
        if thread_id() != self._thread.ident:
            region = timer._find(self._key)
        if region._is_open:
            timer._start_of_open(region, False)
        region._start_ns, region._is_open = clock_ns() if timer._native else timer._read_clock(), True

    def end(self) -> None:
        """Close the region and keep its interval.

        Raises:
            RegionNotOpenError: The calling thread does not have it open.
        """
        timer = self._timer
        if not timer._enabled:
            return
        now_ns = clock_ns() if timer._native else timer._read_clock_at_end(self._key)
        region = self
        if thread_id() != self._thread.ident:
            region = timer._find(self._key)
        if not region._is_open and not timer._resume(region):
            timer._end_of_closed(region)
            return
        if region._open_pair is not None:
            timer._mismatch(region, False)
        start_ns, region._is_open = region._start_ns, False
        # Intervals.append, written out as in Timer.end.
        if cython.compiled:
            keep(region._intervals, start_ns, now_ns)
        else:
            intervals = region._intervals
            buffer = intervals.buffer
            buffer += (start_ns, now_ns)
            if len(buffer) > intervals.limit:
                intervals.flush_block()
        if region._suspended is not None:
            timer._after_end(region)

    def __enter__(self) -> Region:
        """Open the region."""
        timer = self._timer
        if (
            not cython.compiled  # where the interpreter has a way of its own: `enter` in the .pxd
            and timer._enabled
            and timer._native
            and not self._is_open
            and thread_id() == self._thread.ident
        ):
            start_ns = clock_ns()
            # Nothing is called from here on, so that nothing can come between.
            self._block_ns, self._start_ns, self._is_open = start_ns, start_ns, True
            return self
        try:
            self.start()
            if not cython.compiled:
                self._block_ns = self._start_ns
            return self
        except RegionOpenError:
            raise
        except BaseException:
            # If it was opened before that, its end will not be called.
            self._interrupted_ns = self._start_ns
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the region; after an exception its interval is counted as failed and not kept."""
        if kind is not None:
            self._leave_by_exception()
        elif cython.compiled:
            self.end()
        else:
            timer = self._timer
            if (
                timer._enabled
                and timer._native
                and self._open_pair is None
                and self._suspended is None
                and thread_id() == self._thread.ident
            ):
                # As in end, which is another call away.
                now_ns = clock_ns()
                if self._is_open:
                    intervals = self._intervals
                    buffer = intervals.buffer
                    start_ns, self._is_open = self._start_ns, False
                    buffer += (start_ns, now_ns)
                    if len(buffer) > intervals.limit:
                        intervals.flush_block()
                else:
                    self.end()
            else:
                self.end()
        if not cython.compiled:
            self._block_ns = _NEVER

    def _leave_by_exception(self) -> None:
        self._fail()
        self._thread.exception_ns = self._timer.now_ns()
        self._thread.exception_from_ns = self._start_ns

    def _fail(self) -> bool:
        # See Timer.fail.
        timer = self._timer
        region = self
        if thread_id() != self._thread.ident:
            region = timer._find(self._key)
        if not region._is_open and not timer._resume(region):
            return False
        timer._forget_open(region, _FAILED)
        return True

    def _device_store(self) -> Intervals:
        # The intervals of this region on the device, made if there are none yet.
        if self._device_intervals is None:
            self._device_intervals = self._timer._new_intervals()
        return self._device_intervals

    # What named timers, which keep the time themselves, do with a region of their own.

    def _open_at(self, start_ns: int) -> None:
        self._start_ns, self._is_open = start_ns, True

    def _keep_until(self, end_ns: int) -> int:
        # Close it and return when it was opened.
        start_ns, self._is_open = self._start_ns, False
        self._intervals.append(start_ns, end_ns)
        return start_ns

    def _opened_ns(self) -> int:
        return self._start_ns

    def _ignores_end(self) -> bool:
        # Whether an end without a start is to be ignored, this once.
        if self._generation == self._timer._generation:
            return False
        self._generation = self._timer._generation
        return True

    def __repr__(self) -> str:
        """Show the key and the state."""
        return f"<region {self._name!r}, {'open' if self.is_open else 'closed'}, {self._intervals.count} intervals>"

    def __reduce__(self) -> Any:
        """Refuse: a region belongs to a thread."""
        from deep500_timing._recording.misuse import error_of_handle

        raise error_of_handle(self._name)


class KeptMethod:
    """Stands for a method of :class:`Region` in the compiled form; each region keeps the one that is bound to it.

    A ``with`` statement asks for ``__enter__`` and ``__exit__`` bound to the region. Making the two anew each time
    costs more than reading the clock twice; plain Python binds a method faster than a descriptor of ours could answer.
    The interpreter's own way to them is ``kept_method`` in the ``.pxd``, which also takes a shorter way into them.
    """

    __slots__ = ("is_exit", "method")

    def __init__(self, method: Any, is_exit: bool) -> None:
        """Stand for ``__exit__`` or for ``__enter__``."""
        self.method = method
        self.is_exit = is_exit

    def __get__(self, instance: Any, owner: Any) -> Any:
        """The method itself, as it is asked of the type; of something else than a region, an error."""
        return self.method if instance is None else self.method.__get__(instance, owner)


class ThreadRegions:
    """What one thread has recorded: its regions by key.

    When the thread ends, what it left open is discarded and the regions are free for another (``ident`` is 0). Thread
    ids are reused; a new thread must not inherit open regions.
    """

    __slots__ = ("__weakref__", "by_key", "exception_from_ns", "exception_ns", "ident", "watch")

    def __init__(self) -> None:
        """Start empty and free."""
        self.ident = 0
        self.by_key: dict[Any, Region] = {}
        self.exception_ns = -_MOST
        """When an exception last ended a ``with`` block on this thread,"""
        self.exception_from_ns = _MOST
        """and when that block began."""
        self.watch: ref[Any] | None = None

    def claim(self) -> None:
        """Become the calling thread's, until it ends."""
        watch = _life.watch_thread(self)
        if watch is None and _life.is_ending():
            # A finalizer in the thread's local storage. It may use them, but they stay free: the next thread of this
            # id would not be watched.
            return
        self.release()
        self.watch, self.ident = watch, get_ident()

    def release(self) -> None:
        """Discard what is open and become free."""
        for region in list(self.by_key.values()):
            region._timer._discard_all(region)
        self.ident = 0


class Recorder:
    """Keeps the regions of every thread and does what is rare; :class:`Timer` does what is frequent."""

    __slots__ = (
        "__weakref__",
        "_at_end",
        "_at_end_of",
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
    )

    # A subclass that never calls this class's __init__ has the default settings.
    if cython.compiled:

        def __cinit__(self, *_arguments: Any, **_settings: Any) -> None:
            self._set_up()

    else:

        def __new__(cls, *_arguments: Any, **_settings: Any) -> Self:
            """Make it with the default settings."""
            made = super().__new__(cls)
            made._set_up()
            return made

    def _set_up(self) -> None:
        # What a start needs that finds its region open. Imported there, one interrupt after another might never let
        # it come to its end; imported by the first region of a thread, a child that is forked by another thread in
        # that moment would wait for the import for ever.
        from deep500_timing._recording import misuse as _misuse  # noqa: F401

        self._keep_last = -1
        self._skip_first = 0
        self._clock: Clock | None = None
        self._native = True
        self._now: Any = perf_counter_ns
        self._enabled = True
        self._generation = 0
        self._logged = False
        self._threads: dict[int, ThreadRegions] = {}
        self._current = ThreadRegions()
        """Those of the thread that was here last."""
        self._set_aside: dict[int, ThreadRegions] = {}
        """Those of threads that are recomputing."""
        # What was read of the memory at the ends of regions, by their names, if somebody asked for it.
        self._memory_at_ends: dict[str, MemorySamples] = {}
        self._run: Any = None  # The log that what is recorded here goes to, if there is one.
        self._at_end: Callable[[Recorder, str], object] | None = None
        self._at_end_of: frozenset[str] | None = None
        _life.all_recorders.add(self)

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        enabled: bool = True,
        keep_last: int | None = None,
        skip_first: int = 0,
    ) -> None:
        """See :class:`deep500_timing.Timer`."""
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
        """The host clock of the user's own, which may raise; None for the system's."""
        return self._clock

    @property
    def keep_last(self) -> int | None:
        """How many intervals are kept one by one, for each region and thread; None for all."""
        return None if self._keep_last < 0 else self._keep_last

    @property
    def skip_first(self) -> int:
        """How many of the first intervals of each region, on each thread, are left out of the statistics."""
        return self._skip_first

    def _new_intervals(self) -> Intervals:
        return Intervals(self._keep_last, self._skip_first, self._logged)

    def _read_clock(self) -> int:
        # A clock of the user's own.
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

    def _read_clock_at_end(self, key: TimeType | str) -> int:
        # If it raises, the region stays open, and may be ended later or started anew.
        try:
            return self._read_clock()
        except BaseException:
            region = self._find(key)
            region._interrupted_ns = region._start_ns
            raise

    def _find(self, key: TimeType | str) -> Region:
        # The region of this key on the calling thread, made if need be.
        regions = self._current
        if thread_id() != regions.ident:
            regions = self._enter_thread()
        region = look_up(regions, key)
        if region is not None:
            return region
        return self._new_region(key, regions)

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
            InvalidKeyError: The key is neither a ``TimeType`` nor a non-empty string.
        """
        if end_ns < start_ns:
            raise ValueError(
                f"Recording {key!r} from {start_ns} to {end_ns} ns: it ends before it begins. Swap the arguments."
            )
        # What cannot be kept is an error here, not when the times are read.
        start_ns, end_ns = index(start_ns), index(end_ns)
        if start_ns < -_MOST - 1 or end_ns > _MOST or end_ns - start_ns > _MOST:
            raise OverflowError(
                f"Recording {key!r} from {start_ns} to {end_ns} ns: the times or what is between them do not fit into "
                "64 bits. Pass nanoseconds."
            )
        if self._enabled:
            self._find(key)._intervals.append(start_ns, end_ns)

    def _keep(self, key: TimeType | str, start_ns: int, end_ns: int) -> None:
        # As record, for what was read from the timer's own clock, which may run backwards.
        if self._enabled:
            self._find(key)._intervals.append(start_ns, end_ns)

    def _count_failed(self, key: TimeType | str) -> None:
        # What was timed without opening the region has failed.
        if self._enabled:
            intervals = self._find(key)._intervals
            intervals.failed += 1

    def now_ns(self) -> int:
        """The timer's host clock, in nanoseconds since an arbitrary moment."""
        return clock_ns() if self._native else self._read_clock()

    def discard(self, key: TimeType | str) -> bool:
        """Forget the region ``key`` if the calling thread has it open; it is counted as discarded.

        The ``end`` that would have closed it, as at the end of a ``with`` block, is ignored.

        Returns:
            Whether it was open.
        """
        region = self._find(key)
        if not region._is_open and not self._resume(region):
            return False
        self._discard(region)
        region._generation = _IGNORE_NEXT_END
        return True

    def fail(self, key: TimeType | str) -> bool:
        """Close the region ``key`` if the calling thread has it open; it is counted as failed and not kept.

        For a caller of ``start`` that sees an exception, as a ``with`` block does by itself.

        Returns:
            Whether it was open.
        """
        return self._find(key)._fail()

    def cancel(self, key: TimeType | str) -> None:
        """Forget the open region ``key`` without counting it: what was to be timed turned out not to exist."""
        self._forget_open(self._find(key), _NOT_COUNTED)

    def _discard(self, region: Region) -> None:
        self._forget_open(region, _DISCARDED)

    def _discard_all(self, region: Region) -> None:
        # What is open, and what a second entry has interrupted.
        while region._is_open or self._resume(region):
            self._discard(region)

    def _forget_open(self, region: Region, counted: int) -> None:
        # Its time on the device is as unknown as its host's. Nothing is called between closing and counting.
        pair, intervals = region._open_pair, region._intervals
        on_device = None if pair is None else region._device_store()
        region._is_open, region._open_pair, region._interrupted_ns = False, None, -_MOST - 1
        if counted == _FAILED:
            intervals.failed += 1
            if on_device is not None:
                on_device.failed += 1
        elif counted == _DISCARDED:
            intervals.discarded += 1
            if on_device is not None:
                on_device.discarded += 1
        self._resume(region)
        if pair is not None:
            self._take_back(region, pair)

    def _take_back(self, region: Region, pair: Any) -> None:
        # For timers that mark the device as well.
        raise NotImplementedError

    @property
    def enabled(self) -> bool:
        """Whether the timer records. May be set at any time; an ``end`` whose ``start`` was not seen is ignored."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if bool(value) == self._enabled:
            return
        self._close_all()
        self._enabled = bool(value)

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def _close_all(self) -> None:
        # Regions that are open now will not be ended in the ordinary way: ignore their next unmatched end.
        self._generation += 1
        for region in self._regions():
            self._discard_all(region)

    def _all_threads(self) -> list[ThreadRegions]:
        # Without what is only there while a thread recomputes. A list of keys is made without making anything else, in
        # the middle of which the collector could run, and with it something that changes the dict.
        found = list(self._set_aside.values())
        for ident in list(self._threads):
            regions = self._threads.get(ident)
            if regions is not None and ident not in self._set_aside:
                found.append(regions)
        return found

    def _regions(self) -> list[Region]:
        # Every region of every thread, each once though a TimeType may be known under two keys.
        seen = {}
        for regions in self._all_threads():
            for region in list(regions.by_key.values()):
                seen[id(region)] = region
        return list(seen.values())

    def _regions_of(self, name: str) -> list[Region]:
        # The region of this name on every thread, at the cost of one look-up each.
        members: Any = TimeType.__members__
        key = members.get(name, name)
        found = [regions.by_key.get(key) for regions in self._all_threads()]
        return [region for region in found if region is not None]

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def _recorded(self) -> int:
        # Intervals of every region on every thread, since they were new.
        recorded = 0
        for region in self._regions():
            recorded += region._intervals.count
        return recorded

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def _attach_log(self) -> None:
        # From now on intervals wait for a log to take them, see Intervals.since; of new regions as well.
        self._logged = True
        for region in self._regions():
            region._intervals.attach()
            if region._device_intervals is not None:
                region._device_intervals.attach()

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def _detach_log(self) -> None:
        self._logged = False
        for region in self._regions():
            region._intervals.detach()
            if region._device_intervals is not None:
                region._device_intervals.detach()

    def _shared_region(self, key: TimeType | str, number: int) -> Region:
        # A region shared by all threads; one thread's own is discarded when it ends. The same key has as many as are
        # asked for by number, from 0.
        like = self._find(key)
        ident = SHARED + 2 * number
        regions = self._threads.get(ident)
        if regions is None:
            regions = ThreadRegions()
            regions.ident = ident
            regions = self._threads.setdefault(ident, regions)
        region: Region = regions.by_key.setdefault(like._key, Region(like._key, like._name, regions, self))
        return region

    def _enter_thread(self) -> ThreadRegions:
        if cython.compiled:
            known: ThreadRegions | None = known_regions_of(self)
            if known is not None:
                self._current = known
                return known
        ident = get_ident()
        regions = self._threads.get(ident)
        if regions is None or regions.ident != ident:
            # A thread that has ended leaves its regions to the next, so that there are no more than threads.
            with _life.claim_lock:
                regions = self._threads.get(ident)
                if regions is None:
                    regions = self._reuse_regions(ident)
                if regions.ident != ident:
                    regions.claim()
        self._current = regions
        if cython.compiled:
            remember_regions(self, regions)
        return regions

    def _reuse_regions(self, ident: int) -> ThreadRegions:
        # A callback of the garbage collector or a signal handler that enters meanwhile on this thread comes first.
        for other in list(self._threads):
            free = self._threads.get(other)
            if free is not None and free.ident == 0 and other not in self._set_aside:
                regions = self._threads.setdefault(ident, free)
                if regions is free:
                    self._threads.pop(other, None)
                return regions
        return self._threads.setdefault(ident, ThreadRegions())

    def _new_region(self, key: TimeType | str, regions: ThreadRegions) -> Region:
        if isinstance(key, TimeType):
            name, resolved = key.name, key
        else:
            name = name_of("Timing a region with the key", key)
            members: Any = TimeType.__members__
            resolved = members.get(name, name)
        region = regions.by_key.get(resolved)
        if region is None:
            # Not set but kept if a callback of the garbage collector has made it meanwhile.
            region = regions.by_key.setdefault(resolved, Region(resolved, name, regions, self))
        if type(key) is str:
            # A TimeType's name is found under itself from now on. A subclass of str may compare as it likes.
            regions.by_key[key] = region
        return region

    def _start_of_open(self, region: Region, always: bool) -> None:
        # Return if the start may go on. See misuse.py.
        if not region._is_open:
            return
        try:
            self._make_way(region, always)
        except RegionOpenError:
            raise
        except BaseException:
            # To tell takes its time. Interrupted in it, the next start knows at once: there was an interrupt.
            region._interrupted_ns = region._start_ns
            raise

    def _make_way(self, region: Region, always: bool) -> None:
        from deep500_timing._recording import misuse

        interrupted = region._interrupted_ns == region._start_ns
        if not interrupted and misuse.interrupts():
            open_now = (region._start_ns, region._open_pair, region._suspended)
            region._suspended, region._is_open, region._open_pair = open_now, False, None
            return
        open_s = (self.now_ns() - region._start_ns) / 1e9
        thread = region._thread
        # An exception that has ended a block in which the region was opened.
        inside = thread.exception_from_ns < region._start_ns <= thread.exception_ns
        seen = always or interrupted or inside or misuse.exception_is_known()
        if not cython.compiled and not seen and region._block_ns == region._start_ns:
            handle = region if region._open_pair is None else region._device_handle
            seen = not misuse.block_is_live(handle, region)
        if not seen:
            raise misuse.error_of_open(region._name, region._key, region._thread.ident, open_s)
        self._discard(region)
        region._generation = _IGNORE_NEXT_END
        misuse.warn_of_open(region._name, region._key, open_s)
        if region._is_open:  # That was a second entry's, and what it had interrupted is open again.
            self._make_way(region, always)

    def _call_at_end(self, function: Callable[[Recorder, str], object], names: frozenset[str] | None) -> None:
        # From now on each region that is made, or each of these names, calls it with the timer and its name when it has
        # ended, its time on host and device being kept. Regions of timers without pay nothing, see Region._suspended.
        self._at_end, self._at_end_of = function, names

    def _is_watched(self, name: str) -> bool:
        return self._at_end is not None and (self._at_end_of is None or name in self._at_end_of)

    def _after_end(self, region: Region) -> None:
        # What an end has to do besides, see Region._suspended.
        self._resume(region)
        self._tell_end(region)

    def _tell_end(self, region: Region) -> None:
        if self._at_end is not None and self._is_watched(region._name):
            self._at_end(self, region._name)

    def _resume(self, region: Region) -> bool:
        # Open again what a second entry has interrupted, if it has; see _start_of_open. Each end of an entry does so,
        # so that the code around it finds the region as it was.
        suspended = region._suspended
        if not suspended:
            return False
        start_ns, pair, before = suspended
        region._suspended, region._start_ns, region._open_pair, region._is_open = before, start_ns, pair, True
        return True

    def _end_of_closed(self, region: Region) -> None:
        if region._ignores_end():
            return
        from deep500_timing._recording.misuse import error_of_closed

        open_on = []
        for other in self._regions_of(region._name):
            if other._is_open:
                open_on.append(other._thread.ident)  # noqa: PERF401 (compiled, a comprehension knows no types)
        raise error_of_closed(region._name, region._key, region._thread.ident, open_on)

    def _mismatch(self, region: Region, gpu: bool) -> NoReturn:
        from deep500_timing._recording.misuse import error_of_mismatch

        raise error_of_mismatch(region._name, region._thread.ident, gpu)

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def reset(self) -> None:
        """Forget every finished interval and every count. Regions that are open stay open."""
        run = self._run
        for region in self._regions():
            if run is not None:
                run.retire(self, region, "CPU", region._intervals)
                if region._device_intervals is not None:
                    run.retire(self, region, "GPU", region._device_intervals)
            region._intervals = self._new_intervals()
            if region._device_intervals is not None:
                region._device_intervals = self._new_intervals()
            if region._pair is not None:
                region._pair.forget_lead()
        self._memory_at_ends = {}

    def _after_fork(self) -> None:
        # The parent reports what it recorded; the child starts with nothing, and with the one thread that it has.
        self._run = None
        self._close_all()
        self.reset()
        ident = get_ident()
        self._threads = {other: regions for other, regions in self._threads.items() if other == ident}
        self._set_aside = {}
        self._current = ThreadRegions()
        if cython.compiled:
            forget_regions(self)

    def _begin_recomputation(self, ident: int) -> None:
        if cython.compiled:
            forget_regions(self)
        regions = self._threads.pop(ident, None)
        self._set_aside[ident] = ThreadRegions() if regions is None else regions
        self._set_aside[ident].ident = _ASIDE

    @cython.locals(region=Region, known=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def _end_recomputation(self, ident: int) -> None:
        # What was recorded meanwhile is counted, and forgotten.
        if cython.compiled:
            forget_regions(self)
        regions = self._set_aside.pop(ident, None)
        if regions is None:  # It was made meanwhile, and repeats nothing.
            return
        again = self._threads.pop(ident, None)
        regions.ident = ident
        self._threads[ident] = regions
        if again is not None:
            again.ident = 0
        for region in [] if again is None else set(again.by_key.values()):
            times = region._intervals.count + region._intervals.failed + region._intervals.discarded
            if region.is_open:
                times += 1
                self._forget_open(region, _NOT_COUNTED)
            known = look_up(regions, region._key)
            if known is None:
                known = self._new_region(region._key, regions)
            intervals = known._intervals
            intervals.recomputed += times

    def _settings(self) -> dict[str, Any]:
        return {
            "clock": self._clock,
            "enabled": self._enabled,
            "keep_last": self.keep_last,
            "skip_first": self._skip_first,
        }

    def __reduce__(self) -> Any:
        """Copy and pickle the settings: the copy is a timer of its own that has recorded nothing yet.

        So a checkpoint of an object that holds a timer works, and a worker process starts with an empty one, as it
        does after a fork. To keep the times, keep ``timer.snapshot()``.
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
    # The class that declares the settings takes them; a subclass of the user's may be made in a way of its own, and has
    # its attributes from the copied state.
    rebuilt: Recorder = kind.__new__(kind)
    taker: Any = next(base for base in kind.__mro__ if "_settings" in base.__dict__)
    taker.__init__(rebuilt, **settings)
    return rebuilt


def name_of(doing: str, key: object) -> str:
    """The name of the region that a key stands for. A ``str`` is its value, whatever its class makes of it.

    Raises:
        InvalidKeyError: It is neither a ``TimeType`` nor a non-empty string; ``doing`` begins its text.
    """
    if isinstance(key, TimeType):
        return key.name
    if isinstance(key, str) and str.__len__(key):
        return str.__str__(key)
    from deep500_timing._recording.misuse import error_of_key

    raise error_of_key(doing, key)


_recomputing: dict[int, int] = {}


def begin_recomputation() -> None:
    """From now on the calling thread only repeats what was timed before, as an activation checkpoint does.

    Until :func:`end_recomputation`, its regions on every timer are counted as recomputed and keep no times. May be
    nested.
    """
    ident = get_ident()
    depth = _recomputing.get(ident, 0)
    _recomputing[ident] = depth + 1
    if depth == 0:
        for recorder in list(_life.all_recorders):
            recorder._begin_recomputation(ident)


def end_recomputation() -> None:
    """End what :func:`begin_recomputation` began, whatever was left open since."""
    ident = get_ident()
    depth = _recomputing.pop(ident, 0)
    if depth > 1:
        _recomputing[ident] = depth - 1
        return
    for recorder in list(_life.all_recorders):
        recorder._end_recomputation(ident)
