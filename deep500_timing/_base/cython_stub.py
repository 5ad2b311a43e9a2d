"""Stands for the module ``cython`` in files that run as plain Python as well as compiled.

Cython knows the value of ``cython.compiled`` while it compiles and drops the branch that it does not need. Plain
Python reads it here, so that the package neither needs Cython to run nor spends 20 ms on importing it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])

compiled = False
longlong = Py_ssize_t = int
bint = bool


def locals(**_types: object) -> Callable[[F], F]:  # noqa: A001 (it is the name in Cython)
    """Leave a function as it is; compiled, it gives its local variables C types."""
    return lambda function: function


def binding(_wanted: bool) -> Callable[[F], F]:
    """Leave a function as it is; compiled, it says whether it knows its annotations, at the price of slower calls."""
    return lambda function: function


def in_c(*_arguments: Any) -> Any:
    """Stand for a function that a ``.pxd`` defines in C and only the compiled form calls."""
    raise NotImplementedError
