"""What is timed, and into which timer."""

from __future__ import annotations

import sys
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from deep500_timing import CPUGPUTimer, TimeType
from deep500_timing_torch.comm._log import LOG, fault
from deep500_timing_torch.comm._ops import bandwidths
from deep500_timing_torch.comm._records import DONE, SYNC, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deep500_timing import Timer


class Settings:
    """The settings of this process; one object, read by every timed operation."""

    __slots__ = (
        "by_functions",
        "debug",
        "enabled",
        "now_ns",
        "on_change",
        "prof_all",
        "prof_ops",
        "quick",
        "timer",
        "verbose",
    )

    def __init__(self) -> None:
        """Everything is timed, into no timer."""
        self.enabled = True
        self.prof_all = True
        self.prof_ops: frozenset[str] = frozenset()
        self.verbose = False
        self.debug = False
        self.timer: Timer | None = None
        self.now_ns: Callable[[], int] = perf_counter_ns
        self.by_functions = True
        """Whether the timed functions do the timing: they are on, and the kernel, which sees more, is not at work."""
        self.quick = True
        """Whether the timed functions may take their short way: everything is timed, and nothing else is asked for."""
        self.on_change: Callable[[], None] | None = None
        """Told of changes: the kernel, while it is at work."""

    def changed(self) -> None:
        """Hand on what was changed."""
        self.by_functions = self.enabled and self.on_change is None
        more = self.verbose or self.debug or self.timer is not None
        self.quick = self.by_functions and self.prof_all and not more
        if self.on_change is not None:
            self.on_change()

    def wants(self, name: str) -> bool:
        """Whether an operation of that name is timed."""
        return self.prof_all or name in self.prof_ops

    def region(self, name: str, start_ns: int, end_ns: int) -> None:
        """Give the timer a stretch of communication; a timer that fails is said once, and fails nobody else."""
        try:
            if self.timer is not None:
                self.timer.record(TimeType.COMM, start_ns, end_ns)
        except Exception as error:
            fault(name, error)

    def device_store(self) -> Any:
        """Where the timer keeps the device times of communication, None if it has no device or there is no timer."""
        if isinstance(self.timer, CPUGPUTimer):
            return self.timer.device_sink(TimeType.COMM)
        return None


SETTINGS = Settings()
_UNSET: Any = object()


def configure(
    *,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
    timer: Timer | None = _UNSET,
) -> None:
    """Choose what is timed; what is not given stays as it is.

    Args:
        enabled: Whether anything is timed (it is, to begin with). Off costs each call one test.
        prof_all: Whether every operation is timed, or only those of ``prof_ops``.
        prof_ops: Names of the operations to time if ``prof_all`` is false, such as ``["all_reduce"]``.
        verbose: Print a line for each operation to the standard error of rank 0, when its time is known.
        debug: Keep the operations apart by the function that called them.
        timer: A timer that gets a region ``TimeType.COMM`` for each stretch of time that the calling thread spends in
            communication: blocking operations, the calls of asynchronous ones, and the waits for them; of a
            ``CPUGPUTimer`` the device's times as well. None for no timer. Its clock times everything from now on.

    Raises:
        TypeError: ``prof_ops`` is one string instead of several.
    """
    if enabled is not None:
        SETTINGS.enabled = bool(enabled)
    if prof_all is not None:
        SETTINGS.prof_all = bool(prof_all)
    if prof_ops is not None:
        if isinstance(prof_ops, str):
            raise TypeError(
                f"configure(prof_ops={prof_ops!r}): give a list of names, not one string: prof_ops=[{prof_ops!r}]."
            )
        SETTINGS.prof_ops = frozenset(prof_ops)
    if verbose is not None:
        SETTINGS.verbose = bool(verbose)
        LOG.observer = _say if verbose else None
    if debug is not None:
        SETTINGS.debug = bool(debug)
    if timer is not _UNSET:
        SETTINGS.timer = timer
        SETTINGS.now_ns = perf_counter_ns if timer is None else timer.now_ns
    SETTINGS.changed()


def _say(record: Record, kind: int, start_ns: int, end_ns: int) -> None:
    if kind not in (SYNC, DONE) or record.group.global_ranks[record.group.rank] != 0:
        return
    algbw, busbw = bandwidths(record.message_bytes, record.group.size, (end_ns - start_ns) / 1e9, record.op.factor)
    size = "" if record.message_bytes is None else f", {record.message_bytes:.0f} B"
    rates = "" if algbw is None else f", algbw {algbw:.3f} GB/s"
    rates += "" if busbw is None else f", busbw {busbw:.3f} GB/s"
    most = "at most " if record.upper_bound else ""
    print(
        f"comm: {record.label}{size}, {record.group.size} ranks: {most}{(end_ns - start_ns) / 1e6:.3f} ms{rates}",
        file=sys.stderr,
    )
