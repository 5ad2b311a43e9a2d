"""One operation from its call to its end, for patched functions, the compiled kernel and DDP's hook alike.

On the CPU an operation ends when its call or its wait returns, or when its future completes. On a device NCCL's own
events tell its duration by way of PyTorch's flight recorder (:mod:`._device`). Without the recorder it lies between two
events on the current stream, the second one behind the last wait; for an asynchronous operation that is an upper bound.

No future of a device's operation is asked for: a callback on it makes one of PyTorch's pooled streams wait for the
operation and keeps its outputs until then, and before PyTorch 2.10 asking may end the process.

This module runs as plain Python and, with the C types of ``_operation.pxd``, compiled.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deep500_timing_torch.comm._backward import watch_backward
from deep500_timing_torch.comm._device import RECORDER, Stretch, is_captured, pool_for
from deep500_timing_torch.comm._handles import TimedFuture, timed_work
from deep500_timing_torch.comm._log import CAPTURED, DONE, EXPOSED, FAILED, ISSUE, LOG, UNTIMED, Record
from deep500_timing_torch.comm._report import report_time_out
from deep500_timing_torch.comm._settings import SETTINGS, fault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from deep500_timing_torch.comm._ops import Op

_world: Any = getattr(c10d, "_world", None)
_coalescing: Any = getattr(_world, "pg_coalesce_state", None)
_Work: Any = dist.Work
_Future: Any = torch._C.Future

_inside: set[int] = set()
"""The threads that are within a timed operation, by ident: nested operations are part of it."""


class PendingOp:
    """An operation that is about to be called, or was. No method raises."""

    def __init__(self, record: Record, process_group: Any, tensor: Any) -> None:
        self.record = record
        self.start_ns = 0
        self.done_ns: int | None = None
        """When it was done on the host's clock; of a device, its start and its duration there."""
        self.captured = False
        self.asynchronous = False
        """Whether its handles were returned before its end, and its end is known without a wait."""
        self.recorded = False
        """Whether the flight recorder has its duration."""
        self.pool: Any = None
        """The events of the device that it runs on, None on the host and where there are none."""
        self.sequence: int | None = None
        """Its number in the group, the expected one while its call has not returned."""
        self.waits_left = 0
        """For how many handles no caller has waited yet."""
        self.exposures_left = 0
        """For how many handles the exposed time has not been counted; for the log alone, as the next one."""
        self.exposed_ns = 0
        self._alone = True
        self._blocking = False
        self._stretch: Stretch | None = None
        LOG.under_way[id(self)] = ref(self)
        try:
            number = record.group.number()
            if number is not None:
                self.sequence = number + 1
            if tensor is not None and not tensor.is_cpu:
                self.pool = pool = pool_for(tensor)
                if pool is not None:
                    record.on_device = True
                    self.captured = is_captured(pool, tensor)
                    if not self.captured and not record.op.point_to_point:
                        self.recorded = RECORDER.enable(record.group, process_group, tensor.device)
            self.start_ns = SETTINGS.now_ns()
            if self.pool is not None and not self.captured and not self.recorded:
                self._stretch = Stretch(self.pool, record.label, self.start_ns)
        except Exception as error:
            self.fault(error)

    # --- the call has returned ------------------------------------------------------------------------------------

    def called(self, handles: int, followed: bool = False, blocking: bool = False) -> bool:
        """The call has returned so many handles, for which its callers will wait, or the function itself if it blocks.

        Without a handle the operation is over: on a device, when the current stream is there. Returns whether
        :meth:`ended` shall be called at its end, which only happens if it can be (``followed``).
        """
        try:
            end_ns: int = SETTINGS.now_ns()
            SETTINGS.region(self.record.label, self.start_ns, end_ns)
            expected = self.sequence
            self.sequence = self.record.group.count(expected)
            self._alone = self.sequence == expected
            self.waits_left = self.exposures_left = handles
            self._blocking = blocking
            if handles == 0:
                self._over(end_ns)
            elif self.captured and not blocking:
                self._end(CAPTURED)
            elif not blocking:
                LOG.put(self.record, ISSUE, self.start_ns, end_ns)
                if self.pool is None:
                    self.asynchronous = followed
                    return followed
                self.asynchronous = self.recorded or self._stretch is not None
                if self.recorded:
                    self._expect()
        except Exception as error:
            self.fault(error)
        return False

    def launched(self, blocking: bool) -> bool:
        """The kernel or DDP's hook has got a handle; returns whether :meth:`ended` shall be called at its end."""
        followed = self.called(1, True, blocking)
        try:
            task = torch._C._current_graph_task_id()
            if task != -1 and not blocking and not self.captured:
                watch_backward(self, task)
        except Exception as error:
            fault(self.record.label, error)
        return followed

    def follow(self, work: Any) -> None:
        """Ask a handle of an operation on the CPU, or its future, for the end."""
        try:
            future = work if isinstance(work, _Future) else work.get_future()
        except RuntimeError:
            self.not_followed()
            return
        future.add_done_callback(self._future_done)

    def not_followed(self) -> None:
        """The backend has no futures for this operation: it ends with the last wait, at the latest."""
        self.asynchronous = False

    def failed(self, error: BaseException) -> None:
        """The operation, or a wait for it, has raised an error."""
        try:
            report_time_out(self, error)
            self._end(FAILED)
        except Exception as fault_of_ours:
            self.fault(fault_of_ours)

    def fault(self, error: Exception) -> None:
        """A fault in the timing costs the operation's time and one warning."""
        fault(self.record.label, error)
        self.untimed()

    def _over(self, end_ns: int) -> None:
        # The host has nothing to wait for any more.
        if self.captured:
            self._end(CAPTURED)
        elif self.pool is None:
            self._end(DONE, end_ns)
        else:
            LOG.put(self.record, ISSUE, self.start_ns, end_ns)
            if self.recorded:
                self._expect()
            else:
                self._end_stretch()

    def _end_stretch(self) -> None:
        # Only now the device's queue refers to the operation: before, dropping its handles is noticed.
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            stretch.end(self._passed)

    def _expect(self) -> None:
        if self._alone:
            RECORDER.expect(self)
        else:
            self.untimed()  # Several operations, or part of a batch: the recorder has no entry for it alone.

    # --- its end --------------------------------------------------------------------------------------------------

    def _end(self, kind: int, end_ns: int = 0) -> None:
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            try:
                stretch.drop()
            except Exception as error:
                fault(self.record.label, error)
        # Removing the entry is atomic: completion, wait and failure may come on different threads.
        if LOG.under_way.pop(id(self), None) is None:
            return
        if kind == DONE:
            self.done_ns = end_ns
            sequence = self.sequence if self.record.op.synchronizes else None
            LOG.put(self.record, DONE, self.start_ns, end_ns, sequence, self if self.asynchronous else None)
        else:
            LOG.put(self.record, kind, 0, 0)

    def took(self, duration_ns: int, start_ns: int | None = None) -> None:
        """It took that long on the device, from there on the host's clock or from its call."""
        if start_ns is None:
            start_ns = self.start_ns
        store = SETTINGS.device_store()
        if store is not None:
            store.append(start_ns, start_ns + duration_ns)
        self._end(DONE, self.start_ns + duration_ns)

    def untimed(self) -> None:
        """Its time will not be known, as of an operation that is launched later, with others."""
        self._end(UNTIMED)

    def _future_done(self, future: Any) -> None:
        try:
            future.value()
        except Exception:
            self.ended(True)
        else:
            self.ended(False)

    def ended(self, failed: bool) -> None:
        """It has ended: called on the backend's thread, or at once."""
        try:
            if failed:
                self._end(FAILED)
            else:
                self._end(DONE, SETTINGS.now_ns())
        except Exception as error:
            self.fault(error)

    def _passed(self, start_ns: int, end_ns: int | None) -> None:
        if end_ns is None:
            self._end(FAILED)
            return
        # A communicator runs one operation after another: this one began after the one issued before it ended.
        group = self.record.group
        clock, before_ns = group.device_end
        if clock == SETTINGS.now_ns and before_ns > start_ns:
            start_ns = min(before_ns, end_ns)
        group.device_end = (SETTINGS.now_ns, end_ns)
        self.took(end_ns - start_ns, start_ns)

    def __del__(self) -> None:
        """Every handle was dropped before its time was known."""
        try:
            self.untimed()
        except Exception:  # The interpreter may be ending.
            return

    # --- waits ----------------------------------------------------------------------------------------------------

    def start_wait(self) -> tuple[int, Stretch | None] | None:
        """A caller begins to wait for one of the handles; the result is for :meth:`end_wait`."""
        try:
            if self.captured and not self._blocking:
                return None
            now_ns = SETTINGS.now_ns()
            if self.pool is None or self._blocking:
                return now_ns, None
            return now_ns, Stretch(self.pool, self.record.label, now_ns)
        except Exception as error:
            self.fault(error)
            return None

    def end_wait(self, token: tuple[int, Stretch | None] | None, error: BaseException | None = None) -> None:
        """The wait is over, with an error if there was one."""
        try:
            start_ns, stretch = token or (0, None)
            if error is not None:
                if stretch is not None:
                    stretch.drop()
                self.failed(error)
            elif token is not None:
                end_ns: int = SETTINGS.now_ns()
                SETTINGS.region(self.record.label, start_ns, end_ns)
                self.waits_left -= 1
                if self._blocking:
                    self._over(end_ns)
                elif stretch is not None:
                    stretch.end(self.exposed)
                    if self.waits_left == 0 and self._stretch is not None:
                        self.record.upper_bound = True
                        self._end_stretch()
                else:
                    self.exposed(start_ns, end_ns)
                    if self.waits_left == 0:
                        # It has ended when its last wait has: its callback may come later, or not at all.
                        if not self.asynchronous:
                            self.record.upper_bound = True
                        self._end(DONE, end_ns)
        except Exception as fault_of_ours:
            self.fault(fault_of_ours)

    def timed_wait(self, wait: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``wait``; how long that takes is exposed time."""
        token = self.start_wait()
        try:
            result = wait(*args, **kwargs)
        except BaseException as error:
            self.end_wait(token, error)
            raise
        self.end_wait(token, None)
        return result

    def exposed(self, start_ns: int, end_ns: int | None) -> None:
        """Count a wait for it, by a caller or at the end of a backward pass; its end is None if it is unknown."""
        if end_ns is None:
            LOG.put(self.record, UNTIMED, 0, 0)
        else:
            LOG.put(self.record, EXPOSED, start_ns, end_ns, None, self if self.asynchronous else None)


# --- at PyTorch's dispatcher ------------------------------------------------------------------------------------------


def dispatched(op: Op, nbytes: int, process_group: Any, tensor: Any) -> PendingOp | None:
    """Time an operation that the kernel or DDP's hook is about to hand to a process group; -1 bytes are unknown."""
    if get_ident() in _inside or not SETTINGS.wants(op.name):
        return None
    try:
        group = LOG.group_of(process_group)
        if group is None:
            return None
        label = f"{op.name} | {_caller()}" if SETTINGS.debug else op.name
        return PendingOp(group.record(op, label, None if nbytes < 0 else nbytes), process_group, tensor)
    except Exception as error:
        fault(op.name, error)
        return None


# --- by functions -----------------------------------------------------------------------------------------------------


def measure(func: Callable[..., Any], op: Op, args: Any, kwargs: Any, options: Any) -> Any:
    """Call a function and time it as an operation, with everything that it calls in turn."""
    pending = None if get_ident() in _inside else _begin(op, args, kwargs, options)
    if pending is None:
        return func(*args, **kwargs)
    result = run(pending, func, args, kwargs)
    try:
        return _replace_handles(pending, result)
    except Exception as error:
        pending.fault(error)
        return result


def run(op: PendingOp, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the function of an operation; what it calls in turn is part of it."""
    thread = get_ident()
    _inside.add(thread)
    try:
        return func(*args, **kwargs)
    except BaseException as error:
        op.failed(error)
        raise
    finally:
        _inside.discard(thread)


def _begin(op: Op, args: Any, kwargs: Any, options: Any) -> PendingOp | None:
    # None if it is not to be timed.
    try:
        log_name = options and options.get("log_name")
        asked = options and (options.get("prof") or log_name in SETTINGS.prof_ops)
        if not asked and not SETTINGS.wants(op.name):
            return None
        try:
            nbytes, per_rank, process_group, tensor = op.describe(*args, **kwargs)
        except Exception:
            # Arguments that the operation itself will refuse, or of a kind that has no size.
            nbytes, per_rank, process_group, tensor = None, False, kwargs.get("group"), None
        if process_group is None:
            process_group = dist.GroupMember.WORLD if _world is None else _world.default_pg
        group = LOG.group_of(process_group)
        if group is None:
            return None
        if per_rank and nbytes is not None:
            nbytes *= group.size
        label = log_name or op.name
        if SETTINGS.debug:
            label = f"{label} | {(options and options.get('debug')) or _caller()}"
        record = group.record(op, label, nbytes)
        if _coalescing and process_group in _coalescing:
            # The call is only noted; the coalescing manager issues all of them at its end, as one.
            LOG.put(record, UNTIMED, 0, 0)
            group.seen += not _coalescing[process_group]
            return None
        return PendingOp(record, process_group, tensor)
    except Exception as error:
        fault(op.name, error)
        return None


def _caller() -> str:
    # The name of the function that called into this package.
    frame = sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("deep500_timing_torch.comm", "torch.distributed")
    ):
        frame = frame.f_back
    return frame.f_code.co_name


def _replace_handles(op: PendingOp, result: Any) -> Any:
    # Finishes the call of an operation; returns what its caller shall get.
    if result is None:
        op.called(0)
        return result
    if isinstance(result, _Work):
        if op.called(1, True):
            op.follow(result)
        return timed_work(result, op)
    works = result if isinstance(result, list) else [result]
    if not works or not all(isinstance(work, (_Work, _Future)) for work in works):
        op.called(0)
        return result
    followed = op.called(len(works), len(works) == 1)
    if op.pool is not None and any(isinstance(work, _Future) for work in works):
        # A callback on a future of device values makes streams wait, so its completion is not asked for. The caller
        # keeps the future, which carries streams that only the original knows.
        op.untimed()
        return result
    if followed:
        op.follow(works[0])
    handles = [timed_work(work, op) if isinstance(work, _Work) else TimedFuture(work, op) for work in works]
    return handles if isinstance(result, list) else handles[0]
