"""Public names that are imported when they are first asked for."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any


def homes_in(package: str, modules: Mapping[str, str]) -> dict[str, str | Callable[[], Any]]:
    """The table of :func:`lazy_names`, from the names that each module of a package has."""
    return {name: f"{package}.{module}" for module, names in modules.items() for name in names.split()}


def lazy_names(
    module: str, public: Iterable[str], homes: Mapping[str, str | Callable[[], Any]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package with parts that are slow to import."""
    import sys

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        from importlib import import_module

        home = homes[name]
        value = getattr(import_module(home), name) if isinstance(home, str) else home()
        vars(sys.modules[module])[name] = value
        return value

    def dir_() -> list[str]:
        return sorted({*public, *(name for name in vars(sys.modules[module]) if name.startswith("__"))})

    return getattr_, dir_
