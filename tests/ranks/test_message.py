"""What a rank sends of its snapshot, and what is made of the messages of many."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing._distributed.gathered import (
    COARSEST,
    LIMIT_BYTES,
    bin_error,
    merge_snapshots,
    pack_snapshot,
    unpack_snapshot,
)
from deep500_timing._recording.intervals import BIN_COUNT
from deep500_timing._summary.distribution import Distribution, dense, merge
from deep500_timing._summary.snapshot import COUNTERS, RegionTimes, Snapshot
from deep500_timing._summary.stats import stats_of

MS = 1_000_000
times = st.lists(st.integers(0, 2**50), max_size=40)
worlds = st.lists(
    st.dictionaries(st.sampled_from(["IO", "FORWARD", "ñ/\\"]), times, max_size=3), min_size=1, max_size=6
)


def region(name, durations, **more):
    """A region with these durations in ns."""
    if len(durations) == 0:
        return RegionTimes(name, "CPU", None, **more)
    times_ns = np.array(durations, dtype=np.int64)
    return RegionTimes(name, "CPU", stats_of(times_ns), distribution=Distribution.of(times_ns), **more)


def snapshot(regions, rank=0, **more):
    """A snapshot of one rank, from durations in ns by region."""
    found = tuple(region(name, durations) for name, durations in regions.items())
    return Snapshot(found, 1.7e9 + rank, f"host{rank // 2}", 1000 + rank, rank=rank, world_size=8, **more)


def gathered_of(snapshots, limit_bytes=10**6):
    """What all of them say together."""
    messages = {rank: pack_snapshot(one, limit_bytes=limit_bytes) for rank, one in enumerate(snapshots)}
    return merge_snapshots(messages, range(len(snapshots)))


def thirty_regions(steps, spread, rank=0):
    """A snapshot as a training has it, from 20 µs to 20 ms, some regions with a slow mode."""
    rng = np.random.default_rng(rank)
    found = {}
    for place, base in enumerate(np.geomspace(2e4, 2e7, 30)):
        durations = base * np.exp(rng.normal(0, spread, steps))
        if place % 5 == 0:
            durations[::17] *= 3
        found[f"region_{place:02}"] = durations
    return snapshot(found, rank)


@given(worlds)
def test_what_is_merged_is_what_all_times_together_are(world):
    """Counts, totals, extremes and histograms of any ranks are exact; the variance is right to seven digits."""
    snapshots = [snapshot(regions, rank) for rank, regions in enumerate(world)]
    gathered = gathered_of(snapshots)
    expected = {name: [d for regions in world for d in regions.get(name, [])] for regions in world for name in regions}
    assert {name for name, found in expected.items() if found} == {one.name for one in gathered}
    assert ((), None, {}) == (gathered.missing, gathered.fault, gathered.unreadable)
    for one in gathered:
        alone = region(one.name, expected[one.name]).distribution
        own = one.distribution
        assert (alone.count, alone.total_ns, alone.min_ns, alone.max_ns, alone.bins) == (
            own.count, own.total_ns, own.min_ns, own.max_ns, own.bins,
        )  # fmt: skip
        parts = [r.distribution for s in snapshots for r in s if r.name == one.name and r.distribution is not None]
        assert merge(parts).m2_ns2 == pytest.approx(own.m2_ns2, rel=1e-6, abs=1e-6 * own.count)


@given(st.dictionaries(st.integers(0, BIN_COUNT - 1), st.integers(1, 2**40), min_size=1, max_size=80))
def test_bins_arrive_as_they_were_sent(counts):
    """Whatever the bins and counts, those that are read are those that were packed."""
    one = region("IO", [1])
    bins = sorted(counts)
    first_bin, dense_counts = dense(np.array(bins), np.array([counts[bin_] for bin_ in bins]))
    own = replace(one.distribution, first_bin=first_bin, counts=dense_counts)
    message = pack_snapshot(Snapshot((replace(one, distribution=own),), 0.0, "h", 1), limit_bytes=10**6)
    (found,) = unpack_snapshot(message)["regions"]
    assert sorted(counts) == found["bins"]
    assert [counts[bin_] for bin_ in sorted(counts)] == found["counts"]


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("steps", [100, 3000])
def test_thirty_regions_stay_within_the_limit(steps, spread):
    """However wide the times spread, a message has no more than 8 KB, and its quantiles the error that is said."""
    sent = thirty_regions(steps, spread)
    message = pack_snapshot(sent)
    assert len(message) <= LIMIT_BYTES
    messages = {0: message}
    for one in merge_snapshots(messages, range(1)):
        exact = sent.get(one.name)
        assert exact.stats.count == one.stats.count
        for name in ("median", "p95"):
            assert getattr(one.stats, name) == pytest.approx(getattr(exact.stats, name), rel=one.stats.quantile_error)
            # Its own are sent ready.
            assert getattr(exact.stats, name) == pytest.approx(one.over_ranks[name].max, rel=1e-6)


def test_coarser_bins_merge_with_finer_ones():
    """A rank that had to merge its bins costs the report their error, no time, and the others nothing."""
    fine, coarse = thirty_regions(500, 0.3, 0), thirty_regions(500, 0.3, 1)
    messages = {0: pack_snapshot(fine, limit_bytes=10**6), 1: pack_snapshot(coarse, limit_bytes=1)}
    for one in merge_snapshots(messages, range(2)):
        both = merge([fine.get(one.name).distribution, coarse.get(one.name).distribution])
        assert bin_error(COARSEST) == one.stats.quantile_error
        assert both.count == one.distribution.count
        each = [
            np.bincount(bins >> COARSEST, counts) for bins, counts in (both.used_bins(), one.distribution.used_bins())
        ]
        assert each[0].tolist() == each[1].tolist()


def test_over_ranks_names_the_extremes():
    """Each rank's own median and mean, which rank has the least and the most, and the smallest of equals."""
    gathered = gathered_of(
        [snapshot({"IO": [d * MS, d * MS, 4 * d * MS]}, rank) for rank, d in enumerate([3, 1, 5, 5])]
    )
    io = gathered.get("IO")
    median = io.over_ranks["median"]
    assert (4, 1, 2) == (median.ranks, median.min_rank, median.max_rank)
    assert [1e-3, 5e-3, 3.5e-3, 4e-3] == pytest.approx([median.min, median.max, median.mean, median.median])
    assert {0: 6e-3, 1: 2e-3, 2: 10e-3, 3: 10e-3} == pytest.approx(gathered.of_ranks("IO", "mean"))
    assert ("host0", "host0", "host1", "host1") == gathered.hosts
    assert 3.0 == gathered.spread_s


def test_ranks_with_other_regions_and_missing_ones():
    """The union of regions; a rank without a region is not counted in it, and one that sent nothing is missing."""
    messages = {0: pack_snapshot(snapshot({"IO": [MS]}, 0)), 2: pack_snapshot(snapshot({"FORWARD": [MS], "X": []}, 2))}
    gathered = merge_snapshots(messages, range(4))
    assert [("FORWARD", 1), ("IO", 1)] == [(one.name, one.ranks) for one in gathered]
    assert ((0, 2), (1, 3)) == (gathered.ranks, gathered.missing)
    assert {2: pytest.approx(1e-3)} == gathered.of_ranks("FORWARD")
    assert () == merge_snapshots(messages, range(4), fault="no answer").missing


def test_counters_are_added():
    """What is not in the statistics of the ranks is counted in the report."""
    messages = {}
    for rank in range(3):
        counted = region("IO", [MS], failed=rank, running=1)
        messages[rank] = pack_snapshot(Snapshot((counted,), 0.0, "h", 1))
    counters = merge_snapshots(messages, range(3)).get("IO").counters
    assert {"failed": 3, "running": 3} == counters
    assert set(counters) <= set(COUNTERS)


def test_totals_beyond_64_bits():
    """Ten times 2**62 ns is more than a 64-bit number holds, and is what the sum says."""
    gathered = gathered_of([snapshot({"IO": [2**62]}, rank) for rank in range(10)])
    assert 10 * 2**62 == gathered.get("IO").distribution.total_ns


def test_a_message_that_cannot_be_read_spoils_none_of_the_others():
    """Cut off, of another kind, of a later version: the rank is named with the reason, and is missing."""
    good = pack_snapshot(snapshot({"IO": [MS, 2 * MS]}, 0))
    later = zlib.compress(json.dumps({"version": 9}).encode())
    messages = {0: good, 1: good[:-7], 2: b"nonsense", 3: later, 4: zlib.compress(b"[]"), 5: b""}
    gathered = merge_snapshots(messages, range(6))
    assert (0,) == gathered.ranks
    assert (1, 2, 3, 4, 5) == gathered.missing
    assert [1, 2, 3, 4, 5] == list(gathered.unreadable)
    assert "Reading a rank's snapshot: Error" in gathered.unreadable[1]
    assert "every rank must run the same" in gathered.unreadable[3]


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_no_damage_reaches_the_report(where, value):
    """A changed byte makes a message unreadable, or changes nothing."""
    good = pack_snapshot(snapshot({"IO": [MS, 2 * MS, 3 * MS], "FORWARD": [5 * MS]}, 0))
    changed = bytearray(good)
    changed[where % len(good)] = value
    messages = {0: bytes(changed)}
    gathered = merge_snapshots(messages, range(1))
    assert 1 == len(gathered.ranks) + len(gathered.unreadable)
    if gathered.ranks:
        assert 3 == gathered.get("IO").stats.count
