"""Changes to other libraries: attributes that are replaced for a while, and what is done once one is imported."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
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

    ``wrappers`` gives owners, names, and what makes the replacement of the original.
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


def after_import(name: str, call: Callable[[], object]) -> Callable[[], None]:
    """Call a function, which must not raise, once a module has been imported; returns what takes the request back."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        call()
        return lambda: None
    watch = _AfterImport(name, call)
    sys.meta_path.insert(0, watch)
    return watch.remove


class _AfterImport:
    """An entry of ``sys.meta_path`` that finds its one module by the other finders."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self.name = name
        self.call = call
        self._is_looking = False

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name or self._is_looking or self not in sys.meta_path:
            return None
        from importlib.util import find_spec

        self._is_looking = True
        try:
            spec = find_spec(name)
        finally:
            self._is_looking = False
        if (loader := getattr(spec, "loader", None)) is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            # Not before: a program may look for the module without importing it. Others may have asked meanwhile.
            for watch in [one for one in sys.meta_path if isinstance(one, _AfterImport) and one.name == self.name]:
                watch.remove()
                watch.call()

        with suppress(AttributeError):  # a loader that is no plain object: not to be watched
            loader.exec_module = exec_module
        return spec
