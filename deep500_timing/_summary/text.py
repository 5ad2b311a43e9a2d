"""Times and names as a reader wants to see them."""

from __future__ import annotations

import math
import unicodedata

UNKNOWN = "–"
_UNITS = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_HOUR_S = 3600.0
_DIGITS = 4
# They let whoever chooses a region's name reorder what follows it on the line.
_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def format_time(seconds: float | None) -> str:
    """A time with its unit and four significant digits, such as ``"12.34 ms"``; from 10 000 s on in hours."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    scale, unit = _unit_of(seconds)
    return f"{_digits(seconds / scale, _decimals(seconds / scale))} {unit}"


def format_interval(interval: tuple[float, float] | None) -> str:
    """Two times with one unit, such as ``"[12.30, 12.38] ms"``."""
    if interval is None or not all(map(math.isfinite, interval)):
        return UNKNOWN
    low, high = interval
    scale, unit = _unit_of(high)
    decimals = _decimals(high / scale)
    return f"[{_digits(low / scale, decimals)}, {_digits(high / scale, decimals)}] {unit}"


def format_bytes(number: int) -> str:
    """An amount of memory with its unit, such as ``"1.50 GiB"``."""
    for scale, unit in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        # What rounding would carry to 1024 of a unit belongs to the next one.
        if number >= scale * 0.9995:
            return f"{number / scale:.2f} {unit}"
    return f"{number} B"


def _unit_of(seconds: float) -> tuple[float, str]:
    size = abs(seconds)
    if size == 0:
        return 1.0, "s"
    # A value that rounding would carry to 1000 of a unit belongs to the next one.
    for scale, unit in _UNITS[:-1]:
        if size / scale < 999.95:
            return scale, unit
    return (1.0, "s") if size < 9999.5 else (_HOUR_S, "h")


def _decimals(value: float) -> int:
    size = abs(value)
    if size == 0:
        return 0
    whole = 1 if size < 1 else math.floor(math.log10(size) + 1e-12) + 1
    decimals = max(_DIGITS - whole, 0)
    # 9.9996 has four digits as 10.00, not as 10.000.
    if decimals and round(size, decimals) >= 10**whole:
        decimals -= 1
    return decimals


def _digits(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}"


def safe_name(name: str) -> str:
    """A region's name with what would break a line, or steer the terminal, shown as its escape."""
    if name.isprintable():
        return name
    return "".join(_escaped(character) for character in name)


def _escaped(character: str) -> str:
    # Joiners and variation selectors (Cf, Mn) are part of how emoji and several scripts are written.
    unsafe = unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"} or character in _DIRECTION
    return character.encode("unicode_escape").decode("ascii") if unsafe else character


def width_of(text: str) -> int:
    """How many columns a text takes up on a terminal."""
    if text.isascii():
        return len(text)
    try:
        from rich.cells import cell_len
    except ImportError:
        return sum(_width_of_character(character) for character in text)
    return cell_len(text)


def _width_of_character(character: str) -> int:
    if unicodedata.category(character) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in {"W", "F"} else 1


def pad(text: str, width: int, *, right: bool = False) -> str:
    """A text filled up with blanks to a width in columns, pushed to the right if ``right`` is true."""
    blanks = " " * (width - width_of(text))
    return blanks + text if right else text + blanks


def wrap(text: str, width: int, indent: int) -> str:
    """Break a sentence between words into lines of a width in columns, the later ones indented."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and width_of(lines[-1]) + 1 + width_of(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return ("\n" + " " * indent).join(lines)


def fit_encoding(text: str, encoding: str | None) -> str:
    """A text as a stream of that encoding can take it: unchanged, or with plain signs for those that it lacks."""
    if encoding is None:
        return text
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        plain = text.translate({ord("µ"): "u", ord("–"): "-", ord("─"): "-", ord("±"): "+-", ord("·"): "|"})
        return plain.encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        pass
    return text
