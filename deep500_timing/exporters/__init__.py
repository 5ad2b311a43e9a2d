"""Destinations for snapshots, one module each; none imports its package before it is made.

::

    from deep500_timing.exporters import JsonLinesExporter, TerminalExporter

    tmr.export(TerminalExporter(), JsonLinesExporter("times.jsonl"), step=300)

``all()`` names the exporters registered under the entry point group ``deep500_timing.exporters``, third-party ones
included; ``available()`` names the usable ones; ``get(name)`` returns one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._base.lazy import homes_in as _homes_in
from deep500_timing._base.lazy import lazy_names as _lazy_names
from deep500_timing.exporters._base import BaseExporter, Exporter, kept_exporter, report

if TYPE_CHECKING:
    from deep500_timing.exporters._files import CsvExporter, JsonLinesExporter, read_json_lines
    from deep500_timing.exporters._mlflow import MlflowExporter
    from deep500_timing.exporters._opentelemetry import OpenTelemetryExporter, send_spans
    from deep500_timing.exporters._prometheus import PrometheusExporter, grafana_dashboard
    from deep500_timing.exporters._table import TerminalExporter, TextExporter
    from deep500_timing.exporters._trackers import CometExporter, TensorBoardExporter, TrackioExporter
    from deep500_timing.exporters._wandb import WandbExporter

__all__ = [
    "BaseExporter",
    "CometExporter",
    "CsvExporter",
    "Exporter",
    "JsonLinesExporter",
    "MlflowExporter",
    "OpenTelemetryExporter",
    "PrometheusExporter",
    "TensorBoardExporter",
    "TerminalExporter",
    "TextExporter",
    "TrackioExporter",
    "WandbExporter",
    "all",
    "available",
    "get",
    "grafana_dashboard",
    "kept_exporter",
    "read_json_lines",
    "report",
    "send_spans",
]

GROUP = "deep500_timing.exporters"
"""The entry point group under which a distribution registers its exporters."""

_HOMES = {
    "_files": "CsvExporter JsonLinesExporter read_json_lines",
    "_mlflow": "MlflowExporter",
    "_opentelemetry": "OpenTelemetryExporter send_spans",
    "_prometheus": "PrometheusExporter grafana_dashboard",
    "_table": "TerminalExporter TextExporter",
    "_trackers": "CometExporter TensorBoardExporter TrackioExporter",
    "_wandb": "WandbExporter",
}


def all() -> tuple[str, ...]:  # noqa: A001 (used as `exporters.all()`)
    """The names of every registered exporter, sorted; none is imported."""
    from deep500_timing._base.plugins import names

    return names(GROUP)


def available() -> tuple[str, ...]:
    """The names of the exporters that can be used here, sorted.

    Leaves out exporters whose package (attribute ``package``) is not installed and, with a warning each, exporters that
    cannot be imported.
    """
    from deep500_timing._base.plugins import loadable
    from deep500_timing._base.require import is_installed

    return tuple(
        name
        for name, exporter in loadable(GROUP)
        if (package := getattr(exporter, "package", None)) is None or is_installed(package)
    )


def get(name: str) -> Any:
    """The exporter of that name, to be called with its own arguments.

    Raises:
        LookupError: No exporter of that name is registered.
        Exception: What importing it raises.
    """
    from deep500_timing._base.plugins import load

    return load(GROUP, name)


__getattr__, __dir__ = _lazy_names(__name__, __all__, _homes_in(__name__, _HOMES))
