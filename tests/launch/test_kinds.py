"""Kinds of unchanged programs under ``autolog``: their result is the same, and their phases have names and times.

Each program of ``kinds.py`` runs plain and timed, side by side. Its own stopwatch is the truth for the phases.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest
import suite_ranks

pytest.importorskip("torch", reason="times PyTorch")
pytestmark = [pytest.mark.slow, pytest.mark.matrix]

KINDS = Path(__file__).with_name("kinds.py")
NAMES = [
    line.removeprefix("def ").partition("(")[0]
    for line in KINDS.read_text().split("def step(")[1].splitlines()
    if line.startswith("def ")
]
PLAIN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
TIMED = """
import json, runpy, sys
import deep500_timing

log = deep500_timing.autolog(sys.argv[-1] + ".run", quiet=True)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
log.close()
timer = log.timer()
names = [times.name for times in timer.snapshot().regions]
found = {name: timer.intervals(name).tolist() for name in names}
failed = sum(times.failed + times.discarded + times.running for times in timer.snapshot().regions)
with open(sys.argv[2] + ".found", "w") as file:
    json.dump({"regions": found, "failed": failed}, file)
"""
RANKS = {"fsdp2": 2}
"""The kinds that several ranks run together."""
BETWEEN = {"prepare batch", "loss", "gradients", "between steps", "other code"}


@pytest.fixture(scope="session")
def measure(forks, tmp_path_factory):
    """Run a kind: its output plain and timed, its stopwatch, and the regions. Each runs once."""
    results = {}

    def run(name):
        if name in results:
            return results[name]
        folder = tmp_path_factory.mktemp(name)
        ranks = range(RANKS.get(name, 1))
        runs = []
        for program, what in ((PLAIN, "plain"), (TIMED, "timed")):
            (folder / what).mkdir()
            of_all = {"WORLD_SIZE": str(len(ranks)), "MASTER_PORT": str(suite_ranks.free_port())} if ranks[1:] else {}
            for rank in ranks:
                command = ["-c", program, str(KINDS), name, str(folder / what / f"{rank}.json")]
                own = {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", **of_all} if of_all else {}
                environment = suite_ranks.environment(PYTHONHASHSEED="0", **own)
                runs.append(forks.start(command, environment, folder / f"{what}-{rank}.log"))
        statuses = [run.wait(300) for run in runs]
        printed = [[(folder / f"{what}-{rank}.log").read_text() for rank in ranks] for what in ("plain", "timed")]
        assert not any(statuses), printed
        truth = json.loads((folder / "timed" / "0.json").read_text())
        results[name] = printed, truth, json.loads((folder / "timed" / "0.json.found").read_text())
        return results[name]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_it_computes_the_same(name, measure):
    """Weights, random states, output and exit status are those of the plain program."""
    (plain, timed), _, _ = measure(name)
    assert all("weights" in one for one in plain)
    assert plain == timed


@pytest.mark.parametrize("name", NAMES)
def test_its_phases_are_those_of_an_independent_clock(name, measure):
    """Each phase is seen as often as it happened, each time within the stopwatch's and near to it."""
    _, truth, found = measure(name)
    assert 0 == found["failed"]
    for phase, by_watch in truth.items():
        ours = [(end - start) / 1e9 for start, end in found["regions"].get(phase, [])]
        assert len(by_watch) == len(ours), phase
        if not (phase == "optimizer" and name == "own_optimizer"):  # which is taken to last until the next batch
            around = [theirs - mine for theirs, mine in zip(by_watch, ours, strict=True)]
            assert min(around) > 0, phase
            if len(around) >= 5:  # A busy machine comes between the two clocks some times, not each time.
                assert min(around) < 0.1 * statistics.median(by_watch) + 3e-4, phase


def share_named(regions, *, with_gaps):
    """The share of BATCH that lies in a named region, in the median: a busy machine prolongs some steps outside."""
    inner = sorted(
        tuple(span)
        for name, spans in regions.items()
        if name not in ("BATCH", "EPOCH") and (with_gaps or name not in BETWEEN)
        for span in spans
    )
    shares = []
    for start, end in regions["BATCH"]:
        covered, at = 0, start
        for begin, stop in inner:
            if stop > at and begin < end:
                covered += min(stop, end) - max(begin, at)
                at = max(at, min(stop, end))
        shares.append(covered / (end - start))
    return statistics.median(shares)


def test_the_named_phases_cover_the_steps(measure):
    """They cover 95 % of BATCH in the median and 80 % in the worst kind; without the regions between events less."""
    results = {name: measure(name) for name in NAMES}
    shares = {name: share_named(found["regions"], with_gaps=True) for name, (_, _, found) in results.items()}
    events = {name: share_named(found["regions"], with_gaps=False) for name, (_, _, found) in results.items()}
    for name in shares:
        print(f"{name:20} {shares[name]:.3f} of BATCH named, {events[name]:.3f} by events alone", file=sys.stderr)
    print(f"median {statistics.median(shares.values()):.3f}, {statistics.median(events.values()):.3f}", file=sys.stderr)
    assert statistics.median(shares.values()) >= 0.95, shares
    assert min(shares.values()) >= 0.80, shares
