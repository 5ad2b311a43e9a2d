"""The parts of framework adapters, besides timers and :mod:`deep500_timing.devices`.

::

    from deep500_timing.adapters import rank_and_world, warn_once

    try:
        names = framework.names_of_layers()
    except Exception as error:
        warn_once(f"Asking rank {rank_and_world()[0]} for its layers failed; they go by number: {error}")

The adapters of this distribution use only public names of the core. ``adapters/README.md`` explains each name. A name
is imported at its first use.
"""

from __future__ import annotations

from deep500_timing._base.lazy import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from deep500_timing._base.imports import after_import
    from deep500_timing._base.require import missing_package, require
    from deep500_timing._base.warn import warn_once
    from deep500_timing._base.workers import WORKER_PARTS, TimedLoop, WorkerTimes
    from deep500_timing._distributed.connection import store_connection
    from deep500_timing._distributed.exchange import DEADLINE_S, Exchange
    from deep500_timing._distributed.late import steps_of_operations
    from deep500_timing._distributed.launchers import Launch, discover_launch, rank_and_world
    from deep500_timing._named.named_timer import NamedTimer, timer_for
    from deep500_timing._recording.intervals import Intervals
    from deep500_timing._recording.recorder import begin_recomputation, end_recomputation
    from deep500_timing._summary.reading import summarize
    from deep500_timing._summary.snapshot import take_anchor
    from deep500_timing._summary.stats import QUANTILES, TRIM
    from deep500_timing._summary.text import (
        UNKNOWN,
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
        width_of,
    )
    from deep500_timing._views.page._colours import REGION_COLOURS

__all__ = [
    "DEADLINE_S",
    "QUANTILES",
    "REGION_COLOURS",
    "TRIM",
    "UNKNOWN",
    "WORKER_PARTS",
    "Exchange",
    "Intervals",
    "Launch",
    "NamedTimer",
    "TimedLoop",
    "WorkerTimes",
    "after_import",
    "begin_recomputation",
    "discover_launch",
    "end_recomputation",
    "fit_encoding",
    "format_bytes",
    "format_ms",
    "format_number",
    "format_share",
    "format_time",
    "format_utilization",
    "lazy_names",
    "lines_of",
    "missing_package",
    "pad",
    "rank_and_world",
    "require",
    "safe_name",
    "steps_of_operations",
    "store_connection",
    "summarize",
    "take_anchor",
    "timer_for",
    "warn_once",
    "width_of",
]

_LAZY = {
    "DEADLINE_S": "deep500_timing._distributed.exchange",
    "Exchange": "deep500_timing._distributed.exchange",
    "Intervals": "deep500_timing._recording.intervals",
    "Launch": "deep500_timing._distributed.launchers",
    "NamedTimer": "deep500_timing._named.named_timer",
    "QUANTILES": "deep500_timing._summary.stats",
    "REGION_COLOURS": "deep500_timing._views.page._colours",
    "TRIM": "deep500_timing._summary.stats",
    "TimedLoop": "deep500_timing._base.workers",
    "UNKNOWN": "deep500_timing._summary.text",
    "WORKER_PARTS": "deep500_timing._base.workers",
    "WorkerTimes": "deep500_timing._base.workers",
    "after_import": "deep500_timing._base.imports",
    "begin_recomputation": "deep500_timing._recording.recorder",
    "discover_launch": "deep500_timing._distributed.launchers",
    "end_recomputation": "deep500_timing._recording.recorder",
    "fit_encoding": "deep500_timing._summary.text",
    "format_bytes": "deep500_timing._summary.text",
    "format_ms": "deep500_timing._summary.text",
    "format_number": "deep500_timing._summary.text",
    "format_share": "deep500_timing._summary.text",
    "format_time": "deep500_timing._summary.text",
    "format_utilization": "deep500_timing._summary.text",
    "lines_of": "deep500_timing._summary.text",
    "missing_package": "deep500_timing._base.require",
    "pad": "deep500_timing._summary.text",
    "rank_and_world": "deep500_timing._distributed.launchers",
    "require": "deep500_timing._base.require",
    "safe_name": "deep500_timing._summary.text",
    "steps_of_operations": "deep500_timing._distributed.late",
    "store_connection": "deep500_timing._distributed.connection",
    "summarize": "deep500_timing._summary.reading",
    "take_anchor": "deep500_timing._summary.snapshot",
    "timer_for": "deep500_timing._named.named_timer",
    "warn_once": "deep500_timing._base.warn",
    "width_of": "deep500_timing._summary.text",
}

__getattr__, __dir__ = lazy_names(__name__, __all__, _LAZY)
