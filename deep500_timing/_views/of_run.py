"""The report of a run: findings about all ranks, the table of one."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from deep500_timing._summary.snapshot import COUNTERS
from deep500_timing._summary.text import safe_name, shorten
from deep500_timing._views.about import about_run, title_of
from deep500_timing._views.findings import evidence_of, find, start_note, verdict
from deep500_timing._views.notes import device_note, first_note
from deep500_timing._views.table import LONGEST_NAME, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deep500_timing._summary.tree import Tree
    from deep500_timing._views.about import About
    from deep500_timing.runs import Run

COMMAND = "deep500-timing"
_NAMED = 6
"""Most ranks that are listed."""


def sheet_of_run(run: Run, *, rank: int | None = None, session: int | None = None, off: Iterable[str] = ()) -> Sheet:
    about = about_run(run)
    shown = choose_rank(about, rank)
    if session is not None and not 0 <= session < about.sessions:
        raise LookupError(f"Showing session {session}: the run has sessions {ranges(range(about.sessions))}.")
    evidence = evidence_of(run, shown, session)
    tree = evidence.tree
    findings = tuple(find(evidence, off=off))
    said = "" if findings or not tree.roots else verdict(evidence)
    failed = [("left out", f"the rule {rule}: {error}") for rule, error in evidence.failed.items()]
    return Sheet(
        title_of(about), " · ", tree, findings, said, (*failed, *start_note(evidence), *_notes(about, tree, shown))
    )


def choose_rank(about: About, rank: int | None) -> int:
    shown = about.ranks[0] if rank is None else rank
    if shown not in about.ranks:
        raise LookupError(f"Showing rank {rank}: the run has {_ranks(about)}.")
    return shown


def _notes(about: About, tree: Tree, rank: int) -> list[tuple[str, str]]:
    notes = []
    if not tree.roots:
        notes.append(("no times", "nothing is recorded yet"))
    for counter, text in COUNTERS.items():
        concerned = [(key, counts[counter]) for key, counts in sorted(tree.counters.items()) if counts.get(counter)]
        if concerned:
            named = [
                f"{number} × {shorten(safe_name(name), LONGEST_NAME)} ({device})"
                for (name, device), number in concerned
            ]
            notes.append((counter, f"{', '.join(named)}: {text}"))
    notes += [*first_note(tree), *device_note(tree)]
    return [*notes, ("", _closing(about, tree, rank, any_failed=bool(tree.counters)))]


def _closing(about: About, tree: Tree, rank: int, *, any_failed: bool) -> str:
    folder = shlex.quote(safe_name(about.folder))
    on = "on the CPU and the GPU" if tree.has_device_times else "on the CPU"
    lost = [
        f"{number} {what}"
        for number, what in (
            (about.dropped, "dropped"),
            (about.damaged_bytes, "bytes damaged"),
            (about.missing_frames, "frames missing"),
        )
        if number
    ]
    said = (
        f"Lost: {', '.join(lost)}."
        if lost
        else "Nothing dropped."
        if any_failed
        else "Nothing failed, nothing dropped."
    )
    sentences = [f"Times of rank {rank}, {on}.", said]
    others = [other for other in about.ranks if other != rank]
    if others:
        sentences.append(f"{'Rank' if len(others) == 1 else 'Ranks'} {ranges(others)}: --rank {others[0]}.")
    sentences.append(f"Page: {COMMAND} report {folder}")
    return " ".join(sentences)


def _ranks(about: About) -> str:
    return f"{'rank' if len(about.ranks) == 1 else 'ranks'} {ranges(about.ranks)}"


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers as text: ``"0, 1, 4"``, ``"0 to 63"``."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    shown = ", ".join(map(str, numbers[:_NAMED]))
    return f"{shown} and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else shown
