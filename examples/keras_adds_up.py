"""How the times of a Keras fit add up: what the other ``keras_*`` examples print below their table.

Regions lie inside one another: FIT holds EPOCH, EPOCH holds the batches, the hooks of callbacks, VALIDATION and what
Keras does before and after the batches, and BATCH holds IO, FORWARD and BACKWARD. What none of the inner ones covers is
the rest: in a batch the optimizer's update and Keras's own work.
"""

from __future__ import annotations

import numpy as np

import deep500_timing_tensorflow as timer

PARTS = (
    "EPOCH (start)",
    timer.TimeType.BATCH,
    "BATCH (first)",
    "CALLBACKS",
    "VALIDATION",
    "EPOCH (end)",
)


def total(tmr: timer.Timer, key: timer.TimeType | str) -> float:
    """The seconds that were spent in a region."""
    return sum(tmr.get_time(key))


def waits_inside_batches(tmr: timer.Timer) -> float:
    """The seconds of IO that belong to the batches of the steady state, as BATCH does."""
    batches, waits = tmr.intervals(timer.TimeType.BATCH), tmr.intervals(timer.TimeType.IO)
    place = np.searchsorted(batches[:, 0], waits[:, 0], side="right") - 1
    inside = (place >= 0) & (waits[:, 1] <= batches[np.maximum(place, 0), 1])
    return float((waits[inside, 1] - waits[inside, 0]).sum() / 1e9)


def show(tmr: timer.Timer, callback: timer.TimerCallback) -> None:
    """Print where an epoch and a batch go, in seconds and percent, and how fast it went."""
    types = timer.TimeType
    epoch, batch = total(tmr, types.EPOCH), total(tmr, types.BATCH)
    tables = {
        "EPOCH": (epoch, {str(getattr(part, "name", part)): total(tmr, part) for part in PARTS}),
        "BATCH": (
            batch,
            {
                "IO": waits_inside_batches(tmr),
                "FORWARD": total(tmr, types.FORWARD),
                "BACKWARD": total(tmr, types.BACKWARD),
            },
        ),
    }
    for name, (whole, parts) in tables.items():
        parts = {key: seconds for key, seconds in parts.items() if seconds}
        parts["the rest"] = whole - sum(parts.values())
        print(f"\n{name + ', in all':<18}{whole:9.3f} s")
        for key, seconds in parts.items():
            print(f"  {key:<16}{seconds:9.3f} s {100 * seconds / whole:5.1f} %")
    found = callback.throughput
    if found is not None and found.samples_per_s is not None:
        print(f"\nnewest epoch, steady state: {found.steps_per_s:.1f} steps/s, {found.samples_per_s:.0f} samples/s")
