"""Runs next to busy neighbours: ``compare`` says so first, ``ab`` runs their pair again, a noise floor keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import MadeMachine, made_rank

from deep500_timing.compare import _ab, compare
from deep500_timing.compare._compare import find_floor, floor_of, store_floor
from deep500_timing.compare._runs import RunTimes, read_run
from deep500_timing.compare._text import draw
from deep500_timing.runs import Run


def made(waited=None, *, name="a", seconds=1.0):
    """One run's times."""
    return RunTimes(name, seconds, {"BATCH": seconds}, mean_s=seconds, steps=40, waited=waited, load=3.0)


def test_how_long_a_run_waited_is_read(tmp_path):
    """From the readings of the thread of the steps; a run without any does not know."""
    for folder, waited_s in (("with", 0.004), ("without", None), ("later", 0.002)):
        with made_rank(tmp_path / folder) as rank:
            machine = None if waited_s is None else MadeMachine(rank)
            for step in range(40):
                rank.spend("BATCH", 0.01 + 0.001 * (step % 2))
                if machine is not None:
                    machine.read(waited_s)
    found = []
    for folder in ("with", "without", "later"):
        with Run.open(tmp_path / folder) as run:
            found.append(read_run(run))
    assert pytest.approx(0.004 / 0.0105) == found[0].waited
    assert (True, None, False) == (found[0].is_disturbed, found[1].waited, found[1].is_disturbed)
    assert (None, pytest.approx(0.0065, rel=0.1), pytest.approx(0.0085, rel=0.1)) == (
        found[1].cpu_s,
        found[0].cpu_s,
        found[2].cpu_s,
    )


@pytest.mark.parametrize(
    ("waited", "cpu_s", "said"),
    [
        ((0.4, 0.0), (0.5, 0.55), "B / A is +10.0 % (500.0 ms to 550.0 ms a step)."),
        ((0.0, 0.4), (0.5, 0.5), "B / A is +0.0 % (500.0 ms to 500.0 ms a step)."),
        ((0.0, 0.0), (0.5, 0.55), None),
        ((0.4, 0.4), (0.5, None), None),
        ((None, None), (None, None), None),
    ],
)
def test_where_the_clock_is_noisy_cpu_time_is_compared_as_well(waited, cpu_s, said):
    """By its name, and only where a run was disturbed and both sides know it."""
    sides = [[replace(made(waited[at], name="ab"[at]), cpu_s=cpu_s[at])] for at in (0, 1)]
    found = compare(*sides)
    text = draw(found)
    if said is None:
        assert found.cpu is None
        assert "CPU time" not in text
    else:
        assert f"In CPU time of the thread that trains {said}" in text
        assert ("CPU time of the step", cpu_s) == (found.cpu.path, (found.cpu.a_s, found.cpu.b_s))
        assert [] == [one.path for one in found.regions if "CPU" in one.path]


def test_cpu_time_of_pairs_is_tested():
    """Its verdict is its own: the wall clock of a busy machine hides the change."""
    pairs = range(8)
    made_runs = [
        [
            replace(
                made(0.4, name=f"{side}{pair}", seconds=1.0 + 0.3 * ((pair * 7 + add) % 5)),
                cpu_s=0.5 * (1 + 0.1 * (side == "b")) * (1 + 0.001 * pair),
                session="s",
                pair=pair,
                side=side.upper(),
            )
            for pair in pairs
        ]
        for side, add in (("a", 0), ("b", 2))
    ]
    found = compare(*made_runs)
    assert ("paired", "no difference shown", "slower") == (found.method, found.step.verdict, found.cpu.verdict)
    assert "In CPU time of the thread that trains B / A is +10.0 %" in draw(found)


def test_a_comparison_says_which_runs_were_disturbed():
    """It is the first warning, and the load at the start, which is a guess, is said only where nothing is known."""
    a, b = [made(0.46, name="a-0"), made(0.02, name="a-1")], [made(0.0, name="b-0", seconds=1.1)]
    assert (
        "The machine was busy: the training thread waited for a processor for so much of the time: a-0 46 %.",
    ) == compare(a, b).warnings
    [said] = compare([made(name="a-0")], [made(name="b-0")]).warnings
    assert "load average" in said


def test_a_disturbed_pair_is_run_again_once(tmp_path, monkeypatch):
    """Its runs stay where no comparison looks; a pair that is disturbed twice counts."""
    waits = {("A", 0): [0.5, 0.0], ("B", 2): [0.5, 0.5]}
    ran, said = [], []

    def run_once(variant, folder, *, session, pair, side):
        Path(folder).mkdir()
        ran.append(f"{side}-{pair}")
        again = ran.count(ran[-1]) - 1
        waited = waits.get((side, pair), [0.0, 0.0])[again]
        return replace(made(waited, name=ran[-1], seconds=1 + 0.001 * pair), session=session, pair=pair, side=side)

    monkeypatch.setattr(_ab, "run_once", run_once)
    variant = _ab.Variant(("program",))
    found, _, done = _ab.run_pairs(
        variant,
        variant,
        str(tmp_path / "out"),
        pairs=3,
        floor_path=str(tmp_path / "f"),
        on_run=lambda *of: said.append(of[2]),
    )
    assert ["A-0", "B-0", "A-0", "B-0", "B-1", "A-1", "A-2", "B-2", "A-2", "B-2"] == ran
    assert "pair 0 was disturbed by other programs, and runs again" in said
    assert [(0.0, 0.0), (0.0, 0.0), (0.0, 0.5)] == [(a.waited, b.waited) for a, b in done]
    assert 3 == found.pairs
    inside = [
        sorted(path.name for path in folder.iterdir()) for folder in (tmp_path / "out", tmp_path / "out/disturbed")
    ]
    assert [["A-0", "A-1", "A-2", "B-0", "B-1", "B-2", "disturbed"], ["A-0", "A-2", "B-0", "B-2"]] == inside


def test_a_noise_floor_keeps_how_disturbed_it_was(tmp_path):
    """It comes back from the file; a file of before, without it, is read as well."""
    pairs = [(made(0.1, seconds=1.0), made(0.3, seconds=1.01)), (made(None), made(0.0, seconds=1.02)), (made(), made())]
    floor = floor_of(pairs)
    file = store_floor(floor, str(tmp_path / "floors.json"))
    assert 0.3 == floor.waited == find_floor(pairs[0][0], file).waited
    text = Path(file).read_text().replace('"waited": 0.3,', "")
    Path(file).write_text(text)
    assert None is find_floor(pairs[0][0], file).waited
