"""What a reader believes of a log that somebody else may have written: every limit with its reason, and every check.

A log's checksums find damage. They do not say that the writer meant well, or that it was this program.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

ROWS = 1 << 15
"""Rows of a frame. A writer makes no larger ones: a flipped bit destroys one, and it takes the GIL for as long."""
PAYLOAD_BYTES = 1 << 24
"""Bytes of a frame, decompressed. 2^15 rows of 40 numbers take 10 MB; JSON of this size takes 350 MB as objects."""
NAMES = 1 << 20
"""Numbers of names. Tables are made up to the highest number."""
RANKS = 1 << 20
"""Ranks of a training. The ranks without a log are listed."""
MANIFEST_BYTES = 1 << 26
"""Bytes of a manifest: 150 for each log, and 1500 for each Parquet part."""
TABLES, COLUMNS, NAME_LETTERS = 256, 64, 64
"""Tables that a log may declare, columns of each, and letters of their names, which become names of files."""
TEXT_LETTERS = 1 << 12
"""Letters of a text of the header, such as the host."""
FAR = 1 << 62
"""Times and durations in ns are below it, so that their sums are too: 146 years."""
NO_STEP = -(1 << 63)
"""No step, and no host interval."""
_SMALL = (1 << 31) - 1
_OWN_COLUMNS = ("rank", "session", "unix_ns")
"""Columns that the reader adds to every table."""
_RESERVED = ("logs", "events", "steps")
"""Tables that the reader makes."""


class BadLogError(ValueError):
    """A log cannot be read, with the reason as a sentence."""


def json_of(data: bytes) -> Any:
    """JSON without its extensions ``NaN`` and ``Infinity``.

    Raises:
        ValueError: It is none, or nested too deeply.
    """

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no number of JSON")

    try:
        return json.loads(data, parse_constant=refuse)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _int(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= TEXT_LETTERS


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of(kind: type, inner: Callable[[Any], bool] = lambda value: True) -> Callable[[Any], bool]:
    def check(found: Any) -> bool:
        values: Any = found.values() if isinstance(found, dict) else found
        return isinstance(found, kind) and all(map(inner, values))

    return check


_time = _int(-FAR, FAR)


def _anchor(value: Any) -> bool:
    return isinstance(value, dict) and _time(value.get("time_ns")) and _time(value.get("unix_ns"))


_HEADER: dict[str, Callable[[Any], bool]] = {
    "rank": _int(0, RANKS - 1),
    "session": _int(0, _SMALL),
    "segment": _int(0, _SMALL),
    "local_rank": _or_none(_int(0, RANKS - 1)),
    "world_size": _or_none(_int(1, RANKS)),
    "pid": _or_none(_int(0, FAR)),
    "host": _or_none(_text),
    "clock": _or_none(_text),
    "platform": _or_none(_text),
    "program": _or_none(_text),
    "written_by": _or_none(_text),
    "process_start_unix_ns": _or_none(_time),
    "anchor": _or_none(_anchor),
    "job": _or_none(_of(dict, _or_none(_number))),
    "versions": _or_none(_of(dict, _text)),
    "machine": _or_none(_of(dict)),
    "devices": _or_none(_of(list, _text)),
    "measurement": _or_none(_of(dict)),
    "attributes": _or_none(_of(dict)),
    "tables": _of(dict),
}
_NEEDED = ("rank", "session", "segment", "tables")


def check_header(header: Any, named: tuple[int, int, int] | None) -> None:
    """See that every field of a header that is read has a value that a writer gives it.

    Args:
        header: The header.
        named: Rank, session and segment in the file's name; None if the name has none.

    Raises:
        BadLogError: A field has not.
    """
    if not isinstance(header, dict):
        raise BadLogError("its header is no object")
    for name, is_right in _HEADER.items():
        if (name in header or name in _NEEDED) and not is_right(header.get(name)):
            raise BadLogError(f"its header's {name} is {_short(header.get(name))}")
    found = header["rank"], header["session"], header["segment"]
    if named is not None and found != named:
        raise BadLogError(
            "its name says rank {}, session {}, segment {}, its header {}, {}, {}: a copy?".format(*named, *found)
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]} …"


def is_name(name: Any) -> bool:
    """Whether a table or column may have this name, which becomes part of a file's name and of SQL."""
    return isinstance(name, str) and len(name) <= NAME_LETTERS and name.isascii() and name.isidentifier()


def is_table(name: Any, kind: Any, columns: Any, known: Mapping[str, Any], first_own: int) -> bool:
    """Whether a log may declare a table: new, or again as before. A built-in one may have further columns."""
    names = [column for column, _ in columns]
    if not all(map(is_name, (name, *names))) or not 0 < len({one.lower() for one in names}) == len(names) <= COLUMNS:
        return False
    before = known.get(name)
    if before is not None:
        return kind == before.kind and (
            columns == before.columns or (kind < first_own and set(before.columns) <= set(columns))
        )
    others = {other.lower() for other in known}
    return (
        len(known) < TABLES
        and _int(first_own, (1 << 16) - 1)(kind)
        and name.lower() not in others | {*_RESERVED}
        and kind not in {other.kind for other in known.values()}
        and not {*names} & {*_OWN_COLUMNS}
    )


def check_rows(columns: Any, arrays: Mapping[str, NDArray[Any]], *, is_ours: bool) -> None:
    """See that the values of a frame are in the range that a writer gives them.

    Raises:
        ValueError: One is not.
    """
    for column in columns:
        values = arrays[column.name]
        if column.type == "name":
            low, high = 0, NAMES - 1
        elif column.name == "thread" and is_ours:
            low, high = -1, _SMALL
        elif column.type in ("int", "time") and is_ours:
            low, high = -FAR, FAR
        else:
            continue
        least, most = int(values.min()), int(values.max())
        if least == NO_STEP and column.name in ("step", "host_start_ns"):
            known = values[values != NO_STEP]
            least = int(known.min()) if len(known) else low
        if least < low or most > high:
            raise ValueError(f"The column {column.name!r} has a value outside of {low} to {high}.")


def event_of(value: Any) -> dict[str, Any]:
    """An event, with a time.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(value, dict) or not _time(value.get("time_ns", 0)):
        raise ValueError("The event has no time.")
    return {"time_ns": 0, **value}
