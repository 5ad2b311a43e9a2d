"""Columns and frames come back as they went in, with any content; damaged ones do not come back at all."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep500_timing.runs._format import HEAD, MAGIC, Column, Damage, Frame, encode, pack, read_frames, unpack

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=64)


@settings(deadline=None)
@given(st.lists(st.tuples(INT64, INT64, FLOATS, st.integers(0, 1000)), min_size=1, max_size=50))
def test_columns_come_back(rows):
    """Any int64 and any double, the extremes, NaN and minus zero among them, comes back to the bit, inside its span."""
    columns = [Column("t", "time"), Column("i", "int"), Column("f", "float"), Column("n", "name")]
    arrays = {
        name: np.array([row[place] for row in rows], dtype=np.float64 if name == "f" else np.int64)
        for place, name in enumerate("tifn")
    }
    spans = {}
    got = unpack(columns, len(rows), pack(columns, arrays), spans)
    assert {name: values.tobytes() for name, values in arrays.items()} == {
        name: values.tobytes() for name, values in got.items()
    }
    for low, high, values in ((*spans[name], got[name]) for name in "tin"):  # Beyond 64 bits a span leaves a doubt.
        assert low < -(2**63) or high >= 2**63 or (low <= values.min() and values.max() <= high)


def test_what_does_not_vary_costs_nothing():
    """A column of one value over and over is nine bytes, however many rows there are."""
    assert 9 == len(pack([Column("a", "int")], {"a": np.full(10_000, 2**62)}))


@pytest.mark.parametrize("wrong", [b"", b"\0" * 8, b"\0" * 8 + b"\x09", b"\0" * 8 + b"\x01", b"\0" * 10])
def test_a_payload_that_is_not_so_many_rows(wrong):
    """A payload that does not hold what its frame says is an error, not a number."""
    with pytest.raises(ValueError):
        unpack([Column("a", "int")], 3, wrong)


def _file():
    payloads = [bytes([number]) * (number * 37) + random.Random(number).randbytes(40) for number in range(12)]
    return payloads, b"".join(encode(16, number, 1, payload) for number, payload in enumerate(payloads))


def test_frames_come_back():
    """Frames come back in order, with their numbers."""
    payloads, data = _file()
    got = list(read_frames(data))
    assert payloads == [frame.payload for frame in got]
    assert list(range(12)) == [frame.sequence for frame in got]


def test_any_flipped_bit_costs_one_frame():
    """Each single bit of a file, flipped: the frame it is in is gone, every other one is read as it was."""
    payloads, data = _file()
    starts = [frame.offset for frame in read_frames(data)]
    for place in range(len(data)):
        broken = bytearray(data)
        broken[place] ^= 1 << place % 8
        got = [frame for frame in read_frames(bytes(broken)) if isinstance(frame, Frame)]
        hit = max(number for number, start in enumerate(starts) if start <= place)
        assert payloads[:hit] + payloads[hit + 1 :] == [frame.payload for frame in got]


def test_any_cut_costs_the_frame_that_is_cut():
    """A file cut short at each place: every frame before the cut is read, the rest is named."""
    payloads, data = _file()
    ends = [*[frame.offset for frame in read_frames(data)][1:], len(data)]
    for cut in range(len(data)):
        got = list(read_frames(data[:cut]))
        wholes = sum(end <= cut for end in ends)
        assert payloads[:wholes] == [frame.payload for frame in got if isinstance(frame, Frame)]
        torn = [found for found in got if isinstance(found, Damage)]
        begun = [0, *ends][wholes]
        assert ([] if begun == cut else [Damage(begun, cut - begun)]) == torn


def test_a_length_beyond_reason():
    """A head that claims more than any frame holds is no frame."""
    head = HEAD.pack(MAGIC, 16, 0, 0, 1, 2**32 - 1, 0)
    assert [Damage(0, len(head))] == list(read_frames(head))


def test_what_is_not_a_log_at_all():
    """A foreign file is one stretch of damage."""
    assert [Damage(0, 9)] == list(read_frames(b"PAR1 or so"[:9]))
    assert [] == list(read_frames(b""))
