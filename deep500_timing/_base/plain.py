"""The plain form of the modules that also exist compiled: what stands for ``cython`` in it, and how it is loaded.

Cython knows the value of ``cython.compiled`` while it compiles and drops the branch that it does not need. Plain
Python reads it here, so that the package neither needs Cython to run nor spends 20 ms on importing it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])

compiled = False
longlong = int


def locals(**_types: object) -> Callable[[F], F]:  # noqa: A001 (it is the name in Cython)
    """Leave a function as it is; compiled, it gives its local variables C types."""
    return lambda function: function


def binding(_wanted: bool) -> Callable[[F], F]:
    """Leave a function as it is; compiled, it says whether it knows its annotations, at the price of slower calls."""
    return lambda function: function


def in_c(*_arguments: Any) -> Any:
    """Stand for a function that a ``.pxd`` defines in C and only the compiled form calls."""
    raise NotImplementedError


def load_plain(package: str, folder: Path, names: tuple[str, ...]) -> None:
    """Import modules from their sources, for ``DEEP500_TIMING_PURE=1``; an import would prefer the compiled ones.

    In the order given, so that an earlier one does not fetch another's compiled form.
    """
    import sys
    from importlib.util import module_from_spec, spec_from_file_location

    for name in names:
        full_name = f"{package}.{name}".replace("/", ".")
        if full_name in sys.modules:  # The caller's file was read a second time, under another name.
            continue
        spec = spec_from_file_location(full_name, folder / f"{name}.py")
        if spec is None or spec.loader is None:  # pragma: no cover
            raise ImportError(f"{full_name} cannot be loaded from its source")
        module = module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
