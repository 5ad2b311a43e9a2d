"""A Grafana dashboard for the metrics of ``PrometheusExporter``, generated from their names."""

from __future__ import annotations

from typing import Any

from deep500_timing.exporters._prometheus import EXCLUDED, LEFT_OUT, MEMORY, REPORTED, TIMES

_OF = 'job=~"$job", rank=~"$rank"'
_RATE = "[$__rate_interval]"


def _mean(more: str, by: str) -> str:
    several = f"{_OF}, {more}" if more else _OF
    total, count = (f"sum by ({by}) (rate({TIMES}_{what}{{{several}}}{_RATE}))" for what in ("sum", "count"))
    return f"{total} / {count}"


PANELS = (
    ("Mean step time by rank", "s", _mean('region="BATCH", device="CPU"', "rank"), "rank {{rank}}"),
    (
        "Steps per second by rank",
        "cps",
        f'rate({TIMES}_count{{{_OF}, region="BATCH", device="CPU"}}{_RATE})',
        "rank {{rank}}",
    ),
    ("Mean time by region, on the host", "s", _mean('device="CPU"', "region"), "{{region}}"),
    ("Mean time by region, on the device", "s", _mean('device!="CPU"', "region"), "{{region}}"),
    (
        "Share of a step by region, on the host",
        "percentunit",
        f'sum by (region) (rate({TIMES}_sum{{{_OF}, device="CPU", region!="BATCH"}}{_RATE})) / ignoring (region) '
        f'group_left () sum (rate({TIMES}_sum{{{_OF}, device="CPU", region="BATCH"}}{_RATE}))',
        "{{region}}",
    ),
    ("Largest memory by region", "bytes", f"max by (region, kind) ({MEMORY}{{{_OF}}})", "{{region}} {{kind}}"),
    ("Intervals without a time", "cps", f"sum by (reason) (rate({EXCLUDED}_total{{{_OF}}}{_RATE}))", "{{reason}}"),
    ("Seconds since the last report", "s", f"time() - {REPORTED}{{{_OF}}}", "rank {{rank}}"),
    ("Regions left out", "none", f"sum by (rank) ({LEFT_OUT}{{{_OF}}})", "rank {{rank}}"),
)
"""Title, Grafana's unit, PromQL and legend of each panel."""


def grafana_dashboard(title: str = "Training times") -> dict[str, Any]:
    """The dashboard, to be written with ``json.dump`` and imported in Grafana, which asks for the data source.

    Args:
        title: Its title.
    """
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": name,
            "datasource": source,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [{"refId": "A", "datasource": source, "expr": query, "legendFormat": legend}],
        }
        for number, (name, unit, query, legend) in enumerate(PANELS)
    ]
    choices: list[dict[str, Any]] = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    for name in ("job", "rank"):
        query = f"label_values({REPORTED}, {name})"
        choices.append(
            {
                "name": name,
                "type": "query",
                "datasource": source,
                "query": query,
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return {
        "title": title,
        "uid": "deep500-timing",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["deep500-timing"],
        "templating": {"list": choices},
        "panels": panels,
    }
