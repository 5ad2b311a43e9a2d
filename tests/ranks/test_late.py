"""Who is late, and why: in simulated trainings, in runs of several ranks, and in reports of all ranks."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.straggler_worlds import correlated, world
from deep500_timing import Timer
from deep500_timing._command._app import app
from deep500_timing._distributed import stragglers
from deep500_timing._distributed.late import REST, RankSteps, judge
from deep500_timing._distributed.stragglers import steps_of_run
from deep500_timing._distributed.verdict import WhatIf
from deep500_timing.ranks import Stragglers, find_stragglers
from deep500_timing.runs import Run, RunLog
from deep500_timing.testing import ManualClock, ManualDeviceClock

PLACES = ("IO", "FORWARD", "BACKWARD", "COMM", REST)
SHARES = np.array([0.10, 0.30, 0.46, 0.06, 0.08])


def own_times(rng, ranks, steps):
    """Each rank's own times in steps of about 1 s, of shape (steps, ranks, places): 1 % apart, with 3 % of noise."""
    logs = 0.03 * correlated(rng, (steps, ranks, len(PLACES)), 0.5) + 0.01 * rng.standard_normal((ranks, len(PLACES)))
    return SHARES * np.exp(logs)


def seen(own):
    """The steps of a training with ranks that meet after BACKWARD and in COMM."""
    before = np.concatenate((np.zeros_like(own[:1, :, 4]), own[:-1, :, 4]))
    first, second = before + own[:, :, :3].sum(axis=2), own[:, :, 3]
    late = first - first.max(axis=1, keepdims=True) + second - second.max(axis=1, keepdims=True)
    ranks = own.shape[1]
    return RankSteps(
        tuple(range(ranks)), tuple(f"host{rank // 8}" for rank in range(ranks)), tuple(range(len(own))), PLACES,
        late, own, float(np.median(first.max(axis=1) + second.max(axis=1))), "BACKWARD and COMM",
    )  # fmt: skip


def training(delays=(), *, ranks=8, steps=200, seed=1):
    """A training in which something was added to own times: functions of them."""
    own = own_times(np.random.default_rng([seed, 77]), ranks, steps)
    for delay in delays:
        delay(own)
    return judge(seen(own))


@settings(max_examples=30)
@given(st.integers(2000, 10**6), st.sampled_from([8, 24]), st.sampled_from([0.08, 0.3]))
def test_the_late_rank_and_its_cause(seed, ranks, delay):
    """In any world the rank that is late by 8 % of a step or more is named, no other, and the region as well."""
    steps, late, region = world(seed, "ar5", ranks, delay)
    found = judge(steps)
    assert (late, "rank", region) == (found.ranks, found.kind, found.region)
    assert delay == pytest.approx(found.lateness_s, rel=0.5)


def test_in_backward_only_the_waits_tell():
    """A delay inside BACKWARD, where all ranks' times are alike with the wait in them, is found by own times alone."""
    steps, late, _ = next(w for w in (world(seed, "ar5", 8, 0.1) for seed in range(100)) if w.region == "BACKWARD")
    as_timed = steps.own[:, :, 0] + steps.lateness.max(axis=1, keepdims=True) - steps.lateness
    spread = np.median(as_timed, axis=0)
    assert spread.max() - spread.min() < 0.5 * 0.1
    assert (late, "BACKWARD", "compute") == (judge(steps).ranks, judge(steps).region, judge(steps).cause)


def test_where_waits_and_regions_are_of_different_clocks_there_is_no_cause():
    """The rank is named, and no region is."""
    steps, late, _ = world(5, "ar5", 8, 0.1)
    found = judge(replace(steps, one_clock=False))
    assert (late, None, None) == (found.ranks, found.region, found.cause)


@pytest.mark.parametrize("delay", [0.05, 0.2])
def test_one_of_two_hosts_is_late(delay):
    """All ranks of one of two hosts come late: the host is named, though half of the ranks stand out."""
    found = [(judge(made.steps), made) for made in (world(seed, "ar5", 16, delay, "host late") for seed in range(5))]
    assert [("node", set(made.late), made.region) for _, made in found] == [
        (of.kind, set(of.ranks), of.region) for of, _ in found
    ]


def test_a_rank_that_is_late_now_and_then_is_listed():
    """One step in 50, by 30 % of a step: too short for a slow step, and too rare for a late rank."""
    for seed in range(5):
        made = world(seed, "ar5", 8, 0.3, "now and then", steps=1000)
        found = judge(made.steps)
        assert ((), set(made.late)) == (found.ranks, set(found.intermittent))
        (count,) = found.intermittent.values()
        assert f"Rank {made.late[0]} came late in {count} of 1000 steps" in str(found)


@pytest.mark.parametrize(("noise", "ranks"), [("lengths", 8), ("lengths", 64), ("ar5", 2), ("host", 8), ("pareto", 4)])
def test_no_rank_is_named_where_none_is_late(noise, ranks):
    """Variable lengths, shared noise and spikes name no rank, and neither do two ranks that differ by 1 %."""
    worlds = range(6 if ranks > 8 else 20)
    assert [] == [seed for seed in worlds if judge(world(seed, noise, ranks, 0.0, "none").steps).ranks]


def test_ranks_that_differ_by_3_percent_do_not_hide_one_that_is_late_by_10_percent():
    """The spread of the ranks is judged from all regions."""
    made = [world(seed, "apart", 8, 0.1) for seed in range(10)]
    assert [one.late for one in made] == [judge(one.steps).ranks for one in made]


def test_slow_noise_and_many_ranks_are_no_reason_to_abstain():
    """Of 256 ranks one is late by a half, and neighbouring steps are alike: 200 steps are enough."""
    made = world(1, "ar9", 256, 0.5, steps=200)
    assert made.late == judge(made.steps).ranks


def test_a_host_is_late():
    """All ranks of one machine come late: it is the machine that is named."""

    def slow(own):
        own[:, 8:16, 1] += 0.1

    found = training([slow], ranks=32)
    assert ("node", "host1", "FORWARD") == (found.kind, found.host, found.region)
    assert set(range(8, 16)) == set(found.ranks)
    assert "The host host1 is late, its ranks" in str(found)


def test_two_ranks_are_late():
    """Two ranks of different machines are named, the later one first."""

    def slow(own):
        own[:, 3, 1] += 0.1
        own[:, 20, 0] += 0.2

    found = training([slow], ranks=32)
    assert ("ranks", (20, 3), "IO", None) == (found.kind, found.ranks, found.region, found.host)


def test_a_slow_step_for_everybody_is_nobodys():
    """Steps that are slow on all ranks alike name no one, and are listed; one that a rank made slow is that rank's."""

    def slow(own):
        own[:] = np.minimum(own, 1.1 * SHARES)
        own[50:60] *= 2
        own[100, 5, 1] += 2

    found = training([slow])
    assert ("nobody", ()) == (found.kind, found.ranks)
    assert dict.fromkeys(range(50, 60)) | {100: 5} == found.slow_steps
    assert "slow for every rank alike" in str(found)
    assert "Step 100 was slow because of rank 5." in str(found)


def test_lateness_that_grows_is_drift():
    """A device that slows down all along is late, and its lateness grows; one that became slow is late since then."""

    def drifts(own):
        own[:, 2, 2] += np.linspace(0, 0.3, len(own))

    found = training([drifts])
    assert ((2,), True, None) == (found.ranks, found.grows, found.since)

    def begins(own):
        own[150:, 2, 2] += 0.2

    found = training([begins])
    assert ((2,), False) == (found.ranks, found.grows)
    assert 125 <= found.since <= 150


def test_a_rank_that_was_late_for_a_moment_is_not_late():
    """A tenth of the steps does not make a straggler, however slow."""

    def stalls(own):
        own[80:100, 4, 0] += 1.0

    assert () == training([stalls]).ranks


def test_what_if():
    """Without the late rank a step is shorter by the others' wait for it; alike ranks cost the rest."""

    def slow(own):
        own[:, 6, 1] += 0.25

    found, without = training([slow]), training()
    assert 0.25 == pytest.approx(found.what_if.without_rank_s + without.what_if.all_alike_s, rel=0.2)
    assert found.what_if.all_alike_s > found.what_if.without_rank_s


def test_abstentions_say_why():
    """Too few steps, one rank: no rank is named, with the reason."""
    steps, *_ = world(1, "ar5", 8, 0.3)
    few = replace(steps, lateness=steps.lateness[:10], own=steps.own[:10], numbers=steps.numbers[:10])
    assert "The data do not tell whether a rank is late: 10 steps are too few, 16 are the least." in str(judge(few))
    alone = replace(steps, ranks=(0,), lateness=steps.lateness[:, :1], own=steps.own[:, :1])
    assert ("unknown", "there is one rank") == (judge(alone).kind, judge(alone).reason)


def test_a_cause_that_the_regions_do_not_show():
    """Who is late by a delay outside all regions is named without a cause."""
    steps, late, _ = world(3, "ar5", 8, 0.2)
    blind = replace(steps, own=world(4, "ar5", 8, 0.0).steps.own)
    found = judge(blind)
    assert (late, None, None) == (found.ranks, found.region, found.cause)
    assert "The cause is unknown" in str(found)


@pytest.mark.parametrize("ranks", [2, 3])
def test_few_ranks(ranks):
    """With two or three ranks there is no scale of the others: chance and jitter decide."""

    def slow(own):
        own[:, 1, 1] += 0.1

    assert ((1,), "FORWARD") == (training([slow], ranks=ranks).ranks, training([slow], ranks=ranks).region)


def test_a_rank_of_two_is_late_by_5_percent():
    """It is found in 97.5 % of worlds and more."""
    made = [world(seed, noise, 2, 0.05) for noise in ("ar5", "heavy") for seed in range(100)]
    assert 195 <= sum(one.late == judge(one.steps).ranks for one in made)


# --- from a run -----------------------------------------------------------------------------------------------------

ORDER = ("IO", "FORWARD", "BACKWARD", "COMM")


def write_run(folder, own, *, collectives=True, ranks=None, first_has=ORDER, reported_ns=0):
    """Logs of ranks that meet at the end of BACKWARD and in COMM, from their own times in s.

    ``first_has`` are the regions of rank 0; ``reported_ns`` is how long after its end an all_reduce is reported.
    """
    steps, ranks = own.shape[0], own.shape[1] if ranks is None else ranks
    clocks = [ManualClock() for _ in range(ranks)]
    timers = [Timer(clock=clock) for clock in clocks]
    logs = [RunLog(folder, timer, rank=rank, flush_s=None) for rank, timer in enumerate(timers)]
    for clock, rank in zip(clocks, range(ranks), strict=True):
        clock.advance(1000.0 * rank)  # No two ranks need a common clock.
    begun = np.zeros(ranks)
    for step in range(steps):
        first = begun + own[step, :ranks, :3].sum(axis=1)
        met = first.max() + 0.001
        second = met + own[step, :ranks, 3]
        left = second.max() + 0.001
        for rank, (clock, timer, log) in enumerate(zip(clocks, timers, logs, strict=True)):
            timer.step(step)
            with timer.region("BATCH"):
                for place, name in enumerate(ORDER[:3]):
                    with timer.region(name) if rank or name in first_has else contextlib.nullcontext():
                        clock.advance(own[step, rank, place])
                        if name == "BACKWARD":
                            at = timer.now_ns()
                            clock.advance(met - first[rank])
                            if collectives:
                                end_ns = timer.now_ns() + reported_ns
                                log.collective("all_reduce", at, end_ns, group="world", sequence=2 * step)
                with timer.region("COMM"):
                    clock.advance(own[step, rank, 3])
                    at = timer.now_ns()
                    clock.advance(left - second[rank])
                    if collectives:
                        log.collective("barrier", at, timer.now_ns(), group="world", sequence=2 * step + 1)
                clock.advance(own[step, rank, 4])
            begun[rank] = left + own[step, rank, 4]
    for log in logs:
        log.close()


def own_of(place=None, *, steps=60, seed=4):
    """Own times of six ranks; rank 4 takes 12 % of a step longer in one place."""
    own = own_times(np.random.default_rng([seed, 9]), 6, steps)
    if place is not None:
        own[:, 4, PLACES.index(place)] += 0.12
    return own


@pytest.mark.parametrize("place", ["BACKWARD", "IO", REST])
def test_a_run_names_the_rank_and_the_cause(tmp_path, place):
    """From the waits in its collectives, for any clocks; in BACKWARD, where all times agree, too."""
    write_run(tmp_path, own_of(place))
    with Run.open(tmp_path) as run:
        found = find_stragglers(run)
        if place == "BACKWARD":
            times = run.sql(
                "select rank, median(dur_ns) as took from intervals where region = 'BACKWARD' group by rank order by 1"
            ).rows()
            assert max(row["took"] for row in times) == pytest.approx(min(row["took"] for row in times), rel=0.1)
    assert ("rank", (4,), place) == (found.kind, found.ranks, found.region)
    assert 0.12 == pytest.approx(found.lateness_s, rel=0.2)
    assert "collective operations" == found.met_at
    result = CliRunner().invoke(app, ["stragglers", str(tmp_path)])
    assert 0 == result.exit_code
    assert "Rank 4 is late by" in result.output
    data = json.loads(CliRunner().invoke(app, ["stragglers", str(tmp_path), "--json"]).output)
    assert (found.kind, list(found.ranks), found.lateness_s) == (data["kind"], data["ranks"], data["lateness_s"])


def test_a_run_whose_operations_are_reported_late(tmp_path):
    """A thread reports each end 20 ms after BACKWARD: the times are of one clock all the same, and name the cause."""
    write_run(tmp_path, own_of("FORWARD"), reported_ns=20_000_000)
    with Run.open(tmp_path) as run:
        found = find_stragglers(run)
    assert ("rank", (4,), "FORWARD") == (found.kind, found.ranks, found.region)


@pytest.mark.parametrize("first_has", [("FORWARD", "BACKWARD", "COMM"), ("COMM",)])
def test_a_region_that_rank_0_does_not_have(tmp_path, first_has):
    """Rank 0 loads no data, or times only its communication: the other ranks are judged as ever."""
    write_run(tmp_path, own_of("FORWARD"), first_has=first_has)
    with Run.open(tmp_path) as run:
        found = find_stragglers(run)
    assert ("rank", (4,)) == (found.kind, found.ranks)


def test_of_a_long_run_the_newest_steps(tmp_path, monkeypatch):
    """The analysed data are bounded, however long the run is; who is late in it is found as well."""
    monkeypatch.setattr(stragglers, "_MOST_ROWS", 6 * 40)
    monkeypatch.setattr(stragglers, "_LEAST_STEPS", 10)
    write_run(tmp_path, own_of("FORWARD"))
    with Run.open(tmp_path) as run:
        found = steps_of_run(run)
        late = find_stragglers(run)
    assert 39 <= len(found.numbers) <= 40
    assert ("rank", (4,), "FORWARD") == (late.kind, late.ranks, late.region)


def write_gpu_run(folder, place, *, ranks=8, steps=60, launch_s=0.1):
    """Logs of ranks with a host that runs ahead of the device; rank 5 takes 120 ms longer in one place."""
    rng = np.random.default_rng(3)
    clocks, devices = [ManualClock() for _ in range(ranks)], [ManualDeviceClock() for _ in range(ranks)]
    timers = [Timer(device, clock=clock) for device, clock in zip(devices, clocks, strict=True)]
    logs = [RunLog(folder, timer, rank=rank, flush_s=None) for rank, timer in enumerate(timers)]
    host = np.zeros(ranks)
    for step in range(steps):
        own = np.array([[0.02], [0.3], [0.5]]) * np.exp(0.01 * rng.standard_normal((3, ranks)))
        own[ORDER.index(place), 5] += 0.12
        begun = host + own[0]
        ready = begun + np.maximum(own[1] + own[2], launch_s)
        done = ready.max() + 0.01
        for rank, (clock, device, timer, log) in enumerate(zip(clocks, devices, timers, logs, strict=True)):
            timer.step(step)
            before = clock.now_ns()
            with timer.region("BATCH", gpu=True):
                with timer.region("IO"):
                    clock.advance(own[0, rank])
                device.now_ns = max(device.now_ns, int(begun[rank] * 1e9))
                with timer.region("FORWARD", gpu=True):
                    device.launch(own[1, rank])
                    clock.advance(0.4 * launch_s)
                with timer.region("BACKWARD", gpu=True):
                    clock.advance(0.5 * launch_s)
                    at = clock.now_ns()
                    device.launch(own[2, rank] + done - ready[rank])
                    clock.advance(0.1 * launch_s)
                length_ns = int((done - ready[rank]) * 1e9)
                log.collective("all_reduce", at, at + length_ns, group="world", sequence=step)
                clock.advance(max(done - (host[rank] + own[0, rank] + launch_s), 0.0))
            device.finish()
            host[rank] += (clock.now_ns() - before) / 1e9
    for log in logs:
        log.close()


@pytest.mark.parametrize("place", ["FORWARD", "BACKWARD"])
def test_the_cause_on_a_gpu_comes_from_times_of_the_gpu(tmp_path, place):
    """The host launches ahead of the device, so its times tell nothing: the region is right, or none is named."""
    write_gpu_run(tmp_path, place)
    with Run.open(tmp_path) as run:
        found = find_stragglers(run)
    assert ("rank", (5,)) == (found.kind, found.ranks)
    assert 0.12 == pytest.approx(found.lateness_s, rel=0.2)
    assert found.region in (place, None)


def test_a_run_without_collectives(tmp_path):
    """Regions in which ranks meet serve as well: who is late before them is named, and with what."""
    write_run(tmp_path, own_of("FORWARD"), collectives=False)
    with Run.open(tmp_path) as run:
        found = find_stragglers(run)
    assert ("rank", (4,), "FORWARD", "BACKWARD") == (found.kind, found.ranks, found.region, found.met_at)


@pytest.mark.parametrize("late", [True, False])
def test_a_run_with_operations_alone(tmp_path, late):
    """Without steps the operations say who is late, or that no one is; why they cannot say."""
    rng = np.random.default_rng(8)
    came = rng.random((120, 3)) * 1e-3
    came[:, 2] += 0.02 * late
    for rank in range(3):
        clock = ManualClock()
        log = RunLog(tmp_path, Timer(clock=clock), rank=rank, flush_s=None)
        for number, of in enumerate(came):
            start = clock.now_ns()
            clock.advance(of.max() - of[rank] + 1e-3)
            log.collective("all_reduce", start, clock.now_ns(), sequence=number)
            log.collective("broadcast", start, start + 5, sequence=1000 + number)
        log.close()
    with Run.open(tmp_path) as run:
        found = find_stragglers(run)
    assert (120, None, None) == (found.steps, found.region, found.cause)
    if late:
        assert ("rank", (2,), 1.0) == (found.kind, found.ranks, found.last_share)
        assert (pytest.approx(0.02, rel=0.1),) * 2 == (found.lateness[2], found.lateness_s)
        assert "Rank 2 is late by " in str(found)
        assert " an operation." in str(found)
        assert "an operation would be" in str(found)
    else:
        assert ("nobody", ()) == (found.kind, found.ranks)
        assert "No rank is late: no rank stands out from the differences between ranks (" in str(found)
    assert "Judged from 120 operations, by the waits in collective operations." in str(found)


def test_shares_are_written_as_everywhere():
    """A share of a step reads as in a table, with a blank and without a decimal, and a little is not none."""
    found = Stragglers("rank", (1,), lateness_s=0.827, step_s=1.0, steps=9, what_if=WhatIf(0.57, 0.001))
    text = str(found)
    assert "late by 827.0 ms a step (83 %)." in text
    assert "a step would be 570.0 ms (57 %) shorter" in text
    assert "costs 1.000 ms a step (<1 %)." in text


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_ranks_are_compared_with_each_other(ranks):
    """The late one's longer part and its cost are against the others, not against a median halfway to it."""
    found = training([lambda own: own.__setitem__((slice(None), 1, 0), own[:, 1, 0] + 0.3)], ranks=ranks)
    assert ((1,), "IO") == (found.ranks, found.region)
    assert (pytest.approx(0.3, rel=0.1),) * 2 == (found.lateness_s, found.excess_s)
    # Of three, the later one of the others is waited for then.
    assert 0.25 < found.what_if.without_rank_s < 0.33
    assert 0.29 < found.what_if.all_alike_s < 0.4


def test_a_run_that_cannot_tell(tmp_path):
    """One rank, or ranks that never meet: no one is named, and the reason is said."""
    write_run(tmp_path / "one", own_of(steps=20), ranks=1)
    with Run.open(tmp_path / "one") as run:
        assert "the run has one rank" == find_stragglers(run).reason
    for rank in range(2):
        clock = ManualClock()
        timer = Timer(clock=clock)
        log = RunLog(tmp_path / "apart", timer, rank=rank, flush_s=None)
        for _ in range(30):
            with timer.region("BATCH"):
                clock.advance(1.0 + rank)
        log.close()
    with Run.open(tmp_path / "apart") as run:
        assert "nothing says where the ranks meet" in find_stragglers(run).reason
        assert "the run has no session 7, but 0" == find_stragglers(run, session=7).reason
