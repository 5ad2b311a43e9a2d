"""The table of steps."""

from __future__ import annotations

from typing import Any

from deep500_timing._base.require import require
from deep500_timing.runs._tables import schema_of

COLUMNS = {
    "rank": "int32",
    "session": "int32",
    "step": "int64",
    "start_ns": "int64",
    "unix_ns": "int64",
    "dur_ns": "int64",
    "batches": "int64",
}


def steps_of(intervals: Any, marks: Any, rank: int | None, session: int | None) -> Any:
    """Steps out of BATCHes, or out of marks for ranks and sessions that have no BATCH.

    Args:
        intervals: As a lazy frame of Narwhals.
        marks: Likewise.
        rank: Of which rank, None for all.
        session: Of which session, None for all.

    Returns:
        A ``pyarrow.Table``, by rank, session and start.
    """
    pa = require("pyarrow", extra="runs", caller="Reading a run")
    nw = require("narwhals", extra="runs", caller="Reading a run")
    start, duration = nw.col("start_ns"), nw.col("dur_ns")
    batches = (
        intervals.filter((nw.col("region") == "BATCH") & (nw.col("device") == "CPU") & ~nw.col("step").is_null())
        .with_columns(end_ns=start + duration)
        .group_by("rank", "session", "step")
        .agg(
            start.min().alias("start_ns"),
            nw.col("end_ns").max().alias("end_ns"),
            nw.col("unix_ns").min().alias("unix_ns"),
            nw.len().cast(nw.Int64).alias("batches"),
        )
    )
    rows = batches.collect("pyarrow").to_native().to_pylist()
    for row in rows:
        row["dur_ns"] = row.pop("end_ns") - row["start_ns"]
    counted = {(row["rank"], row["session"]) for row in rows}
    rows += _of_marks(marks, counted, rank, session)
    rows.sort(key=lambda row: (row["rank"], row["session"], row["start_ns"], row["step"]))
    return pa.Table.from_pylist(rows, schema=schema_of(COLUMNS))


def _of_marks(marks: Any, counted: set[tuple[int, int]], rank: int | None, session: int | None) -> list[dict[str, Any]]:
    found = sorted(
        (row["rank"], row["session"], row["time_ns"], row["step"], row["unix_ns"])
        for row in marks.collect("pyarrow").to_native().to_pylist()
        if (row["rank"], row["session"]) not in counted
        and (rank is None or row["rank"] == rank)
        and (session is None or row["session"] == session)
    )
    rows = []
    for place, (of_rank, of_session, time, step, unix) in enumerate(found):
        following = found[place + 1] if place + 1 < len(found) else None
        same = following is not None and following[:2] == (of_rank, of_session)
        length = following[2] - time if following is not None and same else None
        rows.append(
            {"rank": of_rank, "session": of_session, "step": step, "start_ns": time, "unix_ns": unix}
            | {"dur_ns": length, "batches": 0}
        )
    return rows
