"""The timer of this adapter, and a training step that is timed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import deep500_timing as _core
from deep500_timing.devices import lazy_device
from deep500_timing_jax._clock import OutputClock, smallest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import DeviceClock
    from deep500_timing.devices import LazyDevice

output_clock = OutputClock()
"""The clock of all timers of this process."""


def _search() -> DeviceClock | str:
    return OutputClock.why_unavailable() or output_clock


class CPUGPUTimer(_core.CPUGPUTimer):
    """Times regions on the host and, with ``gpu=True``, until the outputs that ``watch`` is given are ready.

    JAX returns before a device has computed: a region on the host is the dispatch. With ``gpu=True``, call ``watch``
    with an output of the region before the region ends. Nothing waits on the calling thread.

    Args:
        device_clock: A clock to use in place of the adapter's.
        **settings: As for :class:`deep500_timing.Timer`.
    """

    __slots__ = ()

    def __init__(self, *, device_clock: DeviceClock | LazyDevice | None = None, **settings: Any) -> None:
        super().__init__(device_clock=device_clock or lazy_device(_search), **settings)

    def watch(self, output: Any) -> None:
        """Show the newest output of this thread. A small array of it is kept until it is ready: pass the loss."""
        output_clock.watch(output)


class TimedStep:
    """A training step, called as the function itself. Made by :func:`timed_step`."""

    def __init__(
        self, function: Callable[..., Any], timer: _core.Timer, every: int, output: Callable[[Any], Any]
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._timer = timer
        self._every = every
        self._output = output
        self._previous: Any = None
        self._ready_ns = 0
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        """As the function has it: ``lower``, ``clear_cache`` and so on."""
        return getattr(self._function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Every so many calls, wait for the output of the call before this one."""
        timer = self._timer
        if not timer.enabled:
            return self._function(*args, **kwargs)
        start_ns = timer.now_ns()
        result = self._function(*args, **kwargs)
        end_ns = timer.now_ns()
        timer.record("dispatch", start_ns, end_ns)
        previous, self._previous = self._previous, None
        self._calls += 1
        if self._every and self._calls % self._every == 0 and previous is not None:
            previous.block_until_ready()
            dispatched_ns, end_ns = end_ns, timer.now_ns()
            timer.record("wait for device", dispatched_ns, end_ns)
            if self._ready_ns:
                timer.device_sink(f"{self._every} steps").append(self._ready_ns, end_ns)
            self._ready_ns = end_ns
        if self._every and (self._calls + 1) % self._every == 0:
            self._previous = smallest_of(self._output(result))
        return result

    def restart(self) -> None:
        """Count calls from 0 again: after an evaluation, which would be part of ``10 steps``."""
        self._calls, self._ready_ns, self._previous = 0, 0, None


def timed_step(
    function: Callable[..., Any],
    timer: _core.Timer,
    *,
    every: int = 10,
    output: Callable[[Any], Any] = lambda result: result,
) -> TimedStep:
    """Time a training step, such as a function of ``jax.jit``.

    ``dispatch`` is the call. Every ``every`` calls the program waits for the output of the call *before*, so that the
    device has work meanwhile. The region ``wait for device`` is that. ``10 steps``, on the device, is the time between
    two such moments: the true time of ten steps.

    Args:
        function: The step.
        timer: Where to record.
        every: Calls between two waits; 0 never waits.
        output: Picks what to wait for out of the result, such as the loss; it must not be donated to the next call.

    Raises:
        ValueError: ``every`` is 1 or negative: waiting at each step serializes dispatch and computation.
    """
    if every < 0 or every == 1:
        raise ValueError(
            f"timed_step(every={every}): give 2 or more, or 0 for never. Each step would wait for the device."
        )
    return TimedStep(function, timer, every, output)
