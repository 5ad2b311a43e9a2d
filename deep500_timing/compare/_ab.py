"""Runs two commands in turn, A B B A A B ..., until the answer is known."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deep500_timing.compare._compare import Comparison, Floor, compare, find_floor
from deep500_timing.compare._runs import OPTIONS, NotComparableError, RunTimes, read_run
from deep500_timing.compare._statistics import FEWEST_PAIRS, level_of_look
from deep500_timing.compare._text import interval_text, percent
from deep500_timing.runs import Run
from deep500_timing.runs._header import MEASUREMENT

if TYPE_CHECKING:
    Difference = tuple[str, str, str]

_LINES = 10
"""Lines of a failed command's output that the error shows."""


@dataclass(frozen=True)
class Variant:
    """How a side is run."""

    command: tuple[str, ...]
    cwd: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of this process."""
    steps: int | None = None
    """The program is ended after so many steps."""


class CommandFailedError(RuntimeError):
    """A command of a side ended with an error, or timed nothing."""


def launch(variant: Variant, folder: str, *, session: str, pair: int, side: str) -> None:
    """Run a side once.

    The command runs below ``deep500-timing run``, so a program without a timer is timed as well. Its output goes to
    ``FOLDER.log``.
    """
    options = ["--run", folder, "--quiet", *([] if variant.steps is None else [f"--steps={variant.steps}"])]
    launcher = [sys.executable, "-m", "deep500_timing", "run", *options, "--", *variant.command]
    mark = json.dumps({"session": session, "pair": pair, "side": side})
    environment = {**os.environ, **variant.environment, MEASUREMENT: mark, "DEEP500_TIMING_RUN": folder}
    log, what = folder + ".log", f"The command ({f'side {side}' if side in ('A', 'B') else side})"
    with open(log, "wb") as output:
        status = subprocess.run(
            launcher,
            cwd=variant.cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        ).returncode
    if status:
        with open(log, encoding="utf-8", errors="replace") as output:
            end = "".join(output.readlines()[-_LINES:])
        raise CommandFailedError(f"{what} ended with the exit status {status}. Its output is in {log}:\n{end}")
    if not os.path.isdir(folder):
        raise CommandFailedError(
            f"{what} recorded no times. A program without PyTorch, TensorFlow, Keras and JAX requires a Timer: "
            f"`from deep500_timing import Timer`. Its output is in {log}."
        )


def run_once(variant: Variant, folder: str, *, session: str, pair: int, side: str) -> RunTimes:
    """Run a side once and read its times."""
    launch(variant, folder, session=session, pair=pair, side=side)
    with Run.open(folder) as run:
        return read_run(run, os.path.basename(folder))


def run_pairs(
    a: Variant,
    b: Variant,
    folder: str,
    *,
    pairs: int,
    stop_early: bool = True,
    floor_path: str | None = None,
    on_run: Callable[[int, int, str], object] = lambda done, of, text: None,
) -> tuple[Comparison, Floor | None, list[tuple[RunTimes, RunTimes]]]:
    """Run both sides in turn and compare them after each pair from the third on.

    A pair with a disturbed run is run again, once; its runs stay in the folder ``disturbed``, which is not compared.
    """
    if pairs < FEWEST_PAIRS:
        raise ValueError(f"{pairs} pairs give no answer: -n {FEWEST_PAIRS} is the least.")
    os.makedirs(folder, exist_ok=True)
    session, text = uuid.uuid4().hex, ""
    variants = {"A": a, "B": b}
    done: dict[str, list[RunTimes]] = {"A": [], "B": []}
    floor, found = None, None
    for pair in range(pairs):
        for again in (False, True):
            for side in "BA" if pair % 2 else "AB":
                target = os.path.join(folder, f"{side}-{pair}")
                done[side].append(run_once(variants[side], target, session=session, pair=pair, side=side))
                on_run(len(done["A"]) + len(done["B"]), 2 * pairs, text)
            if again or not (done["A"][-1].is_disturbed or done["B"][-1].is_disturbed):
                break
            text = f"pair {pair} was disturbed by other programs, and runs again"
            os.makedirs(os.path.join(folder, "disturbed"), exist_ok=True)
            for side, runs in done.items():
                name = f"{side}-{pair}"
                os.rename(os.path.join(folder, name), os.path.join(folder, "disturbed", name))
                runs.pop()
        if pair == 0:
            floor = find_floor(done["A"][0], floor_path)
        if pair + 1 < FEWEST_PAIRS:
            continue
        found = compare(done["A"], done["B"], floor=floor, level=level_of_look(pair + 1, pairs))
        found = replace(found, differences=_with_words(found.differences, a.command, b.command))
        text = f"B / A {percent(found.step.change)} ({interval_text(found.step)})"
        if stop_early and found.step.verdict in ("slower", "faster"):
            break
    assert found is not None
    return found, floor, list(zip(done["A"], done["B"], strict=True))


def _with_words(differences: Iterable[Difference], a: Sequence[str], b: Sequence[str]) -> tuple[Difference, ...]:
    """What differs, with the words of the two commands in place of the hashes that the runs hold of them."""
    start = _alike(a, b)
    end = _alike(a[start:][::-1], b[start:][::-1])
    one, other = (shlex.join(command[start : len(command) - end]) or "(none)" for command in (a, b))
    return tuple(("arguments", one, other) if fact[0] == OPTIONS and a != b else fact for fact in differences)


def _alike(a: Sequence[str], b: Sequence[str]) -> int:
    """The number of words that both begin with."""
    return next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def split_commands(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The commands before and after ``---``; the same twice where there is one."""
    at = words.index("---") if "---" in words else len(words)
    a = tuple(words[:at])
    b = tuple(words[at + 1 :]) if at < len(words) else a
    if not a or not b or "---" in b:
        raise NotComparableError("Name one command, or two with --- between them: `ab -- A-COMMAND --- B-COMMAND`.")
    return a, b


def _run(command: Sequence[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandFailedError(f"{what}: {(done.stderr or done.stdout).strip()[-1000:]}")
    return done.stdout.strip()


@contextmanager
def revision(rev: str, folder: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A git worktree of a revision of the repository around the working directory, removed at the end.

    Folders of the repository that Python imports from, as of an editable installation, are replaced by those of the
    worktree.
    """
    here = os.path.realpath(os.getcwd())
    top = os.path.realpath(_run(["git", "-C", here, "rev-parse", "--show-toplevel"], f"--rev {rev}"))
    folder = os.path.abspath(folder)
    _run(["git", "-C", top, "worktree", "add", "--detach", "--quiet", folder, rev], f"--rev {rev}")
    try:
        packages = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")}
        inside = [
            os.path.relpath(os.path.realpath(path), top)
            for path in sys.path
            if path and _is_below(path, top) and not any(_is_below(path, one) for one in packages)
        ]
        paths = [folder, *(os.path.normpath(os.path.join(folder, path)) for path in inside)]
        yield os.path.normpath(os.path.join(folder, os.path.relpath(here, top))), _with_paths(*dict.fromkeys(paths))
    finally:
        subprocess.run(["git", "-C", top, "worktree", "remove", "--force", folder], capture_output=True, check=False)


def _is_below(path: str, folder: str) -> bool:
    path, folder = os.path.realpath(path), os.path.realpath(folder)
    return path == folder or path.startswith(folder + os.sep)


def _with_paths(*paths: str, **environment: str) -> dict[str, str]:
    """An environment in which Python looks in some folders first."""
    others = environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH") or ""
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, [*paths, others]))}


def environment_with(requirement: str, folder: str, environment: dict[str, str]) -> dict[str, str]:
    """Install a package at a version, in front of those of this environment.

    A virtual environment over the present one takes the package and its missing requirements. The
    command's own Python, or launcher, finds it by ``PYTHONPATH``.
    """
    folder = os.path.abspath(folder)
    _run([sys.executable, "-m", "venv", "--without-pip", folder], f"--with {requirement}")
    python = os.path.join(folder, "Scripts" if os.name == "nt" else "bin", "python")
    packages = _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], f"--with {requirement}")
    with open(os.path.join(packages, "below.pth"), "w", encoding="utf-8") as file:
        file.write(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    what = f"--with {requirement}: it cannot be installed"
    # pip sees the packages of the environment below and leaves them alone; uv installs every dependency again.
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
        _run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", requirement], what)
    elif shutil.which("uv"):
        _run(["uv", "pip", "install", "--quiet", "--python", python, requirement], what)
    else:
        raise CommandFailedError(f"{what}: neither pip nor uv is here. `python -m ensurepip` installs pip.")
    return _with_paths(packages, **environment)
