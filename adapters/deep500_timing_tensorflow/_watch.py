"""Functions of a framework that are replaced for as long as a fit needs it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Watch:
    """Replaces functions as the first fit enters it, and restores them as the last one leaves."""

    def __init__(self, functions: Callable[[], Iterable[tuple[Any, str, Callable[[Any], Any]]]]) -> None:
        self._functions = functions
        self._lock = threading.Lock()
        self._users = 0
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        """Begin to need the replacements."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                for owner, name, replacement in self._functions():
                    original = getattr(owner, name)
                    self._originals.append((owner, name, original))
                    setattr(owner, name, replacement(original))

    def __exit__(self, *_: object) -> None:
        """Need them no longer."""
        with self._lock:
            self._users -= 1
            while not self._users and self._originals:
                setattr(*self._originals.pop())
