"""Nesting is found as one would find it by looking at every pair."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deep500_timing._summary.nesting import (
    ENDLESS,
    Paths,
    covered_by_siblings,
    distinct,
    order_for_nesting,
    parents_of,
    path_text,
    split_path,
)
from deep500_timing.runs._format import NO_STEP


def text_of(paths, number, names):
    """The text of a path of :class:`Paths`."""
    return path_text([names[region] for region in paths.regions_of(number)])


DEEP = [(place, 24 - 2 * place, 0) for place in range(12)]
"""Each in the one before: more depths than are found by a pass each."""
STAIRS = [(place, 3, 0) for place in range(12)]
"""Each overlaps the next ones."""
INTERVALS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8), st.integers(0, 2)), min_size=1, max_size=14)


@settings(deadline=None, max_examples=300)
@given(INTERVALS)
@example(DEEP)
@example([*DEEP, *STAIRS])
@example([*STAIRS, (0, 40, 1), *((start + 20, length, 2) for start, length, _ in STAIRS)])
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
        # Of the ones that lie inside another candidate, the outer one tells.
        assert bool([before for before in overlapped if before > parents[place]]) == overlaps[place]


@settings(deadline=None, max_examples=300)
@given(INTERVALS)
def test_what_siblings_cover_together(rows):
    """Without the overlap with earlier siblings, children of one region add up to the time that they cover together."""
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
    """Marks at one moment lie next to each other, however many, and in the region open then."""
    starts, ends = np.array([0, 7, 7, 7, 9]), np.array([9, 7, 7, 7, 9])
    assert [-1, 0, 0, 0, -1] == parents_of(starts, ends)[0].tolist()


def test_order_of_what_begins_together():
    """What begins together is ordered by length, then by the region that was known first."""
    starts, ends = np.array([5, 5, 5, 1]), np.array([6, 9, 6, 2])
    assert [3, 1, 2, 0] == order_for_nesting(starts, ends, np.array([2, 0, 1, 0])).tolist()


def nest(paths, starts, ends, regions, threads, on_host, hosts):
    """Nest rows; an end of ENDLESS is an open region."""
    columns = {
        "start_ns": np.array(starts, dtype=np.int64),
        "dur_ns": np.array(ends, dtype=np.int64) - np.array(starts, dtype=np.int64),
        "region": np.array(regions, dtype=np.int64),
        "thread": np.array(threads, dtype=np.int64),
        "on_host": np.array(on_host, dtype=bool),
        "host_start_ns": np.array(hosts, dtype=np.int64),
    }
    is_open = np.array(ends, dtype=np.int64) == ENDLESS
    ended = {name: values[~is_open] for name, values in columns.items()}
    begun = {name: columns[name][is_open] for name in ("start_ns", "region", "thread")}
    return paths.nest(ended, begun)


def test_paths_of_threads_and_devices():
    """Threads nest separately, open regions enclose, and a device interval has the path of its host interval."""
    names = ["FIT", "BATCH", "a/b", "IO"]
    paths = Paths()
    nested = nest(
        paths,
        [0, 10, 12, 15, 30, 11],
        [ENDLESS, 20, 18, 900, 31, 13],
        [0, 1, 2, 2, 3, 3],
        [0, 0, 0, 0, 0, 1],
        [True, True, True, False, True, True],
        [NO_STEP, NO_STEP, NO_STEP, 12, NO_STEP, NO_STEP],
    )
    texts = [text_of(paths, number, names) for number in nested.paths.tolist()]
    assert ["FIT/BATCH", "FIT/BATCH/a\\/b", "FIT/BATCH/a\\/b", "FIT/IO", "IO"] == texts
    assert ["FIT", "BATCH", "a/b"] == split_path(texts[1])
    # The device interval arrives one chunk later; the region has other paths meanwhile.
    late = nest(paths, [950, 40], [960, 41], [2, 2], [0, 0], [False, True], [12, NO_STEP])
    assert nested.paths[1] == late.paths[0]
    assert "a\\/b" == text_of(paths, int(late.paths[1]), names)


CHUNK = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=8
)


@settings(deadline=None, max_examples=200)
@given(CHUNK, CHUNK)
def test_chunks_of_a_log_nest_as_one_by_one(first, second):
    """Threads nest separately. A device interval has its host interval's path, else the newest, else the first."""
    paths, last, before = Paths(), {}, []
    for chunk, at in ((first, 0), (second, 100)):
        # By start, as in a log.
        columns = np.array(sorted(chunk, key=lambda row: (row[0], -row[1], row[2])), dtype=np.int64).reshape(-1, 5)
        columns[:, 0] += at
        starts, ends, regions, threads = columns[:, 0], columns[:, 0] + columns[:, 1], columns[:, 2], columns[:, 3]
        on_host = columns[:, 4].astype(bool)
        nested = nest(paths, starts, ends, regions, threads, on_host, starts)
        texts = [text_of(paths, number, ["a", "b", "c"]) for number in nested.paths.tolist()]
        now = []
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
            now += [(thread, int(regions[row]), int(starts[row]), texts[row]) for row in rows]
        for row in np.flatnonzero(~on_host).tolist():
            own = [one for one in before + now if one[:2] == (threads[row], regions[row])]
            there = {one[3] for one in own if one[2] == starts[row]}
            known = last.get((int(threads[row]), int(regions[row])))
            assert texts[row] in (there or {known or (own[0][3] if own else "abc"[regions[row]])})
        last |= {(thread, region): text for thread, region, _, text in now}
        before = now


@settings(deadline=None, max_examples=200)
@given(INTERVALS, st.lists(st.integers(0, 14), max_size=3))
@example([*DEEP, *STAIRS], [9])
@example(STAIRS, [2, 2, 5])
def test_parts_of_a_flush_nest_as_the_whole(rows, cuts):
    """What is sorted by start may be cut between two starts: what encloses or overlaps later rows is known there."""
    rows = np.array(sorted(rows, key=lambda row: row[0]), dtype=np.int64)
    whole, paths = Paths(), Paths()
    parts = np.split(rows, sorted(cut for cut in cuts if cut < len(rows) and rows[cut, 0] > rows[cut - 1, 0]))

    def nested_in(among, of):
        count = len(of)
        return nest(among, of[:, 0], of[:, 0] + of[:, 1], of[:, 2], [0] * count, [True] * count, [NO_STEP] * count)

    expected = nested_in(whole, rows)
    found = [nested_in(paths, part) for part in parts]
    for name in ("overlaps", "covered"):
        assert getattr(expected, name).tolist() == [
            value for nested in found for value in getattr(nested, name).tolist()
        ]
    assert [whole.regions_of(number) for number in expected.paths.tolist()] == [
        paths.regions_of(number) for nested in found for number in nested.paths.tolist()
    ]


def test_names_that_are_far_apart():
    """Numbers beyond a table of counts are distinguished as well."""
    for numbers in ([3, 1, 3], [3, 1 << 22, 3], [(1 << 22) - 1, 0], [1 << 40, 5, 1 << 40], []):
        assert sorted(set(numbers)) == distinct(np.array(numbers, dtype=np.int64))


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_any_path_comes_apart_again(names):
    """Names of any text, slashes and backslashes among them, come back from a path."""
    paths, number = Paths(), -1
    for region in range(len(names)):
        number = paths.number_of(number, region)
    assert names == split_path(text_of(paths, number, names))
