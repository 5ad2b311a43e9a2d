"""The regions of a fit, and the way to close them after an exception.

Keras calls no hook after an exception or Ctrl-C. The regions of such a fit stay open, and count as running, until a
callback is next given a model; then they are closed as failed.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

from deep500_timing import RegionOpenError
from deep500_timing_tensorflow import _keras
from deep500_timing_tensorflow._epoch import EPOCH, Key

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Timer
    from deep500_timing_tensorflow._epoch import EpochTotals


class FitRegions:
    """The regions that one list of callbacks has open on a timer, and what closes them after an exception.

    It holds neither the model nor the data, so an aborted fit keeps neither alive.
    """

    def __init__(self, timer: Timer, callbacks: Any = None) -> None:
        self.timer = timer
        self.totals: EpochTotals | None = None
        self.gpu = False
        """Whether batches and phases are timed on the device as well."""
        self.open: dict[Key, tuple[int, Any]] = {}
        """Of each open region: its begin, and its handle; None if a fit around this one has it open on the timer."""
        self.on_abort: Callable[[], None] | None = None
        """Called before the regions of an aborted fit are closed."""
        self._callbacks = None if callbacks is None else ref(callbacks)
        self._thread = get_ident()
        self._now_ns = timer.now_ns

    @property
    def callbacks(self) -> Any:
        """Keras's list; None if there is none or Keras has dropped it."""
        return None if self._callbacks is None else self._callbacks()

    def is_running(self) -> bool:
        """Whether this thread is inside the fit; of a loop of the user's own it is taken for granted."""
        if self._callbacks is None:
            return True
        callbacks = self._callbacks()
        return callbacks is not None and _keras.is_running(callbacks)

    def is_own_thread(self) -> bool:
        return self._thread == get_ident()

    def begin(self, key: Key) -> None:
        self._thread = get_ident()
        if self not in _unfinished:
            _unfinished.append(self)
        self.start(key)

    def finish(self, key: Key) -> None:
        self.end(key)
        if not self.open and self in _unfinished:
            _unfinished.remove(self)

    def start(self, key: Key, gpu: bool = False) -> int:
        """Open a region, and return its begin on the timer's clock.

        A region that is open already, because of a fit around this one, is measured here and recorded as it ends.
        """
        handle: Any = self.timer.region(key, gpu)
        try:
            handle.start()
        except RegionOpenError:
            handle = None
        began_ns = self._now_ns()
        self.open[key] = began_ns, handle
        return began_ns

    def end(self, key: Key, kept_as: Key | None = None) -> int | None:
        opened = self.open.pop(key, None)
        if opened is None:
            return None
        now_ns = self._now_ns()
        self.close(key, opened, now_ns, kept_as or key)
        return now_ns - opened[0]

    def close(self, key: Key, opened: tuple[int, Any], now_ns: int, kept_as: Key) -> None:
        began_ns, handle = opened
        if handle is not None and kept_as == key:
            handle.end()
        else:
            if handle is not None:
                self.timer.cancel(key)
            self.timer.record(kept_as, began_ns, now_ns)

    def end_and_add(self, key: Key) -> None:
        """Close a region, and add it to the epoch's totals."""
        took_ns = self.end(key)
        if self.totals is not None and took_ns is not None:
            self.totals.add(key, took_ns)

    def record(self, key: Key, began_ns: int, ended_ns: int, count: int = 1) -> None:
        """Record an interval, and add it to the epoch's totals with the given count."""
        self.timer.record(key, began_ns, ended_ns)
        if self.totals is not None:
            self.totals.add(key, ended_ns - began_ns, count)

    def drop(self, key: Key) -> None:
        """Cancel an open region that did not happen, such as a batch after the last; it is not counted."""
        if self.open.pop(key, (0, None))[1] is not None:
            self.timer.cancel(key)

    def fail_all(self) -> None:
        """Close every open region, innermost first, and count it as failed."""
        for key in reversed(list(self.open)):
            if self.open.pop(key)[1] is not None:
                self.timer.fail(key)

    def abort(self) -> None:
        """Close the regions that an exception left open; without effect on a fit that came to its end."""
        on_abort, self.on_abort = self.on_abort, None
        try:
            if on_abort is not None:
                on_abort()
        finally:
            if EPOCH in self.open and self.totals is not None:
                self.totals.lasts(self.timer.now_ns())
            self.fail_all()
            if self in _unfinished:
                _unfinished.remove(self)


_unfinished: list[FitRegions] = []
"""The fits, evaluations and predictions that have begun and not ended, of all threads."""


def end_aborted_fits() -> None:
    """Close the regions of every aborted fit of this thread."""
    for regions in reversed(_unfinished.copy()):
        if regions.is_own_thread():
            if not regions.is_running():
                regions.abort()
        elif regions._callbacks is not None and regions.callbacks is None:
            # Its thread has dropped the list. Regions belong to their thread, so only ``on_abort`` is called.
            _unfinished.remove(regions)
            on_abort, regions.on_abort = regions.on_abort, None
            regions.open.clear()
            if on_abort is not None:
                on_abort()
