"""Something to be done once another module has been imported."""

from __future__ import annotations

import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def after_import(name: str, call: Callable[[], object]) -> Callable[[], None]:
    """Call a function, which must not raise, once a module has been imported; returns what takes the request back."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        call()
        return _nothing
    watch = _Watch(name, call)
    sys.meta_path.insert(0, watch)
    return watch.remove


def _nothing() -> None:
    pass


class _Watch:
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
        loader: Any = getattr(spec, "loader", None)
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            # Not before: a program may look for the module without importing it, as TensorFlow does for Keras.
            if self in sys.meta_path:
                self.remove()
                self.call()

        with suppress(AttributeError):  # a loader that is no plain object: not to be watched
            loader.exec_module = exec_module
        return spec
