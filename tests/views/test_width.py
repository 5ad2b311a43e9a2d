"""Lines of findings fit the terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep500_timing._summary.tree import Node, build_tree
from deep500_timing._views.findings._finding import Finding
from deep500_timing._views.table import _finding, brief, folded, plain


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_long_remedy_is_broken(width: int) -> None:
    """The sentence and its remedy are broken between words, and no line is wider than the terminal."""
    remedy = "cache compilation; leave the first steps out of comparisons"
    finding = Finding("warm-up", "33 % of the run is warm-up", why="36 steps", remedy=remedy, gain_share=0.33)
    lines = plain(list(_finding(finding, 1, 5, width))).splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()).endswith(remedy)


FIT = (
    "100 % of it in <module> (train.py:22): model.fit(Images(), epochs=3, verbose=0), there in quick_execute (eager.py)"
)
LINES = "53 % of it in Env.step (env.py:141): self._integrate(action), 22 % in Env.reset (env.py:88): self._draw()"


@pytest.mark.parametrize(
    ("where", "why", "remedy", "said"),
    [
        ("", "", "do it less often", "X takes 56 % of BATCH, 364 ms a step."),
        ("every 3 steps", "", "do it less often", "X takes 56 % of BATCH, 364 ms a step, every 3 steps."),
        ("every 3 steps", LINES, "less often, or never", f"X takes 56 % of BATCH, 364 ms a step: {LINES[:35]}."),
        (
            "",
            f"the rest takes it, {LINES}",
            "less often, or never",
            f"X takes 56 % of BATCH, 364 ms a step: {LINES[:35]}.",
        ),
        ("", "a" * 200, "less often", "X takes 56 % of BATCH, 364 ms a step."),
        ("", FIT, "workers= of the PyDataset", "X takes 56 % of BATCH, 364 ms a step."),
    ],
)
def test_a_finding_takes_two_lines(where, why, remedy, said):
    """The fact and the remedy stay; of a long cause as much as there is room for."""
    finding = Finding("unnamed", "X takes 56 % of BATCH, 364 ms a step", where, why, remedy=remedy, gain_share=0.56)
    shown = brief(replace(finding, region=("BATCH", "IO")))
    assert said == shown.text
    assert shown.help.startswith(f"saves at most 56 %; {remedy[:10]}")
    assert len(list(_finding(shown, 1, 5, 80))) <= 2


def test_small_regions_are_one_row():
    """Ten thousand names are no ten thousand rows; a finding's region, has failed or is open keeps its row."""
    nodes = [Node("BATCH", ("BATCH",), total_s=100.0, count=9)]
    nodes += [Node(f"r{number}", ("BATCH", f"r{number}"), total_s=0.009, count=9) for number in range(10_000)]
    nodes += [Node("failed", ("BATCH", "failed"), total_s=0.1, count=1), Node("one", ("one",), total_s=0.1)]
    tree = build_tree(nodes, counters={("failed", "CPU"): {"failed": 1}})
    [batch, one] = folded(tree, [("BATCH", "r7")]).roots
    assert [node.name for node in batch.children] == ["failed", "r7", "9999 more regions", "the rest"]
    assert (batch.children[2].total_s, batch.children[2].share) == (pytest.approx(89.991), pytest.approx(0.89991))
    assert one.name == "one"  # there is no other with it
