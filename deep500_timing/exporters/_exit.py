"""The end of a process, and the birth of another by a fork, for reports that are on their way."""

from __future__ import annotations

import atexit
import sys
import time
import warnings
from typing import TYPE_CHECKING
from weakref import WeakSet

from deep500_timing._base.at_exit import do_after_reports
from deep500_timing._base.fork import after_fork
from deep500_timing.exceptions import TimingWarning

if TYPE_CHECKING:
    from typing import Protocol

    class Caller(Protocol):
        """What of a background caller is used here."""

        service: str

        def hurry(self) -> float: ...
        def wait_until_empty(self, timeout_s: float) -> bool: ...
        def give_up(self) -> list[str]: ...
        def after_fork_in_child(self) -> None: ...

        def __hash__(self) -> int: ...


_callers: WeakSet[Caller] = WeakSet()


class _State:
    registered = False
    in_child_of_multiprocessing = False
    begun = False
    ended = False


def look_after(caller: Caller) -> None:
    """Drain a caller when the program ends, and begin it anew in a child."""
    _callers.add(caller)
    if not _State.registered:
        _State.registered = True
        atexit.register(drain)
        do_after_reports(drain)
        after_fork(_after_fork_in_child)


def expect_end_of_child() -> None:
    """Drain at the end of a child of multiprocessing as well, which leaves without the functions of ``atexit``."""
    if _State.in_child_of_multiprocessing or "multiprocessing.process" not in sys.modules:
        return
    from multiprocessing import parent_process
    from multiprocessing.util import Finalize

    if parent_process() is not None:
        _State.in_child_of_multiprocessing = True
        Finalize(None, drain, exitpriority=0)


def has_begun() -> bool:
    """Whether the program is ending."""
    return _State.begun


def has_ended() -> bool:
    """Whether nobody looks after reports any more, so that each must arrive while its exporter waits."""
    return _State.ended


def drain() -> None:
    """Wait for what is on its way, as long as its exporters allow, then count and tell what is lost."""
    _State.begun = True
    callers = sorted(_callers, key=lambda caller: caller.service)
    begin = time.monotonic()
    allowed_s = [caller.hurry() for caller in callers]
    for caller, seconds in zip(callers, allowed_s, strict=True):
        caller.wait_until_empty(begin + seconds - time.monotonic())
    for caller in callers:
        for sentence in caller.give_up():
            warnings.warn(sentence, TimingWarning, stacklevel=2)
    _State.ended = True


def _after_fork_in_child() -> None:
    _State.begun = _State.ended = _State.in_child_of_multiprocessing = False
    for caller in list(_callers):
        caller.after_fork_in_child()
