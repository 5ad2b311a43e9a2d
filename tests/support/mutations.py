"""Changes to files and messages that somebody else may have made: of bytes, of JSON, of whole frames of a log."""

from __future__ import annotations

import json

import numpy as np

from deep500_timing.runs import _format as form

ODD = (None, True, -1, 0, 1, 2**31, 2**40, 2**63 - 1, 2**63, -(2**63), 10**400, 1e308, float("inf"), float("nan"))
ODD += ("", "x", "\ud800", "\0", "9" * 5000, "../../x", "/etc/passwd", [], [1], [[1, "x"]], {}, {"a": 1})
NUMBERS = (-1, 0, 7, 2**20, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
WORDS = (b"[" * 2000, b"[" * 200_000, b"NaN", b"1e999", b"-Infinity", b"{", b'"', b"\xff", b"9" * 6000, b"\x00")


def of_bytes(rng, data):
    """Flip, cut, repeat, insert and blank parts, once or often; half of it near the end."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 30))):
        at, how = rng.randrange(len(data) + 1), rng.random()
        if how < 0.35 and data:
            data[at - 1] ^= 1 << rng.randrange(8)
        elif how < 0.45:
            del data[at : at + rng.randrange(1, 400)]
        elif how < 0.5:
            del data[at:]
        elif how < 0.65:
            data[at:at] = data[rng.randrange(len(data) + 1) :][: rng.randrange(1, 400)]
        elif how < 0.8:
            data[at : at + rng.randrange(1, 64)] = bytes(rng.randrange(1, 64))
        elif how < 0.9:
            data[at:at] = form.MAGIC + rng.randbytes(rng.randrange(40))
        else:
            data[at:at] = rng.choice(WORDS)
    return bytes(data)


def of_value(rng, value, depth=0):
    """Put something odd at one place of plain data, or leave that out, or give it another name."""
    if rng.random() < 0.2 or depth > 6 or not (isinstance(value, dict | list) and value):
        return rng.choice(ODD)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        more = [rng.choice(ODD)] if rng.random() < 0.2 else []
        return [*value[:at], of_value(rng, value[at], depth + 1), *value[at + 1 :], *more]
    key, how = rng.choice(list(value)), rng.random()
    if how < 0.15:
        return {name: one for name, one in value.items() if name != key}
    if how < 0.25:
        return {**value, rng.choice(("x", "intervals", "logs", "", "rank")): value[key]}
    return {**value, key: of_value(rng, value[key], depth + 1)}


def of_json(rng, data):
    """Odd values in JSON, and now and then its bytes. What is no JSON any more has its bytes changed."""
    is_json = True
    try:
        data = json.dumps(of_value(rng, json.loads(data))).encode()
    except (ValueError, RecursionError):
        is_json = False
    return of_bytes(rng, data) if rng.random() < 0.3 or not is_json else data


def of_frames(rng, data):
    """Whole frames with right checksums: what a broken or a hostile writer may write."""
    frames = [(frame.kind, frame.sequence, frame.rows, frame.payload) for frame in form.read_frames(data)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, how = rng.randrange(len(frames)), rng.random()
        kind, sequence, rows, payload = frames[at]
        is_json = kind < form.FIRST_TABLE
        if how < 0.45:
            payload = of_json(rng, payload) if is_json else _of_rows(rng, kind, rows, payload)
        elif how < 0.6:
            payload = of_bytes(rng, payload)
        elif how < 0.7:
            rows = rng.choice((0, 1, rows + 1, max(rows - 1, 0), 70_000, 2**32 - 1))
        elif how < 0.8:
            kind = rng.choice((*range(6), *range(15, 31), 64, 65535))
        elif how < 0.9:
            frames.insert(rng.randrange(len(frames)), frames[at])
            continue
        elif how < 0.95:
            rng.shuffle(frames)
            continue
        frames[at] = kind, sequence, rows, payload
        if how >= 0.95 and len(frames) > 1:
            del frames[at]
    numbered = rng.random() < 0.5
    return b"".join(
        form.encode(kind, place if numbered else sequence, rows, payload)
        for place, (kind, sequence, rows, payload) in enumerate(frames)
    )


def _of_rows(rng, kind, rows, payload):
    columns = next((table.columns for table in form.TABLES.values() if table.kind == kind), None)
    if columns is None or not 0 < rows <= form.ROWS:
        return payload
    try:
        arrays = form.unpack(columns, rows, payload)
    except ValueError:  # It was changed before.
        return payload
    column = rng.choice(columns)
    values = arrays[column.name].copy()
    odd = (float("nan"), float("inf"), 1e308, -1.0) if column.type == "float" else NUMBERS
    values[rng.randrange(len(values))] = np.array(rng.choice(odd), dtype=values.dtype)
    return form.pack(columns, {**arrays, column.name: values})
