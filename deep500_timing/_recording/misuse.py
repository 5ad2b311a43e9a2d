"""The start of an open region, and the error texts of misuse.

* A second entry (a finalizer, a callback of the garbage collector or a signal handler that interrupted the code that
  opened the region): both stretches are timed.
* While an exception is handled, and after one has ended an interactive command such as a notebook's cell: the open
  stretch is discarded with a warning, and the start goes on.
* Everything else is an error that names the remedies: Python keeps no trace of an exception that was caught elsewhere,
  so such a region cannot be told from a missing ``end``.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import sys
import threading
import weakref
from operator import index

from deep500_timing._base.names import TimeType
from deep500_timing._base.warn import warn_once
from deep500_timing._recording.threads import thread_name
from deep500_timing.exceptions import InvalidKeyError, RegionMismatchError, RegionNotOpenError, RegionOpenError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any

# The module `signal` would create an enumeration member for each.
_SIGNALS = sorted(map(int, _signal.valid_signals()))


def is_second_entry() -> bool:
    """Whether the calling code runs in a finalizer, a callback of the garbage collector or a signal handler."""
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
    """Whether an exception is being handled, or ended an interactive command such as a notebook's cell."""
    return sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None


def as_code(key: TimeType | str) -> str:
    """Return a key as a program writes it."""
    return str(key) if isinstance(key, TimeType) else repr(key)


def _length(seconds: float) -> str:
    if abs(seconds) >= 1e-3 or not seconds:
        return f"{seconds:.6g} s"
    return f"{seconds * 1e3:.3g} ms"


def warn_of_open(name: str, key: TimeType | str, open_s: float) -> None:
    """Warn once that a start discarded the open stretch of its region."""
    warn_once(
        f"Starting region {name!r}: it was still open, since {_length(open_s)}. That stretch is counted as discarded, "
        f"and the new one goes on. After an interrupt or an exception nothing need be done; else an "
        f"end({as_code(key)}) is missing on some path, which `with timer.region({as_code(key)})` would supply. "
        "Said once.",
        key=f"open {name}",
    )


def error_of_open(name: str, key: TimeType | str, ident: int, open_s: float) -> RegionOpenError:
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
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio is not None and asyncio.get_running_loop() is not None
    except RuntimeError:
        return False


def error_of_closed(name: str, key: TimeType | str, ident: int, open_on: list[int]) -> RegionNotOpenError:
    names = ", ".join(map(thread_name, open_on))
    where = f" (it is open on {names}: end it there)" if open_on else ""
    return RegionNotOpenError(
        f"Ending region {name!r}: it is not open on {thread_name(ident)}{where}. "
        f"Call start({as_code(key)}) first, on the same thread, and end it once."
    )


def error_of_mismatch(name: str, ident: int, gpu: bool) -> RegionMismatchError:
    return RegionMismatchError(
        f"Ending region {name!r} on {thread_name(ident)} with gpu={gpu}: it was started with "
        f"gpu={not gpu}, and is still open. Pass the same gpu argument to start and end."
    )


def error_of_key(doing: str, key: object) -> InvalidKeyError:
    if isinstance(key, str):
        return InvalidKeyError(f"{doing} {key!r}: the string is empty. Give the region a name.")
    remedy = ""
    if hasattr(key, "__code__"):
        remedy = ' To decorate a function, call timed with its region: @timer.timed("name").'
    return InvalidKeyError(
        f"{doing} {key!r}: a key is a TimeType, such as TimeType.BATCH, or a string that names a region of your own, "
        f"not {type(key).__name__}.{remedy}"
    )


def checked_span(key: object, start_ns: Any, end_ns: Any) -> tuple[int, int]:
    """Start and end of an interval as integers of 64 bits."""
    if end_ns < start_ns:
        raise ValueError(
            f"Recording {key!r} from {start_ns} to {end_ns} ns: it ends before it begins. Swap the arguments."
        )
    start_ns, end_ns = index(start_ns), index(end_ns)
    if start_ns < -(2**63) or end_ns >= 2**63 or end_ns - start_ns >= 2**63:
        raise OverflowError(
            f"Recording {key!r} from {start_ns} to {end_ns} ns: the times or the time between them do not fit "
            "into 64 bits. Pass nanoseconds."
        )
    return start_ns, end_ns


def error_of_handle(name: str) -> TypeError:
    return TypeError(f"A region handle ({name!r}) cannot be copied or pickled; ask a timer for region(key).")


def error_of_clock(clock: object, now: object) -> TypeError:
    return TypeError(
        f"Reading the timer's clock {clock!r}: its now_ns() gave {now!r}, not an integer. Return whole nanoseconds, as "
        "time.perf_counter_ns() does: round(seconds * 1e9)."
    )
