"""When JAX's devices finish an output, learnt by a thread that waits for it, so that the program need not."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any

from deep500_timing.adapters import missing_package


class OutputEvent:
    """A point behind one output: reached when the output is there."""

    __slots__ = ("error", "number", "reached", "ready_ns")

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.ready_ns = 0
        self.error: Exception | None = None
        self.number = 0


class OutputClock:
    """A device clock for JAX, which has no events: a thread waits for the outputs that it is shown.

    An event is reached when the output that :meth:`watch` was last given, on the same thread, is ready, and not before
    the event is recorded. The waiting thread reads the host's clock then, late by the time that it takes to get the
    interpreter: microseconds while the program waits or dispatches, up to 5 ms while it runs Python.
    """

    name = "JAX"

    def __init__(self) -> None:
        self._shown = threading.local()
        self._waiting: SimpleQueue[tuple[OutputEvent, int, Any, int]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @staticmethod
    def why_unavailable() -> str | None:
        """Why the clock cannot be used, or None."""
        from importlib.util import find_spec

        if find_spec("jax") is not None:
            return None
        return str(missing_package("jax", extra="jax", caller="A device time"))

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
        event.number += 1
        event.reached.clear()
        event.error = None
        output = getattr(self._shown, "output", None)
        now_ns = perf_counter_ns()
        if output is None:
            event.ready_ns = now_ns
            event.reached.set()
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._wait, name="deep500-timing JAX", daemon=True)
            self._thread.start()
        self._waiting.put((event, event.number, output, now_ns))

    def _wait(self) -> None:
        while True:
            event, number, output, recorded_ns = self._waiting.get()
            error = None
            try:
                output.block_until_ready()
            except Exception as fault:  # It failed on the device, or was donated.
                error = fault
            ready_ns = max(perf_counter_ns(), recorded_ns)
            if event.number == number:
                event.ready_ns, event.error = ready_ns, error
                event.reached.set()
            del output

    def is_done(self, event: OutputEvent) -> bool:
        return event.reached.is_set()

    def wait(self, event: OutputEvent) -> None:
        event.reached.wait()

    def elapsed_ns(self, start: OutputEvent, end: OutputEvent) -> int:
        """Nanoseconds between two events.

        Raises:
            RuntimeError: One is not reached.
            Exception: The computation of an output failed, or its memory was donated.
        """
        for event in (start, end):
            if not event.reached.is_set():
                raise RuntimeError("elapsed_ns was asked for an event before its output was ready; wait for it first")
            if event.error is not None:
                raise event.error
        return end.ready_ns - start.ready_ns


def smallest_of(output: Any) -> Any:
    """A small array of an output, or None: its arrays are ready together, and the loss is seldom donated."""
    if hasattr(output, "block_until_ready"):
        return output
    import jax

    leaves = [leaf for leaf in jax.tree_util.tree_leaves(output) if hasattr(leaf, "block_until_ready")]
    few = leaves if len(leaves) < 9 else leaves[:4] + leaves[-4:]
    return min(few, key=lambda leaf: leaf.size, default=None)
