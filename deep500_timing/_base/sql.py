"""Text in queries."""

from __future__ import annotations


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
