"""The settings: which operations are timed, how, and into which timer."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from deep500_timing import CPUGPUTimer, TimeType
from deep500_timing.adapters import warn_once
from deep500_timing_torch.comm._ops import OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deep500_timing import Timer


DEVICE_TIMES = ("auto", "flight_recorder", "stream_events")


def fault(name: str, error: Exception) -> None:
    """Warn once that an operation could not be timed; it runs all the same."""
    warn_once(
        f"Timing {name} failed; it runs all the same, untimed: {type(error).__name__}: {error}",
        key=f"comm {name} {type(error).__name__}",
    )


class Settings:
    """The settings of this process; one object, read by every timed operation."""

    def __init__(self) -> None:
        self.enabled = True
        self.prof_all = True
        self.prof_ops: frozenset[str] = frozenset()
        self.verbose = False
        self.debug = False
        self.timer: Timer | None = None
        self.device_times = "auto"
        self.now_ns: Callable[[], int] = perf_counter_ns
        self.kernel: Any = None
        """The module of the compiled kernel while it is at work."""
        self.instruments = 0
        """How many objects of :func:`instrument` are in force."""
        self.why_no_kernel: str | None = None
        self.by_functions = True
        """Whether the timed functions do the timing: it is on, and the kernel, which sees more, is not at work."""
        self._wanted: frozenset[str] = frozenset()

    def changed(self) -> None:
        self.by_functions = self.enabled and self.kernel is None
        # Functions for one operation share its name in the log.
        self._wanted = self.prof_ops | {OPS[name].name for name in self.prof_ops if name in OPS}
        if self.kernel is not None:
            self.kernel.enable(self.enabled)

    def wants(self, name: str) -> bool:
        """Whether an operation of that name in the log is timed."""
        return self.prof_all or name in self._wanted

    def region(self, name: str, start_ns: int, end_ns: int) -> None:
        """Give the timer, if there is one, a stretch of communication; a timer that fails costs one warning."""
        if self.timer is not None:
            try:
                self.timer.record(TimeType.COMM, start_ns, end_ns)
            except Exception as error:
                fault(name, error)

    def device_store(self) -> Any:
        """Where the timer keeps the device times of communication, None if it has no device or there is no timer."""
        return self.timer.device_sink(TimeType.COMM) if isinstance(self.timer, CPUGPUTimer) else None


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
    device_times: str | None = None,
) -> None:
    """Choose which operations are timed; a setting that is not given stays as it is.

    Args:
        enabled: Whether anything is timed, as it is at first. Off costs each call one test.
        prof_all: Whether every operation is timed, or only those of ``prof_ops``.
        prof_ops: Names of the operations to time if ``prof_all`` is false, such as ``["all_reduce"]``.
        verbose: Print a line for each operation to the standard error of rank 0, when its time is known.
        debug: Keep the operations apart by the function that called them.
        timer: A timer that gets a region ``TimeType.COMM`` for each stretch of time that the calling thread spends in
            communication: blocking operations, the calls of asynchronous ones, and the waits for them; of a
            ``CPUGPUTimer`` the device's times as well. None for no timer. Its clock times everything from now on.
        device_times: How NCCL's operations are timed. ``"flight_recorder"``: by NCCL's own events, which PyTorch's
            flight recorder reads. ``"stream_events"``: between two events on the current stream, which bounds the time
            of asynchronous operations from above. ``"auto"``, as at first: the flight recorder where PyTorch has one,
            but for ``CUDA_DEVICE_MAX_CONNECTIONS=1``, where NCCL's timed events would end the overlap with computing.

    Raises:
        TypeError: ``prof_ops`` is one string instead of several.
        ValueError: ``device_times`` is not one of the three.
    """
    switches = {"enabled": enabled, "prof_all": prof_all, "verbose": verbose, "debug": debug}
    for name, value in switches.items():
        if value is not None:
            setattr(SETTINGS, name, bool(value))
    if prof_ops is not None:
        if isinstance(prof_ops, str):
            raise TypeError(
                f"configure(prof_ops={prof_ops!r}): give a list of names, not one string: prof_ops=[{prof_ops!r}]."
            )
        SETTINGS.prof_ops = frozenset(prof_ops)
    if device_times is not None:
        if device_times not in DEVICE_TIMES:
            raise ValueError(f"configure(device_times={device_times!r}): choose one of {', '.join(DEVICE_TIMES)}.")
        SETTINGS.device_times = device_times
    if timer is not _UNSET:
        SETTINGS.timer = timer
        SETTINGS.now_ns = perf_counter_ns if timer is None else timer.now_ns
    SETTINGS.changed()
