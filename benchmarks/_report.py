"""Writes the report: the results, how, and how to read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks._contenders import CLOCK
from benchmarks._reach import FORMS, GOALS, keras_runs, seen_from, within_noise

_GROUPS = {
    "limit": "Bounds",
    "compiled": "deep500-timing, compiled",
    "plain": "deep500-timing, plain Python",
    "peer": "Peers",
}


_MODELS = {"new": "a new model, traced in it", "warm": "a model that was traced before"}


def number(value: float | None, digits: int = 3) -> str:
    """A number with that many significant digits, thousands apart, no exponent; a dash for None."""
    if value is None:
        return "–"
    if value != 0 and abs(value) < 0.005:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{round(value):,}".replace(",", "\u202f")
    return f"{value:.{digits}g}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numeric_from: int = 1) -> list[str]:
    """A Markdown table; columns from ``numeric_from`` on are aligned to the right."""
    rule = ["---" if column < numeric_from else "---:" for column in range(len(header))]
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)] + [""]


def _with_spread(spread: dict[str, float] | None, digits: int = 3) -> str:
    if not spread:
        return "–"
    median, low, high = (number(spread[name], digits) for name in ("median", "low", "high"))
    return median if low == high else f"{median} ({low}…{high})"


def _verdict(reached: bool | None) -> str:
    return "–" if reached is None else ("yes" if reached else "**no**")


def reach_table(results: dict[str, Any]) -> list[str]:
    """Target, measured and reached for both forms."""
    rows = []
    for goal in GOALS:
        cells = [goal.text]
        for form, target in zip(FORMS, goal.targets, strict=True):
            sign, measured = "≥" if goal.at_least else "≤", goal.measure(results, form)
            cells.append(f"{sign} {target:g}{goal.unit}")
            if measured is None:
                cells += ["not measured", "–"]
                continue
            median, low, high = (number(value) for value in measured)
            spread = "" if low == high else f" ({low}…{high})"
            cells += [f"{median}{goal.unit}{spread}", _verdict(goal.reached(measured[0], target))]
        rows.append(cells)
    for name, runs in keras_runs(results).items():
        overhead = runs.get("TimerCallback", {}).get("overhead_percent")
        if overhead:
            cell = f"{overhead['median']:+.1f} % ({overhead['low']:+.1f}…{overhead['high']:+.1f})"
            rows.append([name, "within noise", cell, _verdict(within_noise(runs)), "", "", ""])
    header = ["", "compiled: target", "measured", "reached", "plain: target", "measured", "reached"]
    return table(header, rows)


def short_of(results: dict[str, Any]) -> list[str]:
    """For each goal that is missed: in which form, by how much, and what stands in the way."""
    lines = []
    for goal in GOALS:
        for form, target, limit in zip(FORMS, goal.targets, goal.limits, strict=True):
            measured = goal.measure(results, form)
            if measured is None or goal.reached(measured[0], target):
                continue
            percent = 100 * abs(measured[0] / target - 1)
            side = "below" if goal.at_least else "above"
            lines.append(f"- {goal.text}, {form}: {percent:.0f} % {side} the target. {limit}".rstrip())
    return ["Short of the target:", "", *lines, ""] if lines else []


def _pairs_tables(results: dict[str, Any]) -> Iterable[str]:
    header = ["", "warm, ns", f"÷ {CLOCK}", "cold, ns", f"÷ cold {CLOCK}", "reads, ns", "bytes kept", "p99.99, µs"]
    for group, title in _GROUPS.items():
        rows = []
        for label, found in results["contenders"].items():
            if found["group"] != group:
                continue
            tail = found.get("tail_ns")
            rows.append(
                [
                    f"{found['name']}<br>`{found['statement']}`",
                    _with_spread(found.get("warm_ns")),
                    _with_spread(found.get("warm_ratio")) if label != CLOCK else "1",
                    _with_spread(found.get("cold_ns")),
                    _with_spread(found.get("cold_ratio")) if label != CLOCK else "1",
                    number(found["reads_ns"]["median"]) if "reads_ns" in found else "–",
                    number(found.get("bytes_kept")),
                    number(tail["p99.99"] / 1000) if tail else "–",
                ]
            )
        if rows:
            yield from (f"### {title}", "", *table(header, rows))


def _peer_table(results: dict[str, Any]) -> list[str]:
    peers = results["peer_ratios"]
    if not peers:
        return []
    columns = [f"{name} ({form})" for form in FORMS for name in ("start/end", "with region")]
    rows = [[peer, *(_with_spread(ratios.get(column)) for column in columns)] for peer, ratios in peers.items()]
    header = ["÷", *(f"`{column.partition(' (')[0]}`, {column.partition(' (')[2][:-1]}" for column in columns)]
    return [
        "## Ratios to each peer",
        "",
        "How many times as long a warm pair of the peer takes as one of ours: the median of the rounds' ratios and, in "
        "brackets, their quartiles. Above 1 the peer is slower.",
        "",
        *table(header, rows),
    ]


def training_lines(results: dict[str, Any]) -> list[str]:
    """Whole runs: the loops of PyTorch and of Keras that were measured."""
    lines: list[str] = []
    if found := results.get("pytorch"):
        lines += _training_table(f"A PyTorch loop on the CPU, {found['steps']} steps, 4 regions each", found)
    if found := results.get("processes"):
        lines += _process_table(found)
    if found := results.get("keras"):
        lines += _keras_tables(found)
    return lines


def _keras_tables(found: dict[str, Any]) -> Iterable[str]:
    keras = f"Keras {found['keras']}"
    yield from _keras_table(
        f"{keras} `fit` on {found['backend']}, a tiny model, one epoch of {found['steps']} steps, each of them", found
    )
    if longer := found.get("longer"):
        yield from _keras_table(f"{keras}, a larger model, each of its steps", {"runs": longer})
    for kind, runs in found.get("first_batch", {}).items():
        title = f"{keras}, from the call of `fit` to the end of the first batch, {_MODELS[kind]}"
        yield from _keras_table(title, {"runs": runs})


def _keras_table(title: str, found: dict[str, Any]) -> list[str]:
    # With the table's values of the callback.
    lines = _training_table(title, found)
    least = seen_from(found["runs"])
    if least is None:
        return lines
    ours, noise = (found["runs"][name]["overhead_percent"] for name in ("TimerCallback", "no timing, again"))
    told = "cannot be told from" if within_noise(found["runs"]) else "is more than"
    return [
        *lines,
        f"What the callback adds, {ours['median']:+.2f} % ({ours['low']:+.2f} … {ours['high']:+.2f}), {told} what a "
        f"second fit without it differs by, {noise['median']:+.2f} % ({noise['low']:+.2f} … {noise['high']:+.2f}). "
        f"More than {least:.1f} % would have been seen.",
        "",
    ]


def _training_table(title: str, found: dict[str, Any]) -> list[str]:
    took = "us" if all("us" in run for run in found["runs"].values()) else "ms"
    header = ["", "µs" if took == "us" else "ms per run", "overhead", "95 % interval", "rounds"]
    measured = [f"Measured until {found['measured']}.", ""] if "measured" in found else []
    return [f"### {title}", "", *measured, *table(header, _compared(found, took, "overhead_percent", " %"))]


def _process_table(found: dict[str, Any]) -> list[str]:
    header = ["", "µs per step", "added, µs", "95 % interval", "processes"]
    return [
        f"### The same loop, each in processes of its own, {found['steps']} steps",
        "",
        "TraceML starts the program and patches PyTorch in it. A process is one sample, the median of its steps; "
        "processes differ by more than what a region costs.",
        "",
        *table(header, _compared(found, "us", "added_us")),
    ]


def _compared(found: dict[str, Any], took: str, more: str, unit: str = "") -> list[list[str]]:
    rows = []
    for name, run in found["runs"].items():
        added = run.get(more)
        rows.append(
            [
                name,
                number(run[took]["median"], 4),
                f"{added['median']:+.2f}{unit}" if added else "–",
                f"{added['low']:+.2f} … {added['high']:+.2f}{unit}" if added else "–",
                str(run[took]["rounds"]),
            ]
        )
    return rows


def _once(results: dict[str, Any]) -> Iterable[str]:
    if imports := results.get("imports"):
        rows = [
            [name, _with_spread(found), number(found["least"]), str(found["rounds"])] for name, found in imports.items()
        ]
        yield from ("### Importing, ms over a bare interpreter", "")
        yield from table(["", "median (quartiles)", "least", "rounds"], rows)
    if found := results.get("statistics"):
        yield from (f"### Statistics of {number(found['count'])} intervals", "")
        rows = [["Python: `min`, `max`, `statistics.mean`, `.median`, `.stdev`", _with_spread(found["python_ms"]), "1"]]
        rows += [[name, _with_spread(ms), _with_spread(found["ratio"][name])] for name, ms in found["ms"].items()]
        yield from table(["", "ms", "Python's ÷ ours"], rows)
        yield from (
            "Ours are `get_time_stats`: count, total, minimum, mean, median, maximum, standard deviation, three "
            "percentiles and a confidence interval of the median, from the recorded intervals.",
            "",
        )
    if found := results.get("memory"):
        yield from ("### Memory of a run without end", "")
        header = ["", "regions", "keep_last", "MiB after 1 %", "largest after", "at the end", "growth, KiB"]
        rows = [
            [
                form,
                number(run["regions"]),
                number(run["keep_last"]),
                *(f"{run[name] / 2**20:.2f}" for name in ("first_bytes", "largest_bytes", "last_bytes")),
                f"{run['growth_bytes'] / 2**10:+.0f}",
            ]
            for form, run in found.items()
        ]
        yield from table(header, rows)
    if found := results.get("block_sizes"):
        yield from ("### What a kept interval weighs", "")
        rows = [
            [form, number(size["intervals"]), number(size["bytes"], 6), f"{size['bytes_per_interval']:.2f}"]
            for form, size in found.items()
        ]
        yield from table(["", "intervals in a block", "bytes of a block", "bytes per interval"], rows)
    if found := results.get("device_calls"):
        yield from ("### Calls that reach the device, per region with `gpu=True` in the steady state", "")
        columns = list(next(iter(found.values())))
        rows = [[form, *(f"{counts[column]:.3g}" for column in columns)] for form, counts in found.items()]
        yield from table(["", *columns], rows)


def _how(results: dict[str, Any]) -> list[str]:
    return [
        "## How it is measured",
        "",
        "All contenders run in one process, in turns of some tenths of a millisecond, in an order that is drawn anew "
        f"each round ({results['rounds']['warm']} rounds). The plain form is the same package, read once more from "
        "its `.py` files under another name, beside the compiled one. Each contender is fixed source in a `for` loop "
        "of its own, its names local variables, with no call in between; it is warmed up before each turn, and the "
        "same loop without it, run right before, is subtracted.",
        "",
        f"- **Ratios** are taken within a round, to {CLOCK} that were measured right before the turn, or to the other "
        "contender of the same round; then the median over the rounds. What slows a round down slows both. Brackets "
        "hold the first and the third quartile.",
        f"- **Cold**: {results.get('cold_how', 'not measured')}, the same without a pair subtracted. The median of "
        f"{results['rounds']['cold_pairs']} pairs a round, {results['rounds']['cold']} rounds. It is what a pair costs "
        "in a training step, which leaves nothing of the timer in the caches.",
        "- **Reads**: the median that the timer itself reports for a region with nothing in it.",
        "- **Bytes kept**: what `tracemalloc` finds allocated after 10⁵ pairs (fewer for OpenTelemetry and "
        "`record_function`, which take long), divided by the pairs. A timer that reuses a block shows less than the "
        "size of an interval.",
        "- **p99.99**: of single pairs with a clock reading around each, which is included. It counts whatever else "
        "the machine does in the meantime: compare it with that of the bare clock.",
        "- **Decorator**: less the undecorated call. **iterate**: the loop over it, less the loop over the items.",
        "- **Training**: whole runs, in turns, in an order drawn anew each round; the overhead is that of each round "
        "over the mean of both runs without timing of the same round, and its interval a bootstrap of the median. *No "
        "timing, again* is the second of them over the first: what the method makes of no difference.",
        "- Garbage collection is off, except in the measurement of the tail and in training.",
        "",
        "## How to read it",
        "",
        "Nanoseconds belong to this machine at that hour; ratios travel better. A ratio below 1 to two clock reads is "
        "no mistake: the compiled form reads the same clock without the call through Python. Where the quartiles of "
        "two contenders overlap, take them for equal.",
        "",
    ]


def report(results: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    machine = results["machine"]
    lines = [
        "# What timing costs",
        "",
        f"Made by `python -m benchmarks{'' if results['effort'] == 'full' else ' --effort ' + results['effort']}` on "
        f"{machine['date']}. All tables are from that one run, but for those that have a date of their own.",
        "",
        "![Cost of a timed region](results.png)",
        "",
        "## Reach",
        "",
        *reach_table(results),
        *short_of(results),
        "## A pair of calls",
        "",
        *_pairs_tables(results),
    ]
    if results["missing"]:
        lines += ["### Not measured", ""]
        lines += table(["", "why"], sorted(results["missing"].items()), numeric_from=2)
    lines += _peer_table(results)
    once = list(_once(results))
    if once:
        lines += ["## What is paid once, or in the long run", "", *once]
    if training := training_lines(results):
        lines += ["## Training", "", *training]
    if found := results.get("comm"):
        lines += ["## Communication", "", *found]
    if found := results.get("pipeline"):
        lines += ["## Pipelines", "", *found]
    if found := results.get("layers"):
        lines += ["## Layers", "", *found]
    lines += _how(results)
    lines += ["## Where it was measured", ""]
    facts = {**machine, **results["versions"]}
    lines += table(["", ""], facts.items(), numeric_from=2)
    return "\n".join(lines).rstrip() + "\n"
