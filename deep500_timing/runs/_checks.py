"""What a reader believes of a log that someone else may have written: every limit with its reason, and every check.

A log's checksums find damage. They do not say that the writer meant well, or that it was this program.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from deep500_timing._base.regular import read_bounded

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
JSON_BYTES, TRACE_BYTES = 1 << 25, 1 << 30
"""Bytes of a file of results, of which each run takes some 10 kB; and of a profiler's trace, decompressed."""
TABLES, COLUMNS, NAME_LETTERS = 256, 64, 64
"""Tables that a log may declare, columns of each, and letters of their names, which become names of files."""
TEXT_LETTERS = 1 << 12
"""Letters of a text of the header, such as the host."""
FAR = 1 << 62
"""Times and durations in ns are below it, so that their sums are too: 146 years."""
NO_STEP = -(1 << 63)
"""No step, and no host interval."""
_SMALL = (1 << 31) - 1
_LARGE = 1e18
"""Numbers are below it, so that their squares and sums are finite."""
_OWN_COLUMNS = ("rank", "session", "unix_ns")
"""Columns that the reader adds to every table."""
_RESERVED = ("logs", "events", "steps")
"""Tables that the reader makes."""


class BadLogError(ValueError):
    """A log cannot be read, with the reason as a sentence."""


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def json_of(data: bytes, *, strict: bool = True) -> Any:
    """JSON; strict without its extensions ``NaN`` and ``Infinity``.

    Raises:
        ValueError: It is none, or nested too deeply.
    """
    try:
        return json.loads(data, parse_constant=_refuse if strict else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str, limit: int = JSON_BYTES) -> Any:
    """The JSON in a regular file, which may be packed by gzip, as other programs write it.

    Args:
        path: The file.
        limit: The most bytes, unpacked.

    Raises:
        OSError: It is no regular file, or cannot be read.
        ValueError: It has more bytes or is no JSON, as a part of a sentence.
    """
    data = read_bounded(path, limit)
    try:
        if data[:2] == b"\x1f\x8b":
            inflater = zlib.decompressobj(zlib.MAX_WBITS | 16)
            data = inflater.decompress(data, limit)
            if not inflater.eof:
                raise ValueError(f"it is cut short, or unpacks to more than {limit >> 20} MB")
        return json_of(data, strict=False)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"it is no JSON: {error}") from None


def integer(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def string(value: Any) -> bool:
    return isinstance(value, str)


def text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= TEXT_LETTERS


def number(value: Any) -> bool:
    return type(value) in (int, float) and -_LARGE < value < _LARGE


def of(kind: type, inner: Callable[[Any], bool] = lambda value: True) -> Callable[[Any], bool]:
    """A check of a container and of each of its values."""

    def check(found: Any) -> bool:
        values: Any = found.values() if isinstance(found, dict) else found
        return isinstance(found, kind) and all(map(inner, values))

    return check


def has(**fields: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A check of an object by its fields; a missing one is None."""
    return lambda found: isinstance(found, dict) and wrong_field(found, fields) is None


def wrong_field(found: dict[str, Any], fields: Mapping[str, Callable[[Any], bool]]) -> str | None:
    """The first of the fields that has another value than a writer gives it, as a part of a sentence."""
    for name, is_right in fields.items():
        if not is_right(found.get(name)):
            return f"{name} is {_short(found.get(name))}"
    return None


_time = integer(-FAR, FAR)
_count = or_none(integer(1, 1 << 20))
_HEADER: dict[str, Callable[[Any], bool]] = {
    "rank": integer(0, RANKS - 1),
    "session": integer(0, _SMALL),
    "segment": integer(0, _SMALL),
    "local_rank": or_none(integer(0, RANKS - 1)),
    "world_size": or_none(integer(1, RANKS)),
    "pid": or_none(integer(0, FAR)),
    "host": or_none(text),
    "clock": or_none(text),
    "platform": or_none(text),
    "program": or_none(text),
    "written_by": or_none(text),
    "command_sha256": or_none(text),
    "process_start_unix_ns": or_none(_time),
    "anchor": or_none(has(time_ns=_time, unix_ns=_time)),
    "job": or_none(of(dict, or_none(number))),
    "versions": or_none(of(dict, text)),
    "machine": or_none(
        has(load_per_cpu=or_none(number), cpus=_count, usable_cpus=_count, not_told=or_none(of(list, text)))
    ),
    "devices": or_none(of(list, text)),
    "measurement": or_none(has(pair=or_none(integer(-_SMALL, _SMALL)))),
    "attributes": or_none(of(dict)),
    "tables": of(dict),
}


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
    if (wrong := wrong_field(header, _HEADER)) is not None:
        raise BadLogError(f"its header's {wrong}")
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
        and integer(first_own, (1 << 16) - 1)(kind)
        and name.lower() not in others | {*_RESERVED}
        and kind not in {other.kind for other in known.values()}
        and not {*names} & {*_OWN_COLUMNS}
    )


def check_rows(
    columns: Any, arrays: Mapping[str, NDArray[Any]], spans: Mapping[str, tuple[int, int]], *, is_ours: bool
) -> None:
    """See that the values of a frame are in the range that a writer gives them, by their spans where these suffice.

    Raises:
        ValueError: One is not.
    """
    for column in columns:
        if column.type == "name":
            low, high = 0, NAMES - 1
        elif column.name == "thread" and is_ours:
            low, high = -1, _SMALL
        elif column.type in ("int", "time") and is_ours:
            low, high = -FAR, FAR
        else:
            continue
        least, most = spans[column.name]
        if low <= least and most <= high:
            continue
        values = arrays[column.name]
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
