"""How far a long piece of work is."""

from __future__ import annotations


def ignore(done: int, of: int) -> None:
    """Show nothing."""


show = ignore
"""Called with how much is done and how much is to be done, in any unit, by who does it."""
