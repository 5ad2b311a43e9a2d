"""Open regions: who has which one open, since when, on which thread.

This file, ``intervals.py`` and ``timer.py`` are the hot path. They run as plain Python and, with the C types in
the ``.pxd`` beside each, compiled by Cython. What differs between the two forms stands under ``cython.compiled``.

How it works. A :class:`Recorder` keeps one :class:`Lane` per thread, and a lane one :class:`Region` per key. A thread
only ever writes to its own lane, so that recording needs no lock; readers copy.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock, _local, get_ident
from array import array
from time import perf_counter_ns
from weakref import WeakSet, ref

from deep500_timing._ground.time_type import TimeType
from deep500_timing._recording.intervals import Intervals
from deep500_timing.exceptions import (
    InvalidKeyError,
    RegionMismatchError,
    RegionNotOpenError,
    RegionOpenError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    import cython

    from deep500_timing._ground.memory_usage import MemorySamples
    from deep500_timing._ground.protocols import Clock
else:
    from deep500_timing._ground import cython_stub as cython

if not cython.compiled:
    clock_ns = perf_counter_ns
    thread_id = get_ident

    def look_up(lane: Lane, key: Any) -> Region | None:
        """The region of that key, None if there is none or the key cannot be one."""
        try:
            return lane.regions[key]
        except (KeyError, TypeError):
            return None

    def keep_methods(_kind: type[Region]) -> None:
        """Leave the type as it is: plain Python binds a method faster than a descriptor of ours could answer."""


COMPILED: bool = cython.compiled

_all_recorders: WeakSet[Recorder] = WeakSet()
_FORGIVEN = 2**32 - 1
"""The generation of a region whose next unmatched end is ignored, whatever the timer's is."""
_adoption_lock = RLock()
_of_thread = _local()


class Region:
    """One region on one thread: a context manager, and a handle that saves the look-up by key.

    ``timer.region(key)`` hands out the same object each time. A handle that reaches another thread serves that
    thread's region of the same key.
    """

    __slots__ = (
        "generation",
        "gpu",
        "gpu_handle",
        "gpu_intervals",
        "intervals",
        "is_open",
        "key",
        "lane",
        "name",
        "pair",
        "start_ns",
        "timer",
    )

    def __init__(self, key: TimeType | str, name: str, lane: Lane, timer: Recorder) -> None:
        """Handed out by :meth:`Timer.region`; not for direct use."""
        self.key = key
        self.name = name
        self.lane = lane
        self.timer = timer
        self.generation = 0
        self.is_open = False
        self.start_ns = 0
        self.intervals = Intervals(timer.keep_last, timer.skip_first)
        self.gpu_intervals: Intervals | None = None
        self.gpu_handle: Any = None
        self.pair: Any = None
        """The device's start event and where it was recorded, if the region was ever timed there."""
        self.gpu = False

    def start(self) -> None:
        """Open the region.

        Raises:
            RegionOpenError: The calling thread has it open already.
        """
        timer = self.timer
        if not timer._enabled:
            return
        region = self
        if thread_id() != self.lane.thread:
            region = timer._find(self.key)
        if region.is_open:
            timer._start_of_open(region)
        region.gpu = False
        if timer._native:
            region.is_open = True
            region.start_ns = clock_ns()
        else:
            region.start_ns = timer._now()
            region.is_open = True

    def end(self) -> None:
        """Close the region and keep its interval.

        Raises:
            RegionNotOpenError: The calling thread does not have it open.
        """
        timer = self.timer
        if not timer._enabled:
            return
        now_ns = clock_ns() if timer._native else timer._now()
        region = self
        if thread_id() != self.lane.thread:
            region = timer._find(self.key)
        if not region.is_open:
            timer._end_of_closed(region)
            return
        if region.gpu:
            timer._mismatch(region, False)
        region.is_open = False
        # Intervals.put, written out as in Timer.end.
        intervals = region.intervals
        index = intervals.index
        intervals.buffer[index] = region.start_ns
        intervals.buffer[index + 1] = now_ns
        intervals.index = index + 2
        if index + 2 == intervals.limit:
            intervals.seal()

    def __enter__(self) -> Region:
        """Open the region."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the region; after an exception its interval is counted as failed and not kept."""
        if kind is None:
            self.end()
        else:
            self.fail()

    def fail(self) -> None:
        """Close the region, if the calling thread has it open, and count its interval as failed."""
        region = self
        if thread_id() != self.lane.thread:
            region = self.timer._find(self.key)
        if region.is_open:
            region.intervals.failed += 1
            if region.gpu:
                # Its device time is as unknown as its host time.
                store = region.gpu_store()
                store.failed += 1
            self.timer._forget_open(region)

    def gpu_store(self) -> Intervals:
        """The intervals of this region on the device, made if there are none yet."""
        if self.gpu_intervals is None:
            self.gpu_intervals = Intervals(self.timer.keep_last, self.timer.skip_first)
        return self.gpu_intervals

    def __repr__(self) -> str:
        """Show the key and the state."""
        return f"<region {self.name!r}, {'open' if self.is_open else 'closed'}, {self.intervals.count} intervals>"

    def __reduce__(self) -> Any:
        """Refuse: a region belongs to a thread."""
        raise TypeError(f"A region handle ({self.name!r}) cannot be copied or pickled; ask a timer for region(key).")


class KeptMethod:
    """Stands for a method of :class:`Region` in the compiled form, and hands out the one that each region keeps.

    A ``with`` statement asks for ``__enter__`` and ``__exit__`` bound to the region. Making the two anew each time
    costs more than reading the clock twice.
    """

    __slots__ = ("is_exit", "method")

    def __init__(self, method: Any, is_exit: bool) -> None:
        """Stand for ``__exit__`` or for ``__enter__``."""
        self.method = method
        self.is_exit = is_exit

    @cython.locals(region=Region)  # type: ignore[untyped-decorator, unused-ignore]
    def __get__(self, instance: Any, owner: Any) -> Any:
        """The bound method, or the method itself if it is asked of the type."""
        if instance is None:
            return self.method
        region = instance
        if self.is_exit:
            if region.kept_exit is None:
                region.kept_exit = self.method.__get__(region, owner)
            return region.kept_exit
        if region.kept_enter is None:
            region.kept_enter = self.method.__get__(region, owner)
        return region.kept_enter


keep_methods(Region)


class Lane:
    """What one thread has recorded: its regions by key.

    When the thread ends, what it left open is discarded and the lane is nobody's (``thread`` is 0): the system gives
    the identity of a thread that has ended to the next one at once, which must not find itself in its regions.
    """

    __slots__ = ("__weakref__", "owner", "regions", "thread")

    def __init__(self) -> None:
        """Start empty, as nobody's."""
        self.thread = 0
        self.regions: dict[Any, Region] = {}
        self.owner: ref[Any] | None = None

    def occupy(self) -> None:
        """Become the calling thread's, until it ends."""
        self.owner = _watch_thread(self)
        self.thread = get_ident()

    def vacate(self) -> None:
        """Discard what is open and become nobody's."""
        for region in list(self.regions.values()):
            if region.is_open:
                region.timer._discard(region)
        self.thread = 0


class Recorder:
    """Keeps the regions of every thread and does what is rare; :class:`Timer` does what is frequent."""

    __slots__ = (
        "__weakref__",
        "_clock",
        "_enabled",
        "_generation",
        "_lane",
        "_lanes",
        "_memory_at_ends",
        "_native",
        "_now",
        "_run",
        "keep_last",
        "skip_first",
    )

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        enabled: bool = True,
        keep_last: int | None = None,
        skip_first: int = 0,
    ) -> None:
        """See :class:`deep500_timing.Timer`."""
        if keep_last is not None and not _is_count(keep_last):
            raise ValueError(f"keep_last={keep_last!r} must be a number of intervals, 0 or more, or None for all.")
        if not _is_count(skip_first):
            raise ValueError(f"skip_first={skip_first!r} must be a number of intervals, 0 or more.")
        self.keep_last = -1 if keep_last is None else keep_last
        self.skip_first = skip_first
        self._clock = clock
        self._native = clock is None
        self._now = perf_counter_ns if clock is None else clock.now_ns
        self._enabled = enabled
        self._generation = 0
        self._lanes: dict[int, Lane] = {}
        self._lane = Lane()
        # What was read of the memory at the ends of regions, by their names, if somebody asked for it.
        self._memory_at_ends: dict[str, MemorySamples] = {}
        self._run: Any = None  # The log that what is recorded here goes to, if there is one.
        _all_recorders.add(self)

    def _find(self, key: TimeType | str) -> Region:
        # The region of this key on the calling thread, made if need be.
        lane = self._lane
        if thread_id() != lane.thread:
            lane = self._enter_thread()
        region = look_up(lane, key)
        if region is not None:
            return region
        return self._new_region(key, lane)

    def record(self, key: TimeType | str, start_ns: int, end_ns: int) -> None:
        """Keep an interval that was measured by other means, on the timer's host clock.

        Args:
            key: The region.
            start_ns: When it began, in nanoseconds of :meth:`now_ns`.
            end_ns: When it ended.

        Raises:
            ValueError: It ends before it begins.
            TypeError: A time is not an integer.
            OverflowError: A time does not fit into 64 bits.
            InvalidKeyError: The key is neither a ``TimeType`` nor a non-empty string.
        """
        if end_ns < start_ns:
            raise ValueError(
                f"Recording {key!r} from {start_ns} to {end_ns} ns: it ends before it begins. Swap the arguments."
            )
        array("q", (start_ns, end_ns))  # What is no integer of 64 bits is an error here, not when the times are read.
        if self._enabled:
            self._find(key).intervals.put(start_ns, end_ns)

    def now_ns(self) -> int:
        """The timer's host clock, in nanoseconds since an arbitrary moment."""
        return clock_ns() if self._native else self._now()

    def discard(self, key: TimeType | str) -> bool:
        """Forget the region ``key`` if the calling thread has it open; it is counted as discarded.

        The ``end`` that would have closed it, as at the end of a ``with`` block, is ignored.

        Returns:
            Whether it was open.
        """
        region = self._find(key)
        if not region.is_open:
            return False
        self._discard(region)
        region.generation = _FORGIVEN
        return True

    def discard_quietly(self, key: TimeType | str) -> None:
        """Forget the open region ``key`` without counting it: what was to be timed turned out not to exist."""
        self._forget_open(self._find(key))

    def _discard(self, region: Region) -> None:
        region.intervals.discarded += 1
        if region.gpu:
            store = region.gpu_store()
            store.discarded += 1
        self._forget_open(region)

    def _forget_open(self, region: Region) -> None:
        # Timers that mark the device as well take the mark back.
        region.is_open = False
        region.gpu = False

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

    def _close_all(self) -> None:
        # Regions that are open now will not be ended in the ordinary way: forgive their next unmatched end.
        self._generation += 1
        for region in self._regions():
            if region.is_open:
                self._discard(region)

    def _regions(self) -> list[Region]:
        # Every region of every thread, each once though a TimeType may be known under two keys.
        seen = {}
        for lane in list(self._lanes.values()):
            for region in list(lane.regions.values()):
                seen[id(region)] = region
        return list(seen.values())

    def _enter_thread(self) -> Lane:
        thread = get_ident()
        lane = self._lanes.get(thread)
        if lane is None or lane.thread != thread:
            # A thread that has ended leaves its lane to the next, so that lanes do not outnumber threads.
            with _adoption_lock:
                lane = self._lanes.get(thread)
                if lane is None:
                    lane = self._adopt_lane(thread)
                if lane.thread != thread:
                    lane.occupy()
        self._lane = lane
        return lane

    def _adopt_lane(self, thread: int) -> Lane:
        # A callback of the garbage collector or a signal handler that enters meanwhile on this thread comes first.
        for ident, vacant in list(self._lanes.items()):
            if vacant.thread == 0:
                lane = self._lanes.setdefault(thread, vacant)
                if lane is vacant:
                    self._lanes.pop(ident, None)
                return lane
        return self._lanes.setdefault(thread, Lane())

    def _new_region(self, key: TimeType | str, lane: Lane) -> Region:
        if isinstance(key, str) and key:
            resolved = TimeType.__members__.get(key, key)
        elif isinstance(key, TimeType):
            resolved = key
        else:
            raise InvalidKeyError(
                f"Timing a region with the key {key!r}: a key is a TimeType, such as TimeType.BATCH, or a string that "
                f"names a region of your own, not {type(key).__name__}."
            ) from None
        region = lane.regions.get(resolved)
        if region is None:
            name = resolved if isinstance(resolved, str) else resolved.name
            # Not set but kept if a callback of the garbage collector has made it meanwhile.
            region = lane.regions.setdefault(resolved, Region(resolved, str(name), lane, self))
        if isinstance(key, str):
            lane.regions[key] = region
        return region

    def _start_of_open(self, region: Region) -> None:
        key = _as_code(region.key)
        raise RegionOpenError(
            f"Starting region {region.name!r}: it is open already on {_thread_name(region.lane.thread)}, since "
            f"{(self.now_ns() - region.start_ns) / 1e9:.6g} s. End it first, or forget it with discard({key}); "
            f"`with timer.region({key})` ends it even after an exception."
        )

    def _end_of_closed(self, region: Region) -> None:
        if region.generation != self._generation:
            region.generation = self._generation
            return
        elsewhere = [
            _thread_name(other.lane.thread) for other in self._regions() if other.name == region.name and other.is_open
        ]
        where = f" (it is open on {', '.join(elsewhere)}: end it there)" if elsewhere else ""
        raise RegionNotOpenError(
            f"Ending region {region.name!r}: it is not open on {_thread_name(region.lane.thread)}{where}. "
            f"Call start({_as_code(region.key)}) first, on the same thread, and end it once."
        )

    def _mismatch(self, region: Region, gpu: bool) -> None:
        raise RegionMismatchError(
            f"Ending region {region.name!r} on {_thread_name(region.lane.thread)} with gpu={gpu}: it was started with "
            f"gpu={not gpu}, and is still open. Pass the same gpu argument to start and end."
        )

    def reset(self) -> None:
        """Forget every finished interval and every count. Regions that are open stay open."""
        run = self._run
        for region in self._regions():
            if run is not None:
                run.retire(self, region, "CPU", region.intervals)
                if region.gpu_intervals is not None:
                    run.retire(self, region, "GPU", region.gpu_intervals)
            region.intervals = Intervals(self.keep_last, self.skip_first)
            if region.gpu_intervals is not None:
                region.gpu_intervals = Intervals(self.keep_last, self.skip_first)
        self._memory_at_ends = {}

    def _after_fork(self) -> None:
        # The parent reports what it recorded; the child starts with nothing, and with the one thread that it has.
        self._run = None
        self._close_all()
        self.reset()
        thread = get_ident()
        self._lanes = {ident: lane for ident, lane in self._lanes.items() if ident == thread}
        self._lane = Lane()

    def _settings(self) -> dict[str, Any]:
        return {
            "clock": self._clock,
            "enabled": self._enabled,
            "keep_last": None if self.keep_last < 0 else self.keep_last,
            "skip_first": self.skip_first,
        }

    def __reduce__(self) -> Any:
        """Copy and pickle the settings: the copy is a timer of its own that has recorded nothing yet.

        So a checkpoint of an object that holds a timer works, and a worker process starts with an empty one, as it
        does after a fork. To keep the times, keep ``timer.snapshot()``.
        """
        return _rebuild, (type(self), self._settings()), getattr(self, "__dict__", None) or None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _rebuild(kind: type[Recorder], settings: dict[str, Any]) -> Recorder:
    return kind(**settings)


def _as_code(key: TimeType | str) -> str:
    return str(key) if isinstance(key, TimeType) else repr(key)


class _Token:
    """Lives in a thread's local storage, and so for as long as the thread does."""


def _watch_thread(lane: Lane) -> ref[Any] | None:
    # Vacates the lane when the calling thread ends. Not for the main thread, which ends with the process, nor for one
    # that Python did not start, whose local storage may go after each call into Python.
    # threading.current_thread() would make an entry, never removed, for such a thread.
    import threading

    ident = get_ident()
    for thread in threading.enumerate():
        if thread.ident == ident:
            if thread is threading.main_thread() or isinstance(thread, threading._DummyThread):
                return None
            break
    else:
        return None
    token = getattr(_of_thread, "token", None)
    if token is None:
        token = _of_thread.token = _Token()
    watched = ref(lane)
    is_finalizing = sys.is_finalizing  # Daemon threads outlive what a module holds.

    def vacate(_token: ref[Any]) -> None:
        vacated = watched()
        if vacated is not None and not is_finalizing():
            vacated.vacate()

    return ref(token, vacate)


def _thread_name(ident: int) -> str:
    import threading

    for thread in threading.enumerate():
        if thread.ident == ident:
            return f"thread {thread.name!r}"
    return f"thread {ident}"


def _reset_after_fork() -> None:
    global _adoption_lock
    _adoption_lock = RLock()
    for recorder in list(_all_recorders):
        recorder._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
