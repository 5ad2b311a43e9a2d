"""Timing by decoration and by iteration: ``timer.timed(key)``, ``timer.iterate(iterable)``, ``timer.steps(loader)``.

If the thread has the key open already, a call or a wait is part of that stretch, as in a recursion.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from deep500_timing._base.names import BATCH, IO, TimeType
from deep500_timing._base.warn import warn_once
from deep500_timing._recording.intervals import last_of
from deep500_timing.exceptions import RegionOpenError

if TYPE_CHECKING:
    from types import FrameType

    Timer = Any
    """A :class:`deep500_timing.Timer`, which imports this module."""

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")


def timed(timer: Timer, key: TimeType | str, gpu: bool = False) -> Callable[[F], F]:
    timer._find(key)  # A bad key is an error here, not at the first call.

    def decorate(function: F) -> F:
        if isinstance(function, (classmethod, staticmethod)):
            inner: Any = function.__func__
            rewrapped: Any = type(function)(decorate(inner))
            return rewrapped  # type: ignore[no-any-return]
        if not callable(function):
            raise TypeError(
                f"timed({key!s}) decorates a function, not {function!r}; for a block use `with timer.region(...)`."
            )
        if isinstance(function, type):
            raise TypeError(
                f"timed({key!s}) decorates a function, and {function.__qualname__!r} is a class, which would no longer "
                "be one. Decorate its __init__, or the function that makes the objects."
            )
        wrap: Callable[..., Any] = _function
        # For an object, its class's __call__ decides.
        called: Any = function if hasattr(function, "__code__") else _unwrapped_call(function)
        name = getattr(function, "__qualname__", repr(function))
        if inspect.isasyncgenfunction(called):
            raise TypeError(
                f"timed({key!s}) cannot decorate the asynchronous generator function {name!r}: other coroutines "
                "run between its items. Put `with timer.region(...)` around the parts of it that do the work."
            )
        if inspect.iscoroutinefunction(called):
            if gpu:
                raise TypeError(
                    f"timed({key!s}, gpu=True) cannot decorate the coroutine function {name!r}: its work on the stream "
                    "cannot be told from that of other coroutines. Leave gpu=True out."
                )
            wrap = _coroutine
        elif inspect.isgeneratorfunction(called):
            wrap = _generator
        return functools.wraps(function)(wrap(timer, key, gpu, function))  # type: ignore[return-value]

    return decorate


def _unwrapped_call(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    if hasattr(function, "__code__") or inspect.ismethod(function) or inspect.isbuiltin(function):
        return function
    return getattr(type(function), "__call__", function)  # noqa: B004 (the kind of function is wanted)


def _function(timer: Timer, key: TimeType | str, gpu: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if timer._find(key).is_open:
            return function(*args, **kwargs)
        try:
            with timer.region(key, gpu):
                return function(*args, **kwargs)
        except BaseException:
            timer.fail(key)  # Still open if Ctrl-C came between the block's last line and its exit.
            raise

    return call


def _coroutine(timer: Timer, key: TimeType | str, gpu: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        # Not an open region: other coroutines of the same key may run meanwhile on the same thread.
        start_ns = timer.now_ns()
        try:
            result = await function(*args, **kwargs)
        except BaseException:
            if timer.enabled:
                timer._find(key)._intervals.failed += 1
            raise
        timer._keep(key, start_ns, timer.now_ns())
        return result

    return call


def _generator(timer: Timer, key: TimeType | str, gpu: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    stretch = _function(timer, key, gpu, _resumed)

    def call(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        resume: Callable[[], Any] = functools.partial(next, generator)
        try:
            while True:
                value, is_last = stretch(resume)
                if is_last:
                    return value
                try:
                    resume = functools.partial(generator.send, (yield value))
                except GeneratorExit:
                    raise
                except BaseException as error:
                    resume = functools.partial(generator.throw, error)
        finally:
            generator.close()

    return call


def _resumed(resume: Callable[[], Any]) -> tuple[Any, bool]:
    # An item, or the value that the generator returned at its end; and whether it was the end.
    try:
        return resume(), False
    except StopIteration as stop:
        return stop.value, True


_END: Any = object()
_NOWHERE = 0, 0, False


class TimedIterable(Generic[T]):
    """The items of another iterable, with each wait for the next one timed."""

    def __init__(self, timer: Timer, iterable: Iterable[T], key: TimeType | str, gpu: bool) -> None:
        self._timer = timer
        self._iterable = iterable
        self._key = key
        self._gpu = gpu

    def __iter__(self) -> Iterator[T]:
        timer = self._timer
        iterator: Iterator[T] | None = None
        while True:
            region: Any = timer.region(self._key, self._gpu)
            is_ours = not region.is_open
            try:
                with region if is_ours else nullcontext():
                    # Creating the iterator is part of the first wait: it starts the worker processes.
                    if iterator is None:
                        iterator = iter(self._iterable)
                    item = next(iterator, _END)
                    if is_ours and item is _END:
                        timer.cancel(self._key)
            except BaseException:
                if is_ours:
                    timer.fail(self._key)  # As in _function.
                raise
            if item is _END:
                return
            yield item


def iterate(timer: Timer, iterable: Iterable[T], key: TimeType | str, gpu: bool = False) -> TimedIterable[T]:
    timer._find(key)
    timed: TimedIterable[T] = _kind_for(TimedIterable, iterable, "iterate")(timer, iterable, key, gpu)
    return timed


def _kind_for(kind: Any, iterable: object, caller: str) -> Any:
    # With a length, as the original.
    if not hasattr(type(iterable), "__iter__") and not hasattr(type(iterable), "__getitem__"):
        raise TypeError(f"{caller}({iterable!r}): it cannot be iterated; pass a data loader, a generator or a list.")
    if not hasattr(type(iterable), "__len__"):
        return kind
    return type(f"Sized{kind.__name__}", (kind,), {"__len__": lambda self: len(self._iterable)})


class TimedSteps(TimedIterable[T]):
    """The items of an iterable, each group of ``micro_batches`` inside one BATCH; see :meth:`Timer.steps`."""

    micro_batches: int
    start: int | None

    def __iter__(self) -> Iterator[T]:
        timer = self._timer
        iterator: Iterator[T] | None = None
        number, begin_ns, batch, asked = self.start, 0, _Batch(timer, self._gpu), _NOWHERE
        while True:
            if batch.thread != get_ident():
                batch, asked = _Batch(timer, self._gpu), _NOWHERE
            io = batch.io
            if batch.region.is_open or io.is_open:
                try:
                    for key in (BATCH, IO):
                        timer.start(key)  # raises, or discards what an exception has left open
                        timer.cancel(key)
                except RegionOpenError as error:
                    warn_once(
                        f"tmr.steps: the items of this loop have no BATCH of their own, as they lie in an open region, "
                        f"such as the BATCH of a loop around it. {error}",
                        key="tmr.steps inside",
                    )
                    yield from TimedIterable(timer, self._iterable if iterator is None else iterator, IO, False)
                    return
            if number is not None:
                begin_ns = timer.now_ns()
            batch.on_device.start()
            try:
                for index in range(self.micro_batches):
                    with io:
                        # Creating the iterator is part of the first wait: it starts the worker processes.
                        if iterator is None:
                            iterator = iter(self._iterable)
                        item = next(iterator, _END)
                        if item is _END:
                            timer.cancel(IO)
                        elif number is not None and index == 0:
                            timer.step(number, time_ns=begin_ns)
                    if item is _END:
                        batch.end("" if index == 0 else None)
                        return
                    if not asked[2]:  # A `for` asks for each item in one place.
                        asked = _place_of_loop()
                    try:
                        yield item
                    except GeneratorExit:
                        end = _end_of_loop(asked, sys._getframe())
                        batch.end("" if end != "failed" and index == 0 and batch.has_only_data() else end)
                        return
                batch.end()
            except BaseException:
                # Still open if Ctrl-C came between the last line of a block and its exit.
                timer.fail(IO)
                batch.end("failed")
                raise
            if number is not None:
                number += 1


class _Batch:
    """The BATCH of a thread, which may end on another."""

    def __init__(self, timer: Timer, gpu: bool) -> None:
        self._timer, self.thread = timer, get_ident()
        self.region, self.on_device, self.io = timer.region(BATCH), timer.region(BATCH, gpu), timer.region(IO)

    def end(self, counted: str | None = None) -> None:
        """Keep it; or drop it, and count it as "failed" or "discarded", or not at all where that is empty."""
        if not self.region.is_open:
            return  # the program has ended it, or the timer is switched off
        if counted is None and get_ident() == self.thread:
            self.on_device.end()
        elif counted is None and self.on_device is self.region:
            self.region._keep_until(self._timer.now_ns())
        else:  # on another thread, the device's end is unknown
            self._timer._forget_open(self.region, "discarded" if counted is None else counted)

    def has_only_data(self) -> bool:
        """Whether nothing was timed since its item came, unlike in the BATCH before: the loop's body did not run."""
        (begun_ns, ended_ns), (_, came_ns) = _newest(self.region), _newest(self.io)
        starts = [one._start_ns for one in self._timer._regions() if one._thread is self.region._thread]
        return any(begun_ns < start < ended_ns for start in starts) and max(starts) < came_ns


def _newest(region: Any) -> Any:
    # The start and the end of its newest interval that is kept; zeros for none.
    return memoryview(b"".join(last_of(region._intervals.kept()[0], 16)).rjust(16, b"\0")).cast("q")


def _place_of_loop() -> tuple[int, int, bool]:
    # The frame of the loop that asks the calling generator for an item, through other generators such as tqdm's, by its
    # identity, as to keep it would keep the generator; the place in it, and whether that is a `for`.
    frame: Any = sys._getframe(1)
    while frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
        if frame is None:
            return _NOWHERE
    return id(frame), frame.f_lasti, _instruction_at(frame) == "FOR_ITER"


def _instruction_at(frame: FrameType) -> str:
    code, place = frame.f_code.co_code, frame.f_lasti
    while (at := dis.opname[code[place]]) == "CACHE":
        place -= 2
    return at


def _end_of_loop(asked: tuple[int, int, bool], frame: Any) -> str | None:
    # The outcome of a BATCH whose generator is closed in its frame, and whose last item was asked for at a place. An
    # exception in the body closes it inside the loop's frame. A loop that is left by `break` or `return` has removed
    # its iterator from the stack by an instruction of its own, and what stands between the loop and the generator, such
    # as islice, drops it as it ends. A call that is the loop, such as `list(map(...))`, has ended or failed. Else the
    # program has dropped it some time after its last item.
    at = ""
    while frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
        if frame is None:
            return "discarded"
        at = _instruction_at(frame)
        if at in ("FOR_ITER", "END_FOR"):
            return None
    if at in ("POP_TOP", "POP_ITER"):
        return None
    if id(frame) != asked[0] or frame.f_lasti == asked[1] or at.startswith(("DELETE", "STORE", "RETURN")):
        return "discarded"
    before = [one for one in dis.get_instructions(frame.f_code) if one.offset < frame.f_lasti]
    loads = [one.argval for one in before if one.opname.startswith("LOAD_")]
    return "discarded" if loads[-1:] == ["close"] else "failed"  # `iterator.close()`


def steps(timer: Timer, iterable: Iterable[T], micro_batches: int, start: int | None, gpu: bool) -> TimedSteps[T]:
    kind = _kind_for(TimedSteps, iterable, "steps")
    if type(micro_batches) is not int or micro_batches < 1:
        raise ValueError(f"steps(micro_batches={micro_batches!r}): it must be an integer, 1 or more.")
    found: TimedSteps[T] = kind(timer, iterable, BATCH, gpu)
    found.micro_batches, found.start = micro_batches, start
    return found
