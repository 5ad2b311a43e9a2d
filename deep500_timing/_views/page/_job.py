"""The whole job: goodput, the processors, the workers of the data loader, samples, missing data and environment."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from deep500_timing._base.names import GPU
from deep500_timing._base.sql import literal
from deep500_timing._summary.text import UNKNOWN, format_bytes, format_time, safe_name
from deep500_timing._views.findings._data import rows_of_workers
from deep500_timing._views.findings._finding import percent
from deep500_timing._views.page._charts import ACCENT, BYTE_LABELS, bars, coloured, layer, quantity, rounded, tooltip
from deep500_timing._views.page._section import Content, Context, Figure, Panel, shown
from deep500_timing.runs._goodput import advice, rows_of, sentence

_PARTS = {
    "productive": "#009e73",
    "communication": "#0072b2",
    "stragglers": "#d55e00",
    "data": "#d08400",
    "lost": "#cc79a7",
    "unknown": "#7f8a93",
}
"""Colours of the parts of the wall clock; the others share one."""
_OTHER = "#2f94cf"
_POINTS = 150
"""Of a line of samples."""
_FINITE = "value is not null and isfinite(value)"
_LINES = 9
"""Metrics of a family that are drawn."""
_TIMES = (("h", "hours", 3600), ("min", "minutes", 60), ("s", "seconds", 1))
"""Units of the time axis; the first of which three fit is taken."""
_FAMILIES = {
    "Memory": "_bytes$",
    "Throughput and MFU": r"^(throughput\.|mfu|flops)",
    "Device and machine": r"^(gpu|system\.|process\.)",
    "Other samples": "",
}
"""The figures of samples, and the patterns of their metrics; the first that matches is taken."""
_BUCKETS = 120
_OF_THREAD = {"on a processor": "#0072b2", "waiting for a processor": "#d55e00", "blocked": "#87919b"}
_USES = {
    "this process": ("process_cores", "#0072b2"),
    "loader workers": ("workers_cores", "#2f94cf"),
    "all processes": ("busy_cores", "#d55e00"),
    "other guests": ("steal_cores", "#8a6038"),
}
"""Columns of the table ``machine`` in cores, and their colours."""
_MOST = 200
_READING = (
    "Times are CPU times of regions unless a chart says GPU. A share is of the region around it; “the rest” is what no "
    "region inside covers. Counts, totals and extremes are exact; medians and percentiles are right within 1 %. A dash "
    "is a number that is not known, or that would stand on too few values; it is never 0."
)
_NOTHING_LOST = "Nothing was lost: no interval was dropped, no byte of a log is damaged, and no part of one is missing."


def goodput(context: Context) -> Content | None:
    """The account of the wall clock, restarts included; a job that was never restarted lacks nothing."""
    if context.about.sessions < 2:
        return None
    account = context.goodput
    drawn = [
        (part.title, part.share, f"{100 * part.share:.2f} %", _PARTS.get(part.name, _OTHER))
        for part in account.buckets
        if part.share
    ]
    figure = Figure(
        "The wall clock of the job",
        sentence(account),
        (Panel(bars(drawn, {"title": "of the wall clock", "format": "%"}, "part", "share")),),
        ("part", "time", "share", "if halved"),
        rows_of(account, "\u2003"),
        note="The parts add up to the wall clock. In each step, the slowest rank decides.",
    )
    return Content((figure,), text=(*advice(account), *account.notes))


def machine(context: Context) -> Content | None:
    """The time of the thread of the steps in its three parts, and the machine's load; None without a reading of it."""
    evidence = context.evidence
    whole, times = evidence.processor, evidence.thread_times
    if whole is None or times is None:
        return None
    session, first_ns, last_ns = times.longest
    edges = np.linspace(first_ns / 1e9, last_ns / 1e9, _BUCKETS + 1)
    sessions, width_s = np.full(_BUCKETS, session), (last_ns - first_ns) / 1e9 / _BUCKETS
    ran, waited = (part / width_s for part in times.between(sessions, edges[:-1], edges[1:]))
    shares = zip(_OF_THREAD, (ran, waited, np.maximum(1 - ran - waited, 0.0)), strict=True)
    values = [
        {"t": rounded(float(at - edges[0]), 5), "what": part, "value": rounded(float(share)), "said": percent(share)}
        for part, of_part in shares
        for at, share in zip(edges[:-1], of_part, strict=True)
    ]
    spec = _load_spec({"type": "area", "interpolate": "step-after"}, values, _OF_THREAD, "%", stack="zero")
    parts_s = (whole.ran_s, whole.waited_s, whole.blocked_s)
    rows = [
        (part, format_time(seconds), percent(seconds / whole.wall_s if whole.wall_s else 0.0))
        for part, seconds in zip(_OF_THREAD, parts_s, strict=True)
    ]
    thread = Figure(
        "The thread of the steps",
        "; ".join(f"{part} {share}" for part, _, share in rows) + ".",
        (Panel(spec),),
        ("the thread was", "time", "share"),
        rows,
        note="Waiting: ready to run, with no processor free. Blocked: waiting for a disk, a device or another thread.",
    )
    return Content((thread, *_load_of(context, session, first_ns)))


def _load_of(context: Context, session: int, first_ns: int) -> tuple[Figure, ...]:
    evidence = context.evidence
    found = context.rows(
        f"select * from machine where rank = {evidence.rank} and session = {session} and time_ns >= {first_ns} "
        "order by time_ns"
    )
    values, rows, colours = [], [], {}
    for name, (column, colour) in _USES.items():
        known = [(row["time_ns"], row[column]) for row in found if row[column] is not None]
        if not any(value for _, value in known):
            continue
        colours[name] = colour
        mean = sum(value for _, value in known) / len(known)
        rows.append((name, rounded(mean, 3), rounded(max(value for _, value in known), 3)))
        values += [
            {
                "t": rounded((at - first_ns) / 1e9, 5),
                "what": name,
                "value": rounded(value),
                "said": f"{value:.2f} cores",
            }
            for at, value in known
        ]
    if not rows:
        return ()
    cores = evidence.machine.of_machine if evidence.machine is not None else None
    of = f" of {cores}" if cores else ""
    said = "; ".join(f"{name} {mean} cores on average" for name, mean, _ in rows)
    spec = _load_spec({"type": "line", "point": len(found) < 30}, values, colours, "~s")
    heads = ("processors used by", "mean", "most")
    return (Figure(f"Processors in use{of}", f"{said}.", (Panel(spec),), heads, rows),)


def _load_spec(
    mark: dict[str, Any], values: list[dict[str, Any]], colours: dict[str, str], form: str, **more: Any
) -> dict[str, Any]:
    axis = {"title": None, "grid": False, "labelExpr": "datum.value + ' s'", "tickCount": 6, "labelOverlap": True}
    encoding = {
        "x": quantity("t", scale={"nice": False, "zero": False}, axis=axis),
        "y": quantity("value", axis={"title": None, "format": form, "tickCount": 4}, **more),
        "color": coloured("what", colours),
        "tooltip": tooltip(what="", said="share" if form == "%" else "cores"),
    }
    return {"height": 140, "data": {"values": values}, "mark": mark, "encoding": encoding}


def workers(context: Context) -> Content | None:
    rows = [row for row in rows_of_workers(context.evidence) if row["worker"] >= 0]
    if not rows:
        return None
    table = [
        (
            row["worker"],
            *(format_time(float(row[part]) / 1e6) for part in ("fetch", "collate", "put", "idle", "started")),
            *(int(row[number]) for number in ("batches", "samples")),
        )
        for row in rows
    ]
    heads = ("worker", "fetch", "collate", "put", "idle", "start-up", "batches", "samples")
    text = f"Rank {context.evidence.rank}, the loader with the most training batches. Idle is the wait for a task."
    return Content(text=(text,), tables=(("Time of each worker over all epochs", heads, table),))


def samples(context: Context) -> Content | None:
    metrics = context.rows(
        f"select coalesce(metric, '') as name, count(*) filter ({_FINITE}) as n, "
        f"count(*) filter (not ({_FINITE})) as unreal, min(value) filter ({_FINITE}) as low, "
        f"avg(value) filter ({_FINITE}) as mean, max(value) filter ({_FINITE}) as high, "
        "min(unix_ns) as first, max(unix_ns) as last from samples group by 1 order by 1"
    )
    families: dict[str, list[dict[str, Any]]] = {name: [] for name in _FAMILIES}
    for row in metrics:
        families[next(name for name, of in _FAMILIES.items() if re.search(of, row["name"]))].append(row)
    figures = tuple(_figure(context, name, rows) for name, rows in families.items() if rows)
    return Content(figures) if figures else None


def _figure(context: Context, name: str, metrics: list[dict[str, Any]]) -> Figure:
    begin = min((row["first"] for row in metrics if row["first"] is not None), default=0)
    span_s = (max((row["last"] for row in metrics if row["last"] is not None), default=0) - begin) / 1e9
    time = next((unit for unit in _TIMES if span_s >= 3 * unit[2]), _TIMES[-1])
    # A capacity is constant: the table is enough.
    drawn = [row for row in metrics if row["n"] and not row["name"].endswith("_total_bytes")][:_LINES]
    panels = tuple(Panel(_spec(context, row, begin, time), shown(row["name"])) for row in drawn)
    said = "; ".join(f"{shown(row['name'])} {_value(row, 'low')} to {_value(row, 'high')}" for row in drawn)
    note = "The line is the mean of all ranks, the band from the lowest to the highest."
    if len(metrics) > len(drawn):
        note += f" {len(drawn)} of {len(metrics)} are drawn; all are in the table."
    unreal = ", ".join(f"{row['unreal']} of {shown(row['name'])}" for row in metrics if row["unreal"])
    if unreal:
        note += f" NaN or infinite, and not drawn: {unreal}."
    return Figure(
        name,
        f"{said}." if said else "No value is finite.",
        panels,
        ("metric", "samples", "lowest", "mean", "highest"),
        [(shown(row["name"]), row["n"], *(_value(row, what) for what in ("low", "mean", "high"))) for row in metrics],
        note=note,
    )


def _value(row: dict[str, Any], what: str) -> str:
    value = row[what]
    if value is None:
        return UNKNOWN
    return format_bytes(value) if row["name"].endswith("_bytes") else f"{value:.4g}"


def _spec(context: Context, metric: dict[str, Any], begin: int, time: tuple[str, str, int]) -> dict[str, Any]:
    abbreviation, plural, length_s = time
    width = max(((metric["last"] or 0) - (metric["first"] or 0)) // _POINTS + 1, 1)
    rows = context.rows(
        f"select (coalesce(unix_ns, time_ns) - {begin}) // {width} as part, avg(value) as mean, min(value) as low, "
        f"max(value) as high from samples where metric = {literal(metric['name'])} and {_FINITE} "
        "group by 1 order by 1"
    )
    in_bytes = metric["name"].endswith("_bytes")
    values = [
        {"t": rounded(row["part"] * width / (length_s * 1e9), 5)}
        | {name: rounded(row[name], 6) for name in ("mean", "low", "high")}
        | {"said": format_bytes(row["mean"]) if in_bytes else f"{row['mean']:.4g}"}
        for row in rows
    ]
    axis: dict[str, Any] = {"title": None, "grid": False, "tickCount": 4, "labelOverlap": True}
    axis["labelExpr"] = f"datum.value + ' {abbreviation}'"
    y_axis = {"title": None, "tickCount": 4, **({"labelExpr": BYTE_LABELS} if in_bytes else {"format": "~s"})}
    x, scale = quantity("t", scale={"nice": False, "zero": False}, axis=axis), {"zero": False}
    band = layer(
        {"type": "area", "opacity": 0.25, "color": ACCENT}, x=x, y=quantity("low", scale=scale, axis=y_axis), y2="high"
    )
    mark, y = {"type": "line", "color": ACCENT, "point": len(values) < 30}, quantity("mean", scale=scale, axis=y_axis)
    line = layer(mark, x=x, y=y, tooltip=tooltip(t=plural, said="mean"))
    return {"height": 120, "data": {"values": values}, "layer": [band, line]}


def not_measured(context: Context) -> Content:
    about = context.about
    missing = [*context.missing]
    if not about.has_device_times:
        missing.append((GPU, "No region has times on a device."))
    if about.missing_ranks:
        ranks = ", ".join(map(str, about.missing_ranks[:20]))
        missing.append(("Ranks", f"Of {about.world_size} ranks these wrote nothing: {ranks}."))
    machine = context.evidence.machine
    not_told = [] if machine is None else [*machine.not_told]
    if "stacks" in not_told:
        not_told.remove("stacks")
        missing.append(("Lines", "Samples waited for the GIL: a line may have up to 5 ms of what ran before it."))
    if not_told:
        missing.append(("Processors", f"The kernel did not tell: {safe_name(', '.join(not_told))}."))
    counters = [
        (safe_name(region), device, what, number)
        for (region, device), found in sorted(context.tree.counters.items())
        for what, number in sorted(found.items())
    ]
    traces = context.rows("select file from slow_steps order by file") if "slow_steps" in context.run.tables else []
    environment = [
        ("ranks", len(about.ranks)),
        ("hosts", ", ".join(map(safe_name, about.hosts)) or None),
        ("started", f"{about.sessions} times" if about.sessions > 1 else "once"),
        ("ended", ", ".join(map(safe_name, about.ends)) if about.ended else about.state),
        ("earlier starts ended", ", ".join(map(safe_name, about.earlier_ends)) or None),
        ("platform", safe_name(about.platform) or None),
        *((safe_name(name), safe_name(version)) for name, version in about.versions.items()),
        *((f"device {place}", safe_name(name)) for place, name in enumerate(about.devices)),
        ("traces of slow steps", ", ".join(safe_name(trace["file"]) for trace in traces) or None),
        *((safe_name(name), safe_name(json.dumps(value))) for name, value in about.attributes.items()),
    ]
    tables: list[tuple[str, tuple[str, ...], Sequence[Sequence[object]]]] = [
        ("Left out of this page", ("what", "why"), missing),
        ("Lost", ("what", "how much"), [*about.lost.items()] if any(about.lost.values()) else []),
        ("In no time", ("region", "device", "what", "how often"), counters[:_MOST]),
        ("Environment", ("what", "value"), [row for row in environment if row[1] is not None]),
    ]
    made_by = f"Made by: deep500-timing report {safe_name(about.folder)}"
    text = (_READING, made_by) if any(about.lost.values()) else (_READING, _NOTHING_LOST, made_by)
    return Content(text=text, tables=tuple(table for table in tables if table[2]))
