from __future__ import annotations

import math
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing._summary.text import (
    align_units,
    deepspeed_gb_in_throughput,
    deepspeed_rate,
    fit_encoding,
    format_bytes,
    format_ms,
    format_number,
    format_share,
    format_time,
    format_utilization,
    lines_of,
    pad,
    safe_name,
    shorten,
    width_of,
    wrap,
)

SCALES = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "h": 3600.0}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1e-9, "1.000 ns"),
        (999.9e-9, "999.9 ns"),
        (999.96e-9, "1.000 µs"),
        (9.9996e-6, "10.00 µs"),
        (0.0123456, "12.35 ms"),
        (0.9999, "999.9 ms"),
        (0.99996, "1.000 s"),
        (59.994, "59.99 s"),
        (9999.0, "9999 s"),
        (9999.6, "2.778 h"),
        (36_000_000.0, "10000 h"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_a_time_has_four_digits_and_its_unit(seconds, text):
    """A time is shown in the unit that suits it, and an unknown one as a dash."""
    assert text == format_time(seconds)


@given(st.floats(min_value=1e-9, max_value=3e7))
def test_a_shown_time_is_the_time(seconds):
    """A shown time differs from the time by half of its fourth digit at most, and takes no more room than that."""
    number, unit = format_time(seconds).split(" ")

    assert float(number) * SCALES[unit] == pytest.approx(seconds, rel=5.01e-4)
    assert len(number.replace(".", "")) == 4
    assert len(number) <= 5


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2**20 - 1, "1.00 MiB"), (3 * 2**29, "1.50 GiB")],
)
def test_an_amount_of_memory_has_its_unit(number, text):
    """Bytes are shown in the unit that suits them."""
    assert text == format_bytes(number)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("data load", "data load"),
        ("a\nb\tc\x1b[31m\x00\x85", "a\\nb\\tc\\x1b[31m\\x00\\x85"),
        ("line\u2028sep", "line\\u2028sep"),
        ("\ud800", "\\ud800"),
        ("a\u202eb", "a\\u202eb"),
        ("👩\u200d🔬 é", "👩\u200d🔬 é"),
    ],
)
def test_a_name_cannot_break_its_line(name, shown):
    """Control characters, line ends, lone surrogates and changes of direction are shown as escapes; scripts are not."""
    assert shown == safe_name(name)


@given(st.text(alphabet=st.characters(codec=None)))
def test_a_shown_name_is_one_printable_line(name):
    """For any name, it is shown on one line that can be written as UTF-8."""
    shown = safe_name(name)

    assert len(shown.splitlines()) <= 1
    assert not any(unicodedata.category(character) in {"Cc", "Cs"} for character in shown)
    assert shown.encode("utf-8").decode("utf-8") == shown


WIDTHS = [("abc", 3), ("データ", 6), ("é", 1), ("e\u0301", 1), ("🚀", 2), ("", 0)]


@pytest.mark.parametrize(("text", "columns"), WIDTHS)
def test_width_with_rich(text, columns):
    """Wide characters count twice and combining ones not at all."""
    pytest.importorskip("rich")

    assert columns == width_of(text)


@pytest.mark.parametrize(("text", "columns"), WIDTHS)
def test_width_without_rich(text, columns, monkeypatch):
    """So they do by the character database alone."""
    monkeypatch.setitem(sys.modules, "rich.cells", None)

    assert columns == width_of(text)


@given(st.text(max_size=20), st.integers(0, 60), st.booleans())
def test_padding_fills_up_to_the_width(text, width, right):
    """A padded text is as wide as asked, unless it was wider already."""
    assert max(width, width_of(text)) == width_of(pad(text, width, right=right))


def test_wrapping_breaks_between_words():
    """Lines are no wider than asked where words allow it, and the later ones are indented."""
    assert "a bb\n  ccc\n  dddddddd\n  e" == wrap("a bb ccc dddddddd e", 5, 2)
    assert "a bbb\n  c" == wrap("a bbb c", 5, 2)


def test_units_of_one_letter_take_the_room_of_two():
    """Only in columns of numbers that have a unit of two letters next to them, so that their digits line up."""
    assert ["1 s ", "40 ms", ""] == align_units(("1 s", "40 ms", ""))
    assert ["3 s ", "6 µs"] == align_units(("3 s", "6 µs"))
    assert ["2 h", "5 h"] == align_units(("2 h", "5 h"))


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        (None, "1 µs – ─ ü"),
        ("utf-8", "1 µs – ─ ü"),
        ("no-such-encoding", "1 µs – ─ ü"),
        ("ascii", "1 us - - \\xfc"),
        ("latin-1", "1 us - - ü"),
    ],
)
def test_a_stream_gets_what_it_can_encode(encoding, text):
    """Signs that an encoding lacks are replaced by plain ones, other characters by their escape."""
    assert text == fit_encoding("1 µs – ─ ü", encoding)


def test_what_is_unknown_is_one_sign_in_tables_and_one_word_in_logs():
    """A reader learns one sign for an unknown value, for any amount."""
    for form in (format_bytes, format_ms, format_number, format_share, format_time):
        assert "–" == form(None) == form(math.nan)
    assert "n/a" == deepspeed_gb_in_throughput(None) == deepspeed_rate(None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (lambda: format_bytes(1_610_612_736), "1.50 GiB"),
        (lambda: format_bytes(1536.5), "1.50 KiB"),
        (lambda: format_bytes(2**40), "1.00 TiB"),
        (lambda: format_bytes(1023), "1023 B"),
        (lambda: deepspeed_gb_in_throughput(1_610_612_736), "1.5GB"),
        (lambda: deepspeed_rate(12.3456789), "12.3456789"),
        (lambda: format_ms(0.0123456, mark="<="), "<=12.346"),
        (lambda: format_number(123.456), "123"),
        (lambda: format_share(0.456), "46 %"),
        (lambda: format_share(0.0049), "<1 %"),
        (lambda: format_utilization(0.3816), "38.2 %"),
        (lambda: format_utilization(0.00049), "<0.1 %"),
        (lambda: format_utilization(0.0), "0.0 %"),
        (lambda: format_share(0.0), "0 %"),
    ],
)
def test_amounts(text, shown):
    """Each kind of amount has one form, and what must look like DeepSpeed's has its own."""
    assert shown == text()


def test_rows_of_a_table_stand_below_each_other():
    """Names are pushed to the left and numbers to the right, by the width that a terminal gives them."""
    assert ["name  count", "läs       1", "漢       12"] == lines_of(
        [("name", "count"), ("läs", "1"), ("漢", "12")], left=1
    )


@given(st.text(max_size=60), st.integers(1, 40))
def test_a_long_name_loses_its_middle(name, width):
    """It fits, keeps both of its ends, and is left alone where it fits as it is."""
    shown = shorten(name, width)
    assert width_of(shown) <= max(width, 1)
    head, mark, tail = shown.partition("…")
    assert shown == name or (mark == "…" and name.startswith(head) and name.endswith(tail))
    assert "encod…er.31" == shorten("encoder.layer.31", 11)
