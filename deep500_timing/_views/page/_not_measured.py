"""Missing measurements, lost data, the environment, and how to read the page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from deep500_timing._summary.text import format_bytes, safe_name
from deep500_timing._views.page._section import Content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._views.page._context import Context

_MOST = 200
_READING = (
    "Times are CPU times of regions unless a chart says GPU. A share is of the region around it; “the rest” is what no "
    "region inside covers. Counts, totals and extremes are exact; medians and percentiles are right within 1 %. A dash "
    "is a number that is not known, or that would stand on too few values; it is never 0."
)

_NOTHING_LOST = "Nothing was lost: no interval was dropped, no byte of a log is damaged, and no part of one is missing."


def not_measured(context: Context) -> Content:
    about = context.about
    missing = [*context.missing]
    if not about.has_device_times:
        missing.append(("GPU", "No region has times on a device."))
    if about.missing_ranks:
        shown = ", ".join(map(str, about.missing_ranks[:20]))
        missing.append(("Ranks", f"Of {about.world_size} ranks these wrote nothing: {shown}."))
    lost = [
        ("intervals dropped", about.dropped),
        ("bytes of logs damaged", about.damaged_bytes),
        ("frames of logs missing", about.missing_frames),
    ]
    counters = [
        (safe_name(region), device, what, number)
        for (region, device), found in sorted(context.tree.counters.items())
        for what, number in sorted(found.items())
    ]
    environment = [
        ("ranks", len(about.ranks)),
        ("hosts", ", ".join(map(safe_name, about.hosts)) or None),
        ("started", f"{about.sessions} times" if about.sessions > 1 else "once"),
        ("ended", ", ".join(map(safe_name, about.ends)) if about.ended else "not: killed, or running"),
        ("earlier starts ended", ", ".join(map(safe_name, about.earlier_ends)) or None),
        ("platform", safe_name(about.platform) or None),
        *((safe_name(name), safe_name(version)) for name, version in about.versions.items()),
        *((f"device {place}", safe_name(name)) for place, name in enumerate(about.devices)),
        ("memory that samples reached", _most_memory(context)),
        ("traces of slow steps", _traces(context)),
        *((safe_name(name), safe_name(json.dumps(value))) for name, value in about.attributes.items()),
    ]
    tables: list[tuple[str, tuple[str, ...], Sequence[Sequence[object]]]] = [
        ("Left out of this page", ("what", "why"), missing),
        ("Lost", ("what", "how much"), lost if any(much for _, much in lost) else []),
        ("In no time", ("region", "device", "what", "how often"), counters[:_MOST]),
        ("Environment", ("what", "value"), [row for row in environment if row[1] is not None]),
    ]
    made_by = f"Made by: deep500-timing report {safe_name(about.folder)}"
    text = (_READING, made_by) if any(much for _, much in lost) else (_READING, _NOTHING_LOST, made_by)
    return Content(text=text, tables=tuple(table for table in tables if table[2]))


def _most_memory(context: Context) -> str | None:
    [row] = context.rows("select max(value) as most from samples where metric like '%_bytes' and isfinite(value)")
    return None if row["most"] is None else format_bytes(row["most"])


def _traces(context: Context) -> str | None:
    found = context.rows("select file from slow_steps order by file") if "slow_steps" in context.run.tables else []
    return ", ".join(safe_name(row["file"]) for row in found) or None
