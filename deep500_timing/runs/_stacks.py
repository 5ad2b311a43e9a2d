"""Samples of the main thread's Python stack: their texts, and where in the program they lie.

A sample is a text: the frames from the outermost to the innermost, one a line. A frame of the program is
``NAME<tab>FILE:LINE<tab>EXPRESSION``; one of the standard library or of an installed package is ``NAME<tab>FILE``.
"""

from __future__ import annotations

import linecache
import os
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deep500_timing._base.names import CPU
from deep500_timing._base.sql import array_of, codes_of, literal, where
from deep500_timing._summary.nesting import distinct, split_path
from deep500_timing._summary.text import safe_name, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType

    from numpy.typing import NDArray

    from deep500_timing._base.stack import Stack

    Int64Array = NDArray[np.int64]

_MOST_TEXTS = 4096
"""Different stacks of a run. Further ones are written without their frames."""
_EXPRESSION = 48
_TEXT = re.compile(r"""(?:\b[rbuftRBUFT]{1,2})?("{3}|'{3}|"|')(?:\\.|(?!\1).)*(?:\1|\\?\Z)""", re.DOTALL)
"""A literal text, also one that ends on a later line."""
_PACKAGES = ("site-packages", "dist-packages")
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LAUNCHER = os.path.join(_HOME, "deep500_timing", "_launch", "program.py")
_OURS = tuple(os.path.join(_HOME, *folder, "deep500_timing") for folder in ((), ("adapters",)))
"""How the files of our packages begin, installed and in a working tree."""
_STANDARD = os.path.dirname(os.__file__) + os.sep
_HOT = 0.5
"""Share of the samples that must share a function for it to be named."""
_UNITS = ((1000, 1), (200, 5), (0, 10))
"""For so many samples the unit of a share that is said, in percent."""
_LINE = 0.2
"""Share of these that a line of it must have to be named; at most two are."""


class StackTexts:
    """Makes texts of stacks, and keeps them: the same stack is the same text."""

    def __init__(self) -> None:
        self._codes: dict[int, tuple[CodeType, bool | None, str]] = {}
        self._texts: dict[tuple[int, ...], str] = {}
        self._lines: dict[tuple[int, int], str] = {}
        self._known: set[str] = set()

    def text_of(self, stack: Stack | None) -> str:
        """The text of a stack; empty if it could not be read."""
        key: list[int] = []
        for code, at in stack or ():
            known = self._codes.get(id(code)) or self._learn(code)
            if known[1] is not None:
                key += (id(code), at if known[1] else -1)
            elif code.co_filename == _LAUNCHER:
                break  # its caller has started us
        text = self._texts.get(tuple(key))
        return self._text_of(key) if text is None else text

    def _learn(self, code: CodeType) -> tuple[CodeType, bool | None, str]:
        # Kept alive, so that its id stays unique. None for a frame of this package.
        file, is_program = _place_of(code.co_filename)
        name = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
        if "__autograph_generated_file" in file:  # TensorFlow has written the function anew.
            name, file = name.removeprefix("outer_factory.inner_factory.tf__"), "AutoGraph"
        label = f"{safe_name(name)}\t{safe_name(file)}"
        known = (code, None if code.co_filename.startswith(_OURS) else is_program, label)
        return self._codes.setdefault(id(code), known)

    def _text_of(self, key: list[int]) -> str:
        frames = []
        for ident, at in zip(key[::2], key[1::2], strict=True):
            code, is_program, label = self._codes[ident]
            if is_program and (ident, at) not in self._lines:
                self._lines[ident, at] = label + _line_of(code, at)
            frames.append(self._lines.get((ident, at), label))
        text = "\n".join(reversed(frames))
        if text not in self._known:
            if len(self._known) >= _MOST_TEXTS:
                return ""
            self._known.add(text)
        if len(self._texts) >= 4 * _MOST_TEXTS:
            self._texts.clear()
        self._texts[tuple(key)] = text
        return text


def _place_of(file: str) -> tuple[str, bool]:
    # The short name of a file, and whether it is of the program.
    for name in _PACKAGES:
        _, found, inside = file.rpartition(f"{os.sep}{name}{os.sep}")
        if found:
            return inside, False
    if file.startswith(_STANDARD):
        return file[len(_STANDARD) :], False
    here = os.getcwd() + os.sep
    short = file[len(here) :] if file.startswith(here) else os.sep.join(file.split(os.sep)[-2:])
    return short, not file.startswith(("<frozen", "<eval_with_key>")) and f"{os.sep}torchinductor_" not in file


def _line_of(code: CodeType, at: int) -> str:
    """The line and the expression that an instruction is of, such as ``:41<tab>os.fsync(file)``."""
    first, last, begin, end = list(code.co_positions())[at // 2]
    if first is None:
        return ":?\t"
    line = linecache.getline(code.co_filename, first).encode()
    text = line[begin or 0 : end if last == first else None].decode(errors="replace").strip()
    text = safe_name(without_texts(text))
    if len(text) > _EXPRESSION and text.startswith("from "):
        text = text.partition(" import ")[0]  # an import is named by its module
    return f":{first}\t{shorten(text, _EXPRESSION)}"


def without_texts(code: str) -> str:
    """A line of code without its literal texts and comments, which may hold passwords, tokens and names."""
    return _TEXT.sub("'…'", code).partition("#")[0].rstrip()


class Frame(NamedTuple):
    """One frame of a sampled stack."""

    name: str
    file: str
    line: str
    """Empty for a library."""
    expression: str


class HotPlace(NamedTuple):
    """A place in the program that many samples share."""

    share: float
    name: str
    file: str
    """The file, with the line if one stands out."""
    expression: str
    """The function that the line calls; empty without a line."""
    inside: str
    """The function of a library in which most of these samples lie; empty if they lie in the program."""
    samples: int
    """How many samples there are in all."""

    @property
    def text(self) -> str:
        said = f"{self.name} ({self.file})" + (f": {self.expression.rstrip(':')}" if self.expression else "")
        return f"{said}, there in {self.inside}" if self.inside else said


def frames_of(text: str) -> list[Frame]:
    """The frames of a sample, the outermost first."""
    found = []
    for row in text.split("\n") if text else ():
        name, file, *expression = row.split("\t")
        file, _, line = file.rpartition(":") if expression else (file, "", "")
        found.append(Frame(name, file, line, expression[0] if expression else ""))
    return found


def places_of(samples: Counter[str], least: int = 1) -> list[HotPlace]:
    """The place in which most samples lie, or two places; none if they share nothing, or are fewer than ``least``."""
    total = samples.total()
    if total < least:
        return []
    stacks = [(frames_of(text), count) for text, count in samples.items()]
    hot, stacks = _hot_path(stacks, total)
    if not hot:
        return []
    at = max((depth for depth, frame in enumerate(hot) if frame.line), default=-1)
    if at < 0:
        return [HotPlace(sum(count for _, count in stacks) / total, hot[-1].name, hot[-1].file, "", "", total)]
    lines: Counter[str] = Counter()
    for frames, count in stacks:
        lines[frames[at].line] += count
    whole, name, file = sum(lines.values()), hot[at].name, hot[at].file
    places = []
    for line, count in [(line, count) for line, count in lines.most_common(2) if count >= _LINE * whole]:
        own = [stack for stack in stacks if stack[0][at].line == line]
        expressions: Counter[str] = Counter()
        for frames, number in own:
            expressions[frames[at].expression] += number
        inside = _innermost(_hot_path(own, count)[0][at + 1 :])
        places.append(HotPlace(count / total, name, f"{file}:{line}", expressions.most_common(1)[0][0], inside, total))
    return places or [HotPlace(whole / total, name, file, "", _innermost(hot[at + 1 :]), total)]


def _innermost(frames: list[Frame]) -> str:
    # A framework calls back a user's function by name; its other functions are named for the innermost one.
    inner = [f"{frame.name} ({frame.file})" for frame in frames]
    return next((text for text in reversed(inner) if ".on_" in text.partition(" ")[0]), inner[-1] if inner else "")


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
                by_function.setdefault((frames[at].name, frames[at].file), []).append((frames, count))
        chosen = max(by_function.values(), key=lambda of: sum(count for _, count in of), default=[])
        if not chosen or sum(count for _, count in chosen) < _HOT * total:
            return path, shared
        stacks = chosen
        path.append(chosen[0][0][at])
        if path[-1].line or not any(frame.line for frame in path):
            shared = stacks


def said_of(places: list[HotPlace]) -> str:
    """A clause such as ``"60 % of it in log_metrics (train.py:41): os.fsync(file)"``.

    By chance a share of a few samples is off by some 20 percentage points, so it has no more digits than it knows.
    """
    shares = [f"{_rounded(place):.0f} %" + ("" if after else " of it") for after, place in enumerate(places)]
    texts = [place.text if len(places) == 1 else place._replace(inside="").text for place in places]
    return ", ".join(f"{share} in {text}" for share, text in zip(shares, texts, strict=True))


_IMPORT = re.compile(r"(?:import|from)\s+(\w+(?:\.\w+\b(?!…))*)(?![\w.]*(?: as \w+)?\s*,)")
"""The module, without the last part of a name that is cut; of several on one line the frames tell which it is."""
_SAME = 0.8
"""The share of some samples that must lie in one line, or function, for their parts to be those within it."""


def parts_of(samples: Counter[str]) -> list[tuple[str, float]]:
    """What a stretch of the program is made of, with shares: modules that are imported, and functions by their calls.

    It goes down the program's frames for as long as one line or function has four fifths of the samples.
    """
    found: Counter[str] = Counter()
    paths: list[tuple[list[tuple[str, str]], int]] = []
    for text, count in samples.items():
        frames = frames_of(text)
        if module := _imported(frames):
            found[f"import {module}"] += count
            continue
        path = []
        for frame in frames:
            if frame.line:
                path.append((frame.name, f"{frame.name} ({frame.file})"))
                path.append((f"{frame.line} {frame.expression}", f"{frame.expression} ({frame.file}:{frame.line})"))
        paths.append((path, count))
    depth = 0
    while True:
        names: Counter[tuple[str, str]] = Counter()
        for path, count in paths:
            names[path[depth] if depth < len(path) else ("", "")] += count
        same, most = max(names.items(), key=lambda item: item[1], default=(("", ""), 0))
        if not same[0] or most < _SAME * names.total():
            break
        for path, count in paths:
            if path[depth : depth + 1] != [same]:
                found[_name_at(path, depth)] += count
        paths = [(path, count) for path, count in paths if path[depth : depth + 1] == [same]]
        depth += 1
    for path, count in paths:
        found[_name_at(path, depth)] += count
    return [(name, count / samples.total()) for name, count in found.most_common()]


def _name_at(path: list[tuple[str, str]], depth: int) -> str:
    return path[min(depth, len(path) - 1)][1] if path else "code of libraries"


def _imported(frames: list[Frame]) -> str:
    # The module that the program's innermost line imports, or the package that a call there does; empty without one.
    # `torch.utils.tensorboard` is not `torch`: it imports TensorFlow. What hooks of the import system do is its own.
    at = max((place for place, frame in enumerate(frames) if frame.line), default=-1)
    if at >= 0 and (statement := _IMPORT.match(frames[at].expression)):
        return statement[1]
    importing = False
    for frame in frames[at + 1 :]:
        importing = importing or frame.file.startswith("<frozen importlib")
        if importing and frame.name == "<module>":
            return frame.file.replace("\\", "/").partition("/")[0].removesuffix(".py")
    return ""


def _rounded(place: HotPlace) -> float:
    unit = next(unit for least, unit in _UNITS if place.samples >= least)
    return unit * round(100 * place.share / unit)


class _Sampled(NamedTuple):
    """The samples of a session in the order of time."""

    times: Int64Array
    """In ns of the rank's clock, shape ``(n,)``."""
    numbers: Int64Array
    """Of each the place of its text in ``texts``."""
    texts: list[str]


def samples_in(
    run: Any,
    path: str,
    *,
    rank: int | None,
    session: int | None = None,
    steps: Iterable[int] | None = None,
    table: str = "stacks",
) -> Counter[str]:
    """The samples in a region's own time, outside of the regions inside it: of the main thread, or of another table."""
    found: Counter[str] = Counter()
    within = "" if steps is None else f"and step in ({', '.join(str(int(step)) for step in steps) or 'null'})"
    depth = len(split_path(path)) if path else 0
    inside = f"and substr(path, 1, {len(path) + 1}) = {literal(path + '/')}" if path else ""
    for one, sampled in _read(run, rank, session, table).items():
        of = f"from intervals where rank = {rank} and session = {one} and device = '{CPU}' and thread = 0 {within}"
        holes = _spans(run, f"{of} {inside} and depth = {depth}")
        if path:
            outer = _spans(run, f"{of} and path = {literal(path)}")
        else:  # from the first region to the last
            outer = np.array([[holes[0, 0], holes[:, 1].max()]]) if len(holes) else holes
        _count(found, sampled, outer, holes)
    return found


def samples_between(
    run: Any, spans: Iterable[tuple[int, int, int]], *, rank: int | None, by_time: bool = False
) -> Counter[str]:
    """The samples in spans of time: session, start and end of each in ns of the rank's clock.

    With ``by_time`` each counts for the ns since the sample before it: while modules are imported, few are taken.
    """
    found: Counter[str] = Counter()
    chosen = np.array(sorted(spans), dtype=np.int64).reshape(-1, 3)
    for session, sampled in _read(run, rank, None).items():
        _count(found, sampled, chosen[chosen[:, 0] == session, 1:], np.empty((0, 2), np.int64), by_time=by_time)
    return found


def _read(run: Any, rank: int | None, session: int | None, source: str = "stacks") -> dict[int, _Sampled]:
    # By session: its clock is its own.
    if rank is None or source not in run.tables:
        return {}
    table = run.sql(
        f"select session, time_ns, coalesce(stack, '') as stack from {source}{where(rank=rank, session=session)} "
        "order by time_ns"
    ).arrow()
    sessions, times = (array_of(table[name]) for name in ("session", "time_ns"))
    numbers, texts = codes_of(table["stack"])
    chosen = {one: sessions == one for one in distinct(sessions)}
    return {one: _Sampled(times[of], numbers[of], texts) for one, of in chosen.items()}


def _spans(run: Any, of: str) -> Int64Array:
    table = run.sql(f"select start_ns, start_ns + dur_ns as end_ns {of} order by start_ns").arrow()
    return np.stack([array_of(table[name]) for name in ("start_ns", "end_ns")], axis=1).reshape(-1, 2)


def _count(
    found: Counter[str], sampled: _Sampled, outer: Int64Array, holes: Int64Array, *, by_time: bool = False
) -> None:
    chosen = _lie_in(sampled.times, outer) & ~_lie_in(sampled.times, holes)
    weights = np.diff(sampled.times, prepend=sampled.times[:1])[chosen] if by_time else None
    for number, count in enumerate(np.bincount(sampled.numbers[chosen], weights).tolist()):
        if count:
            found[sampled.texts[number]] += int(count)


def _lie_in(times: Int64Array, spans: Int64Array) -> NDArray[np.bool_]:
    # Spans in the order of their starts. One that was recorded afterwards may overlap the next.
    if not len(spans):
        return np.zeros(len(times), dtype=np.bool_)
    at = np.searchsorted(spans[:, 0], times, "right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (times < np.maximum.accumulate(spans[:, 1])[np.maximum(at, 0)])
    return inside
