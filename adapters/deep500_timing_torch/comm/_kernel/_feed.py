"""What the kernel saw, carried into the log, and what it asks of Python where Python does the timing."""

from __future__ import annotations

import os
import struct
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from deep500_timing.adapters import warn_once
from deep500_timing_torch.comm import _log, _records
from deep500_timing_torch.comm._device import pool_for
from deep500_timing_torch.comm._kernel._run import KernelRun
from deep500_timing_torch.comm._log import LOG, fault
from deep500_timing_torch.comm._ops import BY_OPERATOR, OPS, Op
from deep500_timing_torch.comm._settings import SETTINGS

if TYPE_CHECKING:
    from types import ModuleType

    from deep500_timing_torch.comm._records import Group

_MESSAGE = struct.Struct("@7q")
_POLL_S = 0.25
"""How often the buffer is emptied. It holds 65 536 messages, four at most for each operation."""

# Kinds of messages, as in kernel.cpp, and what the log calls them. A bounded completion is one of which only is known
# that it was not later; the last two are two messages of the log's each.
_BLOCKING, _ISSUED, _DONE, _WAITED, _PAIRED, _FAILED, _UNTIMED, _BOUNDED, _ENDED, _LATER = range(10)
_KINDS = {
    _BLOCKING: _records.SYNC,
    _ISSUED: _records.ISSUE,
    _DONE: _records.DONE,
    _WAITED: _records.EXPOSED,
    _PAIRED: _records.PAIR,
    _FAILED: _records.FAILED,
    _UNTIMED: _records.UNTIMED,
    _BOUNDED: _records.DONE,
    _ENDED: _records.DONE,
    _LATER: _records.EXPOSED,
}
_STARTS = (_BLOCKING, _ISSUED, _ENDED)


class Feed:
    """The kernel at work: it is one for the process, and empties the kernel's buffer into the log."""

    def __init__(self, module: ModuleType) -> None:
        """Use a kernel that was loaded; nothing happens before :meth:`start`."""
        self._module = module
        self._operations: list[Op] = [BY_OPERATOR[name] for name in module.rules()]
        self._groups: dict[int, Group] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._advanced: dict[int, int] = {}
        self._draining = threading.Lock()
        self._stopped = threading.Event()
        self._original_wait: Any = None
        self._timed_wait: Any = None
        self.dropped = 0

    def start(self) -> None:
        """Put the kernel into the dispatcher and its wait into ``torch.distributed.Work``."""
        self._module.take()
        self._module.install(self._begin, self._meet)
        self._original_wait = vars(dist.Work)["wait"]
        self._timed_wait = self._module.timed_wait(dist.Work, self._original_wait)
        dist.Work.wait = self._timed_wait  # type: ignore[method-assign]
        SETTINGS.on_change = self.configure
        LOG.source = self
        SETTINGS.changed()
        self._stopped.clear()
        threading.Thread(target=self._poll, name="deep500-timing comm", daemon=True).start()

    def stop(self) -> None:
        """Take both out again."""
        self._stopped.set()
        if vars(dist.Work)["wait"] is self._timed_wait:
            dist.Work.wait = self._original_wait  # type: ignore[method-assign]
        else:
            warn_once(
                "Leaving comm.instrument(): torch.distributed.Work.wait was patched by somebody else since and stays "
                "as it is; it may go on timing. Leave blocks in the reverse order of entering them."
            )
        self._module.uninstall()
        self.drain()
        SETTINGS.on_change = None
        SETTINGS.changed()
        LOG.source = None

    def configure(self) -> None:
        """Hand on what is to be timed, and by whom."""
        kept = {OPS[name].same_as or name for name in SETTINGS.prof_ops if name in OPS} | set(SETTINGS.prof_ops)
        wanted = [SETTINGS.prof_all or op.name in kept for op in self._operations]
        by_python = SETTINGS.timer is not None or SETTINGS.verbose or SETTINGS.debug
        self._module.configure(SETTINGS.enabled, by_python, wanted)

    def _poll(self) -> None:
        while not self._stopped.wait(_POLL_S):
            try:
                self.drain()
            except Exception as error:
                fault("operations seen by the kernel", error)

    def drain(self) -> None:
        """Carry what is in the buffer into the log."""
        with self._draining:
            found = self._module.take()
            for kind, number, group_number, nbytes, start_ns, end_ns, seq in _MESSAGE.iter_unpack(found):
                op = self._operations[number]
                group = self._group(group_number)
                size = None if nbytes < 0 or op.factor is None else nbytes
                starts = kind in _STARTS or (kind in (_FAILED, _UNTIMED) and start_ns == 0)
                record = group.record(op, op.name, size) if starts else group.find(op, op.name, size)
                if kind == _BOUNDED:
                    record.upper_bound = True
                elif kind == _ENDED:
                    LOG.put(record, _records.ISSUE, start_ns, end_ns)
                timed = kind in (_BLOCKING, _DONE, _BOUNDED, _ENDED) and op.synchronizes
                LOG.put(record, _KINDS[kind], start_ns, end_ns, seq if timed else None)
                if kind == _LATER:
                    LOG.put(record, _records.PAIR, seq, end_ns - start_ns)
            self.dropped = self._module.dropped()
            for group_number, group in list(self._groups.items()):
                advanced = self._module.group_info(group_number)[3]
                group.seen += advanced - self._advanced.get(group_number, 0)
                self._advanced[group_number] = advanced

    def _meet(self, number: int, process_group: Any) -> None:
        # Called by the kernel before the first operation of a group, and of one that has the address of one that is
        # gone.
        try:
            group = LOG.group_of(process_group)
            if group is not None:
                self._groups[number] = group
            forget, watched = self._module.forget_group, self._watched

            def gone(_: object) -> None:
                forget(number)
                watched.pop(number, None)

            watched[number] = weakref.ref(process_group, gone)
        except Exception as error:
            fault("a group seen by the kernel", error)

    def _group(self, number: int) -> Group:
        group = self._groups.get(number)
        if group is None:  # One that PyTorch's own functions do not know.
            name, size, rank, _ = self._module.group_info(number)
            group = self._groups[number] = LOG.past_group(name, size, rank)
        return group

    def _begin(self, number: int, nbytes: int, process_group: Any, tensor: Any, blocking: bool) -> KernelRun | None:
        # Called by the kernel before an operation that Python times: on a device, or for a timer.
        try:
            op = self._operations[number]
            group = LOG.group_of(process_group)
            if group is None:
                return None
            label = f"{op.name} | {_log.caller()}" if SETTINGS.debug else op.name
            record = group.record(op, label, None if nbytes < 0 or op.factor is None else nbytes)
            return KernelRun(record, None if tensor is None else pool_for(tensor), blocking)
        except Exception as error:
            fault(f"operation {number} seen by the kernel", error)
            return None

    def mute(self, by: int) -> None:
        """Count what this thread issues as part of something else (1), or no more (-1)."""
        self._module.mute(by)

    def after_fork(self) -> None:
        """Start anew in a child process."""
        self._module.after_fork()
        self._draining = threading.Lock()
        self._groups.clear()
        self._watched.clear()
        self._advanced.clear()
        if not self._stopped.is_set():
            threading.Thread(target=self._poll, name="deep500-timing comm", daemon=True).start()


_feed: Feed | None = None


def feed_of(module: ModuleType) -> Feed:
    """The one feed of a kernel."""
    global _feed
    if _feed is None:
        _feed = Feed(module)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_feed.after_fork)
    return _feed
