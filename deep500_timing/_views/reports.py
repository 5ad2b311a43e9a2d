"""The reports of a snapshot, one process at one moment; of a run, findings and the table of a rank; of several runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from deep500_timing._base.memory_usage import SHOWN
from deep500_timing._base.names import BACKWARD, BATCH, CPU
from deep500_timing._summary.snapshot import COUNTERS, RegionTimes, Snapshot, counters_of
from deep500_timing._summary.text import GAP, format_bytes, format_time, lines_of, safe_name, shorten
from deep500_timing._summary.tree import Node, Tree, build_tree, node_of, on_device
from deep500_timing._views.about import About, about_run, title_of
from deep500_timing._views.findings import AFTER, START_UP, Evidence, disturbance, evidence_of, find, notes_of, verdict
from deep500_timing._views.findings._account import Verdict
from deep500_timing._views.findings._devices import device_note
from deep500_timing._views.findings._finding import listed, percent
from deep500_timing._views.table import LONGEST_NAME, TextReport, brief, folded

if TYPE_CHECKING:
    from deep500_timing.runs import Run

_OF_A_RUN = "Which steps are slow, and whether they drift, only a run tells: Timer(run=FOLDER)."
_ROW = 0.01
"""The share of the run from which on its start and its end have separate rows."""
_ROWS = 50
"""Siblings that a terminal shows of a snapshot, however small."""
_NAMED = 6
"""Most ranks that are listed."""
_MOST_RUNS = 20
"""Runs that are listed side by side."""
_NAMED_REGIONS = 2
_TRAINS = (BACKWARD, "optimizer")
"""The engines of an RL job have neither."""


def report_of_snapshot(snapshot: Snapshot, step: int | None = None, *, whole: bool = True) -> TextReport:
    """The report of a snapshot; without ``whole`` many small regions are one row."""
    tree = tree_of_snapshot(snapshot)
    knows = tree.is_nested and any(node.total_s is not None for node in tree.walk())
    evidence = evidence_of(tree)
    findings = tuple(find(evidence)) if knows else ()
    said = verdict(evidence) if knows and not findings else Verdict()
    return TextReport(
        _title(snapshot, step),
        GAP,
        tree if whole else folded(tree, [finding.region for finding in findings], rows=_ROWS),
        findings,
        f"{said.text} {_OF_A_RUN}" if said.is_calm else said.text,
        said.is_calm,
        (*_notes(snapshot, tree), *device_note(evidence), *_of_tree(tree)),
    )


def _title(snapshot: Snapshot, step: int | None) -> tuple[str, ...]:
    taken = datetime.fromtimestamp(snapshot.unix_time_s).astimezone()
    process = f"{safe_name(snapshot.host)}, process {snapshot.pid}"
    if snapshot.rank is not None:
        process += f", rank {snapshot.rank} of {snapshot.world_size}"
    parts = ["Times by region", process, f"{taken:%Y-%m-%d %H:%M:%S %z}"]
    if snapshot.since_unix_time_s is not None:
        parts.append(f"since {datetime.fromtimestamp(snapshot.since_unix_time_s).astimezone():%Y-%m-%d %H:%M:%S %z}")
    if step is not None:
        parts.append(f"step {step}")
    return tuple(parts)


def _notes(snapshot: Snapshot, tree: Tree) -> list[tuple[str, str]]:
    notes = []
    if not any(region.stats is not None for region in snapshot):
        disabled = "the timer is disabled; Timer(enabled=True), or timer.enabled = True, lets it record"
        notes.append(("no times", "nothing has been recorded yet" if snapshot.enabled else disabled))
    notes += _counter_notes(tree)
    timed = {(region.name, region.device): region.stats for region in snapshot if region.stats is not None}
    notes += _note("warm-up", "left out by skip_first", {key: of.skipped for key, of in timed.items() if of.skipped})
    rounded = {key: None for key, of in timed.items() if of.quantile_error > 0}
    notes += _note("rounded", "medians and percentiles are from a histogram, within ±1 %", rounded)
    used = {(region.name, region.device): None for region in snapshot}
    untold = {key: None for key in used if key not in timed and key not in tree.counters}
    notes += _note("no times", "used, but nothing is recorded, or nothing but warm-up", untold)
    return notes + [("memory", text) for region in snapshot if (text := _memory(region))]


def _counter_notes(tree: Tree) -> list[tuple[str, str]]:
    notes = []
    for counter, text in COUNTERS.items():
        concerned: dict[tuple[str, str], int | None]
        concerned = {key: counts[counter] for key, counts in tree.counters.items() if counts.get(counter)}
        if counter == "running" and {*concerned.values()} - {1}:
            text = "open now, by threads; the time so far is not included"
        elif counter == "running":
            concerned = dict.fromkeys(concerned)
        notes += _note(counter, text, concerned)
    return notes


def _note(label: str, text: str, concerned: Mapping[tuple[str, str], int | None]) -> list[tuple[str, str]]:
    named = [
        f"{'' if number is None else f'{number} × '}{_named(name)} ({device})"
        for (name, device), number in concerned.items()
    ]
    return [(label, f"{', '.join(named)}: {text}")] if named else []


def _of_tree(tree: Tree) -> list[tuple[str, str]]:
    # The intervals inside a region's warm-up are not warm-up themselves: the total exceeds the parent's share.
    partly = dict.fromkeys(
        f"{_named(child.name)} (CPU)"
        for parent in tree.walk()
        for child in parent.children
        if parent.warm_up and child.share is not None
        if (child.total_s or 0.0) > 1.005 * child.share * (parent.total_s or 0.0)
    )
    notes = []
    if partly:
        said = "the total includes intervals in the warm-up of the parent, the share does not"
        notes.append(("shares", f"{', '.join(partly)}: {said}"))
    if tree.kept_only:
        notes.append(("nesting", "from the newest intervals; the times are of the whole run"))
    return notes


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
    return f"{_named(region.name)} at its last end: {', '.join(parts)}" if parts else ""


def _named(name: str) -> str:
    return shorten(safe_name(name), LONGEST_NAME)


def tree_of_snapshot(snapshot: Snapshot) -> Tree:
    """The snapshot's tree, or a flat one of its regions if their nesting is unknown."""
    if snapshot.tree is not None:
        return snapshot.tree
    nodes: dict[str, Node] = {}
    for region in snapshot:
        path = (region.name,)
        if region.stats is not None and region.device == CPU:
            nodes[region.name] = node_of(path, region.stats)
        elif region.stats is not None:
            nodes[region.name] = replace(nodes.get(region.name, node_of(path, None)), gpu=on_device(region.stats))
    return build_tree(nodes.values(), rank=snapshot.rank, is_nested=False, counters=counters_of(snapshot))


def report_of_run(
    run: Run, *, rank: int | None = None, session: int | None = None, off: Iterable[str] = (), whole: bool = False
) -> TextReport:
    """The report of a run. With ``whole`` findings keep all that is known, and small regions their rows."""
    evidence = evidence_of(run, rank, session)
    about, shown = evidence.about, evidence.rank or 0
    for what, asked, there in (("rank", rank, about.ranks), ("session", session, range(about.sessions))):
        if asked is not None and asked not in there:
            has = what if len(there) == 1 else f"{what}s"
            raise LookupError(f"Showing {what} {asked}: the run has {has} {ranges(there)}.")
    tree = evidence.tree
    findings = tuple(find(evidence, off=off))
    said = Verdict() if findings or not tree.roots else verdict(evidence)
    failed = [("left out", f"the rule {rule}: {error}") for rule, error in evidence.failed.items()]
    nothing = [] if tree.roots else [("no times", "nothing is recorded yet")]
    closing = _closing(about, tree, shown, any_failed=bool(tree.counters))
    if evidence.start_up:
        tree = _with_ends(evidence)
    notes = (
        *failed,
        *notes_of(evidence, says_start=not any(finding.kind == START_UP for finding in findings)),
        *nothing,
        *_counter_notes(tree),
        *device_note(evidence),
    )
    if not whole:
        shorter = folded(tree, [finding.region for finding in findings]), tuple(map(brief, findings))
        if shorter != (tree, findings):
            notes = (*notes, ("all of it", f"deep500-timing show {shlex.quote(safe_name(about.folder))} --all"))
            tree, findings = shorter
    notes = (*notes, ("", closing))
    *title, state = title_of(about)
    title += [*filter(None, [disturbance(evidence)]), state]
    return TextReport(tuple(title), " · ", tree, findings, said.text, said.is_calm, notes, about.ended, evidence)


def _with_ends(evidence: Evidence) -> Tree:
    # With a row for the run's start, and one for its end around the regions that only come there.
    after_s, later = evidence.after_s, evidence.after
    inside = tuple(replace(node, share=(node.total_s or 0.0) / after_s) for node in later) if after_s else ()
    ends = (
        Node(START_UP, (START_UP,), total_s=evidence.start_up_s),
        Node(AFTER, (AFTER,), total_s=after_s, children=inside),
    )
    rows = [end for end in ends if end.children or (end.total_s or 0.0) >= _ROW * evidence.whole_s]
    roots = [root for root in evidence.tree.roots if not inside or root not in later]
    return replace(evidence.tree, roots=tuple(sorted((*roots, *rows), key=lambda node: -(node.total_s or 0.0))))


def _closing(about: About, tree: Tree, rank: int, *, any_failed: bool) -> str:
    folder = shlex.quote(safe_name(about.folder))
    on = "on the CPU and the GPU" if tree.has_device_times else "on the CPU"
    lost = [f"{number} {what}" for what, number in about.lost.items() if number]
    said = "No interval was dropped." if any_failed else "No interval failed or was dropped."
    sentences = [f"Times of rank {rank}, {on}.", f"Lost: {', '.join(lost)}." if lost else said]
    others = [other for other in about.ranks if other != rank]
    if others:
        sentences.append(f"{'Rank' if len(others) == 1 else 'Ranks'} {ranges(others)}: --rank {others[0]}.")
    sentences.append(f"Help: deep500-timing help reading. Page: deep500-timing report {folder}")
    return " ".join(sentences)


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers as text: ``"0, 1, 4"``, ``"0 to 63"``."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return listed(numbers, _NAMED)


# --- several runs -----------------------------------------------------------------------------------------------------


def read_beside(folders: list[str]) -> list[tuple[About, TextReport]]:
    """The runs in these folders, the one that began first before the others."""
    from deep500_timing.runs import Run

    found = []
    for folder in folders[:_MOST_RUNS]:
        with Run.open(folder) as run:
            found.append((about_run(run), report_of_run(run, whole=True)))
    return sorted(found, key=lambda one: one[0].first_unix_s or 0.0)


def text_beside(found: list[tuple[About, TextReport]]) -> str:
    """As a table, with what stands out of the regions of each."""
    began = found[0][0].first_unix_s or 0.0
    said: list[str] = []
    rows: list[tuple[str, ...]] = [
        ("run", "program", "most of its steps", "ranks", "steps", "a step", "from", "took", "")
    ]
    for about, report in found:
        trains = any(node.name in _TRAINS for node in report.tree.walk())
        step = next(iter(report.tree.named(BATCH)), None)
        inside = sorted(() if step is None else step.children, key=lambda node: -(node.share or 0.0))[:_NAMED_REGIONS]
        began_s = (about.first_unix_s or began) - began
        rows.append(
            (
                safe_name(about.folder),
                safe_name(about.program) + ("" if trains else ", does not train"),
                ", ".join(f"{safe_name(node.name)} {percent(node.share or 0.0)}" for node in inside),
                ranges(about.ranks),
                str(about.steps),
                format_time(None if step is None else step.median_s),
                format_time(began_s),
                format_time(about.wall_s),
                about.state,
            )
        )
        said += [f"{safe_name(about.folder)}: {one.text}" for one in report.findings if one.region][:1]
    heading = f"{len(found)} runs side by side; `deep500-timing show` with one of their folders shows it."
    return "\n".join([heading, "", *lines_of(rows, left=3), "", *said])
