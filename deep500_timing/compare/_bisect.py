"""Finds the commit, or the version of a package, from which on a step is slower: answers are wrong now and then."""

from __future__ import annotations

import math
import os
import re
import sys
import uuid
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from deep500_timing.compare._ab import CommandFailedError, Variant, _run, environment_with, revision, run_once
from deep500_timing.compare._runs import NotComparableError
from deep500_timing.compare._statistics import settled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from deep500_timing.compare._runs import RunTimes

    Measure = Callable[[str, int], float]
    Place = AbstractContextManager[tuple[str | None, dict[str, str]]]


@dataclass(frozen=True)
class Walk:
    """The result of a bisection."""

    change: float | None
    """The step of the last point over that of the first one, less 1; None if no difference was shown."""
    first_slow: str
    """The first point with the slower step, or the first of those that it may be; empty without a difference."""
    last_fast: str
    between: tuple[str, ...] = ()
    """Points between the two that could not be run: each of them may be the first slow one as well."""
    seen: tuple[tuple[str, str], ...] = ()
    """Each point that was looked at, with ``"fast"``, ``"slow"`` or ``"skipped"``."""


def walk(points: Sequence[str], measure: Measure, pairs: int) -> Walk:
    """Look whether the ends differ, and if so, find the first slow point.

    The first test has half of the error rate of 5 %, the points of the walk share the other half. A point is slow if
    its step lies beyond the middle of those of both ends; after ``pairs`` pairs the nearer end counts.

    Args:
        points: The first is fast.
        measure: Runs the first point and one of these; returns the logarithm of the ratio of their steps. Gets the
            number of the pair. Raises ``CommandFailedError`` where a point cannot be run: that one is skipped.
        pairs: The most pairs of a point.

    Raises:
        CommandFailedError: An end cannot be run.
    """
    effect = _settled(points[-1], measure, 0.0, 1 / 2, pairs)
    if effect is None or effect <= 0:
        return Walk(None, "", "")
    steps = max(math.ceil(math.log2(len(points))), 1)
    fast, slow = 0, len(points) - 1
    seen: dict[str, str] = {}
    while candidates := [at for at in range(fast + 1, slow) if seen.get(points[at]) != "skipped"]:
        middle = (fast + slow) / 2
        at = min(candidates, key=lambda one: abs(one - middle))
        try:
            beyond = _settled(points[at], measure, effect / 2, 1 / 2 / steps, pairs, must=True)
        except (CommandFailedError, NotComparableError):
            seen[points[at]] = "skipped"
            continue
        is_slow = beyond is not None and beyond > 0
        seen[points[at]] = "slow" if is_slow else "fast"
        fast, slow = (fast, at) if is_slow else (at, slow)
    return Walk(math.expm1(effect), points[slow], points[fast], tuple(points[fast + 1 : slow]), tuple(seen.items()))


def _settled(
    point: str, measure: Measure, middle: float, part: float, pairs: int, *, must: bool = False
) -> float | None:
    # How far the point's step lies from the middle, in logarithms; None if no side is shown, unless one must be taken.
    logs: list[float] = []
    for pair in range(pairs):
        logs.append(measure(point, pair) - middle)
        found = settled(logs, pairs, part)
        if found is not None:
            return found.log_ratio
    return math.fsum(logs) / len(logs) if must else None


def commits(good: str, bad: str) -> list[str]:
    """The commits from one to the other along the first parents, both included.

    Raises:
        CommandFailedError: Git knows no such revision, or the first is no ancestor of the second.
    """
    what = f"--good {good} --bad {bad}"
    first = _run(["git", "rev-parse", "--verify", f"{good}^{{commit}}"], what)
    later = _run(["git", "rev-list", "--reverse", "--first-parent", "--ancestry-path", f"{good}..{bad}"], what).split()
    if not later:
        raise CommandFailedError(f"{what}: no commit leads from the first to the second.")
    return [first, *later]


def versions(good: str, bad: str) -> list[str]:
    """The versions of a package from one to the other that pip's index has, both included, as ``NAME==VERSION``.

    Versions before a release are left out, unless an end is one.

    Raises:
        CommandFailedError: pip is not here, the ends are of different packages, the index has no such version, or the
            first is not before the second.
    """
    what, (name, _, first), (other, _, last) = f"--good {good} --bad {bad}", good.partition("=="), bad.partition("==")
    if name != other:
        raise CommandFailedError(f"{what}: name two versions of one package, NAME==VERSION.")
    before_release = ["--pre"] * bool(re.search("[a-z]", first + last))
    listed = _run([sys.executable, "-m", "pip", "index", "versions", *before_release, name], what)
    found = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)
    known = found[1].split(", ")[::-1] if found else []
    at = {_short(version): place for place, version in enumerate(known)}
    begin, end = at.get(_short(first), -1), at.get(_short(last), -1)
    if not 0 <= begin < end:
        raise CommandFailedError(f"{what}: no two of these, which the index has from old to new: {', '.join(known)}.")
    return [f"{name}=={version}" for version in known[begin : end + 1]]


def _short(version: str) -> str:
    return re.sub(r"(\.0)+$", "", version)


def bisect(
    command: Sequence[str],
    points: Sequence[str],
    folder: str,
    *,
    pairs: int,
    steps: int | None = None,
    on_run: Callable[[str], object] = lambda text: None,
) -> Walk:
    """Bisect commits of the repository around the working directory, or versions of a package.

    Each run of a commit is made in a worktree of its own; a version has an environment over the present one.
    """
    session = uuid.uuid4().hex
    install = cache(lambda point: environment_with(point, os.path.join(folder, point), {}))

    def run(point: str, side: str, pair: int, place: str) -> RunTimes:
        tree = os.path.join(folder, f"tree-{place}")
        at: Place = nullcontext((None, install(point))) if "==" in point else revision(point, tree)
        with at as (cwd, environment):
            variant = Variant(tuple(command), cwd, environment, steps)
            return run_once(variant, os.path.join(folder, place), session=session, pair=pair, side=side)

    def measure(point: str, pair: int) -> float:
        on_run(f"{named(point)}, pair {pair + 1}")
        times: dict[str, float] = {}
        for side in "BA" if pair % 2 else "AB":
            place = f"{points.index(point)}-{side}-{pair}"
            times[side] = run(points[0] if side == "A" else point, side, pair, place).step_s
        return math.log(times["B"] / times["A"])

    return walk(points, measure, pairs)


def named(point: str) -> str:
    """A point as it is told: the start of a commit's name, or a version."""
    return point if "==" in point else point[:10]
