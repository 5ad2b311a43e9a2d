from __future__ import annotations

import math
import posixpath
import re
from operator import attrgetter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deep500_timing._summary.snapshot import RegionTimes
from deep500_timing.exporters._mlflow import MAX_NAME, clean_name
from deep500_timing.exporters._trackers import VALID_STATS, Metric, TrackerExporter, distinct


class Ours(TrackerExporter):
    """Gives its metrics."""

    package = "json"

    def _export(self, snapshot, step):
        """Write nothing."""


@pytest.mark.parametrize(
    ("prefix", "key"),
    [("", "CPU/BATCH"), ("/", "CPU/BATCH"), ("train", "train/CPU/BATCH"), ("train/", "train/CPU/BATCH")],
)
def test_a_prefix_is_joined_by_one_slash(snapshot_of, prefix, key):
    """With a slash at its end or without, a prefix gives the same key."""
    metrics = Ours(prefix)._metrics(snapshot_of(("BATCH", "CPU", 1.5)))

    assert [(key, 1.5)] == [(metric.name, metric.value) for metric in metrics]


def test_a_prefix_must_be_a_string():
    """Anything else is refused where it is given."""
    with pytest.raises(TypeError, match=r"Ours was given prefix=None; give a string"):
        Ours(None)


def test_every_statistic_can_be_chosen(snapshot_of, stats_of):
    """Each field of TimeStats is one metric, the interval of the median two."""
    snapshot = snapshot_of(RegionTimes("BATCH", "GPU", stats_of(2.0, median_ci=(1.0, 3.0), skipped=4)))
    metrics = Ours(stats=VALID_STATS)._metrics(snapshot)
    named = {metric.name: metric.value for metric in metrics}

    assert len(VALID_STATS) + 1 == len(named)
    assert (2.0, 2.0, 1.0, 3.0, 4) == (
        named["GPU/BATCH"],
        named["GPU/BATCH/p95"],
        named["GPU/BATCH/median_ci_low"],
        named["GPU/BATCH/median_ci_high"],
        named["GPU/BATCH/skipped"],
    )


@pytest.mark.parametrize("stats", [("mean", "p42"), ("median_ci_low",), ()])
def test_an_unknown_statistic_is_refused(stats):
    """An unknown statistic, or none, is refused with the names to choose from."""
    with pytest.raises(ValueError, match=r"Ours was asked to log .*; choose from min, mean, median, max, stdev, count"):
        Ours(stats=stats)


def test_a_bare_string_is_refused():
    """A string is not taken for its letters."""
    with pytest.raises(TypeError, match=r"stats='mean'; give a tuple, such as stats=\('mean',\)"):
        Ours(stats="mean")


def test_what_is_unknown_is_left_out(snapshot_of, stats_of):
    """Neither None nor a value that is not finite is logged, and never as 0; nor is a region without times."""
    snapshot = snapshot_of(
        RegionTimes("a", "CPU", stats_of(1.0, mean=math.nan, p95=math.inf)), RegionTimes("b", "CPU", None, running=1)
    )
    metrics = Ours(stats=("mean", "p95", "median_ci", "max"))._metrics(snapshot)

    assert ["CPU/a/max"] == [metric.name for metric in metrics]


def test_a_region_named_like_a_statistic_stays_apart(snapshot_of):
    """The mean of a region ``BATCH/p95`` and the p95 of ``BATCH`` have two keys."""
    snapshot = snapshot_of(("BATCH", "CPU", 1.0), ("BATCH/p95", "CPU", 2.0))
    metrics = Ours(stats=("mean", "p95"))._metrics(snapshot)
    named = distinct(metrics, attrgetter("name"))

    assert [1.0, 1.0, 2.0, 2.0] == sorted(named.values())
    assert (1.0, 2.0) == (named["CPU/BATCH"], named["CPU/BATCH/p95/p95"])


names = st.text(alphabet=st.sampled_from("ab./ ?:\n_é漢\ud800"), max_size=300) | st.text()
metrics = st.lists(
    st.builds(
        lambda device, name, stat: Metric((device, name, stat), f"{device}/{name}{stat}", 1.0, len(device) + 1),
        st.sampled_from(["CPU", "GPU", "..", ""]),
        names,
        st.sampled_from(["", ".p95"]),
    ),
    max_size=12,
    unique_by=lambda metric: metric.identity,
)


@given(metrics)
@example([Metric(("CPU", name, ""), f"CPU/{name}", 1.0, 4) for name in ("a?b", "a/b", "a_b", "a.b", "A.B", "a/./b")])
@example([Metric(("CPU", "x" * 300 + end, ""), "CPU/" + "x" * 300 + end, 1.0, 4) for end in "abcA"])
def test_names_are_valid_and_distinct(several):
    """MLflow takes every name, and no two metrics share one, for any names of regions."""
    named = distinct(
        [metric._replace(value=float(n)) for n, metric in enumerate(several)],
        clean_name,
        limit=MAX_NAME,
        fold=str.casefold,
    )

    assert sorted(named.values()) == [float(n) for n in range(len(several))]
    assert len(several) == len({name.casefold() for name in named})
    for name in named:
        # One is never the folder of another.
        assert not any(other.casefold().startswith(f"{name.casefold()}/") for other in named)
        assert re.fullmatch(r"[/\w.\-]{1,250}", name)
        assert posixpath.normpath(name) == name
        assert not name.startswith(("/", ".."))
        assert name != "."


@given(metrics)
def test_a_name_does_not_depend_on_the_order(several):
    """The same regions get the same names in every report, in any order."""
    by_identity = [
        {value: name for name, value in distinct(order, clean_name, limit=MAX_NAME, fold=str.casefold).items()}
        for order in (
            [metric._replace(value=hash(metric.identity)) for metric in several],
            [metric._replace(value=hash(metric.identity)) for metric in reversed(several)],
        )
    ]

    assert by_identity[0] == by_identity[1]


def test_a_name_that_needs_no_change_is_kept():
    """A valid name keeps its spelling even next to one that is made the same."""
    same = [Metric(("CPU", name, "mean"), f"CPU/{name}", 0.0, 4) for name in ("a?b", "a_b")]
    named = distinct(same, clean_name, limit=MAX_NAME, fold=str.casefold)

    assert "CPU/a_b" in named
    assert 1 == sum(re.fullmatch(r"CPU/a_b_[0-9a-f]{8}", name) is not None for name in named)
