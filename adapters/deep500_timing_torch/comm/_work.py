"""Asynchronous operations: when they were issued, when they were done, and how long anybody waited for them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from deep500_timing_torch.comm._device import EventPair
from deep500_timing_torch.comm._log import LOG, fault
from deep500_timing_torch.comm._records import DONE, EXPOSED, FAILED, PAIR, UNTIMED, Record
from deep500_timing_torch.comm._settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing.devices import EventPool


class Marked(Protocol):
    """An operation with an event before it, which is timed to an event behind the last wait for it."""

    mark: EventPair

    def end_for(self, tracker: Tracker) -> None:
        """Queue the second event; the time goes to the tracker."""


class Tracker:
    """One asynchronous operation on its way, which may have given out several handles."""

    __slots__ = (
        "_completion",
        "_device",
        "_exposed_ns",
        "_handles",
        "_latency_ns",
        "_run",
        "_tokens",
        "_waited_end_ns",
        "_waits_left",
        "done_ns",
        "record",
        "seq",
        "start_ns",
    )

    def __init__(self, record: Record, start_ns: int, seq: int | None, handles: int, device: EventPool | None) -> None:
        """Take over when the operation has been issued."""
        self.record = record
        self.start_ns = start_ns
        self.seq = seq
        self._handles = handles
        self._device = device
        self._run: Marked | None = None
        self._exposed_ns = 0
        self._latency_ns = 0
        self._waits_left = 0
        self._waited_end_ns = 0
        self.done_ns = 0
        # Completion and wait end on different threads, in either order; whoever comes second finds no token left and
        # counts the pair. Taking one is atomic.
        self._tokens = [1]
        self._completion = False

    def follow(self, future: Any) -> None:
        """Learn of the completion from a future of an operation on the CPU."""
        self._completion = True
        future.add_done_callback(self._on_done)

    def expect(self, run: Marked | None = None) -> None:
        """The completion will be known from the device.

        Args:
            run: Ended behind the last wait; None if the backend itself tells the time.
        """
        self._completion = True
        self._run = run
        self._waits_left = self._handles

    def __del__(self) -> None:
        """Nobody waits any more for an operation that was to be timed by its waits."""
        run = getattr(self, "_run", None)
        if run is not None:
            try:
                run.mark.drop()
                LOG.put(self.record, UNTIMED, 1, 0)
            except Exception:  # the interpreter may be ending
                return

    def _on_done(self, future: Any) -> None:
        # On the backend's thread, or at once. An exception here would be lost in the backend's log.
        try:
            self._complete(future)
        except Exception as error:
            fault(self.record.label, error)
            LOG.put(self.record, UNTIMED, 1, 0)

    def _complete(self, future: Any) -> None:
        end_ns = SETTINGS.now_ns()
        try:
            future.value()
        except Exception:
            LOG.put(self.record, FAILED, 1, 0)
            return
        # The callback may have waited for the interpreter, behind the very thread that has ended its wait.
        waited_end_ns = self._waited_end_ns
        self.done(self.start_ns, min(end_ns, waited_end_ns) if waited_end_ns else end_ns)

    def done(self, start_ns: int, end_ns: int) -> None:
        """The operation is complete."""
        self._latency_ns = end_ns - start_ns
        self.done_ns = end_ns
        LOG.put(self.record, DONE, start_ns, end_ns, self.seq)
        self._second()

    def untimed(self) -> None:
        """The time of its completion cannot be had."""
        LOG.put(self.record, UNTIMED, 0, 0)

    def untimed_under_way(self) -> None:
        """As :meth:`untimed`, of an operation that was counted as under way."""
        LOG.put(self.record, UNTIMED, 1, 0)

    def _second(self) -> None:
        try:
            self._tokens.pop()
        except IndexError:
            LOG.put(self.record, PAIR, self._latency_ns, self._exposed_ns)

    def start_wait(self) -> tuple[int, EventPair | None]:
        """A caller begins to wait for one of the handles."""
        now_ns = SETTINGS.now_ns()
        if self._device is None:
            return now_ns, None
        return now_ns, EventPair(self._device, self.record.label, now_ns, self.exposed, self.untimed, None)

    def end_wait(self, start_ns: int, mark: EventPair | None) -> None:
        """The wait is over."""
        end_ns = SETTINGS.now_ns()
        self._waited_end_ns = end_ns
        if SETTINGS.timer is not None:
            SETTINGS.region(self.record.label, start_ns, end_ns)
        if mark is not None:
            mark.end()
        else:
            self.exposed(start_ns, end_ns)
        self._waits_left -= 1
        if self._waits_left == 0 and self._run is not None:
            run, self._run = self._run, None
            run.end_for(self)

    @property
    def followed(self) -> bool:
        """Whether its completion will be known from a future."""
        return self._completion

    @property
    def waited(self) -> bool:
        """Whether every handle was waited for."""
        return self._handles <= 0

    def exposed(self, start_ns: int, end_ns: int) -> None:
        """Count how long a caller waited for it."""
        LOG.put(self.record, EXPOSED, start_ns, end_ns)
        self._exposed_ns += end_ns - start_ns
        self._handles -= 1
        if self._handles > 0:
            return
        if self._completion:
            self._second()
        else:
            # Without a future the completion is only known not to be later than the end of the last wait.
            self.record.upper_bound = True
            LOG.put(self.record, DONE, self.start_ns, self._waited_end_ns, self.seq)

    def timed_wait(self, wait: Callable[[], Any]) -> Any:
        """Call ``wait``; how long that takes is exposed time."""
        try:
            start_ns, mark = self.start_wait()
        except Exception as error:
            fault(self.record.label, error)
            return wait()
        try:
            result = wait()
        except BaseException:
            self.failed_wait(mark)
            raise
        try:
            self.end_wait(start_ns, mark)
        except Exception as error:
            fault(self.record.label, error)
        return result

    def failed_wait(self, mark: EventPair | None) -> None:
        """The wait ended with an exception."""
        if mark is not None:
            try:
                mark.drop()
            except Exception as error:
                fault(self.record.label, error)
        run, self._run = self._run, None
        if run is not None:
            run.mark.drop()
        if not self._completion or run is not None:
            LOG.put(self.record, FAILED, 1, 0)


class TimedWork(dist.Work):
    """The handle of an asynchronous operation, which times its ``wait``; in all else the one that it stands for."""

    __slots__ = ("_tracker", "_waited", "_work")

    def __init__(self, work: dist.Work, tracker: Tracker) -> None:
        """Stand for ``work``."""
        super().__init__()
        self._work = work
        self._tracker = tracker
        self._waited = False

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the original does; how long that takes is the operation's exposed time."""
        if self._waited:
            return self._work.wait(*args, **kwargs)
        result = self._tracker.timed_wait(functools.partial(self._work.wait, *args, **kwargs))
        self._waited = True
        return result

    def __repr__(self) -> str:
        """Name what it stands for."""
        return f"<TimedWork for {self._work!r}>"


def _delegate(name: str) -> Any:
    def method(self: TimedWork, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._work, name)(*args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"TimedWork.{name}"
    method.__doc__ = f"``{name}`` of the original."
    return method


# The methods of Work are found on the class before any `__getattr__` is asked, so each needs one here. Which there
# are differs between versions of PyTorch.
for _name in dir(dist.Work):
    if not _name.startswith("__") and _name not in vars(TimedWork) and _name not in ("_pybind11_conduit_v1_", "unbox"):
        setattr(TimedWork, _name, _delegate(_name))


def future_of(work: dist.Work, record: Record) -> Any:
    """A future of the operation, or None if its backend has none for it."""
    if record.no_future:
        return None
    try:
        return work.get_future()
    except RuntimeError:
        record.no_future = True
        return None


class TimedFuture(torch.futures.Future):  # type: ignore[type-arg]
    """The future of an operation on the CPU that returns one instead of a handle; it times its ``wait``."""

    def __init__(self, future: Any, tracker: Tracker) -> None:
        """Stand for ``future``, and complete when it does."""
        super().__init__()
        self._future = future
        self._tracker = tracker
        self._waited = False
        future.add_done_callback(self._hand_on)

    def _hand_on(self, future: Any) -> None:
        try:
            value = future.value()
        except Exception as error:
            self.set_exception(error)
        else:
            self.set_result(value)

    def wait(self) -> Any:
        """Wait as the original does; how long that takes is the operation's exposed time."""
        if self._waited:
            return super().wait()
        result = self._tracker.timed_wait(super().wait)
        self._waited = True
        return result
