"""The training loop: ``for batch in timer.steps(loader)``."""

from __future__ import annotations

import dis
import inspect
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from deep500_timing._base.names import BATCH, IO
from deep500_timing._recording.decorators import TimedIterable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    from deep500_timing._recording.decorators import Timer

T = TypeVar("T")

_END: Any = object()


class Steps(TimedIterable[T]):
    """The items of an iterable, each group of ``micro_batches`` inside one BATCH; see :meth:`Timer.steps`."""

    _timer: Any
    micro_batches: int
    start: int | None

    def __iter__(self) -> Iterator[T]:
        timer: Timer = self._timer
        iterator: Iterator[T] | None = None
        number = self.start
        while True:
            for key in (BATCH, IO):
                if timer.region(key).is_open:
                    timer.start(key)  # Raises the error that tells what to do.
            begin_ns = timer.now_ns()
            try:
                with timer.region(BATCH, self._gpu):
                    for index in range(self.micro_batches):
                        with timer.region(IO):
                            # Creating the iterator is part of the first wait: it starts the worker processes.
                            if iterator is None:
                                iterator = iter(self._iterable)
                            item = next(iterator, _END)
                            if item is _END:
                                timer.cancel(IO)
                            elif number is not None and index == 0:
                                timer.step(number, time_ns=begin_ns)
                        if item is _END:
                            if index == 0:
                                timer.cancel(BATCH)
                            return
                        try:
                            yield item
                        except GeneratorExit:
                            if not _loop_was_left():
                                raise
                            return
            except BaseException:
                # Still open if Ctrl-C came between the last line of a block and its exit.
                timer.fail(IO)
                timer.fail(BATCH)
                raise
            if number is not None:
                number += 1


class SizedSteps(Steps[T]):
    """:class:`Steps` over an iterable with a length."""

    _iterable: Any

    def __len__(self) -> int:
        return len(self._iterable)


def _loop_was_left() -> bool:
    # Whether the loop that closes this generator was left by `break` or `return`, and not by an exception. The closing
    # loop has then removed its iterator from the stack by a separate instruction. Generators in between, such as
    # tqdm's, are closed by the loop around them.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    if frame is None:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in {"POP_TOP", "POP_ITER"}


def steps(timer: Timer, iterable: Iterable[T], micro_batches: int, start: int | None, gpu: bool) -> Steps[T]:
    if not hasattr(type(iterable), "__iter__") and not hasattr(type(iterable), "__getitem__"):
        raise TypeError(f"steps({iterable!r}): it cannot be iterated; pass a data loader, a generator or a list.")
    if type(micro_batches) is not int or micro_batches < 1:
        raise ValueError(f"steps(micro_batches={micro_batches!r}): it must be an integer, 1 or more.")
    kind = SizedSteps if hasattr(type(iterable), "__len__") else Steps
    found = kind(timer, iterable, BATCH, gpu)
    found.micro_batches, found.start = micro_batches, start
    return found
