"""Findings about the time outside the steps: how often it is spent, on which thread, and before the first step."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
from made_runs import made_rank

from deep500_timing._views.findings import account_of, evidence_of, find, notes_of, verdict
from deep500_timing.runs import Run
from deep500_timing.wallclock import SynchronizedWallClockTimer

MS = 1e-3
STEPS = 240
STEP_MS = 10


@pytest.fixture
def look(connection, tmp_path):
    """Write a run of one rank; return its findings, and its account, its verdict and the note on its start as text."""

    def of(write):
        with made_rank(tmp_path / "run") as made:
            write(made)
        with Run.open(tmp_path / "run", engine=connection) as run:
            evidence = evidence_of(run)
            note = dict(notes_of(evidence, says_start=True)).get("start-up", "")
            return find(evidence), account_of(evidence).text(), verdict(evidence).text, note

    return of


def steps(made, count=STEPS, after=lambda step: None, step_ms=STEP_MS):
    """Steps that are all alike."""
    for step in range(count):
        with made.region("BATCH"):
            made.spend("FORWARD", 0.4 * step_ms * MS)
            made.spend("BACKWARD", 0.6 * step_ms * MS)
        after(step)


@pytest.mark.parametrize("times", [1, 2, 3, 12, 60, 120, 140, 239, 240, 480, 960])
def test_only_a_region_that_is_rarer_than_the_steps_can_be_done_less_often(look, times):
    """The period and its remedy need at most one region for two steps; an environment is stepped in each."""
    each_s = 0.3 / 0.7 * STEPS * STEP_MS * MS / times

    def write(made):
        def after(step):
            at = step + STEPS // 2
            for _ in range((at + 1) * times // STEPS - at * times // STEPS):
                made.spend("env", each_s)

        steps(made, after=after)

    found = [one for one in look(write)[0] if one.rule == "outside-steps"]
    assert 1 == len(found)
    assert found[0].fact.startswith("env takes 30 % of the run, 1.03 s, ")
    assert ("steps (then 2.0 %)" in found[0].help) == (3 <= times <= 120)
    assert ("do it less often" in found[0].help) == (times == 2)
    assert ("run it in parallel" in found[0].help) == (times == 1 or times > 120)


@pytest.mark.parametrize(("on_main", "in_background"), [(0, 0.48), (0.04, 0.48), (0.2, 0), (0.2, 0.48)])
def test_what_a_background_thread_does_costs_the_run_nothing(look, on_main, in_background):
    """Of checkpoints on the thread of the steps and on another one, the first alone count."""

    def write(made):
        each_s = {on: share * STEPS * STEP_MS * MS / 8 for on, share in (("main", on_main), ("other", in_background))}

        def after(step):
            if step % 30 == 29:
                now = made.clock.now_ns()
                span = ("CHECKPOINT", now - int(each_s["other"] * 1e9), now)
                saver = threading.Thread(target=made.tmr.record, args=span)
                if each_s["other"]:
                    saver.start()
                    saver.join()
                if each_s["main"]:
                    made.spend("CHECKPOINT", each_s["main"])

        steps(made, after=after)

    found, account, said, note = look(write)
    assert note == ""
    if on_main < 0.05:
        assert [] == found
        assert said.startswith("Nothing stands out: ")
        assert account == ("training 96 %, CHECKPOINT 3.8 %" if on_main else "training 100 %")
    else:
        assert found[0].text.startswith("CHECKPOINT takes 17 % of the run, 480 ms, 8 times, 60.0 ms each")


def test_named_timers_name_the_time_of_the_steps(look):
    """A timer may be open around the steps, end in the next one, or lie between two: its time is in a region."""

    def write(made):
        timers = SynchronizedWallClockTimer(made.tmr)
        timers("interval-time").start()

        def after(step):
            made.wait(1 * MS)
            timers("optimizer").stop()
            if step % 30 == 29:
                timers("interval-time").stop()
                timers("save").start()
                made.wait(200 * MS)
                timers("save").stop()
                timers("interval-time").start()

        for step in range(STEPS):
            with made.region("BATCH"):
                made.spend("FORWARD", 3 * MS)
                made.spend("BACKWARD", 3 * MS)
                timers("optimizer").start()
                made.wait(4 * MS)
            after(step)

    found = look(write)[0]
    assert ["outside-steps"] == [one.rule for one in found]
    assert found[0].fact.startswith("save takes 38 % of the run, 1.60 s, 8 times, 200 ms each")


@pytest.mark.parametrize(
    ("start_s", "finding"), [(2, ""), (55, ""), (65, "98 % of the run lies before the first step")]
)
def test_a_start_up_is_a_part_of_the_run_and_a_finding_if_it_is_long(look, start_s, finding):
    """Imports, their garbage collections and the first compilations are distinguished from repeated work."""

    def write(made):
        made.spend("GC", 0.4 * start_s)
        made.wait(0.3 * start_s)
        made.spend("compile", 0.3 * start_s)
        steps(made, 120)

    found, account, said, note = look(write)
    assert " before the first step, " in note
    assert [finding] * bool(finding) == [one.fact.partition(",")[0] for one in found]
    assert ", start-up " in account
    assert bool(finding) or said.startswith("Nothing stands out: of the run, training ")


def test_collections_after_the_first_step_are_no_start_up(look):
    """What goes on while the run trains is not hidden by what came before."""

    def write(made):
        made.spend("GC", 1.0)
        steps(made, after=lambda step: made.spend("GC", 0.02))

    [found] = look(write)[0]
    assert found.fact == "GC takes 67 % of the training loop, 4.78 s, 239 times, 20.0 ms each"
    assert "gc.freeze()" in found.remedy


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_collection_that_the_program_asks_for(look, is_inside):
    """The line that does so is named, in the steps and after them, and is to do so less often."""

    def collect(made):
        with made.region("GC"):
            made.log.add("stacks", (made.clock.now_ns() + 1, "<module>\ttrain.py:9\tgc.collect()"))
            made.wait(0.02)

    def write(made):
        for _ in range(STEPS):
            with made.region("BATCH"):
                made.spend("FORWARD", 0.004)
                made.spend("BACKWARD", 0.006)
                collect(made) if is_inside else None
            collect(made) if not is_inside else None

    [found] = look(write)[0]
    assert "100 % of it in <module> (train.py:9): gc.collect()" in found.text
    assert "call gc.collect() less often" in found.help


@pytest.mark.parametrize("start_s", [0, 20])
def test_a_start_up_hides_no_checkpoints(look, start_s):
    """Their share is of the time after the start-up, which is no longer in a longer run."""

    def write(made):
        made.spend("compile", start_s)
        steps(made, after=lambda step: step % 30 == 29 and made.spend("CHECKPOINT", 0.05))

    [found] = look(write)[0]
    of = "the training loop" if start_s else "the run"
    assert found.text == f"CHECKPOINT takes 14 % of {of}, 400 ms, 8 times, 50.0 ms each, every 30 steps."
    assert found.help.startswith("saves at most 14 %; do it once in 240 steps (then 2.0 %)")


def test_what_costs_less_than_a_hundredth_of_the_time_is_no_finding(look):
    """Steps of microseconds between long pauses: what divides them is worth no sentence."""

    def write(made):
        for _ in range(STEPS):
            with made.region("BATCH"):
                made.spend("loss", 8e-6)
                made.spend("FORWARD", 1e-6)
                made.spend("BACKWARD", 1e-6)
            made.spend("env", 0.01)

    assert ["outside-steps"] == [one.rule for one in look(write)[0]]


@pytest.mark.parametrize(
    ("start_s", "end", "is_kept"),
    [(0.3, "", True), (0.01, "loader\nBase._shutdown_workers\ttorch/loader.py", True), (0.01, "draw_samples()", False)],
)
def test_workers_that_start_and_end_with_an_epoch_are_to_be_kept(look, start_s, end, is_kept):
    """The time before the first step of an epoch and after its last one has the remedy that fits."""

    def write(made):
        columns = ("time_ns", "loader", "iteration", "workers", "is_training", "cpus", "worker")
        numbers = ("start_us", "idle_us", "fetch_us", "collate_us", "put_us", "batches", "samples")
        made.log.declare("loader_workers", **dict.fromkeys((*columns, *numbers), "int"))
        for _ in range(6):
            with made.region("EPOCH"):
                made.spend("EPOCH (start)", start_s)
                steps(made, 40)
                for _ in range(10):
                    if end:
                        made.log.add("stacks", (made.clock.now_ns() + 1, f"<module>\ttrain.py:9\t{end}"))
                    made.wait(0.02)
        made.log.add("loader_workers", (made.clock.now_ns(), 0, 0, 1, 1, 8, 0, 1000, 1000, 10, 10, 10, 240, 960))

    found = look(write)[0]
    assert {"outside-steps", "between-epochs"} >= {one.rule for one in found}
    assert ["persistent_workers" in one.help for one in found] == [is_kept] * len(found)
    assert found


@pytest.mark.parametrize(("pauses_s", "speaks"), [((0, 2), False), ((1, 2), True)])
def test_what_happens_once_is_no_pause_between_epochs(look, pauses_s, speaks):
    """Of two pauses the shorter counts."""

    def write(made):
        for pause_s in (*pauses_s, 0):
            with made.region("EPOCH"):
                steps(made, 40)
            made.spend("EPOCH (start)", pause_s or MS)

    assert speaks == any(finding.rule == "between-epochs" for finding in look(write)[0])


def test_the_warm_up_of_a_trial_does_not_hide_what_goes_on(look):
    """In a run of a minute the wait of each step would cost more than the slow first step."""

    def write(made):
        for step in range(80):
            with made.region("BATCH"):
                made.spend("IO", 0.02)
                made.spend("FORWARD", 4 if step == 0 else 0.05)

    assert ["waits-for-data", "warm-up"] == [one.rule for one in look(write)[0]]


def test_a_finding_and_its_gain_are_shares_of_one_time(look):
    """A warm-up is a part of the run as the start-up is: 25 % of it saves 25 %, not 33 %."""

    def write(made):
        made.spend("compile", 5)
        for step in range(80):
            with made.region("BATCH"):
                made.spend("FORWARD", 5.1 if step == 0 else 0.126)

    [found] = look(write)[0]
    assert found.fact.startswith("25 % of the run is warm-up")
    assert found.help.startswith("saves at most 25 %")


@pytest.mark.parametrize("name", ["IO", "compile", "COMM"])
def test_waits_alone_do_not_divide_a_step(look, name):
    """A fit of Keras on TensorFlow has waits alone in its batches: the compiled graph cannot be divided."""

    def write(made):
        for _ in range(80):
            with made.region("BATCH"):
                made.spend(name, 0.0001)
                made.wait(0.01)

    found, _, said, _ = look(write)
    assert [] == found
    assert f"BATCH is not divided into regions, but for 1.0 % of {name}" in said


@pytest.mark.parametrize("is_inside", [False, True])
def test_compilations_are_told_once(look, is_inside):
    """Where recompilations are named with their cause, neither the region nor the slow steps are repeated."""

    def write(made):
        made.log.declare("compilations", unix_us="int", dur_us="int", compile_id="name", frame="name", reason="name")

        def compilation(step, inside):
            if step % 20 == 10 and inside == is_inside:
                with made.region("compile", 0.1):
                    made.spend("GC", 2 * MS)
                made.log.add("compilations", (step, 100_000, f"0/{step}", "f (train.py:3)", "size of x"))

        for step in range(STEPS):
            with made.region("BATCH"):
                made.spend("FORWARD", 10 * MS)
                compilation(step, True)
            compilation(step, False)

    assert ["recompilation"] == [one.rule for one in look(write)[0]]


def test_what_follows_the_training_is_not_outside_every_region(look):
    """A program that writes its reports at the end, as `examples/demo.py` does, and collects garbage meanwhile."""

    def write(made):
        for _ in range(3):
            with made.region("EPOCH"):
                steps(made, 40)
        made.wait(10)
        made.spend("GC", 0.02)

    found, account, said, _ = look(write)
    assert not found
    assert account.startswith("training 11 %, after training 89 %")
    assert said.startswith("Nothing stands out: of the run, training 11 %, after training 89 %; ")


@pytest.mark.parametrize("name", ["VALIDATION", "export", "FORWARD (no grad)"])
@pytest.mark.parametrize("between", [False, True])
def test_what_only_follows_the_training_is_of_its_end(look, name, between):
    """A test pass, an export, text that the trained model writes: none of them is to be done less often."""

    def write(made):
        def after(step):
            if between and step % 60 == 59:
                made.spend(name, 1)

        steps(made, after=after)
        for _ in range(4):
            made.spend(name, 2)

    found, account, _, _ = look(write)
    assert between == bool(found)
    assert f"{name} 83 %" in account if between else account == "training 23 %, after training 77 %"
    assert all("compute it once" not in one.help for one in found)


@pytest.mark.parametrize("name", ["between steps", "VALIDATION", "GC"])
def test_a_run_without_an_end_has_no_time_after_training(connection, tmp_path, name):
    """What follows its last step may be a part of the next one; of a run that has ended it is of the end."""
    with made_rank(tmp_path / "run") as made:
        steps(made, 60)
        made.spend(name, 0.3)
        made.log.flush()
        with Run.open(tmp_path / "run", engine=connection) as run:
            evidence = evidence_of(run)
            assert (0.0, []) == (evidence.after_s, evidence.after)
            assert {name} == {entry.name for entry in account_of(evidence).entries}
    with Run.open(tmp_path / "run", engine=connection) as run:
        assert {"after training"} == {entry.name for entry in account_of(evidence_of(run)).entries}


@pytest.mark.parametrize("where", [0, 1, 2])
def test_steps_of_an_epoch_that_is_left_are_training(look, where):
    """Data that is left before its end gives no EPOCH: its steps lie in none, and are no start-up and no end."""

    def write(made):
        for epoch in range(3):
            with nullcontext() if epoch == where else made.region("EPOCH"):
                steps(made, 40)

    assert look(write)[1].startswith("training 100 %")


@pytest.mark.parametrize("region", ["GC", "compile"])
@pytest.mark.parametrize("where", ["before", "after", "between"])
def test_what_comes_by_itself_is_of_the_part_that_it_lies_in(look, region, where):
    """Collections while reports are written are no time of the training; between two epochs they are."""

    def write(made):
        if where == "before":
            made.spend(region, 2)
        for epoch in range(3):
            with made.region("EPOCH"):
                steps(made, 40)
            if where == "between" and epoch == 0:
                made.spend(region, 2)
        if where == "after":
            made.wait(1)
            made.spend(region, 2)

    found, account, _, _ = look(write)
    told = [one.fact for one in found if region in one.fact]
    assert (where == "between") == bool(told)
    assert (where == "between") == (region in account)


@pytest.mark.parametrize("name", ["start-up", "after training", "no region"])
def test_a_region_may_have_the_name_of_a_part_of_the_account(look, name):
    """What it costs is told as of any other region: it is neither the start nor the end of the run."""

    def write(made):
        def after(step):
            if step % 12 == 11:
                made.spend(name, 0.3 / 0.7 * 12 * STEP_MS * MS)

        steps(made, after=after)

    [finding, *_], _, _, _ = look(write)
    assert finding.fact.startswith(f"{name} takes 30 % of the run")
    assert 0.3 == pytest.approx(finding.gain_share, abs=0.01)


@pytest.mark.parametrize("name", ["+eval", "eval"])
def test_a_region_that_precedes_slow_steps_is_not_one_around_them(look, name):
    """Whatever its name begins with."""

    def write(made):
        for step in range(STEPS):
            if step % 24 == 23:
                made.spend(name, MS)
            with made.region("BATCH"):
                made.spend("FORWARD", (10 if step % 24 == 23 else 1) * STEP_MS * MS)

    findings, _, _, _ = look(write)
    assert [f"each after {name}"] == [finding.where for finding in findings if finding.rule == "spikes"]
