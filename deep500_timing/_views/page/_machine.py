"""The section on the machine: the time of the thread of the steps in its three parts, and the machine's load."""

from __future__ import annotations

from typing import Any

import numpy as np

from deep500_timing._summary.text import format_time
from deep500_timing._views.findings._finding import percent
from deep500_timing._views.page._charts import coloured, quantity, rounded, tooltip
from deep500_timing._views.page._section import Content, Context, Figure, Panel

_BUCKETS = 120
_PARTS = {"on a processor": "#0072b2", "waiting for a processor": "#d55e00", "blocked": "#87919b"}
_USES = {
    "this process": ("process_cores", "#0072b2"),
    "loader workers": ("workers_cores", "#2f94cf"),
    "all processes": ("busy_cores", "#d55e00"),
    "other guests": ("steal_cores", "#8a6038"),
}
"""Columns of the table ``machine`` in cores, and their colours."""


def machine(context: Context) -> Content | None:
    """None without a reading of the thread."""
    evidence = context.evidence
    whole, times = evidence.processor, evidence.thread_times
    if whole is None or times is None:
        return None
    session, first_ns, last_ns = times.longest
    edges = np.linspace(first_ns / 1e9, last_ns / 1e9, _BUCKETS + 1)
    sessions, width_s = np.full(_BUCKETS, session), (last_ns - first_ns) / 1e9 / _BUCKETS
    ran, waited = (part / width_s for part in times.between(sessions, edges[:-1], edges[1:]))
    shares = zip(_PARTS, (ran, waited, np.maximum(1 - ran - waited, 0.0)), strict=True)
    values = [
        {"t": rounded(float(at - edges[0]), 5), "what": part, "value": rounded(float(share)), "said": percent(share)}
        for part, of_part in shares
        for at, share in zip(edges[:-1], of_part, strict=True)
    ]
    spec = _spec({"type": "area", "interpolate": "step-after"}, values, _PARTS, "%", stack="zero")
    parts_s = (whole.ran_s, whole.waited_s, whole.blocked_s)
    rows = [
        (part, format_time(seconds), percent(seconds / whole.wall_s if whole.wall_s else 0.0))
        for part, seconds in zip(_PARTS, parts_s, strict=True)
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
    spec = _spec({"type": "line", "point": len(found) < 30}, values, colours, "~s")
    heads = ("processors used by", "mean", "most")
    return (Figure(f"Processors in use{of}", f"{said}.", (Panel(spec),), heads, rows),)


def _spec(
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
