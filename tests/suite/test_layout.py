"""The suite's own rules, as ``tests/README.md`` states them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import suite_lanes
import suite_oldest


def test_a_file_name_stands_once():
    """The name of a file of tests tells which one it is."""
    names = Counter(path.name for path in suite_lanes.TESTS.rglob("test_*.py"))
    assert len(names) > 60
    assert [] == [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("lane", ["BOTH_FORMS", "LONGEST", "ONE_FORM", "SLOW"])
def test_what_a_lane_names_exists(lane):
    """A folder or file of a lane that is renamed is renamed there as well."""
    parts = getattr(suite_lanes, lane)
    assert [] == [part for part in parts if not (suite_lanes.TESTS / part).exists()]
    assert lane == "LONGEST" or sorted(parts) == list(parts)


def test_the_longest_files_come_first():
    """No worker begins with something else and ends with one of them alone."""
    longest = [SimpleNamespace(path=suite_lanes.TESTS / part, is_slow=True) for part in suite_lanes.LONGEST]
    others = [SimpleNamespace(path=suite_lanes.TESTS / "a.py", is_slow=is_slow) for is_slow in (True, False)]
    for item in (*longest, *others):
        item.get_closest_marker = lambda name, item=item: (name == "slow" and item.is_slow) or None
    assert [*longest, *others] == sorted([*reversed(others), *reversed(longest)], key=suite_lanes.turn)


def test_what_runs_once_is_in_a_folder_that_runs_twice():
    """An exception that excepts nothing is left over."""
    left = [part for part in suite_lanes.ONE_FORM if not part.startswith(suite_lanes.BOTH_FORMS)]
    assert [] == left


def test_the_oldest_versions_are_those_of_pyproject():
    """Of what several extras ask for the newest lower bound counts; what cannot be installed here is left out."""
    project = {
        "dependencies": ["numpy>=1.26"],
        "optional-dependencies": {"a": ["torch>=2.6", "click>=8.1"], "b": ["click>=8.10", "tensorflow>=2.18"]},
    }
    assert ["numpy==1.26", "click==8.10", "tensorflow-cpu==2.18"] == suite_oldest.oldest(project)


@pytest.mark.parametrize("requirement", ["numpy", "numpy<3", "numpy>=1.26,<3"])
def test_a_dependency_without_an_oldest_version_is_refused(requirement):
    """A lower bound that the lane cannot read is an error, not one version less that is tried."""
    with pytest.raises(ValueError, match="names no oldest version"):
        suite_oldest.oldest({"dependencies": [requirement], "optional-dependencies": {}})
