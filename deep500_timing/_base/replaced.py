"""Attributes of other libraries' objects that are replaced for a while."""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any


class Replaced:
    """The attributes that were replaced, to be restored by :meth:`undo`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._before)

    def put(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, vars(owner).get(name, self), value))
        setattr(owner, name, value)

    def undo(self) -> list[tuple[Any, str]]:
        """Restore the earlier values, the newest first; return those that other code has replaced since, which stay."""
        others = []
        while self._before:
            owner, name, before, ours = self._before.pop()
            now = vars(owner).get(name)
            if getattr(now, "__func__", now) is not getattr(ours, "__func__", ours):
                others.append((owner, name))
            elif before is self:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        return others


class Watch:
    """Wraps attributes from the entry of the first user to the exit of the last one; a context manager.

    Args:
        wrappers: Gives owners, names, and what makes the replacement of the original.
    """

    def __init__(self, wrappers: Callable[[], Iterable[tuple[Any, str, Callable[[Any], Any]]]]) -> None:
        self._wrappers = wrappers
        self._lock = threading.Lock()
        self._users = 0
        self._replaced = Replaced()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                for owner, name, wrap in self._wrappers():
                    self._replaced.put(owner, name, wrap(getattr(owner, name)))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._replaced.undo()
