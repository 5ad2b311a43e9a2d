"""Findings: their sentences. `test_findings_sweep.py` has each rule over the size of its fault."""

from __future__ import annotations

import random
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from made_runs import made_on_device, made_rank

from deep500_timing import Timer
from deep500_timing._views.findings import ENVIRONMENT, evidence_of, find, verdict
from deep500_timing._views.findings._series import trend_of
from deep500_timing._views.reports import report_of_run, tree_of_snapshot
from deep500_timing._views.table import render
from deep500_timing.runs import Run, RunLog
from deep500_timing.testing import ManualClock

MS = 1e-3


def train(folder, steps=80, *, rank=0, noise=0.02, seed=0, before=None, after=None, **parts):
    """A rank of steps of 100 ms: what each part takes is a number of ms, or a function of the step that gives it."""
    dice = random.Random(1000 * seed + rank)
    times: dict = {"IO": 2, "FORWARD": 35, "BACKWARD": 60, "optimizer": 3, **parts}
    with made_rank(folder, rank) as made:
        for step in range(steps):
            if before is not None:
                before(made, step)
            with made.region("BATCH"):
                for name, took in times.items():
                    usual: Any = took(step) if callable(took) else took
                    if usual:
                        made.spend(name, usual * MS * dice.lognormvariate(0.0, noise))
            if after is not None:
                after(made, step)


def in_each_step(write, after_s=0.0):
    """Make a run of 40 steps of what this writes in each, and so many seconds between two."""

    def make(folder):
        with made_rank(folder) as made:
            for step in range(40):
                with made.region("BATCH"):
                    write(made, step)
                made.wait(after_s)

    return make


@in_each_step
def unnamed(made, step):
    """40 ms of each step lie between FORWARD and BACKWARD, in no region."""
    made.spend("FORWARD", 30 * MS)
    made.wait(40 * MS)
    made.spend("BACKWARD", 40 * MS)


def late(folder):
    """Rank 1's FORWARD takes 5 ms longer, and the other waits for it in the collective."""
    dice = random.Random(5)
    takes = [[30 * dice.lognormvariate(0, 0.03), 35 * dice.lognormvariate(0, 0.03)] for _ in range(120)]
    for rank in range(2):
        with made_rank(folder, rank) as made:
            for number, pair in enumerate(takes):
                with made.region("BATCH"):
                    made.spend("FORWARD", pair[rank] * MS)
                    start = made.clock.now_ns()
                    made.spend("COMM", (2 + max(pair) - pair[rank]) * MS)
                    made.log.collective("all_reduce", start, made.clock.now_ns(), sequence=number, nbytes=4096)


def remembering(growth):
    """The process grows by so many MiB a step."""

    def sample(made, step):
        dice = random.Random(step)
        made.log.sample("process.rss_bytes", (2000 + growth * step + dice.gauss(0, 5)) * 2**20, region="BATCH")

    return lambda folder: train(folder, 120, after=sample)


def filling(growth, size_gib=80):
    """What tensors occupy on a device of 80 GiB grows by so many MiB a step, from 20 GiB on."""

    def sample(made, step):
        dice = random.Random(step)
        occupied = (20 * 1024 + growth * step + dice.gauss(0, 5)) * 2**20
        made.log.sample("memory.device_allocated_bytes", occupied, region="BATCH")
        made.log.sample("memory.device_total_bytes", size_gib * 2**30, region="BATCH")

    return lambda folder: train(folder, 120, after=sample)


def sampled(*percents, every_ms=25, **parts):
    """Every 25 ms NVML reads how busy each device is, by a percentage or a function of the step."""

    def make(folder):
        with made_rank(folder) as made:
            for step in range(80):
                with made.region("BATCH"):
                    for name, took in {"IO": 2, "FORWARD": 48, "BACKWARD": 50, **parts}.items():
                        with made.region(name):
                            for _ in range(took // every_ms):
                                made.wait(every_ms * MS)
                                for index, busy in enumerate(percents):
                                    made.log.sample(f"gpu{index}.utilization_percent", busy + (step % 5 - 2))
                            made.wait(took % every_ms * MS)

    return make


def throttled(folder):
    """The device is held down in each fourth sample."""

    def sample(made, step):
        made.log.sample("gpu0.throttled_hw_thermal", float(step % 4 == 0))

    train(folder, after=sample, FORWARD=lambda step: 60 if step % 4 == 0 else 35)


def losing(folder):
    """A region fails now and then."""

    def fail(made, step):
        if step % 20 == 7:
            with suppress(OSError), made.region("checkpoint"):
                raise OSError

    train(folder, after=fail)


def on_device(**parts):
    """Steps with times on a device, see :func:`made_on_device`."""
    return lambda folder: made_on_device(folder, 40, parts)


RUNS = {
    "waits-for-data": lambda folder: train(folder, IO=40),
    "spikes": lambda folder: train(folder, FORWARD=lambda step: 400 if step % 16 == 15 else 35),
    "warm-up": lambda folder: train(folder, FORWARD=lambda step: 2000 if step < 2 else 35),
    "unnamed": unnamed,
    "late-rank": late,
    "throttled": throttled,
    "lost": losing,
    "launch-bound": on_device(FORWARD=(60, 10), BACKWARD=(60, 20)),
    "copies": on_device(COPY=(20, 20), FORWARD=(10, 90)),
}


def test_the_lines_that_wait_are_named(tmp_path):
    """The finding has the lines with most waits, and their number in a step."""
    clock, folder = ManualClock(), tmp_path / "run"
    on_device(FORWARD=(40, 40), BACKWARD=(12, 70))(folder)
    with RunLog(folder, Timer(clock=clock), rank=0, flush_s=None) as log:
        log.declare("sync_lines", time="time", function="name", line="name", expression="name", count="int")
        for step in range(4):
            log.add("sync_lines", (step, "", "", "", 0), (step, "step", "app/train.py:41", "loss.item()", 3))
        log.add("sync_lines", (0, "clip", "nn/clip.py:7", "if norm > limit:", 1), (0, "log", "app/log.py:9", "x", 1))
    with Run.open(folder) as run:
        found = next(one for one in find(run) if one.rule == "cpu-waits-for-gpu")
    assert found.why == (
        "it waits at app/train.py:41 (loss.item()) 3 times a step and app/log.py:9 (x) 0.25 times a step, and 1 more"
    )


def test_the_remedy_is_one_of_the_framework(tmp_path):
    """Keras has no num_workers."""
    for name, versions, data, remedy in (
        ("a", {"torch": "2.13"}, "", "num_workers"),
        ("b", {"tensorflow": "2.21", "jax": "0.10"}, "", "num_parallel_calls"),
        ("c", {"keras": "3.15", "torch": "2.13"}, "PyDataset", "of the PyDataset"),
    ):
        with made_rank(tmp_path / name) as made, patch("deep500_timing.runs._header._versions", lambda of=versions: of):
            if data:
                made.log.declare("fits", unix_us="int", backend="name", data="name", eager="int")
                made.log.add("fits", (0, "tensorflow", data, 0))
            for _ in range(40):
                with made.region("BATCH"):
                    made.spend("IO", 50 * MS)
                    made.spend("FORWARD", 50 * MS)
            made.log.flush()
        with Run.open(tmp_path / name) as run:
            [found] = find(run)
        assert remedy in found.remedy


@pytest.mark.parametrize("inside", ["deep500-timing (start)", "all_reduce"])
def test_time_that_is_no_work_is_no_dominant_region(tmp_path, inside):
    """The start of our own log in a short run, and a collective by hand, are no logging and no clipping."""
    with made_rank(tmp_path / "run") as made:
        for step in range(25):
            with made.region("BATCH"):
                for name in ("FORWARD", "BACKWARD"):
                    made.spend(name, 1 * MS)
                with made.region("between steps"):
                    start = made.clock.now_ns()
                    if inside == "all_reduce":
                        made.wait(2 * MS)
                        made.log.collective("all_reduce", start, made.clock.now_ns(), sequence=step)
                    elif not step:
                        made.spend(inside, 30 * MS)
                    made.wait(0.1 * MS)
    with Run.open(tmp_path / "run") as run:
        assert "dominant-region" not in {finding.rule for finding in find(run)}


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """Make a run and look for findings; each is made once."""
    known = {}
    # One for all: to open a database takes a sixth of the time to look for findings in so small a run.
    connection = pytest.importorskip("duckdb").connect()

    def of(make, **settings):
        if make not in known:
            folder = tmp_path_factory.mktemp("found") / "run"
            make(folder)
            known[make] = folder
        with Run.open(known[make], engine=connection) as run:
            return find(run, **settings)

    yield of
    connection.close()


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("waits-for-data", "IO is 29 % of BATCH: the loop waits for data, 40.0 ms of 138 ms a step."),
        (
            "spikes",
            "5 of 80 steps took more than 4 × the median of 100 ms: 15, 31, 47 and 2 more, every 16 steps: "
            "mostly in FORWARD.",
        ),
        ("warm-up", "33 % of the run is warm-up: the first 2 steps take 4.07 s, those from step 2 on 100 ms each."),
        ("unnamed", "36 % of BATCH lies in no region, 1.60 s in all, most of it between FORWARD and BACKWARD."),
        ("lost", "Not in the numbers: 4 regions failed (checkpoint)."),
        ("launch-bound", "The device is idle for 75 % of BATCH, most of it in FORWARD: the CPU does not keep it busy."),
        (
            "copies",
            "COPY takes 18 % of BATCH, 20.0 ms a step, not overlapped: the CPU waits for it, "
            "as for a copy from pageable memory or without non_blocking.",
        ),
    ],
)
def test_what_is_said(findings, rule, text):
    """The fact with its number, then where, then why."""
    assert [text] == [finding.text for finding in findings(RUNS[rule]) if finding.rule == rule]


def breaking(*names):
    """One exception, through regions that lie in each other."""

    def fail(made, step):
        if step == 7:
            with suppress(OSError), ExitStack() as stack:
                for name in names:
                    stack.enter_context(made.region(name))
                raise OSError

    return lambda folder: train(folder, after=fail)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["EPOCH", "BATCH"], "2 regions failed (BATCH and EPOCH)."),
        (["FIT", "EPOCH", "BATCH"], "3 regions failed (BATCH and 2 others)."),
        (["load", "EPOCH", "BATCH", "read"], "4 regions failed (BATCH and 3 others)."),
    ],
)
def test_what_failed_once_each_is_not_mostly_in_one(findings, names, text):
    """An exception goes through all regions that are open: none of them is where most of it is."""
    assert [f"Not in the numbers: {text}"] == said(findings, breaking(*names), "lost")


def said(findings, make, rule):
    """The sentences of a rule about a run."""
    return [finding.text for finding in findings(make) if finding.rule == rule]


def every(steps, name, *ms):
    """A region outside the steps, once or several times each so many of 120 steps of 100 ms."""

    def after(made, step):
        for length in ms if step % steps == steps - 1 else ():
            made.spend(name, length * MS)

    return lambda folder: train(folder, 120, noise=0.0, after=after)


@pytest.mark.parametrize(
    ("make", "text", "remedy"),
    [
        (
            every(30, "CHECKPOINT", 200),
            "CHECKPOINT takes 6.2 % of the run, 800 ms, 4 times, 200 ms each, every 30 steps.",
            "do it once in 98 steps (then 2.0 %), or in the background",
        ),
        (
            every(20, "VALIDATION", 2000),
            "VALIDATION takes 50 % of the run, 12.0 s, 6 times, 2.00 s each, every 20 steps.",
            "do it once in 180 steps (then 10 %), or in the background",
        ),
        (
            every(20, "VALIDATION", 1900, 100),
            "VALIDATION takes 50 % of the run, 12.0 s, 12 times, 1.00 s each, every 20 steps.",
            "do it once in 180 steps (then 10 %), or in the background",
        ),
        (
            every(60, "log to disk", 700),
            "log to disk takes 10 % of the run, 1.40 s, 2 times, 700 ms each.",
            "do it less often, or in the background",
        ),
    ],
)
def test_how_rarely_would_do(findings, make, text, remedy):
    """Work outside the steps is shown with the period at which it would cost little, if it has one."""
    found = [(one.text, one.remedy) for one in findings(make) if one.rule == "outside-steps"]
    assert [(text, remedy)] == found


@pytest.mark.parametrize(("name", "ms"), [("CHECKPOINT", 150), ("VALIDATION", 700), ("sync", 300)])
def test_what_is_rare_enough(findings, name, ms):
    """Checkpoints below 5 %, a validation below 20 % and anything else below 10 % of the run are no finding."""
    assert [] == said(findings, every(30, name, ms), "outside-steps")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            filling(30),
            "Memory grows by 30.02 MiB a step, from 20.88 GiB to 23.49 GiB (memory.device_allocated_bytes), "
            "read at the end of BATCH: at this rate the 80.00 GiB of the device are full in 1900 steps.",
        ),
        (
            remembering(3),
            "Memory grows by 3.04 MiB a step, from 2.04 GiB to 2.30 GiB (process.rss_bytes), read at the end of BATCH.",
        ),
        (filling(0), None),
    ],
    ids=["device", "host", "within the noise"],
)
def test_when_a_device_will_be_full(findings, make, text):
    """A device's size is read with its use; the host's limit is known to no one, and nothing is said of it."""
    assert [text] * (text is not None) == said(findings, make, "memory-grows")


def test_a_device_without_timed_regions_is_idle_by_its_samples(findings):
    """How busy all keep it bounds how busy this run does."""
    assert [
        "The device is idle for at least 55 % of BATCH, by 240 samples of its utilisation: "
        "the CPU does not keep it busy."
    ] == said(findings, sampled(45), "launch-bound")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(sampled(90), id="busy"),
        pytest.param(sampled(45, IO=50, FORWARD=25, BACKWARD=25), id="waits for data"),
        pytest.param(sampled(2), id="of nobody"),
        pytest.param(sampled(45, 45), id="one of two"),
        pytest.param(sampled(45, every_ms=50, FORWARD=10, BACKWARD=10), id="no samples"),
    ],
)
def test_samples_that_tell_nothing(findings, make):
    """Of a device that is busy, starved, not this run's, or one of several, nothing is concluded."""
    assert [] == said(findings, make, "launch-bound")


def test_a_copy_for_which_the_cpu_does_not_wait(findings):
    """That it waits is measured: where it runs ahead nothing is said of pageable memory."""
    assert ["COPY takes 18 % of BATCH, 20.0 ms a step, not overlapped."] == said(
        findings, on_device(COPY=(1, 20), FORWARD=(10, 90)), "copies"
    )


def test_the_longest_copy_is_named(findings):
    """Of two regions of copies the one that takes longer."""
    (text,) = said(findings, on_device(COPY=(2, 2), transfer=(20, 20), FORWARD=(10, 90)), "copies")
    assert text.startswith("transfer takes 18 % of BATCH")


def test_the_late_rank_is_named_with_its_cause(findings):
    """Who, how often, by how much, and which of its regions takes longer."""
    (found,) = [finding for finding in findings(RUNS["late-rank"]) if finding.rule == "late-rank"]
    assert 1 == found.rank
    assert found.fact.startswith("Rank 1 is late at ")
    assert "of 117 steps, by 4.8" in found.fact
    assert found.why.startswith("its FORWARD takes ")
    assert found.command.startswith("deep500-timing stragglers ")


def test_a_late_rank_whose_time_no_region_covers(findings):
    """The cause is said in words that hold without a region's name."""

    def make(folder):
        dice = random.Random(5)
        takes = [[30 * dice.lognormvariate(0, 0.03), 40 * dice.lognormvariate(0, 0.03)] for _ in range(120)]
        for rank in range(2):
            with made_rank(folder, rank) as made:
                for number, pair in enumerate(takes):
                    with made.region("BATCH"):
                        made.wait(pair[rank] * MS)
                        start = made.clock.now_ns()
                        made.spend("COMM", (2 + max(pair) - pair[rank]) * MS)
                        made.log.collective("all_reduce", start, made.clock.now_ns(), sequence=number, nbytes=4096)

    (found,) = [finding for finding in findings(make) if finding.rule == "late-rank"]
    assert found.why.startswith("what no region of its step covers takes ")


def test_what_was_lost_comes_first_then_the_most_costly(findings, tmp_path):
    """At any cost: a missing log makes the others doubtful."""

    def make(folder):
        def fail(made, step):
            if step == 5:
                with suppress(OSError), made.region("checkpoint"):
                    raise OSError

        train(folder, IO=40, FORWARD=lambda step: 900 if step % 16 == 15 else 35, after=fail)

    lost, *others = findings(make)
    assert "lost" == lost.rule
    assert {"waits-for-data", "spikes"} == {finding.rule for finding in others}
    assert others[0].cost_s > others[1].cost_s > 1.0


def test_no_more_than_five(monkeypatch, findings):
    """A page of findings is none."""
    monkeypatch.setattr("deep500_timing._views.findings.MOST", 1)
    assert 1 == len(findings(RUNS["throttled"]))


def test_a_rule_can_be_switched_off(findings, monkeypatch):
    """By an argument and in the environment; a name that is none is said."""
    make = RUNS["waits-for-data"]
    assert [] == findings(make, off=["waits-for-data"])
    with pytest.raises(ValueError, match="Switching off the finding 'io'"):
        findings(make, off=["io"])
    monkeypatch.setenv(ENVIRONMENT, "-waits-for-data")
    assert [] == findings(make)
    monkeypatch.setenv(ENVIRONMENT, "-waits")
    with pytest.warns(UserWarning, match="which switches off nothing"):
        assert ["waits-for-data"] == [finding.rule for finding in findings(make)]


def fit(first, steps, parts, around):
    """A fit of Keras in three epochs: seconds of the first batch, and of an epoch outside batches; ms of a batch."""

    def make(folder):
        dice = random.Random(steps)
        with made_rank(folder) as made, made.region("FIT"):
            for epoch in range(3):
                with made.region("EPOCH"):
                    made.spend("EPOCH (start)", 0.3 * around)
                    for step in range(steps // 3):
                        with made.region("BATCH"):
                            if epoch == step == 0:
                                made.spend("compile", first)
                            for name, took in parts.items():
                                made.spend(name, took * MS * dice.lognormvariate(0, 0.1))
                            made.wait(1 * MS)
                        made.spend("CALLBACKS", 0.3 * MS)
                    made.spend("VALIDATION", 0.7 * around)

    return make


def loop(steps, *, beside=0.0, crowded=False, **parts):
    """A loop of PyTorch in two epochs, its loader next to BATCH or in it; crowded, a fifth takes 20 times as long."""

    def make(folder):
        dice = random.Random(steps)
        with made_rank(folder) as made:
            for _ in range(2):
                with made.region("EPOCH"):
                    for _ in range(steps // 2):
                        if beside:
                            made.spend("IO", beside * MS * dice.lognormvariate(0, 0.2))
                        slow = 20 if crowded and dice.random() < 0.2 else 1
                        with made.region("BATCH"):
                            for name, took in parts.items():
                                made.spend(name, slow * took * MS * dice.lognormvariate(0, 0.1))

    return make


def warmed(name, make, percent, first_s, others_ms):
    """A fit of which so much is its first step."""
    said = f"the first step takes {first_s} s, those from step 1 on {others_ms} ms each."
    line = f"{percent} % of the run is warm-up: {said}"
    return pytest.param(make, line, id=f"keras_{name}")


@pytest.mark.parametrize(
    ("make", "first_line"),
    [
        warmed("convnet", fit(1.89, 134, {"IO": 0.03, "FORWARD": 10, "BACKWARD": 20.5}, 0.18), 28, 1.92, "31.7"),
        warmed("transformer", fit(7.18, 299, {"IO": 0.05, "FORWARD": 4, "BACKWARD": 4.5}, 0.9), 56, 7.19, "9.54"),
        warmed("unet", fit(3.43, 83, {"IO": 0.03, "FORWARD": 16, "BACKWARD": 30}, 0.3), 42, 3.47, "47.0"),
        pytest.param(
            fit(0.2, 180, {"IO": 21, "FORWARD": 2, "BACKWARD": 3}, 0.05),
            "IO is 78 % of BATCH: the loop waits for data, 21.1 ms of 27.1 ms a step.",
            id="a slow loader in a fit",
        ),
        pytest.param(
            loop(60, beside=25, FORWARD=3, BACKWARD=7, optimizer=1.3),
            "IO is 68 % of EPOCH: the loop waits for data, 25.3 ms a step.",
            id="a slow loader",
        ),
        pytest.param(
            loop(284, IO=0.3, FORWARD=4.4, BACKWARD=5.5, optimizer=0.8),
            "Nothing stands out: training is 100 % of the run; 90 % of BATCH are BACKWARD and FORWARD; "
            "95 % of the steps are within 13 % of the median.",
            id="the demo",
        ),
        pytest.param(
            loop(284, IO=0.3, FORWARD=4.4, BACKWARD=5.5, optimizer=0.8, crowded=True),
            "66 of 283 steps took more than 4 × the median of 11.3 ms: 3, 6, 9 and 63 more.",
            id="the demo on a crowded machine",
        ),
    ],
)
def test_the_first_line_names_the_right_thing(tmp_path, make, first_line):
    """Of runs with the proportions of the examples, the demo and slow loaders: what one who knows them would say."""
    make(tmp_path / "run")
    with Run.open(tmp_path / "run") as run:
        found = find(run)
        said = found[0].text if found else verdict(evidence_of(run)).text
    assert first_line == said


def test_nothing_to_say_is_said(tmp_path):
    """Where a step goes, and how far steps are apart."""
    folder = tmp_path / "run"
    train(folder)
    with Run.open(folder) as run:
        assert [] == find(run)
        said = verdict(evidence_of(run)).text
    assert said.startswith(
        "Nothing stands out: training is 100 % of the run; 95 % of BATCH are BACKWARD and FORWARD; "
        "95 % of the steps are within "
    )


@pytest.mark.parametrize(("steps", "said"), [(1, "one step"), (19, "19 steps")])
def test_too_few_steps_for_a_verdict_is_said(tmp_path, steps, said):
    """A first trial of a few steps says why no rule speaks."""
    folder = tmp_path / "run"
    train(folder, steps)
    with Run.open(folder) as run:
        assert [] == find(run)
        assert f"No finding: the run has only {said}, and most findings need 20." == verdict(evidence_of(run)).text


def test_where_steps_are_far_apart_that_is_said(tmp_path):
    """A spread of several medians is not called within so many percent of it."""
    folder = tmp_path / "run"
    train(folder, FORWARD=lambda step: 150 if step % 16 in (3, 9) else 35)
    with Run.open(folder) as run:
        assert [] == find(run)
        said = verdict(evidence_of(run)).text
    assert said.startswith("No finding: ")
    assert said.endswith("; one step in 20 takes 2.2 × the median or more.")


def test_a_busy_machine_is_no_warm_up(findings):
    """Where one step in four is slow for no reason of its own, the first is all that the start cost."""

    def make(folder):
        train(folder, 90, FORWARD=lambda step: 300 if step == 0 else 160 if step % (4 if step < 40 else 9) == 3 else 35)

    assert [] == [finding.text for finding in findings(make) if finding.rule == "warm-up"]


def test_of_few_steps_the_first_is_told_from_the_others(findings):
    """Ten steps are enough to say that the first was most of the run."""
    found = findings(lambda folder: train(folder, 10, FORWARD=lambda step: 3000 if step == 0 else 35))
    assert ["75 % of the run is warm-up: the first step takes 3.07 s, those from step 1 on 100 ms each."] == [
        finding.text for finding in found
    ]


def test_slow_steps_after_a_validation_say_so(findings):
    """What slow steps share is looked for in what happened just before them."""

    def make(folder):
        with made_rank(folder) as made:
            for _ in range(4):
                with made.region("EPOCH"):
                    for step in range(20):
                        made.spend("BATCH", 0.6 if step == 0 else 0.1)
                    made.spend("VALIDATION", 0.5)

    (found,) = [finding for finding in findings(make) if finding.rule == "spikes"]
    assert "each after VALIDATION" == found.where
    assert (20, 40, 60) == tuple(sorted(found.steps))


def test_one_process_knows_less_and_says_what_it_knows():
    """A snapshot has no steps and no ranks: the rules of the tree speak of it all the same."""
    clock = ManualClock()
    tmr = Timer(clock=clock)
    for step in range(40):
        with tmr.region("BATCH"):
            with tmr.region("IO"):
                clock.advance(0.05)
            with tmr.region("FORWARD"):
                clock.advance(4.0 if step == 0 else 0.05)
    found = find(tree_of_snapshot(tmr.snapshot(places=True)))
    assert ["waits-for-data", "warm-up"] == [finding.rule for finding in found]
    assert "" == "".join(finding.command for finding in found)


def test_a_backward_pass_that_holds_its_communication_is_not_unnamed(findings):
    """Its time outside COMM gives its name; waits do not divide a region."""

    @in_each_step
    def make(made, step):
        made.spend("FORWARD", 0.01)
        with made.region("BACKWARD"):
            made.wait(0.02)
            made.spend("COMM", 0.03)

    assert ["exposed-communication"] == [finding.rule for finding in findings(make)]


def test_the_wait_at_the_end_of_a_backward_pass_is_communication(findings):
    """DDP's reducer waits in C++, where no region is: the last bucket is awaited from its start on, others overlap."""

    @in_each_step
    def make(made, step):
        made.spend("FORWARD", 0.01)
        with made.region("BACKWARD"):
            begin = made.clock.now_ns()
            made.wait(0.05)
            for bucket, (start_s, end_s) in enumerate(((0.01, 0.02), (0.03, 0.06))):
                start, end = (begin + int(seconds * 1e9) for seconds in (start_s, end_s))
                made.log.collective("all_reduce", start, end, sequence=2 * step + bucket, nbytes=1 << 20)

    (found,) = findings(make)
    assert "exposed-communication" == found.rule
    assert found.fact.startswith("Communication that nothing hides takes 33 % of BATCH, 20.0 ms a step")


@pytest.mark.parametrize(
    ("sampled_ms", "waits_ms", "said"),
    [
        ((30, 10), 0, "33 % of BATCH, 20.0 ms a step, by DDP's own samples"),
        ((90, 10), 0, "83 % of BATCH, 50.0 ms a step, by DDP's own samples"),  # no more than BACKWARD
        ((30, 10), 15, None),  # Rank 1 comes later by that: the rest is no tenth of a step.
        ((10, 10), 0, None),
    ],
)
def test_what_ddp_samples_where_its_operations_are_not_seen(findings, sampled_ms, waits_ms, said):
    """What communication takes and what of it the backward pass hides; the wait for a later rank is left out."""

    def make(folder):
        for rank in range(2):
            with made_rank(folder, rank) as made:
                made.log.declare("ddp_samples", time="time", communication_ns="int", hidden_ns="int")
                for step in range(40):
                    with made.region("BATCH"):
                        made.spend("FORWARD", 0.01 + rank * waits_ms * MS)
                        made.spend("BACKWARD", 0.05 - rank * waits_ms * MS)
                    if step < 10:
                        taken = [1_000_000 * ms * (9 if step == 0 else 1) for ms in sampled_ms]
                        made.log.add("ddp_samples", (made.clock.now_ns(), *taken))

    found = [one for one in findings(make) if one.rule == "exposed-communication"]
    assert [f"Communication that nothing hides takes {said}."] * (said is not None) == [one.text for one in found]
    assert all("no_sync()" in one.remedy and "overlap" not in one.remedy for one in found)  # DDP does that itself


def test_an_operation_that_the_loop_waits_for_outside_the_backward_pass(findings):
    """It is communication too; operations of several sizes have their mean size and rate."""

    @in_each_step
    def make(made, step):
        made.spend("FORWARD", 0.01)
        with made.region("loss"):
            for size in (1 << 20, 3 << 20):
                begin = made.clock.now_ns()
                made.wait(0.02)
                made.log.collective("all_gather", begin, made.clock.now_ns(), nbytes=size)
        with made.region("BACKWARD"):
            begin = made.clock.now_ns()
            made.wait(0.05)
            made.log.collective("all_reduce", begin + 40_000_000, made.clock.now_ns(), nbytes=1 << 10)

    found = findings(make)[0]
    assert found.fact.startswith("Communication that nothing hides takes 50 % of BATCH, 50.0 ms a step")
    assert found.where == "most of it in all_gather: 80 operations of 2.00 MiB on average, 100.00 MiB/s"


def test_the_programs_own_region_is_named_for_the_row_around_it(findings):
    """A named timer in the time between two steps."""

    @in_each_step
    def make(made, step):
        with made.region("between steps", 0.001):
            made.spend("batch-generator", 0.06)
        made.spend("FORWARD", 0.01)
        made.spend("BACKWARD", 0.02)

    (found,) = findings(make)
    assert found.fact.startswith("batch-generator takes 67 % of BATCH")


def test_a_loop_without_an_outer_region(findings):
    """IO next to BATCH, as an iterated loader gives it: the two together are the loop."""

    def make(folder):
        train(folder, before=lambda made, step: made.spend("IO", 0.05), IO=0)

    (found,) = findings(make)
    assert found.fact.startswith("IO is 34 % of IO and BATCH: the loop waits for data, 50.0 ms a step")


def test_what_overlaps_is_not_called_unnamed(findings, tmp_path):
    """A region that overlaps its sibling is named, and each moment of the two is taken from the rest once."""

    @in_each_step
    def make(made, step):
        begin, longer = made.clock.now_ns(), 500_000_000 if step == 20 else 0
        made.tmr.record("FORWARD", begin, begin + 60_000_000)
        made.tmr.record("BACKWARD", begin + 59_999_000, begin + 99_000_000 + longer)
        made.wait(0.1 + longer / 1e9)

    assert [] == [finding.text for finding in findings(make) if finding.rule == "unnamed"]
    make(tmp_path / "slow")
    with Run.open(tmp_path / "slow") as run:
        assert ["BACKWARD"] == [cause.name for cause in run.why(20).causes]


@pytest.mark.parametrize("begun_us", [1_000, 59_999])
def test_what_overlaps_much_is_marked(tmp_path, begun_us):
    """A row is marked, and the mark explained, where shares that add up to more than 100 % would astonish."""
    with made_rank(tmp_path) as made, made.region("BATCH"):
        begin = made.clock.now_ns()
        made.tmr.record("FORWARD", begin, begin + 60_000_000)
        made.tmr.record("BACKWARD", begin + begun_us * 1000, begin + 99_000_000)
        made.wait(0.1)
    with Run.open(tmp_path) as run:
        told = render(report_of_run(run))
    assert ("BACKWARD *" in told) == ("at the same time as the rows beside it" in told) == (begun_us == 1_000)


def straddled(made, step):
    """A region of the program's own timer around the optimizer, with a step that ends BATCH."""
    made.spend("FORWARD", 30 * MS)
    begin = made.clock.now_ns()
    made.wait(70 * MS)
    if step:
        made.tmr.record("optimizer", begin, begin + 80_000_000)


def collected(made, step):
    """Keras's BATCH holds nothing but IO, and now and then a pause of the collector."""
    made.spend("IO", 1 * MS)
    if step % 10 == 5:
        made.spend("GC", 2 * MS)
    made.wait(50 * MS)


def started(made, step):
    """What lies between two events has a name, also where the log starts in it."""
    made.spend("FORWARD", 100 * MS)
    with made.region("between steps"):
        made.wait(30 * MS)
        if not step:
            made.spend("deep500-timing (start)", 2000 * MS)


@pytest.mark.parametrize("inside", [straddled, collected, started])
def test_time_that_has_a_name_is_not_called_unnamed(findings, inside):
    """Neither the part of a region that ends after BATCH, nor a BATCH that nothing divides."""
    found = findings(in_each_step(inside, 10 * MS))
    assert [] == [finding.text for finding in found if finding.rule == "unnamed"]


def test_what_a_step_is_made_of_has_nothing_of_ours(tmp_path):
    """A short run, whose log starts in a step for longer than the others take together."""
    with made_rank(tmp_path / "run") as made:
        for step in range(40):
            with made.region("BATCH"):
                made.spend("FORWARD", 60 * MS)
                made.spend("BACKWARD", 35 * MS)
                with made.region("between steps"):
                    made.wait(5 * MS)
                    made.spend("deep500-timing (start)", 0 if step else 9)
    with Run.open(tmp_path / "run") as run:
        assert "; 95 % of BATCH are FORWARD and BACKWARD" in verdict(evidence_of(run)).text


def test_waits_for_micro_batches_are_summed(findings):
    """A step that waits four times waits for the sum."""

    @in_each_step
    def make(made, step):
        for _ in range(4):
            made.spend("IO", 10 * MS)
            made.spend("FORWARD", 15 * MS)

    [found] = [finding for finding in findings(make) if finding.rule == "waits-for-data"]
    assert "IO is 40 % of BATCH: the loop waits for data, 40.0 ms of 100 ms a step." == found.text


def test_a_forward_pass_that_does_not_train_is_named(findings):
    """A teacher or a target network may take most of a step."""
    found = findings(lambda folder: train(folder, **{"FORWARD (no grad)": 150}))
    assert "FORWARD (no grad) takes 60 % of BATCH, 150 ms a step." == found[0].text


def test_steps_that_stay_slow_are_no_spikes(findings):
    """A larger model from one step on is named once."""
    found = findings(lambda folder: train(folder, 120, FORWARD=lambda step: 35 if step < 70 else 600))
    assert ["level-shift"] == [finding.rule for finding in found]
    assert "from step 70 on" in found[0].text


@pytest.mark.parametrize("of", ["training", "FIT"])
def test_another_training_is_no_slowdown(of, findings):
    """Its model or its data are others, whichever way the run knows of it."""

    def make(folder):
        with made_rank(folder) as made:
            for took_ms in (10, 50):
                made.log.event(of)
                with made.region(of):
                    for _ in range(70):
                        with made.region("BATCH"):
                            made.spend("FORWARD", took_ms * MS)

    assert [] == findings(make)


def test_the_start_of_a_fit_is_not_called_unnamed(findings):
    """The time before the first step is the start-up, for which no rule reproaches another region."""

    def make(folder):
        with made_rank(folder) as made, made.region("FIT"):
            made.wait(2.0)
            for _ in range(40):
                with made.region("BATCH"):
                    made.spend("FORWARD", 30 * MS)
                    made.spend("BACKWARD", 60 * MS)

    assert [] == [finding.text for finding in findings(make) if finding.rule == "unnamed"]


@pytest.mark.parametrize(
    ("parts", "note"),
    [
        (
            {"FORWARD": (10, 40), "BACKWARD": (12, 70)},
            "busy for 100 % of BATCH with the regions timed on it; in BACKWARD the CPU runs ahead of it: "
            "12.0 ms against 70.0 ms",
        ),
        (
            {"FORWARD": (60, 10), "BACKWARD": (60, 20)},
            "busy for 25 % of BATCH with the regions timed on it; in BACKWARD the CPU takes longer, so it waits: "
            "60.0 ms against 20.0 ms",
        ),
        (
            {"FORWARD": (70, 70), "BACKWARD": (12, 12)},
            "busy for 100 % of BATCH with the regions timed on it; in FORWARD the CPU takes as long, so one waits for "
            "the other: 70.0 ms against 70.0 ms",
        ),
    ],
    ids=["ahead", "behind", "alike"],
)
def test_the_devices_line(tmp_path, parts, note):
    """Beneath a table with a device's times: how busy it was, and how the CPU kept pace."""
    on_device(**parts)(tmp_path / "run")
    with Run.open(tmp_path / "run") as run:
        notes = dict(report_of_run(run).notes)
    assert note == notes["device"]


def test_without_a_device_nothing_is_said_of_it(tmp_path):
    """A run on the CPU has no such line."""
    train(tmp_path / "run", 20)
    with Run.open(tmp_path / "run") as run:
        assert "device" not in dict(report_of_run(run).notes)


def test_a_steep_slope_is_no_noise(findings):
    """The steeper the growth, the surer it is, however unevenly the values divide into blocks, and bend a little."""
    noise, at = np.random.default_rng(0).normal(100, 5, 90), np.arange(90.0)
    values = (at + np.sin(at / 10) / 2, at + noise, 30 * at + noise)
    chances = [found.chance for of in values if (found := trend_of(of))]
    assert chances[2] <= chances[1] < 1e-4 > chances[0]
