"""launch-bound, cpu-waits-for-gpu, copies, throttled: rules about a device's times and samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deep500_timing._base.names import IO
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._evidence import name_of, percent, took
from deep500_timing._views.findings._finding import Finding
from deep500_timing._views.on_device import AHEAD, ALIKE, busy_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._summary.tree import Node
    from deep500_timing._views.findings._evidence import Evidence

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


def _timed(evidence: Evidence) -> tuple[Node, list[Node]] | None:
    # BATCH with device times, and its children with device times.
    step = evidence.step_node
    if step is None or step.gpu is None or step.count < at_least.LEAST_STEPS or not step.total_s:
        return None
    return step, [child for child in step.children if child.gpu is not None]


def launch_bound(evidence: Evidence) -> Iterator[Finding]:
    """No timed work keeps the device busy in a part of the steady step, and the wait for data is not why."""
    timed = _timed(evidence)
    if timed is None or not timed[1]:
        yield from _idle_by_samples(evidence)
        return
    step, _ = timed
    busy = busy_in(step)
    assert busy is not None
    whole_s, busy_s = busy
    idle_s = whole_s - busy_s
    if idle_s < at_least.IDLE_SHARE * whole_s:
        return
    alone = {
        child: (child.total_s or 0.0) - (child.gpu.total_s if child.gpu is not None else 0.0) for child in step.children
    }
    idlest = max(alone, key=lambda child: alone[child])
    if idlest.name == IO and alone[idlest] >= idle_s / 2:
        return
    yield Finding(
        "launch-bound",
        f"The device is idle for {percent(idle_s / whole_s)} of {name_of(step.name)}",
        where=f"most of it in {name_of(idlest.name)}",
        why="the CPU does not keep it busy",
        cost_s=idle_s,
        anchor="tree",
        region=idlest.path,
        rank=evidence.rank,
    )


def _idle_by_samples(evidence: Evidence) -> Iterator[Finding]:
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
    if len(busy) < at_least.SAMPLES_LEAST:
        return
    idle = 1 - float(busy.mean()) / 100
    waits = sum(child.share or 0.0 for child in step.children if child.name == IO)
    if not at_least.IDLE_SHARE <= idle <= at_least.UNUSED_SHARE or waits >= idle / 2:
        return
    yield Finding(
        "launch-bound",
        f"The device is idle for at least {percent(idle)} of {name_of(step.name)}, by {len(busy)} samples of its "
        "utilisation",
        why="the CPU does not keep it busy",
        cost_s=idle * float(steps.durations_s.sum()),
        anchor="devices",
        rank=evidence.rank,
    )


def cpu_waits_for_gpu(evidence: Evidence) -> Iterator[Finding]:
    """The CPU takes as long as the device in one region, where it waits, and runs ahead in another."""
    timed = _timed(evidence)
    if timed is None:
        return
    step, inside = timed
    assert step.total_s is not None
    long = [child for child in inside if child.gpu and child.gpu.total_s >= at_least.FOLLOWS_SHARE * step.total_s]
    ahead = [child for child in long if _ratio(child) < AHEAD]
    follows = [child for child in long if abs(_ratio(child) - 1) <= ALIKE]
    if not ahead or not follows:
        return
    worst = max(follows, key=lambda child: child.total_s or 0.0)
    assert worst.gpu is not None
    yield Finding(
        "cpu-waits-for-gpu",
        f"The CPU waits for the device in {name_of(worst.name)}: {took(worst.median_s or 0.0)} on the CPU, "
        f"{took(worst.gpu.median_s)} on the device",
        where=f"while it runs ahead in {name_of(ahead[0].name)}",
        why="something in it synchronizes",
        cost_s=worst.total_s,
        anchor="tree",
        region=worst.path,
        rank=evidence.rank,
    )


def _ratio(node: Node) -> float:
    assert node.gpu is not None
    return (node.median_s or 0.0) / node.gpu.median_s if node.gpu.median_s else float("inf")


def copies(evidence: Evidence) -> Iterator[Finding]:
    """Regions of copies to the device take a large part of the step."""
    step = evidence.step_node
    if step is None or step.count < at_least.LEAST_STEPS or not step.total_s:
        return
    found = [node for node in step.walk() if any(word in node.name.lower() for word in _COPIES) and not node.is_rest]
    whole_s = max(step.total_s, step.gpu.total_s if step.gpu is not None else 0.0)
    node = max(found, key=_spent_s, default=None)
    if node is None or node.count < at_least.LEAST_STEPS or _spent_s(node) < at_least.COPY_SHARE * whole_s:
        return
    why = ""
    if node.gpu is not None and abs(_ratio(node) - 1) <= ALIKE:
        why = "the CPU waits for it, as for a copy from pageable memory or without non_blocking"
    yield Finding(
        "copies",
        f"{name_of(node.name)} takes {percent(_spent_s(node) / whole_s)} of {name_of(step.name)}, "
        f"{took(_spent_s(node) / node.count)} a step",
        where="overlapped with other work" if node.overlaps else "not overlapped",
        why=why,
        cost_s=_spent_s(node),
        anchor="tree",
        region=node.path,
        rank=evidence.rank,
    )


def _spent_s(node: Node) -> float:
    return max(node.total_s or 0.0, node.gpu.total_s if node.gpu is not None else 0.0)


def throttled(evidence: Evidence) -> Iterator[Finding]:
    """The driver lowers a device's clocks in a part of the samples."""
    steps = evidence.steady
    for (rank, metric, _), (at, values) in sorted(evidence.samples.items()):
        device, _, reason = metric.partition(f".{_METRIC}")
        held = values > 0
        if not reason or len(values) < at_least.SAMPLES_LEAST or held.mean() < at_least.THROTTLED_SHARE:
            continue
        cost_s, effect = None, ""
        if steps is not None and rank == evidence.rank:
            # A sample describes the time before it.
            after = np.minimum(np.searchsorted(at, steps.starts_s), len(at) - 1)
            slow, usual = steps.durations_s[held[after]], steps.durations_s[~held[after]]
            if len(slow) and len(usual) and np.median(slow) > np.median(usual):
                cost_s = float((np.median(slow) - np.median(usual)) * len(slow))
                effect = f"{len(slow)} steps took {percent(float(np.median(slow) / np.median(usual)) - 1)} longer"
        on = f" of rank {rank}" if len(evidence.by_rank) > 1 else ""
        yield Finding(
            "throttled",
            f"{device.upper()}{on} is throttled in {percent(float(held.mean()))} of {len(held)} samples by "
            f"{_REASONS.get(reason, name_of(reason))}",
            where=effect,
            cost_s=cost_s,
            anchor="devices",
            rank=rank,
        )
        return
