"""Timing by decoration and by iteration: ``timer.timed(key)`` and ``timer.iterate(iterable)``."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sized

    from deep500_timing._ground.time_type import TimeType
    from deep500_timing.timer import Timer

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")


def timed(timer: Timer, key: TimeType | str, gpu: bool = False) -> Callable[[F], F]:
    """What :meth:`Timer.timed` returns.

    Raises:
        InvalidKeyError: The key is neither a ``TimeType`` nor a non-empty string.
    """
    timer._find(key)  # A bad key is an error here rather than at the first call.

    def decorate(function: F) -> F:
        if isinstance(function, (classmethod, staticmethod)):
            inner: Any = function.__func__
            rewrapped: Any = type(function)(decorate(inner))
            return rewrapped  # type: ignore[no-any-return]
        if not callable(function):
            raise TypeError(
                f"timed({key!s}) decorates a function, not {function!r}; for a block use `with timer.region(...)`."
            )
        wrap: Callable[..., Any] = _function
        if inspect.isasyncgenfunction(function):
            raise TypeError(
                f"timed({key!s}) cannot decorate the asynchronous generator function {function.__qualname__!r}: others "
                "run between its items. Put `with timer.region(...)` around the parts of it that do the work."
            )
        if inspect.iscoroutinefunction(function):
            if gpu:
                raise TypeError(
                    f"timed({key!s}, gpu=True) cannot decorate the coroutine function {function.__qualname__!r}: what "
                    "other coroutines put on the stream meanwhile cannot be told from its own work. Leave gpu=True out."
                )
            wrap = _coroutine
        elif inspect.isgeneratorfunction(function):
            wrap = _generator
        wrapped: Any = functools.wraps(function)(wrap(timer, key, gpu, function))
        return wrapped  # type: ignore[no-any-return]

    return decorate


def _function(timer: Timer, key: TimeType | str, gpu: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if timer._find(key).is_open:  # It called itself: the outermost call is the one that is timed.
            return function(*args, **kwargs)
        with timer.region(key, gpu):
            return function(*args, **kwargs)

    return call


def _coroutine(timer: Timer, key: TimeType | str, gpu: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        # Not an open region: others of the same key may run meanwhile on the same thread.
        start_ns = timer.now_ns()
        try:
            result = await function(*args, **kwargs)
        except BaseException:
            if timer.enabled:
                timer._find(key).intervals.failed += 1
            raise
        timer.record(key, start_ns, timer.now_ns())
        return result

    return call


def _generator(timer: Timer, key: TimeType | str, gpu: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        resume: Callable[[], Any] = functools.partial(next, generator)
        try:
            while True:
                # Resumed by a generator of the same key, as in a recursion: that one's stretch holds this one.
                region = None if timer._find(key).is_open else timer.region(key, gpu)
                if region is not None:
                    region.start()
                try:
                    item = resume()
                except StopIteration as stop:
                    # The last stretch, from the last item to the return, is work as well.
                    if region is not None:
                        region.end()
                    return stop.value
                except BaseException:
                    if region is not None:
                        region.fail()
                    raise
                if region is not None:
                    region.end()
                try:
                    resume = functools.partial(generator.send, (yield item))
                except GeneratorExit:
                    raise
                except BaseException as error:
                    resume = functools.partial(generator.throw, error)
        finally:
            generator.close()

    return call


class TimedIterable(Generic[T]):
    """The same items as another iterable, with each wait for the next one timed."""

    def __init__(self, timer: Timer, iterable: Iterable[T], key: TimeType | str, gpu: bool) -> None:
        """See :meth:`Timer.iterate`."""
        self._timer = timer
        self._iterable = iterable
        self._key = key
        self._gpu = gpu

    def __iter__(self) -> Iterator[T]:
        """Go through the items from the start."""
        timer, key, gpu = self._timer, self._key, self._gpu
        region = timer.region(key, gpu)
        # Making the iterator is part of the first wait: worker processes start there.
        region.start()
        try:
            iterator = iter(self._iterable)
            item = next(iterator)
        except StopIteration:
            timer.discard_quietly(key)
            return
        except BaseException:
            region.fail()
            raise
        region.end()
        while True:
            yield item
            region.start()
            try:
                item = next(iterator)
            except StopIteration:
                # The wait for an item that does not come is no wait for an item.
                timer.discard_quietly(key)
                return
            except BaseException:
                region.fail()
                raise
            region.end()


class _SizedTimedIterable(TimedIterable[T]):
    """A :class:`TimedIterable` over something that has a length."""

    _iterable: Any

    def __len__(self) -> int:
        """Items that the original says it has."""
        sized: Sized = self._iterable
        return len(sized)


def iterate(timer: Timer, iterable: Iterable[T], key: TimeType | str, gpu: bool = False) -> TimedIterable[T]:
    """What :meth:`Timer.iterate` returns.

    Raises:
        TypeError: It cannot be iterated.
        InvalidKeyError: The key is neither a ``TimeType`` nor a non-empty string.
    """
    if not hasattr(type(iterable), "__iter__") and not hasattr(type(iterable), "__getitem__"):
        raise TypeError(f"iterate({iterable!r}): it cannot be iterated; pass a data loader, a generator or a list.")
    timer._find(key)
    kind = _SizedTimedIterable if hasattr(type(iterable), "__len__") else TimedIterable
    return kind(timer, iterable, key, gpu)
