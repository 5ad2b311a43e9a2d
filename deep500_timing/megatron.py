"""Named timers in the shape of Megatron's ``megatron.core.timers``.

A script switches by changing the import::

    from deep500_timing_torch.megatron import Timers      # device events where there is a device
    from deep500_timing.megatron import Timers            # the host's clock

    timers = Timers(log_level=1, log_option="minmax")
    timers("forward", log_level=1).start()
    ...
    timers("forward").stop()
    timers.log(["forward"])

Start and stop do not synchronize the device. ``elapsed`` is in seconds and the log in milliseconds, as there. Reports
across ranks go through the job's store, so that ranks that timed other regions, or are dead, do not hold up the rest.
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.exchange import DEADLINE_S, Exchange
from deep500_timing._distributed.launchers import rank_and_world, wait_for_ranks
from deep500_timing._named import NamedTimer, check_normalizer, timer_for
from deep500_timing.exceptions import NoTimesError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deep500_timing._base.protocols import Clock, DeviceClock
    from deep500_timing._distributed.exchange import Answers
    from deep500_timing.timer import Timer as Engine

__all__ = ["DummyTimer", "Timer", "TimerBase", "Timers"]

_OPTIONS = ("max", "minmax", "all")

MAX_LOG_LEVEL = 2
_groups = itertools.count()


class TimerBase:
    """The interface of all timers, also those that time nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, barrier: bool = False) -> None:
        """Start; after waiting for the other ranks if ``barrier``."""
        raise NotImplementedError

    def stop(self, barrier: bool = False) -> None:
        """Stop; after waiting for the other ranks if ``barrier``."""
        raise NotImplementedError

    def reset(self) -> None:
        """Restart from zero."""
        raise NotImplementedError

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """The time since the last reset, in seconds."""
        raise NotImplementedError

    def active_time(self) -> float:
        """The time since the timer was made, in seconds."""
        raise NotImplementedError


class DummyTimer(TimerBase):
    """Stands for every timer with a log level above the group's, and times nothing."""

    def __init__(self) -> None:
        super().__init__("dummy timer")

    def start(self, barrier: bool = False) -> None:
        """Do nothing, barrier included."""

    def stop(self, barrier: bool = False) -> None:
        """Do nothing, barrier included."""

    def reset(self) -> None:
        """Do nothing."""

    def set_barrier_group(self, barrier_group: Any) -> None:
        """Do nothing."""

    def set_elapsed(self, value: float) -> None:
        """Do nothing."""

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """There is no time: ``NoTimesError``."""
        raise NoTimesError(
            "Asking for the elapsed time of a timer that is switched off: its log_level is above that of the Timers "
            "group. Raise the group's log_level, or lower the timer's."
        )

    def active_time(self) -> float:
        """There is no time: ``NoTimesError``."""
        return self.elapsed()


class Timer(TimerBase):
    """One named timer. Times are in seconds."""

    def __init__(self, name: str, core: NamedTimer | None = None) -> None:
        super().__init__(name)
        self._core = NamedTimer(name) if core is None else core
        self._barrier_group: Any = None
        self._set_s: float | None = None

    def set_barrier_group(self, barrier_group: Any) -> None:
        """Which process group a barrier is among; all ranks if None."""
        self._barrier_group = barrier_group

    def start(self, barrier: bool = False) -> None:
        """Start; ``RegionOpenError`` if it is running already. With ``barrier`` every rank of the group must do so."""
        if barrier:
            wait_for_ranks(self._barrier_group)
        self._core.start()

    def stop(self, barrier: bool = False) -> None:
        """Stop; ``RegionNotOpenError`` if it is not running. The wait of ``barrier`` is in the time."""
        if barrier and self._core.running:
            wait_for_ranks(self._barrier_group)
        self._core.stop()

    def reset(self) -> None:
        """Forget what ``elapsed`` stands on, the start of a timer that runs included; not the active time."""
        self._core.forget_running()
        self._core.take()
        self._set_s = None

    def set_elapsed(self, value: float) -> None:
        """Set ``elapsed`` to a time in seconds that was measured otherwise; later times are added to it."""
        self._core.take()
        self._set_s = value

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """The time since the last reset in seconds, with the time of a running timer so far.

        Args:
            reset: Restart from zero.
            barrier: If it runs, wait for the other ranks before stopping it and again before starting it.
        """
        return self._read(reset, barrier)[0]

    def _read(self, reset: bool, barrier: bool = False) -> tuple[float, bool]:
        # The time, and whether anything was timed.
        timed = self._core.running or self._set_s is not None
        if barrier and self._core.running:
            wait_for_ranks(self._barrier_group)
            totals = self._core.read(reset=reset, before_restart=lambda: wait_for_ranks(self._barrier_group))
        else:
            totals = self._core.read(reset=reset)
        total_s = totals.total_ns / 1e9 + (self._set_s or 0.0)
        if reset:
            self._set_s = None
        return total_s, timed or totals.expected > 0

    def active_time(self) -> float:
        """The time since the timer was made, in seconds; no reset forgets it."""
        return self._core.lifetime().total_ns / 1e9


class Timers:
    """A group of named timers.

    Args:
        log_level: Timers with a level above it are not timed: 0, 1 or 2.
        log_option: How a report shows the times of the ranks: ``"max"``, ``"minmax"`` or ``"all"``.
        timer: Your timer, which records the times as regions, for its snapshots and exporters; a new one if None.
        clock: The host clock of a new timer; the system's monotonic clock if None.
        device_clock: The device clock of a new timer; the host's clock if None.
        logging_fn: Called by ``log`` with its text; ``print`` if None.
        deadline_s: How long a report waits for the other ranks, in seconds.

    Raises:
        ValueError: ``log_option`` is none of these.
    """

    def __init__(
        self,
        log_level: int,
        log_option: str,
        timer: Engine | None = None,
        *,
        clock: Clock | None = None,
        device_clock: DeviceClock | None = None,
        logging_fn: Callable[[str], object] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if log_option not in _OPTIONS:
            raise ValueError(f"Timers(log_option={log_option!r}): it must be one of {', '.join(map(repr, _OPTIONS))}.")
        self.timer = timer_for(timer, clock, device_clock)
        self._log_level = log_level
        self._log_option = log_option
        self._logging_fn = logging_fn
        self._deadline_s = deadline_s
        self._timers: dict[str, Timer] = {}
        self._log_levels: dict[str, int] = {}
        self._dummy_timer = DummyTimer()
        # Ranks make their groups in the same order.
        self._exchange = Exchange(f"timers{next(_groups)}")

    def __call__(self, name: str, log_level: int | None = None) -> Timer | DummyTimer:
        """The timer of that name, made if there is none yet; one that does nothing if its level is too high.

        Args:
            name: The timer.
            log_level: Its level, 2 if None and it is new.

        Raises:
            ValueError: The level is above 2, or another one than the timer was made with.
        """
        timer = self._timers.get(name)
        if timer is not None:
            if log_level is not None and log_level != self._log_levels[name]:
                raise ValueError(
                    f"timers({name!r}, log_level={log_level}): it was made with log_level={self._log_levels[name]}. "
                    "Name the same one, or none."
                )
            return timer
        if log_level is None:
            log_level = MAX_LOG_LEVEL
        if log_level > MAX_LOG_LEVEL:
            raise ValueError(f"timers({name!r}, log_level={log_level}): the highest level is {MAX_LOG_LEVEL}.")
        if log_level > self._log_level:
            return self._dummy_timer
        timer = self._timers[name] = Timer(name, NamedTimer(name, self.timer))
        self._log_levels[name] = log_level
        return timer

    # --- reports ------------------------------------------------------------------------------------------------------

    def _own_times(self, names: list[str] | None, reset: bool, barrier: bool) -> bytes:
        # This rank's times in seconds, read now.
        if barrier:
            wait_for_ranks(None)
        times = {}
        for name in list(self._timers) if names is None else names:
            if name in self._timers:
                time_s, timed = self._timers[name]._read(reset)
                if timed:
                    times[name] = time_s
        return json.dumps(times).encode()

    def _gather(self, names: list[str] | None, reset: bool, barrier: bool, here: bool) -> Answers | None:
        # Every rank posts its times, and the one that reports waits for them.
        own = self._own_times(names, reset, barrier)
        self._exchange.post(own, self._deadline_s)
        return self._exchange.gather(own, self._deadline_s) if here else None

    def get_all_timers_string(
        self, names: Iterable[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> str | None:
        """The report as text, on every rank; None if nothing was timed.

        Every rank calls it. Times are in ms; ranks that do not answer in time are named.

        Args:
            names: The timers; all timers of all ranks if None.
            normalizer: What to divide each time by, such as the number of iterations since the last report.
            reset: Restart from zero.
            barrier: Wait for all ranks first.

        Raises:
            ValueError: ``normalizer`` is not positive.
        """
        check_normalizer("get_all_timers_string", normalizer)
        names = None if names is None else list(names)
        # Without rank 0 a rank knows its own times only.
        answers = self._exchange.round(self._own_times(names, reset, barrier), None, self._deadline_s)
        return self._text_of(answers, names, normalizer)

    def log(
        self,
        names: Iterable[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Log the report on one rank, the last if None. Every rank calls it; the others do not wait.

        The other arguments are those of :meth:`get_all_timers_string`.
        """
        check_normalizer("log", normalizer)
        names = None if names is None else list(names)
        here, world = rank_and_world()
        answers = self._gather(names, reset, barrier, here == (world - 1 if rank is None else rank))
        if answers is not None:
            answers.ahead.clear()  # The other ranks do not wait, so some of them may be ahead.
            text = self._text_of(answers, names, normalizer)
            if text is not None:
                (self._logging_fn or partial(print, flush=True))(text)

    def write(
        self,
        names: Iterable[str] | None,
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Write the largest time over the ranks of each timer, as ``name-time``, in seconds. Every rank calls it.

        Args:
            names: These and the last three as for :meth:`get_all_timers_string`.
            writer: A TensorBoard ``SummaryWriter``, the ``wandb`` module, or anything with ``add_scalar(name, value,
                step)`` or ``log(values, step)``. None on the ranks that do not write: they do not wait.
            iteration: The step.
            normalizer: What to divide each time by.
            reset: Restart from zero.
            barrier: Wait for all ranks first.
        """
        check_normalizer("write", normalizer)
        add_scalar, log = getattr(writer, "add_scalar", None), getattr(writer, "log", None)
        if writer is not None and add_scalar is None and log is None:
            raise TypeError(
                f"timers.write() to {type(writer).__name__}: a writer has add_scalar(name, value, step), as "
                "TensorBoard's has, or log(values, step), as the wandb module has."
            )
        names = None if names is None else list(names)
        answers = self._gather(names, reset, barrier, writer is not None)
        times = {} if answers is None else _by_name(answers, names)
        try:
            for name, by_rank in times.items():
                value = max(by_rank.values()) / normalizer
                if add_scalar is not None:
                    add_scalar(f"{name}-time", value, iteration)
                elif log is not None:
                    log({f"{name}-time": value}, iteration)
        except Exception as error:
            warn_once(
                f"Writing times to {type(writer).__name__} failed; the run goes on, the times are lost: {error}",
                key=f"write {type(writer)} {error!r}",
            )

    def _text_of(self, answers: Answers, names: list[str] | None, normalizer: float) -> str | None:
        """The report, in ms; None if nothing was timed and there is nothing to say."""
        times = _by_name(answers, names)
        scale = 1000.0 / normalizer
        lines = []
        if times and self._log_option == "all":
            lines.append("times across ranks (ms):")
            for name, by_rank in times.items():
                lines.append(f"  {name}:")
                lines.extend(f"     rank {rank:2d}: {time_s * scale:.2f}" for rank, time_s in by_rank.items())
        elif times:
            both = self._log_option == "minmax"
            lines.append("(min, max) time across ranks (ms):" if both else "max time across ranks (ms):")
            for name, by_rank in times.items():
                low, high = min(by_rank.values()) * scale, max(by_rank.values()) * scale
                lines.append(f"    {name + ' ':.<48}: " + (f"({low:.2f}, {high:.2f})" if both else f"{high:.2f}"))
        lines.extend(f"  {note}" for note in _notes(answers, self._deadline_s))
        return "\n".join(lines).strip() or None


def _by_name(answers: Answers, names: list[str] | None) -> dict[str, dict[int, float]]:
    """The seconds of each timer by rank; timers that no rank has are left out."""
    found = answers.plain()
    order = list(dict.fromkeys(itertools.chain(*found.values()))) if names is None else names
    times = {name: {rank: times[name] for rank, times in found.items() if name in times} for name in order}
    return {name: by_rank for name, by_rank in times.items() if by_rank}


def _notes(answers: Answers, deadline_s: float) -> Iterator[str]:
    if answers.fault is not None:
        yield f"the other ranks could not be asked: {answers.fault}"
    if answers.missing:
        yield f"no times from rank {', '.join(map(str, answers.missing))} within {deadline_s:g} s"
    for rank, calls in answers.ahead.items():
        where, more = ("ahead", "more") if calls > 0 else ("behind", "fewer")
        rounds = "a round" if abs(calls) == 1 else f"{abs(calls)} rounds"
        yield f"rank {rank} is {rounds} {where}: it has asked for so many {more}"
