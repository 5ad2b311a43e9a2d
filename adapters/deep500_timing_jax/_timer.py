"""The timer of this adapter, a training step that is timed, and the clock that knows when outputs are ready.

JAX has no events: a thread waits for the outputs, so that the program need not.
"""

from __future__ import annotations

import functools
import threading
import weakref
from concurrent.futures import Future
from queue import SimpleQueue
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import deep500_timing as _core
from deep500_timing.adapters import check_timer, missing_package, warn_once
from deep500_timing.devices import lazy_device

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from deep500_timing import Clock, DeviceClock
    from deep500_timing.devices import LazyDevice
    from deep500_timing.runs import RunLog


class OutputEvent:
    """A point behind one output: reached when the output is there."""

    __slots__ = ("ready_ns",)

    ready_ns: Future[int]
    """On the host's clock; the fault of an output that failed on the device or was donated."""


def _wait(waiting: SimpleQueue[tuple[Future[int], Any, int] | None]) -> None:
    # Until the clock is gone, which this must not keep alive.
    while (recorded := waiting.get()) is not None:
        ready_ns, output, recorded_ns = recorded
        try:
            output.block_until_ready()
        except Exception as error:  # It failed on the device, or was donated.
            ready_ns.set_exception(error)
        else:
            ready_ns.set_result(max(perf_counter_ns(), recorded_ns))
        del ready_ns, output, recorded


class OutputClock:
    """A device clock for JAX, which has no events: a thread waits for the outputs that it is shown.

    An event is reached when the output that :meth:`watch` was last given, on the same thread, is ready, and not before
    the event is recorded. The waiting thread reads the host's clock then, late by the time that it takes to get the
    interpreter: microseconds while the program waits or dispatches, up to 5 ms while it runs Python.
    """

    name = "JAX"

    def __init__(self) -> None:
        self._shown = threading.local()
        self._waiting: SimpleQueue[tuple[Future[int], Any, int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @staticmethod
    def why_unavailable() -> str | None:
        """Why the clock cannot be used, or None."""
        from importlib.util import find_spec

        return None if find_spec("jax") else str(missing_package("jax", extra="jax", caller="A device time"))

    def watch(self, output: Any) -> None:
        """Show the thread's newest output, which the next event stands behind. Only one array of it is kept."""
        self._shown.output = smallest_of(output)

    def stream(self) -> str:
        """One queue: XLA orders the programs of a process by their data."""
        return self.name

    def is_capturing(self) -> bool:
        return False

    def new_event(self, stream: object) -> OutputEvent:
        return OutputEvent()

    def record(self, event: OutputEvent, stream: object) -> None:
        ready_ns = event.ready_ns = Future()
        output = getattr(self._shown, "output", None)
        now_ns = perf_counter_ns()
        if output is None:
            ready_ns.set_result(now_ns)
            return
        if self._thread is None or not self._thread.is_alive():
            # A daemon, so that an output that never comes does not keep the process from its end.
            self._thread = threading.Thread(target=_wait, args=(self._waiting,), name="deep500-timing JAX", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._waiting.put, None)
        self._waiting.put((ready_ns, output, now_ns))

    def is_done(self, event: OutputEvent) -> bool:
        return event.ready_ns.done()

    def wait(self, event: OutputEvent) -> None:
        event.ready_ns.exception()

    def elapsed_ns(self, start: OutputEvent, end: OutputEvent) -> int:
        """Nanoseconds between two events.

        Raises:
            RuntimeError: One is not reached.
            Exception: The computation of an output failed, or its memory was donated.
        """
        if not (start.ready_ns.done() and end.ready_ns.done()):
            raise RuntimeError("elapsed_ns was asked for an event before its output was ready; wait for it first")
        return end.ready_ns.result() - start.ready_ns.result()


def smallest_of(output: Any) -> Any:
    """A small array of an output, or None: its arrays are ready together, and the loss is seldom donated."""
    if hasattr(output, "block_until_ready"):
        return output
    import jax

    leaves = [leaf for leaf in jax.tree_util.tree_leaves(output) if hasattr(leaf, "block_until_ready")]
    few = leaves if len(leaves) < 9 else leaves[:4] + leaves[-4:]
    return min(few, key=lambda leaf: leaf.size, default=None)


WAIT = "wait for device"
output_clock = OutputClock()
"""The clock of all timers of this process."""


class CPUGPUTimer(_core.CPUGPUTimer):
    """Times regions on the host and, with ``gpu=True``, until the outputs that ``watch`` is given are ready.

    JAX returns before a device has computed: a region on the host is the dispatch. With ``gpu=True``, call ``watch``
    with an output of the region before the region ends. Nothing waits on the calling thread.

    Args:
        device_clock: A clock to use in place of the adapter's.
        run, clock, enabled, keep_last, skip_first: As for :class:`deep500_timing.Timer`.
    """

    __slots__ = ()

    def __init__(
        self,
        *,
        device_clock: DeviceClock | LazyDevice | None = None,
        run: RunLog | str | PathLike[str] | None = None,
        clock: Clock | None = None,
        enabled: bool = True,
        keep_last: int | None = None,
        skip_first: int = 0,
    ) -> None:
        device_clock = device_clock or lazy_device(lambda: OutputClock.why_unavailable() or output_clock)
        super().__init__(
            device_clock, run=run, clock=clock, enabled=enabled, keep_last=keep_last, skip_first=skip_first
        )

    def watch(self, output: Any) -> None:
        """Show the newest output of this thread. A small array of it is kept until it is ready: pass the loss."""
        output_clock.watch(output)


class TimedStep:
    """A training step, called as the function itself. Made by :func:`timed_step`."""

    def __init__(self, function: Any, timer: _core.Timer, every: int, output: Callable[[Any], Any]) -> None:
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
        try:
            if self._every and self._calls % self._every == 0 and previous is not None:
                previous.block_until_ready()
                dispatched_ns, end_ns = end_ns, timer.now_ns()
                timer.record(WAIT, dispatched_ns, end_ns)
                if self._ready_ns:
                    timer.device_sink(f"{self._every} steps").append(self._ready_ns, end_ns)
                self._ready_ns = end_ns
            if self._every and (self._calls + 1) % self._every == 0:
                self._previous = smallest_of(self._output(result))
        except Exception as error:
            self._ready_ns = 0
            warn_once(
                f"timed_step could not wait for an output, and goes on without that time: {type(error).__name__}: "
                f"{error}. Pass output= a function that picks a result that is not donated to the next call, such as "
                "the loss; an error of the device is raised where the program reads the result.",
                key="timed_step output",
            )
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
        TypeError: ``timer`` is not a timer, or ``function`` is not callable.
        ValueError: ``every`` is 1 or negative: waiting at each step serializes dispatch and computation.
    """
    if not callable(function):
        raise TypeError(f"timed_step({function!r}): pass a function, or the result of jax.jit.")
    check_timer(f"timed_step(step, {timer!r})", timer)
    if every < 0 or every == 1:
        raise ValueError(
            f"timed_step(every={every}): give 2 or more, or 0 for never. Each step would wait for the device."
        )
    return TimedStep(function, timer, every, output)
