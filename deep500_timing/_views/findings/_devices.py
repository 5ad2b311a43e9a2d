"""launch-bound, cpu-waits-for-gpu, copies, throttled, memory-grows: rules about a device's times and samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from deep500_timing._base.names import IO
from deep500_timing._summary.text import format_bytes, format_share, safe_name, shorten
from deep500_timing._views.findings._finding import Finding, Rule, joined, named, of_one_region, percent, took
from deep500_timing._views.findings._series import CHANCE, Trend, trend_of

if TYPE_CHECKING:
    from deep500_timing._summary.tree import Node
    from deep500_timing._views.findings._evidence import Evidence

_AHEAD = 0.7
"""The CPU runs ahead if its time is below this share of the device's."""
_ALIKE = 0.1
"""Largest relative difference of equal times."""
_UNUSED = 0.95
"""launch-bound: a device that is sampled as idle for more than that is not this run's."""
_GROWTH_BYTES = 16 << 20
"""memory-grows: at least so many bytes."""
_FEWEST, _LARGE, _CHANCE_OF_LARGE = 10, 1 << 30, 1e-3
"""memory-grows: the fewest samples, the growth that is said of fewer than usual, and its chance without growth."""
_WARM_UP = 0.25
"""memory-grows: share of the samples in which caches and pools fill."""
_SYSTEM_WIDE = ("system.", "gpu")
_CAPACITY = "memory.device_total_bytes"
_ON_DEVICE = "memory.device_"
_SYNCS = "sync_lines"
_COPIES = ("copy", "h2d", "host to device", "to device", "to_device", "transfer")
_METRIC = "throttled_"
_REASONS = {
    "sw_power_cap": "its power limit",
    "hw_slowdown": "a hardware slowdown",
    "sync_boost": "the clocks of its group",
    "sw_thermal": "its temperature",
    "hw_thermal": "its temperature",
    "hw_power_brake": "the power supply",
}


def launch_bound(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """No timed work keeps the device busy in a part of the steady step, and the wait for data is not why."""
    step, idle_s = evidence.step_node, evidence.idle_s
    if step is None or step.gpu is None or step.total_s is None or idle_s is None:
        yield from _idle_by_samples(rule, evidence)
        return
    whole_s = max(step.total_s, step.gpu.total_s)
    alone = {child: (child.total_s or 0.0) - (child.gpu.total_s if child.gpu else 0.0) for child in step.children}
    idlest = max(alone, key=lambda child: alone[child])
    is_wait = idlest.name == IO and alone[idlest] >= idle_s / 2
    if step.count < rule.least or idle_s < rule.share * whole_s or is_wait:
        return
    yield rule.found(
        evidence,
        f"The device is idle for {percent(idle_s / whole_s)} of {named(step.name)}",
        where=f"most of it in {named(idlest.name)}",
        why="the CPU does not keep it busy",
        cost_s=idle_s,
        region=idlest.path,
    )


def _idle_by_samples(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    # NVML counts the kernels of all processes in up to a second before a sample, which bounds this run's from above.
    # With several devices it is not known which one a rank uses.
    found = [
        sampled
        for (rank, metric, _), sampled in evidence.samples.items()
        if rank == evidence.rank and metric.startswith("gpu") and metric.endswith(".utilization_percent")
    ]
    step, steps = evidence.step_node, evidence.steady
    if len(found) != 1 or step is None or step.gpu is not None or steps is None or not len(steps.durations_s):
        return
    at, busy = found[0]
    place = np.searchsorted(steps.starts_s, at, side="right") - 1
    busy = busy[(place >= 0) & (at <= steps.starts_s[place] + steps.durations_s[place])]
    if len(busy) < rule.least:
        return
    idle = 1 - float(busy.mean()) / 100
    waits = sum(child.share or 0.0 for child in step.children if child.name == IO)
    if not rule.share <= idle <= _UNUSED or waits >= idle / 2:
        return
    yield rule.found(
        evidence,
        f"The device is idle for at least {percent(idle)} of {named(step.name)}, by {len(busy)} samples of its "
        "utilisation",
        why="the CPU does not keep it busy",
        cost_s=idle * float(steps.durations_s.sum()),
        anchor="devices",
    )


def cpu_waits_for_gpu(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """The CPU takes as long as the device in one region, where it waits, and runs ahead in another."""
    step = evidence.step_node
    if step is None or step.gpu is None or not step.total_s:
        return
    long = [child for child in step.children if child.gpu and child.gpu.total_s >= rule.share * step.total_s]
    ahead = [child for child in long if _ratio(child) < _AHEAD]
    follows = [child for child in long if abs(_ratio(child) - 1) <= _ALIKE]
    if not ahead or not follows:
        return
    worst = max(follows, key=lambda child: child.total_s or 0.0)
    assert worst.gpu is not None
    yield rule.found(
        evidence,
        f"The CPU waits for the device in {named(worst.name)}: {took(worst.median_s)} on the CPU, "
        f"{took(worst.gpu.median_s)} on the device",
        where=f"while it runs ahead in {named(ahead[0].name)}",
        why=_lines_that_wait(evidence) or "something in it synchronizes",
        cost_s=worst.total_s,
        region=worst.path,
    )


def _lines_that_wait(evidence: Evidence) -> str:
    # Of all regions, from the steps in which PyTorch told; see the torch adapter's `_syncs`.
    of_rank = f"from {_SYNCS} where rank = {evidence.rank} {evidence.only}"
    rows = evidence.rows(
        f"select line, expression, sum(count) as n {of_rank}group by line, expression order by n desc, line", _SYNCS
    )
    lines = [row for row in rows if row["n"]]
    steps = evidence.rows(f"select count(*) as n {of_rank}and count = 0")[0]["n"] if lines else 0
    if not steps:
        return ""
    said = [
        f"{safe_name(row['line'])} ({shorten(safe_name(row['expression']), 48)}) {row['n'] / steps:.3g} times a step"
        for row in lines[:2]
    ]
    more = f", and {len(lines) - 2} more" if len(lines) > 2 else ""
    return f"it waits at {joined(said)}{more}"


def _ratio(node: Node) -> float:
    assert node.gpu is not None
    return (node.median_s or 0.0) / node.gpu.median_s if node.gpu.median_s else float("inf")


def copies(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Regions of copies to the device take a large part of the step."""
    step = evidence.step_node
    assert step is not None
    found = [node for node in step.walk() if any(word in node.name.lower() for word in _COPIES) and not node.is_rest]
    whole_s, node = _spent_s(step), max(found, key=_spent_s, default=None)
    if node is None or node.count < rule.least or _spent_s(node) < rule.share * whole_s:
        return
    waits = node.gpu is not None and abs(_ratio(node) - 1) <= _ALIKE
    yield rule.found(
        evidence,
        f"{named(node.name)} takes {percent(_spent_s(node) / whole_s)} of {named(step.name)}, "
        f"{took(_spent_s(node) / node.count)} a step",
        where="overlapped with other work" if node.overlaps else "not overlapped",
        why="the CPU waits for it, as for a copy from pageable memory or without non_blocking" if waits else "",
        cost_s=_spent_s(node),
        region=node.path,
    )


def _spent_s(node: Node) -> float:
    return max(node.total_s or 0.0, node.gpu.total_s if node.gpu is not None else 0.0)


def throttled(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """The driver lowers a device's clocks in a part of the samples."""
    steps = evidence.steady
    for (rank, metric, _), (at, values) in sorted(evidence.samples.items()):
        device, _, reason = metric.partition(f".{_METRIC}")
        held = values > 0
        if not reason or len(values) < rule.least or held.mean() < rule.share:
            continue
        cost_s, effect = None, ""
        if steps is not None and rank == evidence.rank:
            # A sample describes the time before it.
            is_slow = held[np.minimum(np.searchsorted(at, steps.starts_s), len(at) - 1)]
            count = int(is_slow.sum())
            if 0 < count < len(is_slow):
                slow_s, usual_s = (float(np.median(steps.durations_s[of])) for of in (is_slow, ~is_slow))
                if slow_s > usual_s:
                    cost_s = (slow_s - usual_s) * count
                    effect = f"{count} steps took {percent(slow_s / usual_s - 1)} longer"
        yield rule.found(
            evidence,
            f"{device.upper()}{evidence.on_rank(rank)} is throttled in {percent(float(held.mean()))} of {len(held)} "
            f"samples by {_REASONS.get(reason, named(reason))}",
            where=effect,
            cost_s=cost_s,
            rank=rank,
        )
        return


def memory_grows(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """A reading of this process's memory has a slope that is more than noise."""
    most, worst = float(_GROWTH_BYTES), None
    for (rank, metric, region), (at, values) in sorted(evidence.samples.items()):
        of_memory = metric.endswith("_bytes") and ("memory" in metric or "rss" in metric) and ".max_" not in metric
        if not of_memory or metric.startswith(_SYSTEM_WIDE) or metric == _CAPACITY or len(values) < _FEWEST:
            continue
        is_short = len(values) < rule.least
        kept = slice(1 if is_short else int(_WARM_UP * len(values)), None)
        found = trend_of(values[kept])
        if found is None or found.growth < rule.share or found.end - found.start < max(most, _LARGE * is_short):
            continue
        if found.chance > (_CHANCE_OF_LARGE if is_short else CHANCE):
            continue
        most, worst = found.end - found.start, (rank, metric, region, found, at[kept])
    if worst is None:
        return
    rank, metric, region, found, at = worst
    steps = 0
    if evidence.steps is not None:
        steps = int(np.diff(np.searchsorted(evidence.steps.starts_s, [at[0], at[-1]]))[0])
    rate = f"{format_bytes(most / steps)} a step" if steps else f"{format_bytes(most)} so far"
    yield rule.found(
        evidence,
        f"Memory{evidence.on_rank(rank)} grows by {rate}, from {format_bytes(found.start)} to "
        f"{format_bytes(found.end)} ({named(metric)})",
        where=f"read at the end of {named(region)}" if region else "",
        why=_when_full(evidence, rank, metric, region, found, steps),
        rank=rank,
    )


def _when_full(evidence: Evidence, rank: int, metric: str, region: str, found: Trend, steps: int) -> str:
    # A device's size is sampled too. The host's limit is not known.
    sizes = evidence.samples.get((rank, _CAPACITY, region))
    if not metric.startswith(_ON_DEVICE) or sizes is None or not steps:
        return ""
    size = float(sizes[1][-1])
    left = (size - found.end) / ((found.end - found.start) / steps)
    said = f"at this rate the {format_bytes(size)} of the device are full in {float(f'{left:.2g}'):.0f} steps"
    return said if left >= 1 else ""


def device_note(evidence: Evidence) -> list[tuple[str, str]]:
    """The line on how busy the device was in a step, or none."""
    step, idle_s = evidence.step_node, evidence.idle_s
    if step is None or step.gpu is None or idle_s is None:
        return []
    busy = 1 - idle_s / max(step.total_s or 0.0, step.gpu.total_s)
    said = f"busy for {format_share(busy)} of BATCH with the regions timed on it"
    longest = max(step.children, key=lambda child: 0.0 if child.gpu is None else child.gpu.total_s)
    if longest.gpu is not None and longest.count >= 3 and longest.median_s and longest.gpu.median_s:
        ratio = _ratio(longest)
        if ratio < _AHEAD:
            pace = "runs ahead of it"
        elif abs(ratio - 1) <= _ALIKE:
            pace = "takes as long, so one waits for the other"
        else:
            pace = "takes longer, so it waits" if ratio > 1 else "takes less"
        both = f"{took(longest.median_s)} against {took(longest.gpu.median_s)}"
        said += f"; in {named(longest.name)} the CPU {pace}: {both}"
    return [("device", said)]


_LAUNCHES = "larger batches, CUDA graphs, torch.compile"
_NO_WAITS = "look for .item(), .cpu(), print of a tensor"
_LISTS = "look for lists and caches that grow"
RULES = (
    Rule("launch-bound", launch_bound, 0.20, 20, "tree", _LAUNCHES, needs="", on_cpu=True),
    Rule(
        "cpu-waits-for-gpu",
        cpu_waits_for_gpu,
        0.10,
        20,
        "tree",
        _NO_WAITS,
        on_cpu=True,
        yields_to={"copies": of_one_region},
    ),
    Rule("copies", copies, 0.10, 20, "tree", "pin_memory=True and non_blocking=True"),
    Rule("throttled", throttled, 0.05, 20, "devices", "cooling, power limit", needs="run"),
    Rule("memory-grows", memory_grows, 0.05, 20, "memory", _LISTS, needs="run"),
)
