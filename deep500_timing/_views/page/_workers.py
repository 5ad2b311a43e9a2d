"""What the workers of the data loader do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._summary.text import format_time
from deep500_timing._views.findings._workers import rows_of_workers
from deep500_timing._views.page._section import Content

if TYPE_CHECKING:
    from deep500_timing._views.page._context import Context

_HEADS = ("worker", "fetch", "collate", "put", "idle", "start-up", "batches", "samples")


def workers(context: Context) -> Content | None:
    rows = [row for row in rows_of_workers(context.evidence) if row["worker"] >= 0]
    if not rows:
        return None
    shown = [
        (
            row["worker"],
            *(format_time(float(row[part]) / 1e6) for part in ("fetch", "collate", "put", "idle", "started")),
            *(int(row[number]) for number in ("batches", "samples")),
        )
        for row in rows
    ]
    text = f"Rank {context.evidence.rank}, the loader with the most training batches. Idle is the wait for a task."
    return Content(text=(text,), tables=(("Time of each worker over all epochs", _HEADS, shown),))
