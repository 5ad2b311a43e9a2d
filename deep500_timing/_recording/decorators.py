"""Timing by decoration and by iteration: ``timer.timed(key)`` and ``timer.iterate(iterable)``."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from deep500_timing.exceptions import RegionOpenError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sized
    from typing import Protocol

    from deep500_timing._base.time_type import TimeType

    class Timer(Protocol):
        """What of a timer is used here."""

        @property
        def enabled(self) -> bool: ...
        def region(self, key: TimeType | str, gpu: bool = False) -> Any: ...
        def now_ns(self) -> int: ...
        def fail(self, key: TimeType | str) -> bool: ...
        def cancel(self, key: TimeType | str) -> None: ...
        def _find(self, key: TimeType | str) -> Any: ...
        def _start_of_open(self, region: Any, always: bool) -> None: ...
        def _count_failed(self, key: TimeType | str) -> None: ...
        def _keep(self, key: TimeType | str, start_ns: int, end_ns: int) -> None: ...


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
        if isinstance(function, type):
            raise TypeError(
                f"timed({key!s}) decorates a function, and {function.__qualname__!r} is a class, which would no longer "
                "be one. Decorate its __init__, or the function that makes the objects."
            )
        wrap: Callable[..., Any] = _function
        # An object is what its class's __call__ is.
        called: Any = function if hasattr(function, "__code__") else _unwrapped_call(function)
        name = getattr(function, "__qualname__", repr(function))
        if inspect.isasyncgenfunction(called):
            raise TypeError(
                f"timed({key!s}) cannot decorate the asynchronous generator function {name!r}: others "
                "run between its items. Put `with timer.region(...)` around the parts of it that do the work."
            )
        if inspect.iscoroutinefunction(called):
            if gpu:
                raise TypeError(
                    f"timed({key!s}, gpu=True) cannot decorate the coroutine function {name!r}: what "
                    "other coroutines put on the stream meanwhile cannot be told from its own work. Leave gpu=True out."
                )
            wrap = _coroutine
        elif inspect.isgeneratorfunction(called):
            wrap = _generator
        wrapped: Any = functools.wraps(function)(wrap(timer, key, gpu, function))
        return wrapped  # type: ignore[no-any-return]

    return decorate


def _unwrapped_call(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    if hasattr(function, "__code__") or inspect.ismethod(function) or inspect.isbuiltin(function):
        return function
    return getattr(type(function), "__call__", function)  # noqa: B004 (its kind is asked for, not whether it is there)


def _function(timer: Timer, key: TimeType | str, gpu: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        region: Any = timer._find(key)
        if region.is_open:
            if region._timed_depth:  # It called itself: the outermost call is the one that is timed.
                return function(*args, **kwargs)
            timer._start_of_open(region, True)
        try:
            region._timed_depth = 1
            with timer.region(key, gpu):
                return function(*args, **kwargs)
        finally:
            region._timed_depth = 0

    return call


def _coroutine(timer: Timer, key: TimeType | str, gpu: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        # Not an open region: others of the same key may run meanwhile on the same thread.
        start_ns = timer.now_ns()
        try:
            result = await function(*args, **kwargs)
        except BaseException:
            timer._count_failed(key)
            raise
        timer._keep(key, start_ns, timer.now_ns())
        return result

    return call


def _generator(timer: Timer, key: TimeType | str, gpu: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    # One stretch of it. Resumed by a generator of the same key, as in a recursion, that one's stretch holds this one.
    stretch = _function(timer, key, gpu, _Resumption.of)

    def call(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        resume: Callable[[], Any] = functools.partial(next, generator)
        try:
            while True:
                step: _Resumption = stretch(resume)
                if step.is_last:
                    return step.value
                try:
                    resume = functools.partial(generator.send, (yield step.value))
                except GeneratorExit:
                    raise
                except BaseException as error:
                    resume = functools.partial(generator.throw, error)
        finally:
            generator.close()

    return call


class _Resumption:
    """What one resumption of a generator came to: an item, or what it returned at its end, which is work as well."""

    __slots__ = ("is_last", "value")

    def __init__(self, value: Any, is_last: bool) -> None:
        self.value = value
        self.is_last = is_last

    @staticmethod
    def of(resume: Callable[[], Any]) -> _Resumption:
        """Resume it."""
        try:
            return _Resumption(resume(), False)
        except StopIteration as stop:
            return _Resumption(stop.value, True)


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
        # Making the iterator is part of the first wait: worker processes start there.
        iterator: Iterator[T] | None = None
        timer = self._timer
        region = timer.region(self._key, self._gpu)
        while True:
            if not timer.enabled:
                if iterator is None:
                    iterator = iter(self._iterable)
                for item in iterator:
                    yield item
                    if timer.enabled:
                        break
                else:
                    return
            ours = False
            try:
                try:
                    region.start()
                except RegionOpenError:
                    if not _forget_abandoned(timer, self._key, region):
                        raise
                    region.start()
                ours = True
                if iterator is None:
                    iterator = iter(self._iterable)
                item = next(iterator)
                region.end()
            except StopIteration:
                # The wait for an item that does not come is no wait for an item.
                timer.cancel(self._key)
                return
            except BaseException as error:
                # A region that was open already is left to the caller that opened it.
                if ours or not isinstance(error, RegionOpenError):
                    timer.fail(self._key)
                raise
            yield item


def _forget_abandoned(timer: Timer, key: TimeType | str, region: Any) -> bool:
    # A wait that an exception has broken off between two lines of `__iter__`. One that still goes on is on the stack,
    # around this one, and then the start is an error.
    from deep500_timing._recording.misuse import is_waiting

    if is_waiting(TimedIterable.__iter__.__code__, region):
        return False
    timer._start_of_open(timer._find(key), True)
    return True


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
