"""How far a long piece of work is, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[int, int], None]
_show: Show | None = None


def tell(done: int, of: int) -> None:
    """Tell how much of the work is done, in any unit."""
    if _show is not None:
        _show(done, of)


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Have ``show`` called with what the block tells."""
    global _show
    before, _show = _show, show
    try:
        yield
    finally:
        _show = before
