"""The options of ``deep500-timing compare`` and ``history``, on runs that the real log wrote."""

from __future__ import annotations

import json

import pytest

from deep500_timing._command._app import main
from deep500_timing.compare import Floor
from deep500_timing.compare._statistics import Spread

JITTER = (1.0, 1.004, 0.997, 1.002, 0.999, 1.003)


@pytest.fixture
def interleaved(write_run, tmp_path):
    """The folder of an experiment as `ab` writes it: B's FORWARD takes so much longer."""

    def make(factor, pairs=4):
        place = 0
        for pair in range(pairs):
            for side in "AB" if pair % 2 == 0 else "BA":
                forward = 0.02 * (factor if side == "B" else 1) * JITTER[place % len(JITTER)]
                marks = {"session": "s", "pair": pair, "side": side}
                write_run(f"runs/{side}-{pair}", forward=forward, minute=place, measurement=marks)
                place += 1
        return str(tmp_path / "runs")

    return make


@pytest.fixture
def floor(tmp_path, monkeypatch):
    """A noise floor for any machine and program."""
    found = Floor("m", "p", {"": Spread(2e-5, 9)})
    monkeypatch.setattr("deep500_timing.compare._compare.find_floor", lambda *_: found)


def test_every_output_at_once(interleaved, floor, tmp_path, capsys, monkeypatch):
    """Terminal, page and GitHub summary say the same slowdown; the gate fails with 3."""
    summary, page = tmp_path / "summary.md", tmp_path / "page.html"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    options = ["--github", "--page", str(page), "--fail-on", "3%"]
    assert 3 == main(["compare", interleaved(1.5), *options])
    said = capsys.readouterr().out
    assert "B is slower: +19." in said
    assert "FORWARD explains" in said
    assert "B is slower" in summary.read_text()
    assert "Median time a step of each run" in page.read_text()


def test_a_page_shows_each_run_in_order_of_time(interleaved, tmp_path, capsys):
    """The page holds every run once, in the order in which the runs were made."""
    page = tmp_path / "page.html"
    assert 0 == main(["compare", interleaved(1.0), "--page", str(page)])
    text = page.read_text()
    places = [text.index(f"runs/{name}") for name in ("A-0", "B-0", "B-1", "A-1", "A-2", "B-2")]
    assert places == sorted(places)


def test_json_is_the_comparison(interleaved, floor, capsys):
    """`--json` prints every field, and the verdict of the gate."""
    assert 0 == main(["compare", interleaved(1.0), "--json", "--fail-on", "0.03"])
    found = json.loads(capsys.readouterr().out)
    assert ("paired", 4, False) == (found["method"], found["pairs"], found["slower"])
    assert found["gate"]["failed"] is False


def test_a_baseline_begins_grows_and_judges(write_run, tmp_path, capsys):
    """Each session is added, but for one that fails the gate; from three sessions on the baseline judges."""
    baseline = tmp_path / "baseline"
    codes = []
    for day, factor in enumerate((1, 1, 1, 1, 2)):
        for run in range(3):
            write_run(f"day-{day}/run-{run}", forward=0.02 * factor * JITTER[day + run % 2], minute=1440 * day + run)
        side = ["compare", "--against", str(baseline), "--update-baseline", str(tmp_path / f"day-{day}")]
        codes.append((main([*side, "--fail-on", "5%"]), len(list(baseline.iterdir()))))
    assert [(0, 1), (1, 2), (1, 3), (0, 4), (3, 4)] == codes, capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Name two sides"),
        (["RUN"], "Name two sides, A and B, or one folder that `ab` has written"),
        (["--update-baseline", "RUN"], "--update-baseline requires --against"),
        (["RUN", "OTHER", "--fail-on", "much"], "'much' is no share"),
        (["RUN", "OTHER", "--github"], "GITHUB_STEP_SUMMARY"),
        (["RUN", "nowhere"], "there is no run"),
    ],
)
def test_wrong_use_says_what_is_right(write_run, capsys, monkeypatch, arguments, said):
    """An exit code above 0 and a sentence, never a trace."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    places = {"RUN": write_run("one"), "OTHER": write_run("two", minute=1)}
    assert main(["compare", *(places.get(word, word) for word in arguments)]) != 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_world_sizes_are_a_scaling_experiment(write_run, capsys):
    """Two world sizes give an efficiency, in text and as data; a gate is refused."""
    one, two = write_run("one"), write_run("two", ranks=2, forward=0.04, minute=1)
    assert 0 == main(["compare", one, two])
    assert "From 1 to 2 ranks the efficiency is 71." in capsys.readouterr().out
    assert 0 == main(["compare", one, two, "--json"])
    assert [1, 2] == [row["ranks"] for row in json.loads(capsys.readouterr().out)["sizes"]]
    assert 0 != main(["compare", one, two, "--fail-on", "3%"])


def test_the_history_names_the_run(write_run, tmp_path, capsys, monkeypatch):
    """Of twelve runs the seventh made it slower; a run of three steps is left out and counted."""
    for number in range(12):
        forward = 0.02 * (1.3 if number >= 6 else 1) * JITTER[number % len(JITTER)]
        write_run(f"runs/run-{number:02}", forward=forward, minute=number)
    write_run("runs/short", steps=3, minute=20)
    monkeypatch.chdir(tmp_path)
    assert 0 == main(["history"])
    said = capsys.readouterr().out
    assert said.startswith("runs/run-06 made it slower: +11.")
    assert "Most of it is in BATCH/FORWARD" in said
    assert "Left out: 1" in said
    assert 0 == main(["history", str(tmp_path / "runs"), "--region", "BATCH/FORWARD", "--json"])
    levels = json.loads(capsys.readouterr().out)["levels"]
    assert [6, 6] == [level["points"] for level in levels]
    assert levels[1]["change"] == pytest.approx(0.3, abs=0.01)
