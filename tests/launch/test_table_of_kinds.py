"""The table of what ``run`` sees: how a row is judged, and a few of its programs."""

from __future__ import annotations

import ast
import types

import pytest

pytest.importorskip("torch", reason="the kinds train with PyTorch")
pytest.importorskip("duckdb", reason="reads a run")
import table_of_kinds as table

KIND = table.Kind("a kind", "classifier", 3, named=("EPOCH",))
FOUND = {"BATCH": [1.0] * 3, "FORWARD": [0.3] * 6, "VALIDATION": [0.5], "EPOCH": [4.0]}


@pytest.mark.parametrize(
    ("truth", "wrong"),
    [
        ({"FORWARD": [0.29] * 6, "VALIDATION": [0.1] * 4}, ()),
        ({"FORWARD": [0.1] * 6}, ("FORWARD 300.0 ms for 100.0",)),
        ({"FORWARD": [0.3] * 4}, ("FORWARD 6 times for 4",)),
        ({"IO": [0.1] * 3}, ("no IO",)),
        ({"VALIDATION": [0.2] * 4}, ("VALIDATION 500 ms for 800",)),
    ],
)
def test_a_phase_is_right_by_the_stopwatch(truth, wrong):
    """As many times, in the median as long; an evaluation at least as long as its calls."""
    assert table.Seen(3, wrong) == table.judge(KIND, FOUND, truth)


def test_a_region_that_is_missing_and_a_row():
    """They are said in the page."""
    seen = table.judge(KIND, {"BATCH": [1.0] * 2}, {})
    assert "| a kind | 2 for 3 | no EPOCH |  |" == table.row_of(KIND, seen)
    assert "| a kind | yes | no | exit status 1: x |" == table.row_of(KIND, table.Seen(3, error="exit status 1: x"))


def test_each_kind_has_a_program_and_a_row_in_the_page():
    """The page is of the programs that there are."""
    programs = {
        one.name for file in (table.PLAIN, table.OTHERS) for one in ast.walk(ast.parse(file.read_text()))
        if isinstance(one, ast.FunctionDef)
    }  # fmt: skip
    assert {kind.program for kind in table.KINDS} <= programs
    page = table.PAGE.read_text()
    assert [kind.title for kind in table.KINDS if f"| {kind.title} |" not in page] == []


@pytest.mark.slow
@pytest.mark.parametrize("program", ["functional", "by_hand", "averaged"])
def test_steps_are_right(program, forks, tmp_path, monkeypatch):
    """Of kinds that no other test of ``run`` has."""
    monkeypatch.setattr(table, "subprocess", types.SimpleNamespace(run=forks.run_instead))
    kind = next(kind for kind in table.KINDS if kind.program == program)
    assert kind.steps == table.run(kind, tmp_path / "kind").steps
