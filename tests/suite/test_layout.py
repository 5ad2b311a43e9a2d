"""The suite's own rules, as ``tests/README.md`` states them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "file", sorted((TESTS.parent / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.stem
)
def test_actions_of_others_are_pinned(file):
    """A workflow uses each action at a commit, not at a tag that may move."""
    used = re.findall(r"uses: (\S+)", file.read_text())
    assert used
    assert [] == [one for one in used if not re.search(r"@[0-9a-f]{40}$", one)]


def test_a_file_name_stands_once():
    """A test file's name is unique, so that it identifies the file."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert len(names) > 60
    assert [] == [name for name, count in names.items() if count > 1]
