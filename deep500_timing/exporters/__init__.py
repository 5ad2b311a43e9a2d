"""Destinations for snapshots, one module each; none imports its package before it is used."""

from __future__ import annotations

from deep500_timing.exporters._base import BaseExporter, Exporter, export_to

__all__ = ["BaseExporter", "Exporter", "export_to"]
