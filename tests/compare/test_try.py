"""``deep500-timing try``: which remedies are tried, what is claimed, and that nothing of the user's is changed."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import suite_ranks
from made_runs import made_rank

pytest.importorskip("scipy", reason="tests remedies")
pytest.importorskip("duckdb", reason="reads a run")
from deep500_timing._base.settings import TRIED, TRY
from deep500_timing._command._app import main
from deep500_timing._command.trial import _line_of
from deep500_timing._views.findings._tries import Try
from deep500_timing.compare import _ab, _try
from deep500_timing.compare._ab import CommandFailedError
from deep500_timing.compare._try import decide, steps_for, try_all

ROOT = Path(__file__).parents[2]
FIRST, SECOND, THIRD = (Try(name, True, "DataLoader") for name in ("persistent_workers", "pin_memory", "third"))


def simulated(effects, seed, noise=0.01):
    """Runs whose steps take 10 ms with some noise, and with each remedy so many times that."""
    chance = random.Random(seed)
    return lambda remedy, pair: (0.01 * effects.get(remedy, 1.0) * chance.lognormvariate(0, noise), ("train.py:1",))


def test_what_helps_is_claimed_and_comes_first():
    """A step of half the length is found in nearly every experiment; what makes no difference is not."""
    right = 0
    for seed in range(100):
        found = decide([FIRST, SECOND], 5, simulated({SECOND: 0.5}, seed))
        right += found[0].remedy == SECOND and found[0].helps and not found[1].helps
    assert right >= 95


def test_false_claims_of_all_remedies_together():
    """Three remedies without an effect: at most 5 % of the experiments claim any of them."""
    wrong = sum(any(one.helps for one in decide([FIRST, SECOND, THIRD], 5, simulated({}, n))) for n in range(1000))
    assert wrong <= 65  # 50 and twice the spread of a count


@pytest.mark.parametrize(
    ("logs", "hinders", "said"),
    [
        ((0.40, 0.41, 0.40, 0.41, 0.40), True, "a step is longer (90 %: +48.2 % to +51.1 %), 3 pairs."),
        ((0.01, -0.01, 0.02, -0.02, 0), False, "no difference shown (90 %: -1.5 % to +1.5 %), 5 pairs."),
        ((0.02, 0.10, -0.02, 0.09, 0.06), False, "no difference shown (90 %: +0.2 % to +10.3 %), 5 pairs. More may"),
    ],
    ids=["longer", "alike", "near"],
)
def test_what_is_said_where_nothing_helps(logs, hinders, said):
    """A longer step only where it is shown; and that more pairs may show one where the interval leaves out zero."""
    (tried,) = decide([FIRST], 5, lambda remedy, pair: (math.exp(logs[pair] if remedy else 0.0), ()))
    assert (hinders, False) == (tried.hinders, tried.helps)
    assert _line_of(tried).startswith(f"{FIRST.text}: {said}")


def test_where_a_remedy_goes():
    """Into the call that the program makes, or it is a call of its own."""
    for remedy, said in ((FIRST, "put it into DataLoader"), (Try("gc.freeze", True, "gc.freeze()"), "call it after")):
        (tried,) = decide([remedy], 5, lambda one, pair: (0.5 if one else 1.0 + pair / 100, ()))
        assert f"; {said}" in _line_of(tried)


def test_a_remedy_with_which_the_program_fails():
    """It is told, is not run again, and the others are tested all the same."""
    runs = []

    def measure(remedy, pair):
        runs.append(remedy)
        if remedy == FIRST:
            raise CommandFailedError("Side B0 ended with the exit status 1.")
        return simulated({SECOND: 0.5}, pair)(remedy, pair)

    found = {one.remedy: one for one in decide([FIRST, SECOND], 5, measure)}
    said = "the program fails with it. Side B0 ended with the exit status 1."
    assert (False, said) == (found[FIRST].helps, found[FIRST].failed)
    assert 1 == runs.count(FIRST)
    assert found[SECOND].helps


def test_a_program_that_fails_as_it_is():
    """There is nothing to test, and its error is the answer."""

    def measure(remedy, pair):
        raise CommandFailedError("It ended with the exit status 1.")

    with pytest.raises(CommandFailedError, match="exit status 1"):
        decide([FIRST], 5, measure)


@pytest.mark.parametrize(
    ("steady_ms", "steps"),
    [
        ([50] * 150, 32),
        ([1] * 150, 200),
        ([10] * 150, 134),  # a second, and the warm-up
        ([5000] * 24, 32),
        ([100, 130] * 75, 69),
        (([100] * 74 + [3000]) * 2, 200),
    ],
    ids=["alike", "short", "a second of them", "long", "noise of 13 %", "rare pauses"],
)
def test_the_steps_of_a_run(steady_ms, steps):
    """As many as know the time of one within 3 %: 1.645 standard errors of the mean, pauses included."""
    assert steps == steps_for(np.array(steady_ms) / 1e3)


def test_the_runs_of_a_trial(tmp_path, monkeypatch):
    """A short run, one for the findings, then pairs. Disturbed runs come again, one with nothing to set does not."""
    launched = []

    def launch(variant, path, *, session, pair, side):
        launched.append((side, variant.steps))
        with made_rank(path) as rank:
            for _ in range(variant.steps):
                rank.spend("BATCH", 0.05)
            if variant.environment.get(TRY) == "persistent_workers=True":
                rank.log.event(TRIED, "train.py:1", before="False")

    monkeypatch.setattr(_try, "launch", launch)
    monkeypatch.setattr(_try, "to_try", lambda *_: [FIRST, SECOND])
    monkeypatch.setattr(_try, "cause_of_waiting", lambda _: "cpu-contention")
    found = try_all(["train.py"], str(tmp_path), steps=None, pairs=3)
    first, second = (f"{name}=True" for name in ("persistent_workers", "pin_memory"))
    assert [("as it is", 32), ("as it is", 200)] == launched[:2]
    rounds = ["as it is", "as it is", first, first, second, first, first, "as it is", "as it is", first]
    assert [(side, 32) for side in rounds] == launched[2:]
    assert {
        "persistent_workers": "",
        "pin_memory": "nothing in the program calls DataLoader, or it has that value already.",
    } == {one.remedy.parameter: one.failed for one in found.tried}


LOADER = """
import time, torch
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)
class Rows(Dataset):
    def __len__(self): return 800
    def __getitem__(self, at): time.sleep(0.0005); return torch.randn(16)
net = torch.nn.Linear(16, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(20):
    for x in DataLoader(Rows(), batch_size=16):
        optimizer.zero_grad(); net(x).sum().backward(); optimizer.step()
"""


@pytest.fixture
def command(forks, tmp_path, monkeypatch, capfd):
    """``deep500-timing`` in this process, in a folder with a program of PyTorch, whose runs are forks.

    Hands back the exit status, the output and the errors.
    """
    pytest.importorskip("torch", reason="times PyTorch")
    (tmp_path / "train.py").write_text(LOADER)
    monkeypatch.chdir(tmp_path)

    def run(words, **how):
        return (forks.run_instead if "stdout" in how else subprocess.run)(words, **how)

    def command(*words):
        if words[0] == "run":
            done = forks.run(tmp_path, *words[1:])
            return done.returncode, "", done.stdout
        return main([*words]), *capfd.readouterr()

    monkeypatch.setattr(_ab, "subprocess", types.SimpleNamespace(DEVNULL=subprocess.DEVNULL, run=run))
    return command


@pytest.mark.slow
@pytest.mark.one_form
def test_a_real_loader(command, tmp_path):
    """The workers that the finding computes are tried, by a hook at the program's line; no file is made or changed."""
    status, printed, errors = command("try", "--steps", "40", "-n", "3", "--json", "--", sys.executable, "train.py")
    assert status in (0, 3), errors  # on a busy machine nothing may be claimed
    found = json.loads(printed)
    tried = {one["remedy"]["parameter"]: one for one in found["tried"]}
    if len(os.sched_getaffinity(0)) > 1:
        assert ["train.py:11 passes 0"] == tried["num_workers"]["places"]
        assert 3 == tried["num_workers"]["pairs"]
    assert found["helps"] == (status == 0)
    assert ["train.py"] == [one.name for one in tmp_path.iterdir()]
    assert LOADER == (tmp_path / "train.py").read_text()


@pytest.mark.slow
@pytest.mark.one_form
@pytest.mark.parametrize(
    ("program", "status", "said"),
    [("raise SystemExit(4)", 1, "exit status 4"), ("print('no training')", 1, "recorded no times")],
)
def test_a_program_that_cannot_be_tried(program, status, said, tmp_path):
    """The error says why, and the program's output is where it says."""
    (tmp_path / "train.py").write_text(program)
    done = suite_ranks.command(tmp_path, "try", "--", sys.executable, "train.py")
    assert status == done.returncode
    assert said in done.stderr
    log = Path(re.search(r"Its output is in (\S+\.log)", done.stderr)[1])
    assert log.exists()
    shutil.rmtree(log.parent)


@pytest.mark.slow
@pytest.mark.matrix
def test_the_commands_of_the_page_for_agents(command, tmp_path):
    """Each runs as it stands there, with fewer steps, and the keys are those of the page."""
    text = (ROOT / "deep500_timing" / "SKILL.md").read_text(encoding="utf-8")
    assert text == (ROOT / "docs" / "for-agents.md").read_text(encoding="utf-8")
    commands = re.findall("^    deep500-timing (.*)$", text, re.MULTILINE)
    assert 4 == len(commands)
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "train.py"), (*author, "commit", "-qm", "begin")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "train.py").write_text(LOADER + "# changed\n")
    keys = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    for line in commands:
        shorter = line.replace("100", "25").replace("--json --", "-n 3 --json --")
        words = [sys.executable if word == "python" else word for word in shorter.split()]
        status, printed, errors = command(*words)
        assert status in (0, 3), errors
        if words[0] == "show":
            for finding in json.loads(printed)["findings"]:
                assert {*keys} <= finding.keys()
                assert {"what", "parameter", "value", "can_try"} == finding["remedy"].keys()
                assert {"file", "line", "function"} == (
                    finding["where"] or dict.fromkeys(("file", "line", "function"))
                ).keys()
