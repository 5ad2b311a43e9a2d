"""The suite's own rules, as ``tests/README.md`` states them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import suite_plugin

TESTS = Path(__file__).parents[1]


def test_a_file_name_stands_once():
    """The name of a file of tests tells which one it is."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert len(names) > 60
    assert [] == [name for name, count in names.items() if count > 1]


def test_what_runs_in_both_forms_exists():
    """A folder or file that runs in both forms and is renamed is renamed there as well."""
    assert [] == [part for part in suite_plugin.BOTH_FORMS if not (TESTS / part).exists()]
