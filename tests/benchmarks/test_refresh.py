"""A section that is measured again: in both files, where it stood, and nothing else touched."""

from __future__ import annotations

import json

import pytest

from benchmarks import refresh

BEFORE = "# Results\n\n{}## How it is measured\n\nCarefully.\n"
OLD = "## Communication\n\nold\n\n| a |\n\n"
PIPELINES = "## Pipelines\n\nkept\n\n"


@pytest.mark.parametrize("before", [OLD + PIPELINES, PIPELINES])
def test_one_section(tmp_path, before):
    """It takes the place of the old one, or stands before the last; both files agree."""
    (tmp_path / "RESULTS.md").write_text(BEFORE.format(before))
    (tmp_path / "results.json").write_text(json.dumps({"comm": ["old"], "pipeline": ["kept"]}))
    for lines in (["first", ""], [r"new \1", "", "| b |", ""]):
        refresh.put(tmp_path, "comm", lines)
    text = (tmp_path / "RESULTS.md").read_text()
    new = "## Communication\n\nnew \\1\n\n| b |\n\n"
    sections = new + PIPELINES if before != PIPELINES else PIPELINES + new
    assert BEFORE.format(sections) == text
    found = json.loads((tmp_path / "results.json").read_text())
    assert {"comm": [r"new \1", "", "| b |", ""], "pipeline": ["kept"]} == found


def test_a_report_of_another_kind(tmp_path):
    """Is refused, and stays as it was."""
    (tmp_path / "RESULTS.md").write_text("# Notes\n")
    with pytest.raises(ValueError, match="write it with `python -m benchmarks` first"):
        refresh.put(tmp_path, "comm", [])
    assert "# Notes\n" == (tmp_path / "RESULTS.md").read_text()


def test_a_section_that_nobody_knows(monkeypatch):
    """Is refused with the ones that there are."""
    monkeypatch.setattr("sys.argv", ["refresh", "weather"])
    with pytest.raises(
        SystemExit, match="no section weather: comm, pipeline, layers, pytorch, keras can be measured anew"
    ):
        refresh.main()


def test_one_loop_of_training(tmp_path):
    """Its tables are new and say when they were measured; those of the other loop stay."""
    runs = {"no timing": {"ms": {"median": 1.0, "rounds": 2}}}
    keras = {"keras": "3", "backend": "tensorflow", "steps": 7, "runs": runs}
    (tmp_path / "RESULTS.md").write_text(BEFORE.format("## Training\n\nold\n\n" + PIPELINES))
    (tmp_path / "results.json").write_text(json.dumps({"keras": keras, "pytorch": {"old": True}}))
    pytorch = {"steps": 5, "runs": runs, "measured": "today"}
    refresh.put_training(tmp_path, {"pytorch": pytorch, "missing": {}})
    text = (tmp_path / "RESULTS.md").read_text()
    assert [
        "A PyTorch loop on the CPU, 5 steps, 4 regions each",
        "Keras 3 `fit` on tensorflow, a tiny model, one epoch of 7 steps, each of them",
    ] == [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")]
    assert "Measured until today." in text
    assert text.endswith(BEFORE.format(PIPELINES).removeprefix("# Results\n\n"))
    assert {"keras": keras, "pytorch": pytorch} == json.loads((tmp_path / "results.json").read_text())


def test_what_is_reached_follows(tmp_path):
    """A goal of training that was reached once and is not any more is not said to be."""
    (tmp_path / "RESULTS.md").write_text(BEFORE.format("## Reach\n\nyes\n\n" + PIPELINES))
    (tmp_path / "results.json").write_text(json.dumps({"contenders": {}, "peer_ratios": {}}))
    took = {"ms": {"median": 1.0, "rounds": 2}, "us": {"median": 1.0, "rounds": 2}}
    runs = {
        "no timing": took,
        "no timing, again": {**took, "overhead_percent": {"median": 0.0, "low": -1.0, "high": 1.0, "rounds": 2}},
        "TimerCallback": {**took, "overhead_percent": {"median": 9.0, "low": 0.5, "high": 10.0, "rounds": 2}},
    }
    keras = {"keras": "3", "backend": "tensorflow", "steps": 7, "runs": runs}
    refresh.put_training(tmp_path, {"keras": keras, "missing": {}})
    reach = (tmp_path / "RESULTS.md").read_text().partition("## Reach")[2].partition("## ")[0]
    assert "yes" not in reach
    assert "+9.0 % (+0.5…+10.0) | **no** |" in reach
