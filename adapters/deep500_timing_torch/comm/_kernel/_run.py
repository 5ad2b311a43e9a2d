"""One operation that the kernel saw and Python times: on a device, or for a timer of the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deep500_timing_torch.comm._backward import BackwardWait
from deep500_timing_torch.comm._device_run import DeviceRun
from deep500_timing_torch.comm._log import LOG, fault
from deep500_timing_torch.comm._records import FAILED, ISSUE, SYNC, UNTIMED, Record
from deep500_timing_torch.comm._settings import SETTINGS
from deep500_timing_torch.comm._work import Tracker, future_of

if TYPE_CHECKING:
    from deep500_timing.devices import EventPool
    from deep500_timing_torch.comm._device import EventPair

_waits: dict[int, BackwardWait] = {}
"""For each backward pass that runs, by the number of its graph task, what was issued in it."""
_MOST_WAITS = 64


class KernelRun:
    """What the kernel holds for such an operation; it calls the methods, none of which raises."""

    __slots__ = ("_blocking", "_device", "_record", "_run", "_seq", "_start_ns", "_taken", "_tracker")

    def __init__(self, record: Record, device: EventPool | None, blocking: bool) -> None:
        """Right before the operation is issued."""
        self._record = record
        self._blocking = blocking
        self._device = device
        self._tracker: Tracker | None = None
        self._seq: int | None = None
        self._taken = False
        self._start_ns = SETTINGS.now_ns()
        self._run = None if device is None else DeviceRun(record, device, self._start_ns)

    def failed(self) -> None:
        """The operation raised."""
        try:
            LOG.put(self._record, FAILED, 0, 0)
            if self._run is not None:
                self._run.mark.drop()
        except Exception as error:
            fault(self._record.label, error)

    def issued(self, work: Any, seq: int) -> None:
        """The call has returned.

        Args:
            work: Its handle, None if it has none: then it is over, or belongs to a batch that is issued later.
            seq: How many collectives its group has issued.
        """
        try:
            self._issued(work, seq if self._record.op.synchronizes else None)
        except Exception as error:
            fault(self._record.label, error)
            LOG.put(self._record, UNTIMED, 0, 0)

    def _issued(self, work: Any, seq: int | None) -> None:
        record, run = self._record, self._run
        end_ns = SETTINGS.now_ns()
        self._seq = seq
        if SETTINGS.timer is not None:
            SETTINGS.region(record.label, self._start_ns, end_ns)
        if work is None:
            if run is not None:
                run.end(end_ns, seq)
            else:
                LOG.put(record, SYNC, self._start_ns, end_ns, seq)
            return
        future = future_of(work, record) if run is None else None
        if self._blocking and run is None:
            if future is not None:
                future.add_done_callback(self._on_done)
            return
        if self._blocking and run is not None:
            run.end(end_ns, seq)
            return
        tracker = Tracker(record, self._start_ns, seq, 1, self._device)
        if run is not None:
            run.follow(tracker, work)
        elif future is not None:
            tracker.follow(future)
        LOG.put(record, ISSUE, self._start_ns, end_ns)
        if not self._blocking:
            self._tracker = tracker
            self._watch_backward(tracker)

    def _watch_backward(self, tracker: Tracker) -> None:
        task = torch._C._current_graph_task_id()
        if task == -1 or not tracker.followed:
            return
        wait = _waits.get(task)
        if wait is None:
            if len(_waits) >= _MOST_WAITS:  # of backward passes that failed on their way
                _waits.clear()
            wait = _waits[task] = BackwardWait()
            wait.watch(self._device)

            def forget() -> None:
                _waits.pop(task, None)

            torch.autograd.Variable._execution_engine.queue_callback(forget)
        wait.sent.append(tracker)

    def _on_done(self, future: Any) -> None:
        # Of a blocking operation on the CPU, on the backend's thread.
        try:
            end_ns = SETTINGS.now_ns()
            try:
                future.value()
            except Exception:
                self._take(FAILED, 0)
            else:
                self._take(SYNC, end_ns)
        except Exception as error:
            fault(self._record.label, error)

    def _take(self, kind: int, end_ns: int) -> None:
        if not self._taken:
            self._taken = True
            LOG.put(self._record, kind, self._start_ns if kind == SYNC else 0, end_ns, self._seq)

    def start_wait(self) -> tuple[int, EventPair | None] | None:
        """Somebody begins to wait for it."""
        try:
            if self._tracker is not None:
                return self._tracker.start_wait()
            return SETTINGS.now_ns(), None
        except Exception as error:
            fault(self._record.label, error)
            return None

    def end_wait(self, begun: tuple[int, EventPair | None] | None, failed: bool) -> None:
        """The wait is over."""
        if begun is None:
            return
        try:
            start_ns, pair = begun
            if self._tracker is not None:
                if failed:
                    self._tracker.failed_wait(pair)
                else:
                    self._tracker.end_wait(start_ns, pair)
                return
            end_ns = SETTINGS.now_ns()
            if SETTINGS.timer is not None:
                SETTINGS.region(self._record.label, start_ns, end_ns)
            if self._run is None:
                self._take(FAILED if failed else SYNC, end_ns)
        except Exception as error:
            fault(self._record.label, error)
