"""Attributes of other libraries' objects that are replaced for a while."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Replaced:
    """The attributes that were replaced, to be restored by :meth:`undo`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._before)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object, class or module."""
        self._before.append((owner, name, vars(owner).get(name, self), value))
        setattr(owner, name, value)

    def undo(self) -> list[tuple[Any, str]]:
        """Restore what was there, the newest first; return those that other code has replaced since, which stay."""
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
