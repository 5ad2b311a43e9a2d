"""Throughput of a training run per second, in samples, tokens or another unit.

The shape is that of DeepSpeed's ``ThroughputTimer``. A *global step* is one update of the weights; it may have several
*micro-steps*, each from a ``start()`` to a ``stop()``, of which the last is ``stop(global_step=True)``. What lies
between a stop and the next start, or in a ``pause()``, is no part of a rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deep500_timing._named import DeepSpeedAttributes, Totals, timer_for
from deep500_timing._summary.text import deepspeed_gb_in_throughput, deepspeed_rate
from deep500_timing.exceptions import RegionNotOpenError
from deep500_timing.memory import HostMemory, MemoryReader, read_or_none

if TYPE_CHECKING:
    from deep500_timing._base.protocols import Clock, DeviceClock
    from deep500_timing.timer import Timer

__all__ = ["ThroughputTimer"]


class ThroughputTimer:
    """Counts the samples of each step, times the steps, and reports rates.

    A rate is None as long as there is none: before a step has been timed, and while the time of all steps is zero.

    Args:
        batch_size: What one global step processes, all its micro-steps and ranks together, unless the following say
            otherwise. None is 1.
        start_step: Global steps of this process that are warm-up and not timed.
        steps_per_output: Log the rates every so many global steps; never if None.
        monitor_memory: Log the use of the host's memory and swap with them.
        logging_fn: Called with each line; ``print`` if None.
        unit: What ``batch_size`` counts.
        per_micro_step: ``batch_size`` is what one micro-step processes. Accumulated steps then count each of them.
        data_parallel_size: Ranks that each process as much; the counts of this rank are multiplied by it.
        global_step: Global steps that were done before this process began, for the numbers in the log. Rates and
            warm-up know only the steps that this process has seen.
        timer: Your timer, which records the times as region ``name``; a new one if None.
        clock: The host clock of a new timer; the system's monotonic clock if None.
        device_clock: The device clock of a new timer; the host's clock if None.
        name: The region.

    Raises:
        ValueError: A size is negative, or not above 0 where it must be.
        MissingPackageError: ``monitor_memory`` is asked for and psutil is not installed.
    """

    memory_reader: MemoryReader | None = None
    """Reads the device's memory for the logged line. Subclasses for frameworks have one."""

    def __init__(
        self,
        batch_size: float | None = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], object] | None = None,
        *,
        unit: str = "samples",
        per_micro_step: bool = False,
        data_parallel_size: int = 1,
        global_step: int = 0,
        timer: Timer | None = None,
        clock: Clock | None = None,
        device_clock: DeviceClock | None = None,
        name: str = "throughput",
    ) -> None:
        for argument, value, least in (
            ("start_step", start_step, 0),
            ("steps_per_output", 1 if steps_per_output is None else steps_per_output, 1),
            ("data_parallel_size", data_parallel_size, 1),
            ("global_step", global_step, 0),
        ):
            if value < least:
                raise ValueError(f"ThroughputTimer({argument}={value!r}): it must be at least {least}.")
        self.batch_size = _amount("batch_size", 1 if batch_size is None else batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or print
        self.unit = unit
        self.per_micro_step = per_micro_step
        self.data_parallel_size = data_parallel_size
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = global_step
        """For the log; may be set at any time, as after loading a checkpoint."""
        self.timed_steps = 0
        """Global steps that the average stands on."""
        self.untimed_steps = 0
        """Global steps after the warm-up without a complete time; they are in no rate."""
        self._host = HostMemory() if monitor_memory else None
        self.config: Any = None
        """The config of DeepSpeed's that it was made with; the torch adapter's takes one."""
        self.initialized = False
        self._core = DeepSpeedAttributes(name, timer_for(timer, clock, device_clock))
        self._started = False
        self._pauses = 0
        self._paused_inside = False
        self._seen_steps = 0
        self._step = _Step()
        # Steps with times on their way from the device, oldest first.
        self._unsettled: deque[_Step] = deque()
        self._totals: dict[str, tuple[float, int]] = {}
        self._last: dict[str, tuple[float, int]] = {}
        self._total_ns = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy counts on from here, with no micro-step under way and no pause."""
        under_way = {"_started": False, "_step": _Step(), "_pauses": 0, "_paused_inside": False}
        # Times that are on their way from the device arrive here.
        return {**self.__dict__, **under_way, "_unsettled": deque(step for step in self._unsettled if step.complete)}

    # --- counting -----------------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether a micro-step is under way."""
        return self._started

    @property
    def start_time(self) -> float:
        """When the last timed micro-step began, as ``start_time`` of a named timer."""
        return self._core.start_time

    @property
    def end_time(self) -> float:
        """When the last timed micro-step ended, as ``end_time`` of a named timer."""
        return self._core.end_time

    def update_epoch_count(self) -> None:
        """A new epoch begins."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro-step begins. If one is under way, it is forgotten, and the time runs from now.

        That happens when an epoch ends: data loaders that start the timer before they fetch find nothing to fetch.
        """
        if self._pauses:
            return
        self._init_timer()
        self._core.forget_running()
        self._core.take()  # A pause may have split the forgotten micro-step.
        self._started = True
        if self._seen_steps >= self.start_step:
            self._core.start()

    def _init_timer(self) -> None:  # DeepSpeed's has it.
        self.initialized = True

    def stop(
        self,
        global_step: bool = False,
        report_speed: bool = True,
        *,
        batch_size: float | None = None,
        amounts: Mapping[str, float] | None = None,
    ) -> None:
        """A micro-step ends. Without a start, and during a pause, this does nothing.

        Args:
            global_step: The weights were updated: the global step ends here as well.
            report_speed: Log the rates if it is time to; False on ranks that are to be silent.
            batch_size: Amount that this micro-step processed. If any micro-step of a global step gives one, the step
                counts their sum instead of the ``batch_size`` of the class.
            amounts: Further amounts by unit: ``{"tokens": 8192}``.

        Raises:
            ValueError: An amount is negative or not finite. The step goes on.
        """
        if self._pauses or not self._started:
            return
        named = {} if amounts is None else {unit: _amount(unit, value) for unit, value in amounts.items()}
        if batch_size is not None:
            named[self.unit] = _amount("batch_size", batch_size)
        self._started = False
        self.micro_step_count += 1
        step = self._step
        step.micro_steps += 1
        if self._core.running:
            self._core.stop()
            step.parts.append(self._core.take())
        for unit, value in named.items():
            step.amounts[unit] = step.amounts.get(unit, 0.0) + value
        if global_step:
            self._end_global_step(report_speed)

    def _end_global_step(self, report_speed: bool) -> None:
        step, self._step = self._step, _Step()
        warm_up = self._seen_steps < self.start_step
        self.global_step_count += 1
        self._seen_steps += 1
        if warm_up:
            return
        step.amounts.setdefault(self.unit, self.batch_size * (step.micro_steps if self.per_micro_step else 1))
        if len(step.parts) == step.micro_steps:
            self._unsettled.append(step)
            self._settle()
        else:
            self.untimed_steps += 1
        if report_speed and self._is_report_boundary():
            self._report()

    def _is_report_boundary(self) -> bool:  # DeepSpeed's has it.
        return bool(self.steps_per_output) and self.global_step_count % (self.steps_per_output or 1) == 0

    def pause(self) -> AbstractContextManager[object]:
        """Keep what follows out of the rates: evaluation, a checkpoint. ``start`` and ``stop`` do nothing meanwhile.

        Returns:
            A context manager that resumes at its end; or call :meth:`resume`. Pauses nest.
        """
        self._pauses += 1
        if self._pauses == 1:
            self._paused_inside = self._core.running
            if self._paused_inside:
                self._core.stop()
        paused = ExitStack()
        paused.callback(self.resume)
        return paused

    def resume(self) -> None:
        """End the innermost pause.

        Raises:
            RegionNotOpenError: There is no pause.
        """
        if not self._pauses:
            raise RegionNotOpenError("Resuming a throughput timer: it is not paused. Call pause() first.")
        self._pauses -= 1
        if not self._pauses and self._paused_inside:
            self._core.start()

    # --- rates --------------------------------------------------------------------------------------------------------

    def _settle(self, wait: bool = False) -> None:
        # Add up the steps with complete times.
        if wait:
            self._core.wait()
        run = self._core._timer._run
        while self._unsettled and self._unsettled[0].complete:
            step = self._unsettled.popleft()
            if any(part.missing for part in step.parts):
                self.untimed_steps += 1
                continue
            self.timed_steps += 1
            self._total_ns += step.time_ns
            self._last = {}
            for unit, value in step.amounts.items():
                counted = value * self.data_parallel_size
                if run is not None and step.time_ns:
                    run.sample(f"throughput.{unit}_per_s", counted * 1e9 / step.time_ns)
                amount, total_ns = self._totals.get(unit, (0.0, 0))
                self._totals[unit] = (amount + counted, total_ns + step.time_ns)
                self._last[unit] = (counted, step.time_ns)

    @property
    def total_elapsed_time(self) -> float:
        """The time of all timed steps, in seconds; waits for times on their way from the device."""
        self._settle(wait=True)
        return self._total_ns / 1e9

    @total_elapsed_time.setter
    def total_elapsed_time(self, seconds: float) -> None:
        # As after loading a checkpoint, to go on from; rates know only the steps that this process has timed.
        self._settle(wait=True)
        self._total_ns = round(_amount("total_elapsed_time", seconds) * 1e9)

    @property
    def step_elapsed_time(self) -> float:
        """The time of the micro-steps that the global step under way has had so far, in s; waits as the total does."""
        self._core.wait()
        return self._step.time_ns / 1e9

    def average(self, unit: str | None = None) -> float | None:
        """The rate per second over all timed steps that counted the unit (the timer's if None), or None; waits."""
        self._settle(wait=True)
        return _rate(*self._totals.get(unit or self.unit, (0.0, 0)))

    def current(self, unit: str | None = None) -> float | None:
        """The rate per second of the last timed step, as :meth:`average`."""
        self._settle(wait=True)
        return _rate(*self._last.get(unit or self.unit, (0.0, 0)))

    def avg_samples_per_sec(self) -> float | None:
        """The average rate of what ``batch_size`` counts, or None while there is none."""
        return self.average()

    def curr_samples_per_sec(self) -> float | None:
        """The current rate of what ``batch_size`` counts, or None while there is none."""
        return self.current()

    def _report(self) -> None:
        where = f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}"
        unit = self.unit.title().replace(" ", "")
        line = f"{where}, RunningAvg{unit}PerSec={deepspeed_rate(self.average())}"
        line += f", Curr{unit}PerSec={deepspeed_rate(self.current())}"
        usage = None if self.memory_reader is None else read_or_none(self.memory_reader)
        if usage is not None and usage.device_allocated_bytes is not None:
            line += f", MemAllocated={deepspeed_gb_in_throughput(usage.device_allocated_bytes)}"
            line += f", MaxMemAllocated={deepspeed_gb_in_throughput(usage.device_peak_allocated_bytes)}"
        self.logging(line)
        host = None if self._host is None else read_or_none(self._host)
        if host is not None:
            self.logging(f"{where}, vm %: {host.host_used_percent}, swap %: {host.swap_used_percent}")


def _amount(what: str, value: float) -> float:
    amount = float(value)
    if not 0.0 <= amount < math.inf:
        raise ValueError(f"Counting {what}={value!r} in a throughput timer: it must be a finite number, 0 or more.")
    return amount


def _rate(amount: float, total_ns: int) -> float | None:
    return amount / (total_ns / 1e9) if total_ns > 0 else None


@dataclass(slots=True)
class _Step:
    """A global step: the times of its micro-steps, which may be on their way from the device, and its amounts."""

    parts: list[Totals] = field(default_factory=list)
    amounts: dict[str, float] = field(default_factory=dict)
    micro_steps: int = 0
    """Those without a time included."""

    @property
    def complete(self) -> bool:
        return all(part.complete for part in self.parts)

    @property
    def time_ns(self) -> int:
        return sum(part.total_ns for part in self.parts)
