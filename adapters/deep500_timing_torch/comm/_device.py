"""Device times of operations, collected without waiting: between events on the current stream, or NCCL's own.

Once a group times its operations (``ProcessGroup._enable_collectives_timing``), PyTorch's watchdog reads NCCL's own
events and keeps each duration in the flight recorder, a ring of 2 000 entries that is on by default. Reading the ring
takes no handle of an operation, so no output tensor stays alive, and costs the training thread nothing per operation.
PyTorch holds the GIL while it writes the ring out: some 8 µs per entry, 15 ms for a full ring. So it is read once per
summary, per 1 000 operations, and before a run's flush if the reads then take at most 1 % of the time.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deep500_timing.adapters import warn_once
from deep500_timing.devices import EventPair as DevicePair
from deep500_timing.devices import EventPool, captures, pool_of
from deep500_timing.runs import feeders, logs
from deep500_timing_torch.comm._log import LOG, Group
from deep500_timing_torch.comm._settings import SETTINGS, fault

WAIT_S = 60.0
"""Seconds that ``collect(wait=True)`` waits for operations that do not end."""
READ_EVERY = 1000
"""Operations after which the ring is read in the background, half of the entries that it holds."""
_SHARE = 0.01
"""Share of the time that reads before the flushes of a run may take."""
_LAST_S = 0.5
"""Seconds that the end of a run waits for PyTorch's watchdog to time the last operations. It looks every 0.1 s."""
_POLL_S = 0.02
COALESCED = "nccl:coalesced"
"""The entry of a coalescing block, which follows those of its operations."""
_ONE_CALL = re.compile(r"nccl:[A-Z_]+_coalesced")
"""The entry of one call that is made of several operations, such as an ``all_gather`` of unequal sizes. PyTorch records
its events on the group's stream, also for a blocking call, which runs on the caller's."""

_pools: dict[torch.device, EventPool | None] = {}


def pool_for(tensor: torch.Tensor) -> EventPool | None:
    """The events of the tensor's device, whichever device is current; None if there are none that can be timed."""
    device = tensor.device
    if device not in _pools:
        found = None
        if device.type not in ("cpu", "meta"):
            from deep500_timing_torch import CudaEventClock

            try:
                clock: Any = CudaEventClock(str(device))
                found = pool_of(clock)
            except Exception as error:
                warn_once(
                    f"Timing communication on {device.type!r}: it has no events that can be timed, so times are the "
                    f"host's, which end when the operation is queued: {error}",
                    key=f"comm on {device.type}",
                )
        _pools[device] = found
    return _pools[device]


def is_captured(pool: EventPool, tensor: torch.Tensor) -> bool:
    """Whether an operation issued now is captured into a graph instead of run."""
    if tensor.device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    clock: Any = pool.clock
    return captures.under_way > 0 or bool(clock.is_capturing())


class Stretch:
    """A stretch of a device's time, given to a function when the device has passed it."""

    __slots__ = ("_keep", "_pair", "_pool", "_start_ns")

    def __init__(self, pool: EventPool, name: str, start_ns: int) -> None:
        """Record the first event on the current stream, of an operation that began on the host at ``start_ns``."""
        self._pool = pool
        self._start_ns = start_ns
        self._pair = DevicePair(name, SETTINGS.now_ns)
        pool.begin(self._pair)

    def end(self, keep: Callable[[int, int | None], None]) -> None:
        """Record the second event on the stream that is current now.

        ``keep`` takes start and end in ns on the host's clock when the device was there; the end is None if unknown.
        """
        self._keep = keep
        self._pool.end(self._pair, self, self._start_ns, SETTINGS.now_ns())

    def drop(self) -> None:
        self._pool.drop(self._pair)

    # --- called by the pool ---------------------------------------------------------------------------------------

    def append(self, start_ns: int, end_ns: int, host_start_ns: int, host_end_ns: int) -> None:
        self._keep(start_ns, end_ns)

    @property
    def failed(self) -> int:
        """Zero. Adding to it reports a time that is unknown."""
        return 0

    @failed.setter
    def failed(self, value: int) -> None:
        self._keep(self._start_ns, None)

    captured = failed


class FlightRecorder:
    """The operations that get their durations from the flight recorder."""

    def __init__(self) -> None:
        self.used = False
        """Whether any group times its operations for it."""
        self._pending: dict[tuple[str, int], Any] = {}
        self._callbacks: deque[tuple[Sequence[Any], Callable[[], None]]] = deque()
        self._reading = threading.Lock()
        self._since_read = 0
        self._next_read = 0.0
        self.is_empty = False
        """Whether the recorder turned out to hold nothing (``TORCH_FR_BUFFER_SIZE=0``)."""

    def description(self) -> str:
        """How operations on a device are timed."""
        if self.used and not self.is_empty:
            return "from NCCL's own events, by PyTorch's flight recorder"
        reason = "the flight recorder is empty" if self.is_empty else why_not() or "no NCCL group is timed"
        return f"between events on the current stream ({reason})"

    def enable(self, group: Group, process_group: Any, device: Any) -> bool:
        """Let a group time its operations from now on, if that is wanted and possible; it is asked once."""
        if group.recorded is None:
            group.recorded = False
            try:
                backend = type(process_group._get_backend(device)).__name__
                if backend == "ProcessGroupNCCL" and why_not() is None and not self.is_empty:
                    # A method of the group; its backend does not have it.
                    process_group._enable_collectives_timing()
                    self.used = group.recorded = True
            except Exception:  # No group, one without a backend for that device, or one of another library.
                group.recorded = False
        return group.recorded and not self.is_empty

    def expect(self, op: Any) -> None:
        """Report the duration of a ``PendingOp`` to it when it is known."""
        self._pending[op.record.group.name, op.sequence] = op
        self._since_read += 1
        if self._since_read >= READ_EVERY and not self._reading.locked():
            self._since_read = 0
            threading.Thread(target=self.collect, name="deep500-timing comm", daemon=True).start()

    def when_read(self, ops: Sequence[Any], call: Callable[[], None]) -> None:
        """Call a function at the read after which none of these operations is expected any more."""
        self._callbacks.append((ops, call))

    def feed(self, *, last: bool) -> None:
        """Read the durations that are known, for a run that is flushed.

        It is left out while another read is under way, which may be on this thread if a signal handler flushes.
        """
        if not self._reading.locked() and (last or time.monotonic() >= self._next_read):
            self.collect(wait=last, limit_s=_LAST_S)

    def collect(self, *, wait: bool = False, limit_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while self._pending or self._callbacks:
            try:
                with self._reading:
                    began = time.monotonic()
                    self._read()
                    ended = time.monotonic()
                    self._next_read = ended + (ended - began) / _SHARE
            except Exception as error:
                fault("operations in the flight recorder", error)
                return
            if not wait or not self._pending or time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _read(self) -> None:
        expected = list(self._pending)
        # Reading asks CUDA for events, which would end a capture.
        with captures.query_lock:
            if captures.under_way:
                return
            # Collectives, without stacks, completed ones as well.
            entries = pickle.loads(_dump_function()(True, False, False)).get("entries", ())
        self.is_empty = not entries
        entries = _without_destroyed(entries)
        oldest: dict[str, int] = {}
        # NCCL launches the operations of a coalescing block at its end, behind their own events. The entry of the
        # block has the number of its last operation.
        blocks = {
            (entry["process_group"][0], entry["op_id"]) for entry in entries if entry["profiling_name"] == COALESCED
        }
        for entry in entries:
            if entry.get("is_p2p") or entry["profiling_name"] == COALESCED:
                continue
            key = name, sequence = entry["process_group"][0], entry["collective_seq_id"]
            oldest.setdefault(name, sequence)
            op = self._pending.get(key)
            if op is None:
                continue
            on_another_stream = _ONE_CALL.fullmatch(entry["profiling_name"]) and not op.asynchronous
            duration_ms = entry.get("duration_ms")
            if on_another_stream or (name, entry["op_id"]) in blocks:
                self._settle(key, None)
            # An entry is completed some time before the watchdog computes its duration and retires it.
            elif duration_ms is not None or entry.get("retired"):
                self._settle(key, duration_ms)
        for name, sequence in expected:
            if self.is_empty or sequence < oldest.get(name, 0):
                self._settle((name, sequence), None)
        for _ in range(len(self._callbacks)):
            ops, call = self._callbacks.popleft()
            if any((op.record.group.name, op.sequence) in self._pending for op in ops):
                self._callbacks.append((ops, call))
            else:
                call()

    def _settle(self, key: tuple[str, int], duration_ms: float | None) -> None:
        op = self._pending.pop(key, None)
        if op is None:
            return
        if duration_ms is None:
            op.untimed()
        else:
            op.took(round(duration_ms * 1e6))

    def after_fork(self) -> None:
        self._reading = threading.Lock()
        self._pending.clear()


def _without_destroyed(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries without those of destroyed groups whose names are used again.

    A group counts its operations from the beginning, also if it has the name of one that was destroyed.
    """
    kept: list[dict[str, Any]] = []
    later: dict[str, dict[str, Any]] = {}
    past: set[str] = set()
    for entry in reversed(entries):
        name = entry["process_group"][0]
        after = later.get(name)
        # The entry of a coalescing block has the number of its last operation.
        if after is not None and entry["op_id"] >= after["op_id"] + (after["profiling_name"] == COALESCED):
            past.add(name)
        if name not in past:
            later[name] = entry
            kept.append(entry)
    return kept[::-1]


def why_not() -> str | None:
    """Why the flight recorder is not to be used, None if it is."""
    if SETTINGS.device_times == "stream_events":
        return "configure(device_times='stream_events')"
    if _dump_function() is None:
        return "this PyTorch has no flight recorder"
    # NCCL's timed events end the overlap with computing that this variable is set for (pytorch#143890).
    if SETTINGS.device_times == "auto" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return "CUDA_DEVICE_MAX_CONNECTIONS=1"
    return None


def _dump_function() -> Callable[[bool, bool, bool], bytes] | Any:
    return getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace", None)


RECORDER = FlightRecorder()
os.register_at_fork(after_in_child=RECORDER.after_fork)


def collect(*, wait: bool) -> None:
    """Collect the device times that are known; wait for the others only for a user who asked for it by name."""
    _collect_events(wait)
    RECORDER.collect(wait=wait)


def _collect_events(wait: bool) -> None:
    for pool in filter(None, list(_pools.values())):
        pool.collect(wait=wait)


def _feed() -> None:
    _collect_events(wait=False)
    RECORDER.feed(last=any(log.closing and not log.closed for log in logs.values()))
    LOG.drain(wait=False)


# Before a run is flushed, finished operations are counted and so queued for it.
feeders.append(_feed)
