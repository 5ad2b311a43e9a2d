"""The suite's own rules, as ``tests/README.md`` states them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_a_file_name_stands_once():
    """A test file's name is unique, so that it identifies the file."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert len(names) > 60
    assert [] == [name for name, count in names.items() if count > 1]
