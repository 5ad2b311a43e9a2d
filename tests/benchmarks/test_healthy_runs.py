"""Runs in which nothing is wrong, a small part of those of the benchmark."""

from __future__ import annotations

import pytest

from benchmarks.healthy_runs import KINDS, count

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

pytest.importorskip("duckdb", reason="reads runs; part of the group `test`")


def test_nothing_is_found_where_nothing_is_wrong():
    """One run of each kind: no rule speaks."""
    by_rule, said = count(range(len(KINDS)))
    assert [] == said
    assert not by_rule
