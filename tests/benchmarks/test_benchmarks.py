"""The benchmarks run and write a well-formed report. How fast anything is, is theirs to say, not asserted."""

from __future__ import annotations

import ast
import importlib
import json
import math
import sys
import time

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import deep500_timing
from benchmarks import __main__ as command
from benchmarks import _loops, _reach, _report
from benchmarks._contenders import CLOCK, assemble
from benchmarks._deep500 import Key, ListTimer
from benchmarks._pairs import device_calls
from benchmarks._plainform import _Rename, load_plain, renamed
from benchmarks._summary import Interval, Spread, ratio
from benchmarks._training import overheads
from benchmarks.bench_before_after import prices_table, slower
from benchmarks.prices import report
from deep500_timing.testing import InMemoryExporter

# The command would set it, for good.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
positive = st.floats(min_value=1e-3, max_value=1e9)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder that a run of the least effort over the contenders without frameworks has written."""
    folder = tmp_path_factory.mktemp("bench") / "report"
    sections = ("warm", "cold", "reads", "bytes", "tail", "statistics", "memory")
    options = ["--effort", "smoke", "--only", r"^start/end \(|^with region \(|Deep500", "--output", str(folder)]
    for section in sections:
        options += ["--section", section]
    with pytest.MonkeyPatch.context() as patch:
        # Two short rounds: by a clock of the processor no other process takes them.
        patch.setattr(_loops, "perf_counter_ns", time.thread_time_ns)
        done = CliRunner(env=NO_GPU).invoke(command.main, options, catch_exceptions=False)
    assert 0 == done.exit_code, done.output
    return folder


class TestRun:
    def test_the_numbers_are_those_that_were_asked_for(self, written):
        """Each contender of the run has every measurement, as finite numbers."""
        results = json.loads((written / "results.json").read_text())
        labels = set(results["contenders"])
        assert {CLOCK, "start/end (plain)", "with region (plain)", "Deep500's design"} <= labels
        assert deep500_timing.compiled == ("start/end (compiled)" in labels)
        assert (6 if deep500_timing.compiled else 4) == len(labels)
        for found in results["contenders"].values():
            for kind in ("warm_ns", "warm_ratio", "cold_ns"):
                assert all(math.isfinite(value) for value in found[kind].values())
            assert 1000 == found["tail_ns"]["pairs"]
            assert math.isfinite(found["bytes_kept"])

    def test_a_kept_interval_weighs_two_int64(self, written):
        """The blocks of intervals add next to nothing to 16 bytes each, in both forms."""
        sizes = json.loads((written / "results.json").read_text())["block_sizes"].values()
        assert (2 if deep500_timing.compiled else 1) == len(sizes)
        for size in sizes:
            assert 16 <= size["bytes_per_interval"] < 17

    def test_every_region_of_the_long_run_is_counted(self, written):
        """The bounded timer's statistics stand on all regions of the run."""
        results = json.loads((written / "results.json").read_text())
        compiled = set() if deep500_timing.compiled else {"deep500-timing, compiled"}
        assert compiled == set(results["missing"]) - {"codetiming"}
        runs = results["memory"].values()
        assert (2 if deep500_timing.compiled else 1) == len(runs)
        for run in runs:
            assert 100_000 == run["regions"]

    def test_the_report_is_markdown_with_even_tables(self, written):
        """Every table of the report has as many cells in each row as in its head."""
        lines = (written / "RESULTS.md").read_text(encoding="utf-8").splitlines()
        assert "# What timing costs" == lines[0]
        assert {"## Reach", "## A pair of calls", "## How it is measured"} <= set(lines)
        tables = rows = 0
        for before, line in zip(["", *lines], lines, strict=False):
            if line.startswith("|"):
                width = before.count("|") if before.startswith("|") else line.count("|")
                assert width == line.count("|"), line
                rows += 1
                tables += not before.startswith("|")
        assert tables >= 6
        assert rows > 3 * tables

    def test_the_picture_is_drawn_where_matplotlib_is(self, written):
        """The run leaves a PNG next to the report."""
        pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
        assert "the picture" not in json.loads((written / "results.json").read_text())["missing"]
        assert b"\x89PNG" == (written / "results.png").read_bytes()[:4]

    def test_less_than_a_full_run_leaves_the_published_report_alone(self):
        """Without a folder to write to, a partial run writes to a temporary one."""
        published = command.HERE / "RESULTS.md"
        before = published.read_bytes() if published.exists() else None
        options = ["--effort", "smoke", "--only", "nothing", "--section", "reads"]
        done = CliRunner(env=NO_GPU).invoke(command.main, options, catch_exceptions=False)
        assert 0 == done.exit_code
        assert str(command.HERE) not in done.output
        assert before == (published.read_bytes() if published.exists() else None)

    def test_a_section_that_fails_is_named(self, tmp_path, monkeypatch):
        """An error in one measurement is in the report, and the others are made."""

        def broken(*_args):
            raise OSError("no such luck")

        monkeypatch.setattr(command.Bench, "_cold", broken)
        options = ["--effort", "smoke", "--only", "Deep500", "--section", "cold", "--section", "warm"]
        done = CliRunner(env=NO_GPU).invoke(command.main, [*options, "--output", str(tmp_path)], catch_exceptions=False)
        assert "OSError: no such luck" in done.output
        results = json.loads((tmp_path / "results.json").read_text())
        assert "OSError: no such luck" == results["missing"]["A pair, cold"]
        assert "warm_ns" in results["contenders"]["Deep500's design"]
        assert "no such luck" in (tmp_path / "RESULTS.md").read_text(encoding="utf-8")


class TestContenders:
    def test_an_absent_peer_is_named_with_its_error(self, monkeypatch):
        """A peer that cannot be imported is among the missing, and the rest is there."""
        monkeypatch.setitem(sys.modules, "codetiming", None)
        found = assemble(frameworks=False)
        assert "codetiming" in found.missing["codetiming"]
        assert CLOCK == found.contenders[0].label

    def test_what_is_measured_records(self):
        """Each contender that reads something has one interval for each time that its statement ran."""
        readers = [contender for contender in assemble(frameworks=False).contenders if contender.reads is not None]
        assert len(readers) >= 11
        for contender in readers:
            contender.reset()
            space = dict(contender.names)
            for _ in range(7):
                exec(contender.statement, space)
            assert 7 == len(contender.reads()), contender.label
            contender.reset()

    @pytest.mark.torch_device
    def test_regions_on_the_test_device_cost_two_records_and_at_most_one_query(self):
        """In the steady state nothing waits for the device and nothing is allocated on it."""
        pytest.importorskip("torch", reason="the device is one of PyTorch's")
        import deep500_timing_torch

        try:
            device = command.load_torch_device()
        except Exception as error:
            pytest.skip(f"the test device cannot be had: {error}")
        device.reset()
        counts = device_calls(deep500_timing_torch, device)
        device.reset()
        assert 2 == counts["records"]
        assert counts["queries"] <= 1
        assert 0 == counts["synchronizes"]
        assert 0 == counts["events made"]

    def test_the_old_design_refuses_what_its_model_refuses(self):
        """It raises for a region that is started twice or ended unstarted, and otherwise keeps one time per region."""
        timer = ListTimer()
        with pytest.raises(RuntimeError):
            timer.end(Key.BATCH)
        timer.start(Key.BATCH)
        with pytest.raises(RuntimeError):
            timer.start(Key.BATCH)
        timer.end(Key.BATCH)
        assert 1 == len(timer.get_time(Key.BATCH))


class TestPlainForm:
    def test_both_forms_live_in_one_process(self):
        """The plain form is Python all through, and shares no class with the ordinary import."""
        plain = load_plain()
        assert not plain.compiled
        assert plain.Timer is not deep500_timing.Timer
        assert plain.TimeType is not deep500_timing.TimeType
        ours = {name for name, module in sys.modules.items() if name.startswith("deep500_timing_plain")}
        assert {"deep500_timing_plain.timer", "deep500_timing_plain._recording.recorder"} <= ours
        assert all(sys.modules[name].__file__.endswith(".py") for name in ours)

    def test_its_lazy_imports_stay_within_it(self):
        """Imports on demand of the plain form are plain as well."""
        plain = load_plain()
        timer = plain.Timer()
        with timer.region(plain.TimeType.IO):
            pass
        assert type(timer.snapshot()).__module__.startswith("deep500_timing_plain.")
        assert type(timer.get_time_stats("IO")).__module__.startswith("deep500_timing_plain.")
        adapters = importlib.import_module("deep500_timing_plain.adapters")
        assert adapters.Intervals.__module__.startswith("deep500_timing_plain.")

    @pytest.mark.parametrize(
        ("module", "expected"),
        [
            ("deep500_timing", "deep500_timing_plain"),
            ("deep500_timing.timer", "deep500_timing_plain.timer"),
            ("deep500_timing_torch._clock", "deep500_timing_torch_plain._clock"),
            ("deep500_timingish", "deep500_timingish"),
            ("numpy", "numpy"),
        ],
    )
    def test_only_the_packages_are_renamed(self, module, expected):
        """The root of the name decides."""
        assert expected == renamed(module)

    def test_a_table_of_homes_is_renamed_in_either_form(self):
        """PyTorch's adapter makes the one of the core's names by a comprehension."""
        tables = ast.parse("{'a': 'deep500_timing'}, {name: 'deep500_timing' for name in b}")
        assert 2 == ast.unparse(_Rename().visit(tables)).count("deep500_timing_plain")


class TestSummary:
    @given(st.lists(positive, min_size=1, max_size=50))
    def test_a_spread_is_in_order_and_within_the_values(self, values):
        """First quartile, median, third quartile, between the extremes."""
        spread = Spread.of(values)
        slack = 1e-9 * max(values)
        assert min(values) - slack <= spread.low <= spread.median + slack
        assert spread.median <= spread.high + slack <= max(values) + 2 * slack

    @given(st.lists(st.tuples(positive, positive), min_size=1, max_size=20), positive)
    def test_a_slow_round_does_not_change_a_ratio(self, rounds, factor):
        """What multiplies both numbers of a round cancels out."""
        plain = ratio([a for a, _ in rounds], [b for _, b in rounds])
        slow = ratio([a * factor for a, _ in rounds], [b * factor for _, b in rounds])
        assert plain.median == pytest.approx(slow.median)

    @given(st.lists(positive, min_size=1, max_size=20))
    def test_an_interval_holds_its_median(self, values):
        """The bootstrap's interval lies around the median, and is a point where all rounds agree."""
        interval = Interval.of(values, resamples=200)
        assert interval.low <= interval.median <= interval.high
        constant = Interval.of([values[0]] * 5, resamples=50)
        assert constant.low == constant.high == values[0]

    def test_nothing_measured_is_an_error(self):
        """A summary of no rounds is refused rather than invented."""
        with pytest.raises(ValueError, match="No round"):
            Spread.of([])
        with pytest.raises(ValueError, match="No round"):
            Interval.of([])


class TestReach:
    def test_a_goal_is_judged_on_its_side(self):
        """At most and at least are distinguished, and the limit itself counts as reached."""
        for goal in _reach.GOALS:
            target = goal.targets[0]
            better, worse = (target * 1.01, target * 0.99) if goal.at_least else (target * 0.99, target * 1.01)
            assert goal.reached(target, target)
            assert goal.reached(better, target)
            assert not goal.reached(worse, target)

    def test_what_was_not_measured_is_said_to_be_so(self):
        """A goal without a measurement is neither reached nor missed."""
        table = _report.reach_table({"contenders": {}, "peer_ratios": {}})
        assert all(2 == row.count("not measured") for row in table[2:-1])
        assert not any("yes" in row or "**no**" in row for row in table)

    @pytest.mark.parametrize(
        ("ours", "noise", "expected"),
        [((-1, 2), (-1, 1), True), ((3, 4), (-1, 1), False), ((3, 4), (-1, 5), True), ((3, 9), (-1, 5), False)],
    )
    def test_within_noise_means_within_that_of_no_change(self, ours, noise, expected):
        """The callback's overhead is compared with that of the same run once more."""
        runs = {
            name: {"overhead_percent": {"median": (low + high) / 2, "low": low, "high": high}}
            for name, (low, high) in (("TimerCallback", ours), ("no timing, again", noise))
        }
        assert expected is _reach.within_noise(runs)
        assert _reach.within_noise({}) is None

    def test_each_way_of_timing_keras_has_a_line(self):
        """A fit and the times to the first batch are judged each alone, and named if they were measured."""
        slow, fast = ({"overhead_percent": {"median": low, "low": low, "high": low + 1}} for low in (9, -1))
        runs = {"TimerCallback": slow, "no timing, again": fast}
        first = {"new": {"TimerCallback": fast, "no timing, again": fast}, "warm": runs}
        results = {"contenders": {}, "peer_ratios": {}, "keras": {"runs": runs, "first_batch": first}}
        lines = [line for line in _report.reach_table(results) if "Keras" in line]
        assert ["**no**", "yes", "**no**"] == [line.split("|")[4].strip() for line in lines]
        assert [] == [line for line in _report.reach_table({"contenders": {}, "peer_ratios": {}}) if "Keras" in line]

    @pytest.mark.parametrize(("low", "told"), [(-0.2, "cannot be told from"), (3.0, "is more than")])
    def test_keras_table_says_what_would_have_been_seen(self, low, told):
        """With the callback's overhead stand that of no change, and from where on it would have been told from it."""
        ours, again = ({"median": at, "low": at, "high": at + 1.5, "rounds": 9} for at in (low, -0.5))
        runs = {
            "no timing": {},
            "no timing, again": {"overhead_percent": again},
            "TimerCallback": {"overhead_percent": ours},
        }
        for run in runs.values():
            run["ms"] = {"median": 1.0, "low": 1.0, "high": 1.0, "rounds": 9}
        results = {"keras": {"keras": "3", "backend": "tensorflow", "steps": 7, "runs": runs}}
        said = "\n".join(_report.training_lines(results))
        assert told in said
        assert "More than 1.5 % would have been seen." in said

    def test_overheads_are_over_the_mean_of_both_runs_without(self):
        """Of two runs without timing either may be disturbed; the second is compared with the first alone."""
        found = overheads({"no timing": [1.0, 1.0], "no timing, again": [3.0, 3.0], "timed": [3.0, 3.0]})
        assert [200.0, 50.0] == [found[name]["overhead_percent"]["median"] for name in ("no timing, again", "timed")]

    @pytest.mark.parametrize(
        ("value", "expected"),
        [(None, "–"), (0.0, "0"), (0.0312, "0.0312"), (1.234, "1.23"), (84.26, "84.3"), (1234.5, "1\u202f234")],
    )
    def test_numbers_are_short_and_without_exponents(self, value, expected):
        """Three significant digits, thousands apart."""
        assert expected == _report.number(value)


def test_what_became_slower_is_named():
    """A row that is more than 10 % slower, by the least of its rounds; one that was not there is not compared."""
    now = {"a": [1.2, 1.11], "b": [1.09, 2.0], "new": [9.0]}
    before = {"a": [1.0, 5.0], "b": [1.0], "gone": [1.0]}
    sides = {"before": before, "now": now}
    assert ["SLOWER: a: 1.11 × of before"] == slower(sides)
    assert ["| new | – | 9000.00 | – |", "| gone | 1000.00 | – | – |"] == prices_table(sides)[-2:]


def test_a_report_is_priced_without_what_its_thread_does():
    """The exporter's thread is waited for between two reports, outside of what is measured."""
    exporter = InMemoryExporter()
    assert report(deep500_timing.Timer(), exporter) >= 0
    assert exporter.flushes == len(exporter.exported)
