"""Callbacks in forked children."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    F = TypeVar("F", bound=Callable[[], object])


def after_fork(renew: F) -> F:
    """Call a function in each process that is forked from now on, in the order of registration; a decorator.

    It must not take a lock: a thread of the parent may have held it. Does nothing where the system has no fork.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
    return renew
