"""Regions that are opened because of a loop that is somebody else's, and that an exception leaves open.

An adapter that a framework's loop calls opens a region in one call and ends it in another. An exception leads past the
end, and where the loop offers no place for it nothing of the adapter's is called. That the loop is over can be seen by
whoever looks, as it is on no stack any more, so those who opened regions are asked before they are read.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakValueDictionary

from deep500_timing._base.warn import warn_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class Opener(Protocol):
        """Who opens regions because of somebody else's loop."""

        def end_what_is_over(self) -> None:
            """Close what was opened because of a loop that is over; on the thread that reads, which may be another."""
            ...


_openers: WeakKeyDictionary[Any, WeakValueDictionary[int, Opener]] = WeakKeyDictionary()


def ask_before_reading(timer: Any, opener: Opener) -> None:
    """From now on and for as long as it lives, have somebody asked before all regions of a timer are read.

    Args:
        timer: Whose regions are opened.
        opener: Who opens them; of several the one that began last is asked first.
    """
    openers = _openers.setdefault(timer, WeakValueDictionary())
    openers.pop(id(opener), None)
    openers[id(opener)] = opener


def end_what_is_over(timer: Any) -> None:
    """Ask all who open regions of a timer; one that fails costs a warning."""
    openers = _openers.get(timer)
    if openers is None:
        return
    for reference in reversed(openers.valuerefs()):
        opener = reference()
        if opener is not None:
            try:
                opener.end_what_is_over()
            except Exception as error:
                warn_once(f"Asking {type(opener).__name__} for the regions that are still open failed: {error!r}")
