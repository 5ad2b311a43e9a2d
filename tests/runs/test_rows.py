"""Rows are merged, given their steps and packed: the same bytes by C and by numpy, and what they say is so."""

from __future__ import annotations

import bisect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep500_timing.runs import _rows, _steps
from deep500_timing.runs._columns import unpack
from deep500_timing.runs._kinds import NO_STEP, TABLES
from deep500_timing.runs._rows import Part, StepTable
from deep500_timing.runs._steps import StepCounter

INT64 = st.integers(-(2**63), 2**63 - 1)
TIMES = st.one_of(INT64, st.integers(-50, 50))
COLUMNS = TABLES["intervals"][1]


def ints(values):
    """Numbers as numpy holds them here."""
    return np.array(values, dtype=np.int64)


@st.composite
def parts(draw):
    """What a few stores gave: in order or not, with steps of their own or without."""
    found = []
    for number in range(draw(st.integers(0, 5))):
        pairs = draw(st.lists(st.tuples(TIMES, TIMES), max_size=20))
        if draw(st.booleans()):
            pairs.sort()
        steps = ints([draw(INT64) for _ in pairs]) if draw(st.booleans()) else None
        found.append(Part(ints(pairs).reshape(-1, 2), steps, number % 3, draw(INT64), draw(st.sampled_from([1, 300]))))
    return found


@st.composite
def tables(draw):
    """Marks or counted BATCHes, with steps in any order."""
    times = sorted(draw(st.lists(TIMES, max_size=20)))
    steps = ints([draw(INT64) for _ in times]) if draw(st.booleans()) else None
    return StepTable(ints(times), steps, draw(st.integers(0, 1000)), draw(st.sampled_from([NO_STEP, 7])))


def step_of(table, start, end):
    """The step of one interval, as the format's page says it."""
    times = table.times_ns.tolist()
    if table.steps is None:
        before = bisect.bisect_left(times, end)
        return table.forgotten + before if before else table.earliest
    before = max(bisect.bisect_left(times, end), bisect.bisect_right(times, start))
    return int(table.steps[before - 1]) if before else table.earliest


@settings(deadline=None)
@given(parts(), tables(), st.integers(1, 40))
def test_both_ways_give_the_same_bytes(parts, table, length):
    """Whatever was recorded, in however large frames: C writes what numpy writes, byte for byte."""
    assert _rows._payloads_by_numpy(parts, table, length) == _rows.payloads_of(parts, table, length)


@settings(deadline=None)
@given(parts(), tables(), st.integers(1, 40))
def test_every_row_is_there_in_order(parts, table, length):
    """The frames hold each interval once, by start, those that began together in the order in which they came."""
    expected = []
    for part in parts:
        steps = [None] * len(part.pairs) if part.steps is None else part.steps.tolist()
        for (start, end), step in zip(part.pairs.tolist(), steps, strict=True):
            step = step_of(table, start, end) if step is None else step
            duration = (end - start + 2**63) % 2**64 - 2**63
            expected.append((start, duration, step, part.region, part.thread, part.device))
    expected.sort(key=lambda row: row[0])
    payloads = _rows.payloads_of(parts, table, length)
    got = []
    for rows, payload in payloads:
        arrays = unpack(COLUMNS, rows, payload)
        got += zip(*(arrays[column.name].tolist() for column in COLUMNS), strict=True)
    assert expected == got
    whole, rest = divmod(len(expected), length)
    assert [length] * whole + [rest] * (rest > 0) == [rows for rows, _ in payloads]


@settings(deadline=None)
@given(st.lists(st.tuples(TIMES, TIMES), max_size=20), TIMES, st.integers(0, 2**63))
def test_both_ways_find_the_same_cut(pairs, cut, future):
    """The first interval that ended after the cut, and not in a future that the clock cannot know."""
    data = ints(pairs).tobytes()
    last = min(cut + future, 2**63 - 1)
    late = [place for place, (_, end) in enumerate(pairs) if cut < end <= last]
    expected = late[0] if late else len(pairs)
    assert expected == _rows.first_late(data, cut, cut + future)
    assert expected == _rows._first_late_by_numpy(data, cut, last)


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=40))
def test_the_newest_ends_are_remembered(counts):
    """However many BATCHes end at a time: the last of them are known, in order, and all are counted."""
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_steps, "_REMEMBERED", 5)
        steps = StepCounter(3)
        for count in counts:
            fresh = [10 * (len(ends) + number) for number in range(count)]
            steps.add_batches(ints(fresh[::-1]))
            ends += fresh
            assert (ends[-5:], 3 + len(ends)) == (steps.table.times_ns.tolist(), steps.batches)


def test_many_rows():
    """As many as a busy second gives, of four regions inside a fifth: both ways agree, runs and steps included."""
    rng = np.random.default_rng(0)
    ends = 10**15 + np.cumsum(rng.integers(1, 2000, 100_000))
    pairs = np.stack((ends - rng.integers(0, 3000, len(ends)), ends), axis=1)
    found = [Part(np.ascontiguousarray(pairs[number::5]), None, number + 1, 0, 6) for number in range(5)]
    table = StepTable(np.ascontiguousarray(ends[4::5]), None, 12, 12)
    assert _rows._payloads_by_numpy(found, table, 32_768) == _rows.payloads_of(found, table, 32_768)


@pytest.mark.skipif(not _rows.COMPILED, reason="C alone reads memory that it must not go beyond")
@pytest.mark.parametrize(
    ("part", "table"),
    [
        (Part(ints([[1, 2]]), ints([1, 2]), 1, 0, 2), StepTable(ints([]), None, 0, 0)),
        (Part(ints([[1, 2]]), None, 1, 0, 2), StepTable(ints([1, 2]), ints([1]), 0, 0)),
        (Part(ints([[1, 2], [3, 4]])[::-1], None, 1, 0, 2), StepTable(ints([]), None, 0, 0)),
    ],
)
def test_lengths_that_do_not_fit(part, table):
    """Steps that are not as many as what they are of, and numbers that do not lie side by side, are refused."""
    with pytest.raises((ValueError, BufferError)):
        _rows.payloads_of([part], table, 10)
