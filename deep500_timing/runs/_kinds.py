"""The kinds of records in a log, and the columns of tables."""

from __future__ import annotations

from deep500_timing.runs._columns import Column

SCHEMA = 1
"""Version of the schema. It rises when older readers would misread; new kinds and attributes do not raise it."""

HEADER = 0
NAMES = 1
KINDS = 2
EVENT = 3
END = 4
"""Kinds below 16 are JSON."""
FIRST_TABLE = 16
FIRST_OWN = 64
"""The first number of tables that a log declares by a record of the kind ``KINDS``."""


def _columns(**types: str) -> tuple[Column, ...]:
    return tuple(Column(name, kind) for name, kind in types.items())


TABLES: dict[str, tuple[int, tuple[Column, ...]]] = {
    "intervals": (
        16,
        _columns(start_ns="time", dur_ns="int", step="int", region="name", thread="int", device="name"),
    ),
    "open": (17, _columns(start_ns="time", region="name", thread="int")),
    "marks": (18, _columns(time_ns="time", step="int")),
    "flushes": (
        19,
        _columns(time_ns="int", unix_ns="int", width_ns="int", written="int", dropped="int", batches="int"),
    ),
    "counters": (
        20,
        _columns(
            region="name",
            thread="int",
            device="name",
            recorded="int",
            failed="int",
            discarded="int",
            captured="int",
            dropped="int",
        ),
    ),
    "collectives": (
        21,
        _columns(start_ns="time", dur_ns="int", op="name", group="name", sequence="int", bytes="int"),
    ),
    "samples": (22, _columns(time_ns="time", metric="name", value="float", region="name")),
    "windows": (
        23,
        _columns(
            first_ns="int",
            last_ns="int",
            first_step="int",
            last_step="int",
            path="name",
            device="name",
            bin="int",
            count="int",
            total_ns="int",
            min_ns="int",
            max_ns="int",
        ),
    ),
    "threads": (24, _columns(thread="int", name="name")),
    "device_intervals": (
        25,
        _columns(
            start_ns="time", dur_ns="int", step="int", region="name", thread="int", device="name", host_start_ns="time"
        ),
    ),
    "milestones": (26, _columns(time_ns="time", what="name", step="int", dur_ns="int")),
    "stacks": (27, _columns(time_ns="time", stack="name")),
}
"""The tables that every reader knows: number and columns by name."""
NOT_READ = ("open", "flushes", "device_intervals")
"""Tables that a reader merges into others."""
NO_STEP = -(1 << 63)
"""No step, and no host interval."""
