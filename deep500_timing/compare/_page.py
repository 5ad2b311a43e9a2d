"""A comparison on one page: the runs in order of time, so that a drift is seen, and the regions with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._base.files import whole_file
from deep500_timing._summary.text import format_time, safe_name
from deep500_timing._views.page._charts import ACCENT, ALARM, COLOUR, layer, quantity, rounded, time_axis, tooltip
from deep500_timing._views.page._page import Built, render_page
from deep500_timing._views.page._section import Content, Figure, Panel
from deep500_timing.compare._text import began, conditions, effect_name, headline, interval_text, percent, table_of

if TYPE_CHECKING:
    from deep500_timing.compare._compare import Comparison, Effect
    from deep500_timing.compare._runs import RunTimes

_COLOURS = {"A": ACCENT, "B": ALARM}
_MOST_CHARTS = 9
_MOST_BARS = 20


def write_page(found: Comparison, path: str) -> None:
    effects = [found.step, *found.regions]
    heads, *rows = table_of(found)
    regions = Content(tables=(("The longest regions", heads, rows),))
    tested = [one for one in effects if one.interval is not None][:_MOST_BARS]
    if tested:
        alt = "An interval that includes 0 shows no difference."
        title = "Change of each region, with its 90 % interval"
        regions = Content((Figure(title, alt, (Panel(_changes(tested)),), heads, rows),))
    sections = [
        Built("regions", "Regions", regions),
        Built("runs", "Runs in order of time", Content((_runs(found, effects[:_MOST_CHARTS]),))),
        Built("conditions", "Conditions", Content(text=tuple(conditions(found)))),
    ]
    head = [f"{len(found.runs_a)} runs of A", f"{len(found.runs_b)} runs of B", found.method]
    with whole_file(path) as file:
        page = render_page("Comparison of runs", sections, head=head, verdict=headline(found))
        file.write(page.encode("utf-8", "backslashreplace"))


def _changes(tested: list[Effect]) -> dict[str, Any]:
    rows = []
    for one in tested:
        low, high = one.interval or (None, None)
        row: dict[str, Any] = {"change": rounded(one.change), "low": rounded(low), "high": rounded(high)}
        row |= {"region": effect_name(one), "said": percent(one.change), "interval": interval_text(one)}
        rows.append(row | {"verdict": one.verdict, "colour": ALARM if one.verdict == "slower" else ACCENT})
    y = {"field": "region", "type": "nominal", "sort": None, "axis": {"title": None, "labelLimit": 260}}
    x = {"axis": {"title": "B / A − 1", "format": "+.1%"}}
    tip = tooltip(region="region", said="B / A", interval="90 % interval", verdict="verdict")
    rule, point = {"type": "rule", "strokeWidth": 3}, {"type": "point", "filled": True, "size": 60}
    layers = [
        layer(rule, y=y, x=quantity("low", **x), x2="high", color=COLOUR, tooltip=tip),
        layer(point, y=y, x=quantity("change", **x), color=COLOUR),
    ]
    return {"height": 26 * len(rows), "data": {"values": rows}, "layer": layers}


def _runs(found: Comparison, effects: list[Effect]) -> Figure:
    both = [("A", run) for run in found.runs_a] + [("B", run) for run in found.runs_b]
    runs = sorted(both, key=lambda one: one[1].start_unix_s or 0.0)
    numbers = [
        (effect_name(one), side, safe_name(run.name), began(run) or None, format_time(run.times.get(one.path)))
        for one in effects
        for side, run in runs
    ]
    return Figure(
        "Median time a step of each run, in the order in which the runs were made",
        "A drift of the machine shows as a slope that both sides share.",
        tuple(Panel(_in_time(one, runs), effect_name(one)) for one in effects),
        ("region", "side", "run", "began (UTC)", "median"),
        numbers,
        legend=tuple(_COLOURS.items()),
    )


def _in_time(one: Effect, runs: list[tuple[str, RunTimes]]) -> dict[str, Any]:
    rows = [
        {"place": place, "s": rounded(run.times[one.path], 6), "side": side, "run": safe_name(run.name)}
        | {"time": format_time(run.times[one.path]), "colour": _COLOURS[side]}
        for place, (side, run) in enumerate(runs, 1)
        if one.path in run.times
    ]
    mark = {"type": "point", "filled": True, "size": 70}
    x = quantity("place", axis={"title": "run", "tickMinStep": 1, "grid": False})
    y = quantity("s", scale={"zero": False}, axis=time_axis(None))
    tip = tooltip(side="side", run="run", time="median")
    return {"height": 160, **layer(mark, rows, x=x, y=y, color=COLOUR, tooltip=tip)}
