"""What is misuse and what is not, and what the errors say.

A region that is found open by a start is one of three things. The code that starts it has interrupted the code that
opened it (a finalizer, a callback of the garbage collector, a signal handler): both are timed. Or an exception, such as
that of Ctrl-C, has led past its end: it is discarded, and the start goes on. Or an end is missing: that is an error.

Python does not tell whether an exception came between two moments. It is known where one is being handled, where it
has ended an interactive command, such as a notebook's cell, or a ``with`` block of the timer's on the same thread, and
where it came out of the timer's own methods. A decorated function knows by itself whether it was called by itself.

Of an exception that was raised and caught without any of these the interpreter keeps no trace: not in the thread's
state, and the frames and instructions of the two starts are those of a loop that forgets its end. So a bare ``start``
that such an exception has left open is an error at the next one, which names the remedies: ``with``, or ``fail`` or
``discard`` in the ``except`` clause.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import sys
import threading
import weakref
from types import MethodType

from deep500_timing._base.time_type import TimeType
from deep500_timing._base.warn import warn_once
from deep500_timing._recording.threads import thread_name
from deep500_timing.exceptions import InvalidKeyError, RegionMismatchError, RegionNotOpenError, RegionOpenError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any

# Without the module `signal`, which makes a member of an enumeration of each.
_SIGNALS = sorted(map(int, _signal.valid_signals()))


def interrupts() -> bool:
    """Whether the calling code runs in a finalizer, a callback of the collector or a signal handler."""
    codes: set[CodeType] = set()
    for callback in gc.callbacks:
        codes.update(_code_of(callback))
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            codes.update(_code_of(_signal.getsignal(number)))
    codes.update(_code_of(weakref.finalize.__call__))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _code_of(function: Any) -> list[CodeType]:
    for attribute in ("func", "__func__", "__wrapped__"):  # a partial, a method, a decorated function
        function = getattr(function, attribute, function)
    called = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(called, "__code__", None)
    return [] if code is None else [code]


def exception_is_known() -> bool:
    """Whether an exception is being handled, or has ended an interactive command such as a notebook's cell."""
    return sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None


def block_is_live(handle: Any, region: Any) -> bool:
    """Whether the program is inside a ``with`` block of a region (plain): the block holds the method that ends it.

    An exception may fall into the very first step of that method; then the region is open, and its block is over.

    Args:
        handle: What the block is of: the region or its handle for the device.
        region: The region.
    """
    leave, enter = type(handle).__exit__, type(handle).__enter__.__code__
    blocks = sum(
        isinstance(holder, MethodType) and holder.__func__ is leave and holder.__self__ is handle
        for holder in gc.get_referrers(handle)
    )
    # A block that is being entered now holds it already.
    return blocks > _frames_of(enter, "self", handle)


def is_waiting(code: CodeType, region: Any) -> bool:
    """Whether a generator of that code, which starts to wait under a region, is called by another that waits."""
    return _frames_of(code, "region", region) > 1


def _frames_of(code: CodeType, local: str, value: object) -> int:
    found = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found += frame.f_code is code and frame.f_locals.get(local) is value
        frame = frame.f_back
    return found


def as_code(key: TimeType | str) -> str:
    """A key as one would write it."""
    return str(key) if isinstance(key, TimeType) else repr(key)


def _length(seconds: float) -> str:
    if abs(seconds) >= 1e-3 or not seconds:
        return f"{seconds:.6g} s"
    return f"{seconds * 1e3:.3g} ms"


def warn_of_open(name: str, key: TimeType | str, open_s: float) -> None:
    """Say once that a start found its region open and has discarded it."""
    warn_once(
        f"Starting region {name!r}: it was still open, since {_length(open_s)}. That stretch is counted as discarded, "
        f"and the new one goes on. After an interrupt or an exception nothing need be done; else an "
        f"end({as_code(key)}) is missing on some path, which `with timer.region({as_code(key)})` would supply. "
        "Said once.",
        key=f"open {name}",
    )


def error_of_open(name: str, key: TimeType | str, ident: int, open_s: float) -> RegionOpenError:
    """What starting an open region raises."""
    code = as_code(key)
    apart = ""
    if _in_coroutine():
        apart = f" Coroutines share a thread: give them a key each, or decorate them with `@timer.timed({code})`."
    return RegionOpenError(
        f"Starting region {name!r}: it is open already on {thread_name(ident)}, since {_length(open_s)}. End it "
        f"first, or forget it with discard({code}); `with timer.region({code})` ends it even after an exception, as "
        f"does fail({code}) in the except clause.{apart}"
    )


def _in_coroutine() -> bool:
    asyncio = sys.modules.get("asyncio")  # Who has not imported it runs none.
    try:
        return asyncio is not None and asyncio.get_running_loop() is not None
    except RuntimeError:
        return False


def error_of_closed(name: str, key: TimeType | str, ident: int, open_on: list[int]) -> RegionNotOpenError:
    """What ending a closed region raises.

    Args:
        name: The region.
        key: Its key.
        ident: The calling thread.
        open_on: The threads that have a region of this name open.
    """
    names = ", ".join(map(thread_name, open_on))
    where = f" (it is open on {names}: end it there)" if open_on else ""
    return RegionNotOpenError(
        f"Ending region {name!r}: it is not open on {thread_name(ident)}{where}. "
        f"Call start({as_code(key)}) first, on the same thread, and end it once."
    )


def error_of_mismatch(name: str, ident: int, gpu: bool) -> RegionMismatchError:
    """What ending a region raises with another ``gpu`` than it was started with."""
    return RegionMismatchError(
        f"Ending region {name!r} on {thread_name(ident)} with gpu={gpu}: it was started with "
        f"gpu={not gpu}, and is still open. Pass the same gpu argument to start and end."
    )


def error_of_key(doing: str, key: object) -> InvalidKeyError:
    """What a key raises that is none."""
    if isinstance(key, str):
        return InvalidKeyError(f"{doing} {key!r}: an empty string names nothing. Give the region a name.")
    remedy = ""
    if hasattr(key, "__code__"):
        remedy = ' To decorate a function, call timed with its region: @timer.timed("name").'
    return InvalidKeyError(
        f"{doing} {key!r}: a key is a TimeType, such as TimeType.BATCH, or a string that names a region of your own, "
        f"not {type(key).__name__}.{remedy}"
    )


def error_of_handle(name: str) -> TypeError:
    """What copying or pickling a handle raises."""
    return TypeError(f"A region handle ({name!r}) cannot be copied or pickled; ask a timer for region(key).")


def error_of_clock(clock: object, now: object) -> TypeError:
    """What a host clock raises that gives something else than whole nanoseconds."""
    return TypeError(
        f"Reading the timer's clock {clock!r}: its now_ns() gave {now!r}, not an integer. Return whole nanoseconds, as "
        "time.perf_counter_ns() does: round(seconds * 1e9)."
    )
