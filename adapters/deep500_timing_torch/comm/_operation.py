"""One operation from its call to its end, for patched functions, the compiled kernel and DDP's hook alike.

On the CPU an operation ends when its call or its wait returns, or when its future completes. On a device NCCL's own
events tell its duration by way of PyTorch's flight recorder (:mod:`._flight`). Without the recorder it lies between two
events on the current stream, the second one behind the last wait; for an asynchronous operation that is an upper bound.

No future of a device's operation is asked for: a callback on it makes one of PyTorch's pooled streams wait for the
operation and keeps its outputs until then, and before PyTorch 2.10 asking may end the process.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from deep500_timing_torch.comm._device import Stretch, is_captured, pool_for
from deep500_timing_torch.comm._flight import RECORDER
from deep500_timing_torch.comm._log import LOG, fault
from deep500_timing_torch.comm._records import (
    CAPTURED,
    DONE,
    EXPOSED,
    FAILED,
    ISSUE,
    PAIR,
    SYNC,
    UNTIMED,
    Record,
)
from deep500_timing_torch.comm._settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., Any])


def _never_raises(method: F) -> F:
    # A fault in the timing costs the operation's time and one warning.
    @functools.wraps(method)
    def guarded(self: PendingOp, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            fault(self.record.label, error)
            self.untimed()
            return None

    return guarded  # type: ignore[return-value]


class PendingOp:
    """An operation that has been called. No method raises."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.start_ns = 0
        self.done_ns = 0
        """When it was done on the host's clock, 0 until then."""
        self.captured = False
        self._before: int | None = None
        self._blocking = False
        self._exposed_ns = 0
        self._followed = False
        self._handles = 0
        self._overlap: tuple[Any, int] | None = None
        self._pool: Any = None
        self._recorded = False
        self._sequence: int | None = None
        self._started = False
        self._stretch: Stretch | None = None
        self._waited_end_ns = 0
        self._waits_left = 0
        # Taking the only item is atomic: completion, wait and failure may come on different threads.
        self._unsettled = [None]
        self._halves = [None]
        LOG.under_way[id(self)] = weakref.ref(self)

    @_never_raises
    def _begin(self, process_group: Any, tensor: Any) -> None:
        record = self.record
        self._before = record.group.number()
        self._pool = pool = pool_for(tensor)
        if pool is not None:
            record.on_device = True
            self.captured = is_captured(pool, tensor)
            if not self.captured:
                self._recorded = not record.op.point_to_point and RECORDER.enable(process_group, tensor.device)
        self.start_ns = SETTINGS.now_ns()
        if pool is not None and not self.captured and not self._recorded:
            self._stretch = Stretch(pool, record.label, self.start_ns)

    # --- the call has returned ------------------------------------------------------------------------------------

    @_never_raises
    def returned(self) -> None:
        """It is over when its call is; on a device, when the current stream is there."""
        end_ns = self._count()
        self._call_over(end_ns)

    @_never_raises
    def blocks(self) -> None:
        self._count()
        self._blocking = True
        self._waits_left = 1

    @_never_raises
    def issued(self, handles: int, future: Any = None) -> None:
        """It runs on, and callers will wait for so many handles."""
        end_ns = self._count()
        self._handles = self._waits_left = handles
        if self.captured:
            self._give_up(CAPTURED)
            return
        self._started = True
        LOG.put(self.record, ISSUE, self.start_ns, end_ns)
        if future is not None:
            self._followed = True
            future.add_done_callback(self._on_done)
        elif self._recorded:
            self._followed = True
            self._expect()
        elif self._stretch is not None:
            self._followed = True

    def coalesced(self) -> None:
        """It will be launched later, with others: it has no time that can be told."""
        self._drop_stretch()
        self.untimed()

    @_never_raises
    def failed(self, error: BaseException) -> None:
        LOG.report_time_out(self, error, SETTINGS.now_ns)
        self._give_up(FAILED)

    def _count(self) -> int:
        end_ns = SETTINGS.now_ns()
        if SETTINGS.timer is not None:
            SETTINGS.region(self.record.label, self.start_ns, end_ns)
        self._sequence = self.record.group.count(self._before)
        return end_ns

    def _call_over(self, end_ns: int) -> None:
        if self.captured:
            self._give_up(CAPTURED)
        elif self._pool is None:
            self.done(self.start_ns, end_ns)
        else:
            self._started = True
            LOG.put(self.record, ISSUE, self.start_ns, end_ns)
            if self._recorded:
                self._expect()
            else:
                self._end_stretch()

    def _end_stretch(self) -> None:
        # Only now the device's queue refers to the operation: before, dropping its handles is noticed.
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            stretch.end(self._passed, self._not_passed)

    def _expect(self) -> None:
        assert self._sequence is not None
        if self._before is None or self._sequence - self._before != 1:
            self.untimed()  # Several operations, or part of a batch: the recorder has no entry for it alone.
        else:
            RECORDER.expect(self, self._sequence)

    # --- its end --------------------------------------------------------------------------------------------------

    def _settle(self) -> bool:
        try:
            self._unsettled.pop()
        except IndexError:
            return False
        LOG.under_way.pop(id(self), None)
        return True

    def done(self, start_ns: int, end_ns: int) -> None:
        if not self._settle():
            return
        self.done_ns = end_ns
        self.start_ns = start_ns
        sequence = self._sequence if self.record.op.synchronizes else None
        LOG.put(self.record, DONE if self._started else SYNC, start_ns, end_ns, sequence)
        self._second()

    def took(self, duration_ns: int, start_ns: int | None = None) -> None:
        """It took that long on the device, from there on the host's clock or from its call."""
        store = SETTINGS.device_store()
        if store is not None:
            start_ns = self.start_ns if start_ns is None else start_ns
            store.append(start_ns, start_ns + duration_ns)
        self.done(self.start_ns, self.start_ns + duration_ns)
        if self._overlap is not None:
            self._overlap[0].took(self._overlap[1], duration_ns)

    def untimed(self) -> None:
        self._give_up(UNTIMED)
        if self._overlap is not None:
            self._overlap[0].took(self._overlap[1], None)

    def _give_up(self, kind: int) -> None:
        self._drop_stretch()
        if self._settle():
            LOG.put(self.record, kind, int(self._started), 0)

    def _drop_stretch(self) -> None:
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            try:
                stretch.drop()
            except Exception as error:
                fault(self.record.label, error)

    @_never_raises
    def _on_done(self, future: Any) -> None:
        # On the backend's thread, or at once.
        end_ns = SETTINGS.now_ns()
        try:
            future.value()
        except Exception:
            self._give_up(FAILED)
            return
        # The callback may have waited for the interpreter, behind the thread that has ended its wait.
        self.done(self.start_ns, min(end_ns, self._waited_end_ns or end_ns))

    def _passed(self, start_ns: int, end_ns: int) -> None:
        # A communicator runs one operation after another: this one began after the one issued before it ended.
        group = self.record.group
        clock, before_ns = group.device_end
        if clock == SETTINGS.now_ns and before_ns > start_ns:
            start_ns = min(before_ns, end_ns)
        group.device_end = (SETTINGS.now_ns, end_ns)
        self.took(end_ns - start_ns, start_ns)

    def _not_passed(self) -> None:
        self._give_up(FAILED)

    def __del__(self) -> None:
        """Every handle was dropped before its time was known."""
        try:
            self.untimed()
        except Exception:  # The interpreter may be ending.
            return

    # --- waits ----------------------------------------------------------------------------------------------------

    @property
    def asynchronous(self) -> bool:
        """Whether its handles were returned before its end."""
        return self._followed

    @property
    def waited(self) -> bool:
        """Whether every handle was waited for."""
        return self._waits_left <= 0

    @_never_raises
    def start_wait(self) -> tuple[int, Stretch | None]:
        """A caller begins to wait for one of the handles."""
        now_ns = SETTINGS.now_ns()
        if self._pool is None or self.captured or self._blocking:
            return now_ns, None
        return now_ns, Stretch(self._pool, self.record.label, now_ns)

    @_never_raises
    def end_wait(self, token: tuple[int, Stretch | None] | None, error: BaseException | None = None) -> None:
        if error is not None:
            LOG.report_time_out(self, error, SETTINGS.now_ns)
            if token is not None and token[1] is not None:
                token[1].drop()
            if self._blocking or not self._followed or self._stretch is not None:
                self._give_up(FAILED)
            return
        if token is None or (self.captured and not self._blocking):
            return
        start_ns, stretch = token
        end_ns = SETTINGS.now_ns()
        if SETTINGS.timer is not None:
            SETTINGS.region(self.record.label, start_ns, end_ns)
        self._waits_left -= 1
        if self._blocking:
            self._call_over(end_ns)
            return
        self._waited_end_ns = end_ns
        if stretch is not None:
            stretch.end(self.exposed, self._exposure_unknown)
        else:
            self.exposed(start_ns, end_ns)
        if self._waits_left == 0 and self._stretch is not None:
            self.record.upper_bound = True
            self._end_stretch()

    def timed_wait(self, wait: Callable[[], Any]) -> Any:
        """Call ``wait``; how long that takes is exposed time."""
        token = self.start_wait()
        try:
            result = wait()
        except BaseException as error:
            self.end_wait(token, error)
            raise
        self.end_wait(token)
        return result

    def exposed(self, start_ns: int, end_ns: int) -> None:
        """Count a wait for it, at the end of a backward pass or by a caller."""
        LOG.put(self.record, EXPOSED, start_ns, end_ns)
        self._exposed_ns += end_ns - start_ns
        self._handles -= 1
        if self._handles > 0:
            return
        if self._followed:
            self._second()
        else:
            # Without a future it was complete at the latest when the last wait ended.
            self.record.upper_bound = True
            self.done(self.start_ns, self._waited_end_ns)

    def _exposure_unknown(self) -> None:
        LOG.put(self.record, UNTIMED, 0, 0)

    def _second(self) -> None:
        # Counts the pair when both its time and its exposed time are known.
        if not self._started or not self._followed or self._overlap is not None:
            return
        try:
            self._halves.pop()
        except IndexError:
            LOG.put(self.record, PAIR, self.done_ns - self.start_ns, self._exposed_ns)

    def exposed_at_end(self, start_ns: int, end_ns: int) -> None:
        """Count the wait for it at the end of a backward pass, which no handle shows."""
        self._waits_left = 0
        self._handles = 1
        self.exposed(start_ns, end_ns)

    # --- overlap within a backward pass ---------------------------------------------------------------------------

    @property
    def on_device(self) -> bool:
        """Whether it runs on a device that can be timed."""
        return self._pool is not None

    def mark(self) -> Stretch | None:
        """A stretch of the device's time from now on, None if its own duration will not be known."""
        return self.stretch_from(SETTINGS.now_ns()) if self._recorded else None

    def stretch_from(self, start_ns: int) -> Stretch:
        """A stretch of its device's time from now on."""
        return Stretch(self._pool, self.record.label, start_ns)

    def join(self, overlap: Any, index: int) -> None:
        """Report the duration to the overlap of a backward pass, in which it has that index."""
        self._overlap = overlap, index
        if not self._unsettled:
            overlap.took(index, self.done_ns - self.start_ns if self.done_ns else None)

    @property
    def sequence(self) -> int | None:
        """Its number in the group; the expected one while its call has not returned."""
        if self._sequence is None and self._before is not None:
            return self._before + 1
        return self._sequence


def future_of(work: Any, record: Record) -> Any:
    """A future of an operation on the CPU, None if its backend has none."""
    if record.no_future:
        return None
    try:
        return work.get_future()
    except RuntimeError:
        record.no_future = True
        return None


def begin(record: Record, process_group: Any, tensor: Any) -> PendingOp:
    """Time an operation that is about to be called."""
    op = PendingOp(record)
    op._begin(process_group, tensor)
    return op
