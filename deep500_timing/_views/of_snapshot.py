"""What is shown of a snapshot: one process at one moment."""

from __future__ import annotations

from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING

from deep500_timing._base.memory_usage import SHOWN
from deep500_timing._summary.snapshot import COUNTERS, CPU
from deep500_timing._summary.text import GAP, format_bytes, safe_name, shorten
from deep500_timing._views.findings import find, verdict_if_none
from deep500_timing._views.first import first_note
from deep500_timing._views.on_device import device_note
from deep500_timing._views.table import LONGEST_NAME, Sheet
from deep500_timing._views.tree_of_snapshot import tree_of_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing._summary.place import Place
    from deep500_timing._summary.snapshot import RegionTimes, Snapshot


def sheet_of(snapshot: Snapshot, step: int | None = None) -> Sheet:
    """Put together what is shown of a snapshot.

    Args:
        snapshot: The times.
        step: The training step, for the title.
    """
    tree = tree_of_snapshot(snapshot)
    knows = tree.is_nested and any(node.total_s is not None for node in tree.walk())
    findings = tuple(find(tree)) if knows else ()
    return Sheet(
        _title(snapshot, step),
        GAP,
        tree,
        findings,
        verdict_if_none(tree) if knows and not findings else "",
        (*_notes(snapshot), *first_note(tree), *device_note(tree), *_of_tree(snapshot)),
    )


def _title(snapshot: Snapshot, step: int | None) -> tuple[str, ...]:
    taken = datetime.fromtimestamp(snapshot.unix_time_s).astimezone()
    process = f"{safe_name(snapshot.host)}, process {snapshot.pid}"
    if snapshot.rank is not None:
        process += f", rank {snapshot.rank} of {snapshot.world_size}"
    parts = ["Times by region", process, f"{taken:%Y-%m-%d %H:%M:%S %z}"]
    if snapshot.since_unix_time_s is not None:
        since = datetime.fromtimestamp(snapshot.since_unix_time_s).astimezone()
        parts.append(f"since {since:%Y-%m-%d %H:%M:%S %z}")
    if step is not None:
        parts.append(f"step {step}")
    return tuple(parts)


def _notes(snapshot: Snapshot) -> list[tuple[str, str]]:
    notes = []
    if not any(region.stats is not None for region in snapshot):
        disabled = "the timer is disabled; Timer(enabled=True), or timer.enabled = True, lets it record"
        notes.append(("no times", "nothing has been recorded yet" if snapshot.enabled else disabled))
    told: set[tuple[str, str]] = set()

    def note(label: str, text: str, count: Callable[[RegionTimes], int], *, show_count: bool = True) -> None:
        concerned = [(region, count(region)) for region in snapshot if count(region)]
        if concerned:
            told.update((region.name, region.device) for region, _ in concerned)
            named = [
                f"{f'{number} × ' if show_count else ''}{_named(region)} ({region.device})"
                for region, number in concerned
            ]
            notes.append((label, f"{', '.join(named)}: {text}"))

    threads = any(region.running > 1 for region in snapshot)
    for counter, text in COUNTERS.items():
        if counter == "running":
            open_text = "open now, by threads; the time so far is not included" if threads else text
            note(counter, open_text, attrgetter(counter), show_count=threads)
        else:
            note(counter, text, attrgetter(counter))
    note("warm-up", "left out by skip_first", lambda region: region.stats.skipped if region.stats else 0)
    note(
        "rounded",
        "medians and percentiles are from a histogram, within ±1 %",
        lambda region: int(region.stats is not None and region.stats.quantile_error > 0),
        show_count=False,
    )
    note(
        "no times",
        "used, but nothing is recorded, or nothing but warm-up",
        lambda region: int(region.stats is None and (region.name, region.device) not in told),
        show_count=False,
    )
    notes += [("memory", text) for region in snapshot if (text := _memory(region))]
    return notes


def _of_tree(snapshot: Snapshot) -> list[tuple[str, str]]:
    places = snapshot.places or ()
    by_path = {place.path: place for place in places if place.device == CPU}
    # What lies in a region's warm-up is no warm-up by that: a total is then more than the share says of the parent's.
    partly = [
        f"{shorten(safe_name(place.path[-1]), LONGEST_NAME)} (CPU)"
        for place in by_path.values()
        if (parent := by_path.get(place.path[:-1])) is not None and _exceeds_its_share(place, parent)
    ]
    notes = []
    if partly:
        named = ", ".join(dict.fromkeys(partly))
        notes.append(("shares", f"{named}: what lies in the warm-up of another region is in the total, in no share"))
    if any(place.is_estimate for place in places):
        notes.append(("places", "what lies in what is known of the newest intervals alone, the times are of all"))
    return notes


def _exceeds_its_share(place: Place, parent: Place) -> bool:
    if place.is_estimate or not parent.warm_up or place.stats is None or parent.stats is None or place.share is None:
        return False
    return place.stats.total > 1.005 * place.share * parent.stats.total


def _memory(region: RegionTimes) -> str:
    memory = region.memory
    if memory is None:
        return ""
    parts = []
    for name, shown_as in SHOWN.items():
        now = getattr(memory.last, name)
        if now is not None:
            most = getattr(memory, f"max_{name}", None)
            what = shown_as.format(device=memory.last.device or "device")
            parts.append(f"{format_bytes(now)} {what} (at most {format_bytes(now if most is None else most)})")
    return f"{_named(region)} at its last end: {', '.join(parts)}" if parts else ""


def _named(region: RegionTimes) -> str:
    return shorten(safe_name(region.name), LONGEST_NAME)
