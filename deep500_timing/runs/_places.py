"""Where in the program sampled stacks lie: the function and the line that most of them share."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deep500_timing._base.sql import array_of, literal
from deep500_timing._summary.nesting import split_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

_HOT = 0.5
"""Share of the samples that must share a function for it to be named."""
_LINE = 0.2
"""Share of these that a line of it must have to be named; at most two are."""


class Frame(NamedTuple):
    """One frame of a sampled stack."""

    name: str
    file: str
    line: str
    """Empty for a library."""
    expression: str

    @property
    def function(self) -> tuple[str, str]:
        return self.name, self.file


class Place(NamedTuple):
    """A place in the program that many samples share."""

    share: float
    name: str
    file: str
    """The file, with the line if one stands out."""
    expression: str
    """The function that the line calls; empty without a line."""
    inside: str
    """The function of a library in which most of these samples lie; empty if they lie in the program."""

    @property
    def text(self) -> str:
        said = f"{self.name} ({self.file})" + (f": {self.expression}" if self.expression else "")
        return f"{said}, there in {self.inside}" if self.inside else said


def frames_of(text: str) -> list[Frame]:
    """The frames of a sample, the outermost first. See :mod:`deep500_timing.runs._stacks` for the text."""
    found = []
    for row in text.split("\n") if text else ():
        name, file, *expression = row.split("\t")
        of_program = bool(expression)
        file, _, line = file.rpartition(":") if of_program else (file, "", "")
        found.append(Frame(name, file, line, expression[0] if of_program else ""))
    return found


def places_of(samples: Counter[str]) -> list[Place]:
    """The place in which most of some samples lie, or the two places; none if the samples share nothing."""
    total = sum(samples.values())
    stacks = [(frames_of(text), count) for text, count in samples.items()]
    hot, stacks = _hot_path(stacks, total)
    if not hot:
        return []
    at = max((depth for depth, frame in enumerate(hot) if frame.line), default=-1)
    inner = [f"{frame.name} ({frame.file})" for frame in hot[at + 1 :]]
    # A framework calls back what a user knows by name; its other functions are named for the innermost one.
    inside = next((text for text in reversed(inner) if ".on_" in text.partition(" ")[0]), inner[-1] if inner else "")
    if at < 0:
        return [Place(sum(count for _, count in stacks) / total, hot[-1].name, hot[-1].file, "", "")]
    lines: Counter[str] = Counter()
    expressions: dict[str, Counter[str]] = {}
    for frames, count in stacks:
        lines[frames[at].line] += count
        expressions.setdefault(frames[at].line, Counter())[frames[at].expression] += count
    whole, name, file = sum(lines.values()), hot[at].name, hot[at].file
    places = [
        Place(count / total, name, f"{file}:{line}", expressions[line].most_common(1)[0][0], "")
        for line, count in lines.most_common(2)
        if count >= _LINE * whole
    ]
    if not places:
        return [Place(whole / total, name, file, "", inside)]
    return [places[0]._replace(inside=inside)] if len(places) == 1 else places


def _hot_path(stacks: list[tuple[list[Frame], int]], total: int) -> tuple[list[Frame], list[tuple[list[Frame], int]]]:
    # Down from the outermost frame for as long as half of the samples share a function. With it the samples that share
    # its innermost function of the program.
    path: list[Frame] = []
    shared = stacks
    while True:
        at = len(path)
        by_function: dict[tuple[str, str], list[tuple[list[Frame], int]]] = {}
        for frames, count in stacks:
            if len(frames) > at:
                by_function.setdefault(frames[at].function, []).append((frames, count))
        chosen = max(by_function.values(), key=lambda of: sum(count for _, count in of), default=[])
        if not chosen or sum(count for _, count in chosen) < _HOT * total:
            return path, shared
        stacks = chosen
        path.append(chosen[0][0][at])
        if path[-1].line or not any(frame.line for frame in path):
            shared = stacks


def text_of(samples: Counter[str], least: int) -> str:
    """A clause such as ``"58 % of it in log_metrics (train.py:41): os.fsync(file)"``."""
    places = places_of(samples) if sum(samples.values()) >= least else []
    shares = [f"{100 * place.share:.0f} %" + ("" if after else " of it") for after, place in enumerate(places)]
    return ", ".join(f"{share} in {place.text}" for share, place in zip(shares, places, strict=True))


class _Sampled(NamedTuple):
    """The samples of a session in the order of time."""

    times: Int64Array
    """In ns of the rank's clock, shape ``(n,)``."""
    numbers: Int64Array
    """Of each the place of its text in ``texts``."""
    texts: list[str]


def samples_in(
    run: Any, path: str, *, rank: int | None, session: int | None = None, steps: Iterable[int] | None = None
) -> Counter[str]:
    """The samples in a region's own time, outside of the regions inside it."""
    found: Counter[str] = Counter()
    within = "" if steps is None else f"and step in ({', '.join(str(int(step)) for step in steps) or 'null'})"
    depth = len(split_path(path)) if path else 0
    inside = f"and substr(path, 1, {len(path) + 1}) = {literal(path + '/')}" if path else ""
    for one, sampled in _read(run, rank, session).items():
        of = f"from intervals where rank = {rank} and session = {one} and device = 'CPU' and thread = 0 {within}"
        holes = _spans(run, f"{of} {inside} and depth = {depth}")
        outer = _spans(run, f"{of} and path = {literal(path)}") if path else _hull(holes)
        _count(found, sampled, outer, holes)
    return found


def samples_between(run: Any, spans: Iterable[tuple[int, int, int]], *, rank: int | None) -> Counter[str]:
    """The samples in spans of time: session, start and end of each in ns of the rank's clock."""
    found: Counter[str] = Counter()
    chosen = np.array(sorted(spans), dtype=np.int64).reshape(-1, 3)
    for session, sampled in _read(run, rank, None).items():
        _count(found, sampled, chosen[chosen[:, 0] == session, 1:], np.empty((0, 2), np.int64))
    return found


def _read(run: Any, rank: int | None, session: int | None) -> dict[int, _Sampled]:
    # By session: its clock is its own.
    if rank is None:
        return {}
    only = "" if session is None else f"and session = {int(session)} "
    table = run.sql(
        f"select session, time_ns, coalesce(stack, '') as stack from stacks where rank = {rank} {only}order by time_ns"
    ).arrow()
    sessions, times = (array_of(table[name]) for name in ("session", "time_ns"))
    stacks = table["stack"].combine_chunks().dictionary_encode()
    numbers, texts = array_of(stacks.indices), stacks.dictionary.to_pylist()
    chosen = {one: sessions == one for one in np.unique(sessions).tolist()}
    return {one: _Sampled(times[of], numbers[of], texts) for one, of in chosen.items()}


def _spans(run: Any, of: str) -> Int64Array:
    table = run.sql(f"select start_ns, start_ns + dur_ns as end_ns {of} order by start_ns").arrow()
    return np.stack([array_of(table[name]) for name in ("start_ns", "end_ns")], axis=1).reshape(-1, 2)


def _hull(spans: Int64Array) -> Int64Array:
    return np.array([[spans[0, 0], spans[:, 1].max()]]) if len(spans) else spans


def _count(found: Counter[str], sampled: _Sampled, outer: Int64Array, holes: Int64Array) -> None:
    chosen = _lie_in(sampled.times, outer) & ~_lie_in(sampled.times, holes)
    for number, count in enumerate(np.bincount(sampled.numbers[chosen]).tolist()):
        if count:
            found[sampled.texts[number]] += count


def _lie_in(times: Int64Array, spans: Int64Array) -> NDArray[np.bool_]:
    # Spans in the order of their starts. One that was recorded afterwards may overlap the next.
    if not len(spans):
        return np.zeros(len(times), dtype=np.bool_)
    at = np.searchsorted(spans[:, 0], times, "right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (times < np.maximum.accumulate(spans[:, 1])[np.maximum(at, 0)])
    return inside
