"""Lines of findings fit the terminal."""

from __future__ import annotations

import re
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
    ("where", "why", "said"),
    [
        ("", "", "X takes 56 % of BATCH, 364 ms a step."),
        ("every 3 steps", "", "X takes 56 % of BATCH, 364 ms a step, every 3 steps."),
        ("", "a" * 200, "X takes 56 % of BATCH, 364 ms a step."),
        ("every 3 steps", LINES, f"X takes 56 % of BATCH, 364 ms a step, every 3 steps: {LINES}."),
        ("every 3 steps", FIT, f"X takes 56 % of BATCH, 364 ms a step: {FIT}."),
        ("", f"the rest takes {'more ' * 9}, {LINES}", f"X takes 56 % of BATCH, 364 ms a step: {LINES[:35]}."),
        ("", f"{FIT}, {'a' * 70}", f"X takes 56 % of BATCH, 364 ms a step: {FIT[:37]}."),
    ],
)
def test_a_finding_is_short(where, why, said):
    """Two lines with the fact and the remedy, or three with a line of the program; of a cause what has room."""
    finding = Finding("unnamed", "X takes 56 % of BATCH, 364 ms a step", where, why, gain_share=0.56)
    shown = brief(replace(finding, remedy="do it less often, or in the background"))
    assert said == shown.text
    assert shown.help.startswith("saves at most 56 %; do it less often")
    assert len(list(_finding(shown, 1, 5, 80))) <= 2 + ("env.py" in said or "train.py" in said)


def test_a_cause_is_not_cut_behind_a_word_that_leads_on():
    """Neither "inputs of another shape or…" nor "in the…"."""
    why = "inputs of another shape or type, in the same run; " * 4
    for shown in (brief(Finding("unnamed", "It takes 56 %", why=why[:length])).text for length in range(60, 140)):
        assert not re.search(r",…| (or|in|the|of)…", shown)


@pytest.mark.parametrize("fact", ["6 steps took more than 4 × the median of 5 ms", "19 pauses take 20 %, 10.4 ms each"])
@pytest.mark.parametrize("numbers", [": 747, 1996, 3257 and 3 more", ": after steps 747, 1996, 3257 and 29 more"])
@pytest.mark.parametrize(
    "why", ["mostly in GC", "mostly in save_checkpoint", "mostly in GC, 60 % of it in f (train.py:9)", ""]
)
def test_a_cause_has_room_before_step_numbers_and_commands(fact, numbers, why):
    """The steps are in `show`, and a command that finds the cause is not needed where it is found."""
    command = "deep500-timing why runs/pretrain-of-the-long-name-20261129-133132 1996"
    shown = brief(Finding("spikes", fact + numbers, why=why, command=command, gain_share=0.56))
    assert (why, fact) == (shown.why, shown.fact[: len(fact)])
    assert (not why, not why) == (shown.fact == fact + numbers, shown.command == command)


@pytest.mark.parametrize("names", [("FORWARD (no grad)", "rollout"), ("BATCH", "IO", "GC"), ("a", "b")])
def test_a_long_start_hides_no_region(names):
    """The rows of a run's start and of its end are no measure of what is small: a trial is little else."""
    nodes = [Node(name, (name,), total_s=0.04, count=9) for name in names]
    ends = [Node("start-up", ("start-up",), total_s=9.0), Node("after training", ("after training",), total_s=3.0)]
    tree = build_tree([*nodes, *ends])
    assert {root.name for root in tree.roots} == {root.name for root in folded(tree).roots}


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
