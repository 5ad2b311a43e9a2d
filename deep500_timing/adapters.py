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

from importlib import import_module as _import_module

from deep500_timing._base.lazy import homes_in as _homes_in
from deep500_timing._base.lazy import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from deep500_timing._base.names import CPU, GPU, outside_name
    from deep500_timing._base.patches import Replaced, Watch, after_import
    from deep500_timing._base.regular import is_private
    from deep500_timing._base.require import missing_package, require
    from deep500_timing._base.settings import cache_folder, setting
    from deep500_timing._base.sql import literal
    from deep500_timing._base.warn import warn_once
    from deep500_timing._base.workers import WORKER_PARTS, TimedLoop, WorkerTimes, makers
    from deep500_timing._distributed.exchange import DEADLINE_S, Exchange, store_connection
    from deep500_timing._distributed.late import steps_of_operations
    from deep500_timing._distributed.launchers import Launch, discover_launch, rank_and_world
    from deep500_timing._named import NamedTimer, check_timer, timer_for
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
        shorten,
        width_of,
    )
    from deep500_timing._views.page import _charts as charts
    from deep500_timing._views.page._charts import REGION_COLOURS

__all__ = [
    "CPU",
    "DEADLINE_S",
    "GPU",
    "QUANTILES",
    "REGION_COLOURS",
    "TRIM",
    "UNKNOWN",
    "WORKER_PARTS",
    "Exchange",
    "Intervals",
    "Launch",
    "NamedTimer",
    "Replaced",
    "TimedLoop",
    "Watch",
    "WorkerTimes",
    "after_import",
    "begin_recomputation",
    "cache_folder",
    "charts",
    "check_timer",
    "discover_launch",
    "end_recomputation",
    "fit_encoding",
    "format_bytes",
    "format_ms",
    "format_number",
    "format_share",
    "format_time",
    "format_utilization",
    "is_private",
    "lazy_names",
    "lines_of",
    "literal",
    "makers",
    "missing_package",
    "outside_name",
    "pad",
    "rank_and_world",
    "require",
    "safe_name",
    "setting",
    "shorten",
    "steps_of_operations",
    "store_connection",
    "summarize",
    "take_anchor",
    "timer_for",
    "warn_once",
    "width_of",
]

_HOMES = {
    "_base.regular": "is_private",
    "_base.names": "CPU GPU outside_name",
    "_base.patches": "Replaced Watch after_import",
    "_base.require": "missing_package require",
    "_base.settings": "cache_folder setting",
    "_base.sql": "literal",
    "_base.warn": "warn_once",
    "_base.workers": "TimedLoop WORKER_PARTS WorkerTimes makers",
    "_distributed.exchange": "DEADLINE_S Exchange store_connection",
    "_distributed.late": "steps_of_operations",
    "_distributed.launchers": "Launch discover_launch rank_and_world",
    "_named": "NamedTimer check_timer timer_for",
    "_recording.intervals": "Intervals",
    "_recording.recorder": "begin_recomputation end_recomputation",
    "_summary.reading": "summarize",
    "_summary.snapshot": "take_anchor",
    "_summary.stats": "QUANTILES TRIM",
    "_summary.text": "UNKNOWN fit_encoding format_bytes format_ms format_number format_share format_time "
    "format_utilization lines_of pad safe_name shorten width_of",
    "_views.page._charts": "REGION_COLOURS",
}
_CHARTS = {"charts": lambda: _import_module("deep500_timing._views.page._charts")}
__getattr__, __dir__ = lazy_names(__name__, __all__, _homes_in(str(__package__), _HOMES) | _CHARTS)
