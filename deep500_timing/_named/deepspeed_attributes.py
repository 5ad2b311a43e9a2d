"""The attributes that DeepSpeed's timers have besides their methods."""

from __future__ import annotations

from deep500_timing._named.named_timer import NamedTimer


class ElapsedTime:
    """A known time between two events on the device."""

    __slots__ = ("_ms",)

    def __init__(self, ms: float) -> None:
        self._ms = ms

    def get_elapsed_msec(self) -> float:
        return self._ms


class DeepSpeedAttributes(NamedTimer):
    """A named timer with DeepSpeed's attributes, read-only.

    Like ``elapsed()`` they wait for times on their way from the device and include the time of a running timer so far.
    """

    __slots__ = ()

    @property
    def name_(self) -> str:
        """Its name."""
        return self.name

    @property
    def started_(self) -> bool:
        """Whether it is running."""
        return self.running

    @property
    def use_host_timer(self) -> bool:
        """Whether the times are the host's. With a lazy device this is known after the first start."""
        return self._on_device is None

    @property
    def start_event(self) -> None:
        """None: the events belong to a pool and are reused as soon as they have been read."""
        return

    @property
    def start_time(self) -> float:
        """When it was last started, in s on the clock of the timer below; 0.0 before, and on a device."""
        return self._region._opened_ns() / 1e9 if self._on_device is None else 0.0

    @property
    def end_time(self) -> float:
        """When it was last stopped, in s on the clock of the timer below; 0.0 before, and on a device."""
        return self._on_host.ended_ns() / 1e9 if self._on_device is None else 0.0

    @property
    def event_timers(self) -> list[float] | list[ElapsedTime]:
        """The times since the last reset: in s on the host, objects with ``get_elapsed_msec()`` on a device."""
        durations_ns = self.read().durations_ns
        if self._on_device is None:
            return [duration_ns / 1e9 for duration_ns in durations_ns]
        return [ElapsedTime(duration_ns / 1e6) for duration_ns in durations_ns]

    @property
    def elapsed_records(self) -> list[float] | None:
        """The times since the last reset in ms, the latest 65 536 of them; None if there is none."""
        return [duration_ns / 1e6 for duration_ns in self.read().durations_ns] or None

    def _get_elapsed_msec(self) -> float:
        return self.read().total_ns / 1e6
