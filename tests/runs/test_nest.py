"""What lies inside what is found as one would find it by looking at every pair."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deep500_timing._summary.nesting import (
    ENDLESS,
    Paths,
    covered_by_siblings,
    distinct,
    order_for_nesting,
    parents_of,
    split_path,
)

INTERVALS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8), st.integers(0, 2)), min_size=1, max_size=14)


@settings(deadline=None, max_examples=300)
@given(INTERVALS)
def test_parents_are_the_smallest_that_enclose(rows):
    """For any intervals, overlapping and equal ones among them: the parent is the nearest before that encloses."""
    starts = np.array([start for start, _, _ in rows])
    ends = starts + np.array([length for _, length, _ in rows])
    regions = np.array([region for _, _, region in rows])
    order = order_for_nesting(starts, ends, regions)
    starts, ends = starts[order], ends[order]
    parents, overlaps = parents_of(starts, ends)
    for place in range(len(rows)):
        enclosing = [before for before in range(place) if ends[before] >= ends[place] and starts[place] < ends[before]]
        assert (enclosing[-1] if enclosing else -1) == parents[place]
        overlapped = [before for before in range(place) if before not in enclosing and ends[before] > starts[place]]
        # Of those that lie inside another candidate, the outer one tells.
        assert bool([before for before in overlapped if before > parents[place]]) == overlaps[place]


@settings(deadline=None, max_examples=300)
@given(INTERVALS)
def test_what_siblings_cover_together(rows):
    """Without what lies within the siblings before them, those inside one region add up to what they cover together."""
    starts = np.array([start for start, _, _ in rows])
    ends = starts + np.array([length for _, length, _ in rows])
    order = order_for_nesting(starts, ends, np.array([region for _, _, region in rows]))
    starts, ends = starts[order], ends[order]
    parents, overlaps = parents_of(starts, ends)
    covered = covered_by_siblings(starts, ends, parents, overlaps)
    for parent in set(parents.tolist()):
        inside = parents == parent
        together = {moment for row in np.flatnonzero(inside) for moment in range(starts[row], ends[row])}
        assert len(together) == int((ends - starts - covered)[inside].sum())
    assert not covered[~overlaps].any()


def test_what_took_no_time_holds_nothing():
    """Marks at one moment lie beside each other, however many, and in what was open then."""
    starts, ends = np.array([0, 7, 7, 7, 9]), np.array([9, 7, 7, 7, 9])
    assert [-1, 0, 0, 0, -1] == parents_of(starts, ends)[0].tolist()


def test_order_of_what_begins_together():
    """What begins together is ordered by length, then by the region that was known first."""
    starts, ends = np.array([5, 5, 5, 1]), np.array([6, 9, 6, 2])
    assert [3, 1, 2, 0] == order_for_nesting(starts, ends, np.array([2, 0, 1, 0])).tolist()


def test_paths_of_threads_and_devices():
    """Threads nest by themselves, open regions enclose, and a device's interval is where its region is."""
    names = ["FIT", "BATCH", "a/b", "IO"]
    starts = np.array([0, 10, 12, 12, 30, 11])
    ends = np.array([ENDLESS, 20, 18, 900, 31, 13])
    regions = np.array([0, 1, 2, 2, 3, 3])
    threads = np.array([0, 0, 0, 0, 0, 1])
    on_host = np.array([True, True, True, False, True, True])
    paths = Paths()
    nested = paths.nest(starts, ends, regions, threads, on_host)
    texts = [paths.text_of(number, names) for number in nested.paths.tolist()]
    assert ["FIT", "FIT/BATCH", "FIT/BATCH/a\\/b", "FIT/BATCH/a\\/b", "FIT/IO", "IO"] == texts
    assert ["FIT", "BATCH", "a/b"] == split_path(texts[2])
    # A device's interval that comes in a later chunk.
    late = paths.nest(*(np.array([value]) for value in (12, 950, 2, 0)), np.array([False]))
    assert nested.paths[2] == late.paths[0]


CHUNK = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=8
)


@settings(deadline=None, max_examples=200)
@given(CHUNK, CHUNK)
def test_chunks_of_a_log_nest_as_one_by_one(first, second):
    """Each thread by itself; a device's interval where its region was at that start, or was last, or is first."""
    paths, last = Paths(), {}
    for chunk in (first, second):
        columns = np.array(chunk, dtype=np.int64).reshape(-1, 5)
        starts, ends, regions, threads = columns[:, 0], columns[:, 0] + columns[:, 1], columns[:, 2], columns[:, 3]
        on_host = columns[:, 4].astype(bool)
        nested = paths.nest(starts, ends, regions, threads, on_host)
        texts = [paths.text_of(number, ["a", "b", "c"]) for number in nested.paths.tolist()]
        for thread in (0, 1):
            rows = [int(row) for row in np.flatnonzero((threads == thread) & on_host)]
            rows = sorted(rows, key=lambda row: (starts[row], -ends[row], regions[row], row))
            parents, overlaps = parents_of(starts[rows], ends[rows])
            covered = covered_by_siblings(starts[rows], ends[rows], parents, overlaps)
            assert (overlaps.tolist(), covered.tolist()) == (
                nested.overlaps[rows].tolist(),
                nested.covered[rows].tolist(),
            )
            for row, parent in zip(rows, parents.tolist(), strict=True):
                above = "" if parent < 0 else texts[rows[parent]] + "/"
                assert above + "abc"[regions[row]] == texts[row]
            for row in np.flatnonzero((threads == thread) & ~on_host).tolist():
                own = [other for other in rows if regions[other] == regions[row]]
                there = [texts[other] for other in own if starts[other] == starts[row]]
                known = last.get((thread, regions[row]))
                expected = there[-1:] or [known or (texts[own[0]] if own else "abc"[regions[row]])]
                assert expected == [texts[row]]
            last |= {(thread, int(regions[row])): texts[row] for row in rows}


def test_names_that_are_far_apart():
    """Numbers beyond what a table of counts would hold are told apart as well."""
    for numbers in ([3, 1, 3], [3, 1 << 22, 3], [(1 << 22) - 1, 0], [1 << 40, 5, 1 << 40], []):
        assert sorted(set(numbers)) == distinct(np.array(numbers, dtype=np.int64))


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_any_path_comes_apart_again(names):
    """Names of any text, slashes and backslashes among them, come back from a path."""
    paths, number = Paths(), -1
    for region in range(len(names)):
        number = paths.number_of(number, region)
    assert names == split_path(paths.text_of(number, names))
