"""The words of a comparison: which test the runs allow, what is slower, and when there is no answer."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing.compare import NotComparableError, _runs, compare
from deep500_timing.compare._compare import floor_of
from deep500_timing.compare._runs import _regions_of, pairs_of, sessions_of, write_baseline
from deep500_timing.compare._series import draw_scaling, scaling
from deep500_timing.compare._text import draw, gate, markdown

ABBA = "ABBAABBAAB"


@pytest.fixture
def sides(times):
    """Makes both sides of an experiment in an order, with 0.5 % between runs; B's FORWARD takes so much longer."""

    def make(order=ABBA, slower=1.0, seed=1, **settings):
        rng, found = random.Random(seed), {"A": [], "B": []}
        for place, side in enumerate(order):
            forward, backward = rng.gauss(0.02, 1e-4), rng.gauss(0.03, 1e-4)
            forward *= slower if side == "B" else 1
            regions = {"BATCH": forward + backward, "BATCH/FORWARD": forward, "BATCH/BACKWARD": backward}
            found[side].append(times(forward + backward + 0.001, place, **settings, **regions))
        return found["A"], found["B"]

    return make


class TestMethods:
    def test_interleaved_runs_are_paired(self, sides):
        """Neighbours of an interleaved session are pairs, whichever comes first."""
        a, b = sides()
        assert compare(a, b).method == "paired"
        assert [(one.name, other.name) for one, other in pairs_of(a, b)][:2] == [("run-0", "run-1"), ("run-3", "run-2")]

    def test_one_after_the_other_is_welch_and_says_so(self, sides):
        """Runs of one session that are not interleaved get Welch's test, and a word on drift."""
        found = compare(*sides("AAABBB"))
        assert found.method == "one session"
        assert "drift" in found.reason

    def test_different_sessions_are_not_comparable(self, times):
        """Five runs of yesterday against five of today have no answer."""
        a = [times(0.050 + 1e-4 * n, n, session="monday") for n in range(5)]
        b = [times(0.060 + 1e-4 * n, n + 5, session="tuesday") for n in range(5)]
        found = compare(a, b)
        assert found.method == "not comparable"
        assert "not comparable: different sessions" in draw(found)
        assert not found.slower
        assert found.step.interval is None

    def test_a_history_of_three_sessions_makes_them_comparable(self, times):
        """The variance between sessions comes from the history; an effect within it is no slowdown."""
        history = [
            times(0.050 * (1 + 0.01 * day), 1000 * day + n, session=f"day {day}") for day in range(4) for n in (0, 1)
        ]
        today = [times(0.0515, 9000 + n, session="today") for n in range(3)]
        a = [times(0.050, 8000, session="yesterday")]
        assert compare(a, today, history=history).method == "across sessions"
        assert not compare(a, today, history=history).slower
        slow = [replace(run, step_s=0.07) for run in today]
        assert compare(a, slow, history=history).slower

    def test_one_run_a_side_is_a_description(self, sides):
        """One run a side says nothing about runs, for any difference."""
        found = compare(*sides("AB", slower=2.0))
        assert found.method == "within this run only"
        assert not found.slower
        assert "within this run only" in draw(found)

    def test_a_pause_of_ten_minutes_begins_a_session(self, times):
        """Runs without the mark of `ab` are of one session while they follow each other."""
        runs = [times(0.05, place, session="host boot") for place in (0, 1, 2, 20, 21)]
        assert [len(session) for session in sessions_of(runs)] == [3, 2]
        assert [1, 1] == [len(session) for session in sessions_of([times(0.05, n, session="") for n in (0, 1)])]


class TestAnswers:
    def test_a_slower_region_is_named(self, sides):
        """FORWARD 10 % slower makes the step slower, and explains it; BACKWARD does not."""
        found = compare(*sides(slower=1.1))
        assert found.slower
        assert found.explains.path == "BATCH/FORWARD"
        assert found.explains.share == pytest.approx(1, abs=0.1)
        assert {one.path: one.verdict for one in found.regions} == {
            "BATCH": "slower",
            "BATCH/FORWARD": "slower",
            "BATCH/BACKWARD": "no difference shown",
        }
        assert "BATCH/FORWARD explains" in draw(found)

    def test_an_epoch_with_noise_hides_no_region(self, times):
        """EPOCH differs too much from run to run for a verdict: the slower FORWARD inside it is named."""
        rng, found = random.Random(1), {"A": [], "B": []}
        for place, side in enumerate(ABBA):
            forward = rng.gauss(0.02, 1e-4) * (1.1 if side == "B" else 1)
            regions = {"EPOCH/BATCH": forward + 0.03, "EPOCH/BATCH/FORWARD": forward, "EPOCH": rng.uniform(0.06, 0.9)}
            found[side].append(times(forward + 0.03, place, **regions))
        assert compare(found["A"], found["B"]).explains.path == "EPOCH/BATCH/FORWARD"

    def test_a_step_explains_nothing(self, times):
        """FORWARD and BACKWARD have half of the change each: no region explains it, and least of all BATCH."""
        rng, found = random.Random(2), {"A": [], "B": []}
        for place, side in enumerate(ABBA):
            half = rng.gauss(0.02, 1e-4) * (1.5 if side == "B" else 1)
            regions = {"BATCH": 2 * half, "BATCH/FORWARD": half, "BATCH/BACKWARD": half}
            found[side].append(times(2 * half, place, **regions))
        changed = compare(found["A"], found["B"])
        assert (True, None) == (changed.slower, changed.explains)

    @pytest.mark.parametrize(
        ("order", "slower", "says"),
        [
            (ABBA, 1.1, "The median step of B is slower: +"),
            (ABBA, 1.0, "No difference is shown in the median step: B / A is "),
            ("AB", 1.1, "B / A is +"),
        ],
    )
    def test_what_the_median_step_hides_is_said(self, sides, order, slower, says):
        """B compiles less: its median step is no faster, and all steps together are."""
        a, b = sides(order=order, slower=slower)
        whole = [replace(run, mean_s=0.3 + run.step_s) for run in a], [replace(run, mean_s=run.step_s) for run in b]
        text = draw(compare(*whole))
        assert f"\n{says}" in text
        assert "Over all steps, with warm-up, compilation and pauses, B " in text
        assert ("B is faster: -8" in text) == (order == ABBA)
        alike = [[replace(run, mean_s=1.02 * run.step_s) for run in side] for side in (a, b)]
        assert "Over all steps" not in draw(compare(*alike))

    def test_a_faster_step_is_no_alarm(self, sides):
        """Faster is said, and is no slowdown."""
        found = compare(*sides(slower=0.8))
        assert found.step.verdict == "faster"
        assert not found.slower

    def test_equal_runs_show_no_difference(self, sides):
        """Nothing is claimed of equal programs."""
        found = compare(*sides(seed=3))
        assert found.step.verdict == "no difference shown"
        assert found.explains is None

    def test_regions_of_one_side_are_listed(self, sides):
        """A region that only one side has is said, and is not compared."""
        a, b = sides()
        b = [replace(run, regions={**run.regions, "BATCH/EMA": 0.001}) for run in b]
        found = compare(a, b)
        assert found.only_b == ("BATCH/EMA",)
        assert "Only in B: BATCH/EMA" in draw(found)

    def test_a_narrow_terminal_gets_fewer_columns(self, sides):
        """At 80 columns the table loses a column and the middle of long names; no line of it is wider."""
        a, b = (
            [replace(run, regions={**run.regions, "BATCH/a long path/of regions/to EMA": 0.001}) for run in side]
            for side in sides(slower=1.1)
        )
        table = draw(compare(a, b), width=80).partition("region ")[2].partition("\n\n")[0].splitlines()
        assert max(map(len, table)) <= 80
        assert "of the change" not in table[0]
        assert "slower" in table[1]

    def test_what_else_differs_comes_first(self, sides):
        """Versions and attributes are compared before the times."""
        a, _ = sides(facts={"version of torch": "2.13", "governor": "performance"})
        _, b = sides(facts={"version of torch": "2.14", "governor": "performance"})
        found = compare(a, b)
        assert found.differences == (("version of torch", "2.13", "2.14"),)
        assert draw(found).splitlines()[:2] == ["Also different (A | B):", "  version of torch: 2.13 | 2.14"]


class TestGate:
    def test_a_machine_that_is_not_qualified_fails_no_build(self, sides):
        """Without a noise floor there is no verdict, and the remedy is named."""
        judged = gate(compare(*sides(slower=1.5)), 0.03, None)
        assert not judged.failed
        assert "ab --same" in judged.text

    def test_a_slowdown_fails_in_ten_lines(self, sides):
        """A qualified machine fails the build, and says names the remedy."""
        floor = floor_of(pairs_of(*sides(seed=9)))
        judged = gate(compare(*sides(slower=1.2), floor=floor), 0.03, floor)
        assert judged.failed
        assert len(judged.text.splitlines()) <= 10
        assert "BATCH/FORWARD" in judged.text

    def test_a_slowdown_below_the_limit_passes(self, sides):
        """A significant effect that is smaller than the limit fails nothing."""
        floor = floor_of(pairs_of(*sides(seed=9)))
        assert not gate(compare(*sides(slower=1.05), floor=floor), 0.1, floor).failed

    def test_too_few_pairs_for_the_limit_are_said(self, sides):
        """A gate that cannot see the effect says how many pairs it takes."""
        floor = floor_of(pairs_of(*sides(seed=9)))
        assert "it takes" in gate(compare(*sides(), floor=floor), 0.0005, floor).text

    @pytest.mark.parametrize("order", ["AB", "AAABBB"])
    def test_runs_in_sequence_fail_no_build(self, sides, order):
        """One run a side, or sides one after the other, never fail a build."""
        floor = floor_of(pairs_of(*sides(seed=9)))
        assert not gate(compare(*sides(order, slower=2.0)), 0.03, floor).failed


class TestRuns:
    @given(
        st.sampled_from((1, 8, 1000)),
        st.sampled_from((1, 3)),
        st.integers(1, 9),
        st.lists(st.tuples(st.integers(0, 8), st.integers(0, 1), st.integers(0, 9)), max_size=40),
    )
    def test_a_region_counts_as_0_in_a_step_without_it(self, cells, stride, steps, intervals):
        """The median of the slowest rank's sums, in each step or only in most; numbers between steps are no steps."""
        import duckdb

        class OneTable:
            def sql(self, query):
                self.found = tables.sql(query)
                return self

            def rows(self):
                return [dict(zip(self.found.columns, row, strict=True)) for row in self.found.fetchall()]

            def batches(self, rows):
                return self.found.to_arrow_reader(rows)

        sums = {}
        chosen = np.arange(steps) * stride
        with duckdb.connect() as tables:
            tables.execute(
                "create table intervals (session int, rank int, path text, device text, step int, dur_ns int)"
            )
            for step, rank, ns in intervals:
                tables.execute(f"insert into intervals values (0, {rank}, 'it''s', 'CPU', {step}, {ns})")
                tables.execute(f"insert into intervals values (0, {rank}, 'it''s', 'GPU', {step}, {2 * ns})")
                sums[step, rank] = sums.get((step, rank), 0) + ns
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_runs, "_CELLS", cells)
                found = _regions_of(OneTable(), 0, chosen)
        slowest = [max(sums.get((step, rank), 0) for rank in (0, 1)) for step in chosen.tolist()]
        expected = float(np.median(slowest)) / 1e9
        both = {"it's": pytest.approx(expected), "it's (GPU)": pytest.approx(2 * expected)}
        assert (both if expected > 0 else {}) == found

    def test_a_run_is_reduced_to_its_slowest_rank(self, write_run):
        """A step takes as long as its slowest rank, and includes the time between two BATCHes."""
        from deep500_timing.compare import read_run
        from deep500_timing.runs import Run

        folder = write_run("two", ranks=2, slow={(1, step) for step in range(60)})
        with Run.open(folder) as run:
            found = read_run(run)
        assert found.step_s == pytest.approx(0.061)
        assert found.regions["BATCH/FORWARD"] == pytest.approx(0.03)
        assert found.facts["attribute batch_size"] == "8"
        assert found.world_size is not None

    def test_the_mean_is_of_all_steps(self, write_run):
        """Slow first steps are a warm-up of the median, and count in the mean."""
        found = compare(write_run("a", slow=[(0, step) for step in range(10)]), write_run("b"))
        assert 0 == pytest.approx(found.step.change)
        assert [0.051 + 0.1 / 59, 0.051] == pytest.approx([found.mean.a_s, found.mean.b_s])

    def test_runs_of_ab_are_compared_by_their_marks(self, write_run):
        """Session, pair and side of the header decide."""
        a, b = [], []
        for number in range(3):
            for side, runs in (("A", a), ("B", b)):
                mark = {"session": "x", "pair": number, "side": side}
                forward = (0.02 if side == "A" else 0.03) + number * 1e-5
                runs.append(write_run(f"{side}{number}", forward=forward, measurement=mark))
        found = compare(a, b)
        assert found.method == "paired"
        assert found.explains.path == "BATCH/FORWARD"

    def test_a_short_run_is_refused(self, write_run):
        """Three steps have no steady state."""
        with pytest.raises(NotComparableError, match="2 complete steps"):
            compare(write_run("short", steps=3), write_run("long"))

    def test_a_run_that_was_cut_short_is_said(self, write_run):
        """What there is counts, with a warning."""
        found = compare(write_run("whole"), write_run("cut", cut=True, minute=3))
        assert "cut short" in " ".join(found.warnings)

    def test_the_same_run_on_both_sides_is_refused(self, write_run):
        """A run is not compared with itself."""
        folder = write_run("one")
        with pytest.raises(NotComparableError, match="both sides"):
            compare(folder, folder)

    def test_a_baseline_keeps_what_is_compared(self, sides, tmp_path):
        """A baseline of JSON files gives the runs back."""
        a, b = sides()
        write_baseline(str(tmp_path / "baseline"), a)
        assert compare(str(tmp_path / "baseline"), b) == compare(a, b)


def test_the_summary_for_github_is_a_table(sides):
    """Names cannot break out of the table; numbers are in it."""
    a, b = sides(slower=1.2)
    rename = [[replace(run, regions={"<b>|x`": run.step_s / 2, **run.regions}) for run in side] for side in (a, b)]
    text = markdown(compare(*rename))
    assert "<b>" not in text
    assert "&lt;b>\\|x\\`" in text


def test_scaling_names_the_region_that_takes_the_rest(times):
    """From 1 to 8 ranks COMM grows by 10 ms: the efficiency is 50 / 60, and COMM takes all that is lost."""
    one = [replace(times(0.05, 0, FORWARD=0.05), world_size=1)]
    eight = [replace(times(0.06, 1, FORWARD=0.05, COMM=0.01), world_size=8)]
    found = scaling([one, eight])
    assert found[1].efficiency == pytest.approx(50 / 60)
    assert (found[1].region, found[1].region_share) == ("COMM", pytest.approx(1))
    assert "COMM takes 100.0 % of the loss" in draw_scaling(found)
    with pytest.raises(NotComparableError, match="world size 1"):
        scaling([one, one])


def test_scaling_with_a_fixed_batch_counts_samples(times):
    """Strong scaling: the same samples a step on two ranks in 0.6 of the time is an efficiency of 83 %."""
    facts = {"attribute samples_per_step": "64"}
    one = [replace(times(0.1, 0, facts=facts), world_size=1)]
    two = [replace(times(0.06, 1, facts=facts), world_size=2)]
    assert scaling([one, two])[1].efficiency == pytest.approx(0.1 / 0.12)
