"""Formats times, sizes, rates and names for all reports.

An unknown value is :data:`UNKNOWN` in a table and :data:`UNKNOWN_IN_LOG` in a logger's line. Functions for lines in
DeepSpeed's format are at the end.
"""

from __future__ import annotations

import math
import unicodedata

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

UNKNOWN = "–"
UNKNOWN_IN_LOG = "n/a"
"""ASCII, because the encoding of a logger's stream is unknown."""
GAP = "  "
_GIB = 1024**3
TIME_UNITS = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (3600.0, "h"))
"""Units of times with their seconds, the shortest first."""
SIZE_UNITS = ((1024**4, "TiB"), (_GIB, "GiB"), (1024**2, "MiB"), (1024, "KiB"))
"""Units of sizes with their bytes, the largest first."""
_PLAIN = str.maketrans(
    {"µ": "u", "–": "-", "─": "-", "±": "+-", "·": "|", "…": "~", "×": "x", "→": ">", "│": "|", "├": "|", "└": "`"}
    | dict(zip("▁▂▃▄▅▆▇█", "_.-~=+*#", strict=True))
)
"""ASCII replacements of the same width, for encodings without these characters."""
# They would reorder the text after a region's name.
_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def format_time(seconds: float | None) -> str:
    """A time with its unit and four significant digits, such as ``"12.34 ms"``; from 10 000 s on in hours."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds == 0:
        return "0 s"
    # A value that rounding would carry to 1000 of a unit belongs to the next one.
    scale, unit = _unit_of(abs(seconds), 999.95)
    value = seconds / scale
    return f"{value:.0f} {unit}" if abs(value) >= 9999.5 else f"{f'{value:#.4g}'.rstrip('.')} {unit}"


def format_bytes(number: float | None) -> str:
    """A size with its unit, such as ``"1.50 GiB"``."""
    if number is None or not math.isfinite(number):
        return UNKNOWN
    for scale, unit in SIZE_UNITS:
        # What rounding would carry to 1024 of a unit belongs to the next one.
        if number >= scale * 0.9995:
            return f"{number / scale:.2f} {unit}"
    return f"{number:.4g} B"


def format_number(value: float | None, *, mark: str = "", digits: int = 3) -> str:
    """A number that has its unit in the heading, such as a bandwidth; ``mark`` stands before it (``"<="``)."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{mark}{value:.{digits}g}"


def format_ms(seconds: float | None, *, mark: str = "") -> str:
    """A time in a column of milliseconds, to the microsecond."""
    return UNKNOWN if seconds is None or not math.isfinite(seconds) else f"{mark}{seconds * 1e3:.3f}"


def format_share(share: float | None) -> str:
    """A share of 1, such as ``"46 %"``; ``"<1 %"`` for less than half a percent."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def format_utilization(ratio: float) -> str:
    """A share of a peak, with a decimal, as ``"38.2 %"``; ``"<0.1 %"`` for less than half of that."""
    return "<0.1 %" if 0 < ratio < 0.0005 else f"{100 * ratio:.1f} %"


def times(values: Sequence[float | None], *, by_largest: bool = False) -> list[str]:
    """A column of times in seconds: three digits, in the column's unit where a value can be read in it."""
    known = [value for value in values if value is not None and math.isfinite(value) and value > 0]
    units = [_unit_of(value, 999.5) for value in ([max(known)] if known and by_largest else known)]
    # The most frequent unit, of two the larger one; and the decimals of its largest value.
    scale, unit = max(dict.fromkeys(units), key=lambda own: (units.count(own), own[0]), default=(1.0, "s"))
    most = 1 if any(9.995 <= value / scale < _limit(unit, 999.5) for value in known) else 2
    return [_cell(value, scale, unit, most) for value in values]


def _cell(value: float | None, scale: float, unit: str, most: int) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return f"0 {unit}"
    if not (0.1 if most > 1 else 0.995) <= value / scale < _limit(unit, 999.5):
        scale, unit = _unit_of(value, 999.5)
        most = 2
    number = value / scale
    decimals = max(min(3 - len(str(int(number))), most), 0)
    return f"{number:.{decimals}f} {unit}"


def _unit_of(seconds: float, limit: float) -> tuple[float, str]:
    return next((own for own in TIME_UNITS if seconds / own[0] < _limit(own[1], limit)), TIME_UNITS[-1])


def _limit(unit: str, limit: float) -> float:
    # Seconds are used up to 10 000, because hours are harder to read.
    return 9999.5 if unit == "s" else limit


def safe_name(name: str) -> str:
    """A region's name with control characters and line breaks as escapes."""
    if name.isprintable():
        return name
    return "".join(_escaped(character) for character in name)


def _escaped(character: str) -> str:
    # Joiners and variation selectors (Cf, Mn) are part of how emoji and several scripts are written.
    unsafe = unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"} or character in _DIRECTION
    return character.encode("unicode_escape").decode("ascii") if unsafe else character


def width_of(text: str) -> int:
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


def shorten(text: str, width: int) -> str:
    """A text of at most ``width`` columns. A longer text loses its middle, because names differ at both ends."""
    if width_of(text) <= width:
        return text
    head, tail, left = "", "", width - 1
    while True:
        # In turn from the front and from the back.
        front = len(head) <= len(tail)
        character = text[len(head)] if front else text[-1 - len(tail)]
        left -= width_of(character)
        if left < 0:
            return f"{head}…{tail}"
        head, tail = (head + character, tail) if front else (head, character + tail)


def pad(text: str, width: int, *, right: bool = False) -> str:
    """A text padded with blanks to a width in columns, on the left if ``right`` is true."""
    blanks = " " * (width - width_of(text))
    return blanks + text if right else text + blanks


def widths_of(rows: Iterable[Sequence[str]]) -> list[int]:
    return [max(map(width_of, column)) for column in zip(*rows, strict=True)]


def lines_of(rows: Sequence[Sequence[str]], *, left: int = 2) -> list[str]:
    """Rows, the heading first, as lines: the first ``left`` columns left-aligned, the others right-aligned."""
    widths = widths_of(rows)
    padded = [[pad(row[at], widths[at], right=at >= left) for at in range(len(widths))] for row in rows]
    return [GAP.join(cells).rstrip() for cells in padded]


def align_units(column: Sequence[str]) -> list[str]:
    """A column in which "s" and "h" are as wide as units of two letters, so that numbers align."""
    has_long = any(cell.endswith(("ms", "µs", "ns")) for cell in column)
    return [cell + " " if has_long and cell.endswith((" s", " h")) else cell for cell in column]


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
    """A text that an encoding can represent: unchanged, or with ASCII replacements."""
    if encoding is None:
        return text
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        pass
    return text


# --- as DeepSpeed writes it, where GB is 1024³ bytes ------------------------------------------------------------------


def deepspeed_gb_in_throughput(number: float | None) -> str:
    """A size in the manner of DeepSpeed's throughput lines: ``"1.5GB"``."""
    return UNKNOWN_IN_LOG if number is None else f"{round(number / _GIB, 2)}GB"


def deepspeed_rate(rate: float | None) -> str:
    """A rate in the manner of DeepSpeed's throughput lines, with all its digits."""
    return UNKNOWN_IN_LOG if rate is None else str(rate)
