"""Breaks one place of a function at a time, in the plain form, and reports which breaks no test notices.

``make mutants`` runs the plan in ``plan.toml``: modules, and the tests that answer for them. Tests that start
interpreters or ranks see the module unchanged there; only what runs in pytest's own process can notice a change.
A change that makes no difference to what a user sees is listed in ``equivalent.toml``, with the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import sys
import time
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from changes import Change, changes_of
from forks import HUNG, KILLED, SURVIVED, UNFIT, Trials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
Trial = tuple["Change | None", str, str, list[str]]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "mutants"
# Two runs at a time do not meet.
OWN = WORK / str(os.getpid())
WANTED = 0.95
SCORES = HERE / "scores.md"
HEADING = ["| module | places | tried | noticed | equivalent | left | score |", "|---|--:|--:|--:|--:|--:|--:|"]
# Hypothesis finds the same examples in each fork; nothing is drawn or shuffled.
QUIET = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist", "-m", "not slow"]


@dataclass
class Score:
    """What has become of a module's changes."""

    module: str
    places: int = 0
    """Changes that could be tried."""
    tried: int = 0
    killed: int = 0
    equivalent: int = 0
    left: list[Change] = field(default_factory=list)

    def add(self, change: Change, *, noticed: bool, known: bool) -> None:
        """Count a change; one that is known to be equivalent and was noticed is not."""
        self.tried += 1
        if noticed:
            self.killed += 1
        elif known:
            self.equivalent += 1
        else:
            self.left.append(change)

    @property
    def ratio(self) -> float:
        """The share of the changes that were noticed, of those that make a difference."""
        return self.killed / counted if (counted := self.tried - self.equivalent) else 1.0

    @property
    def row(self) -> str:
        """As a line of the table under :data:`HEADING`."""
        counts = f"{self.places} | {self.tried} | {self.killed} | {self.equivalent} | {len(self.left)}"
        return f"| {self.module} | {counts} | {self.ratio:.1%} |"


def main() -> int:
    """Run the plan, or the part of it that is asked for; 1 if a module's score is too low."""
    options = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0])
    options.add_argument("modules", nargs="*", help="parts of the names of the plan's modules; all of them by default")
    options.add_argument("--plan", type=Path, default=HERE / "plan.toml")
    options.add_argument("--sample", type=int, default=60, help="changes for each module; 0 tries all of them")
    options.add_argument("--only", default="", help="changes with this in their function or text")
    options.add_argument("--seed", type=int, default=1, help="which sample")
    options.add_argument("--left", action="store_true", help="count what an earlier run saw noticed, try the rest")
    options.add_argument("--jobs", type=int, default=2, help="forks at a time")
    options.add_argument("--most", type=float, default=20.0, help="seconds of tests for each change, the best first")
    options.add_argument("--write", action="store_true", help="put the scores into scores.md, beside those of others")
    options.add_argument("--show", action="store_true", help="list the changes, try none")
    chosen = options.parse_args()
    if chosen.write and chosen.only:
        options.error("--write with --only: a score is of all of a module's changes, or of a sample of them.")
    os.chdir(ROOT)
    plan = tomllib.loads(chosen.plan.read_text(encoding="utf-8"))["area"]
    scores: list[Score] = []
    for area in plan:
        whole = [
            str(path.relative_to(ROOT))
            for pattern in area["modules"]
            for path in sorted(ROOT.glob(pattern))
            if path.name != "__init__.py"
        ]
        modules = [name for name in whole if not chosen.modules or any(part in name for part in chosen.modules)]
        if not modules:
            continue
        samples = {module: sample(module, chosen.sample, chosen.seed, chosen.only) for module in modules}
        if chosen.show:
            for module, changes in samples.items():
                print(*(f"{module}:{change.line}  {change.function}: {change.text}" for change in changes), sep="\n")
        else:
            scores += try_area(area["tests"], whole, samples, chosen)
    shutil.rmtree(OWN, ignore_errors=True)
    if not chosen.show:
        report(scores)
        if chosen.write:
            write_down(scores)
    return int(any(score.ratio < WANTED for score in scores))


def sample(module: str, size: int, seed: int, only: str) -> list[Change]:
    """So many changes of a module, spread over its lines: a second one of a line only when every line has one."""
    source = (ROOT / module).read_text(encoding="utf-8")
    found = [change for change in changes_of(source) if only in f"{change.function}: {change.text}"]
    random.Random(f"{seed} {module}").shuffle(found)
    rank: dict[int, int] = defaultdict(int)
    spread = []
    for change in found:
        spread.append((rank[change.line], change))
        rank[change.line] += 1
    spread.sort(key=lambda entry: entry[0])
    return sorted((change for _, change in spread[: size or None]), key=lambda change: change.line)


def try_area(
    tests: list[str], whole: list[str], samples: dict[str, list[Change]], chosen: argparse.Namespace
) -> list[Score]:
    """Try the changes of some modules on their tests, and add them up."""
    scores = {module: Score(module, len(changes_of((ROOT / module).read_text("utf-8")))) for module in samples}
    noticed: dict[str, set[tuple[str, ...]]] = {
        module: noticed_of(module) if chosen.left else set() for module in samples
    }
    print(f"mutants: {', '.join(samples)}\n         against {' '.join(tests)}", flush=True)
    began = time.monotonic()
    reach, seconds = reach_of(tests, whole)
    trials: list[Trial] = []
    owners = []
    for module, changes in samples.items():
        file = str(ROOT / module)
        source = Path(file).read_text(encoding="utf-8")
        for change in changes:
            if change.name in noticed[module]:
                scores[module].add(change, noticed=True, known=False)
                continue
            names = set().union(*(reach.get(f"{file}:{line}", ()) for line in change.lines))
            trials.append((change, file, source, within(chosen.most, in_order(names, seconds), seconds)))
            owners.append((module, change))
    asked = {name for _, _, _, names in trials for name in names}
    trials.insert(0, (None, "", "", in_order(asked, seconds)))
    files = sorted({name.partition("::")[0] for name in asked})
    unchanged, *outcomes = (
        apart(lambda: tried(files, trials, seconds, chosen.jobs)) if files else [SURVIVED] * len(trials)
    )
    if unchanged != SURVIVED:
        sys.exit(1)
    known = equivalents()
    for (module, change), outcome in zip(owners, outcomes, strict=True):
        is_known = bool(known & {(module, change.function), (module, *change.name)})
        if outcome != UNFIT:
            scores[module].add(change, noticed=outcome in (KILLED, HUNG), known=is_known)
        if outcome in (KILLED, HUNG):
            noticed[module].add(change.name)
    for module, names in noticed.items():
        note_of(module).write_text(json.dumps(sorted(names)), encoding="utf-8")
    print(f"         {len(outcomes)} changes in {time.monotonic() - began:.0f} s", flush=True)
    return list(scores.values())


def note_of(module: str) -> Path:
    """Where it stands what was noticed in a module."""
    (WORK / "noticed").mkdir(parents=True, exist_ok=True)
    return WORK / "noticed" / f"{module.replace('/', '.')}.json"


def noticed_of(module: str) -> set[tuple[str, ...]]:
    """What earlier runs saw noticed in a module."""
    note = note_of(module)
    return {tuple(name) for name in json.loads(note.read_text(encoding="utf-8"))} if note.exists() else set()


def apart(function: Callable[[], T]) -> T:
    """Run a function in a fork, so that each pytest begins with nothing imported; hand back what it returned."""
    OWN.mkdir(parents=True, exist_ok=True)
    answer = OWN / "answer.json"
    answer.unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        try:
            answer.write_text(json.dumps(function()), encoding="utf-8")
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(pid, 0)
    if not answer.exists():
        sys.exit("mutants: pytest ended before the tests did; its output is above")
    return json.loads(answer.read_text(encoding="utf-8"))


class Stopwatch:
    """A pytest plug-in: for how long each test had the processor, fixtures included, and whether any failed.

    Args:
        switch: Called with each test's name before its set-up.
    """

    def __init__(self, switch: Callable[[str], None]) -> None:
        self.switch = switch
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """What runs from here on is this test's, until it has been torn down."""
        self.switch(item.nodeid)
        began = time.process_time()
        outcome = yield
        self.seconds[item.nodeid] = time.process_time() - began
        self.switch("")
        return outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that fails."""
        if report.failed:
            self.failed.append(report.nodeid)


def reach_of(tests: list[str], modules: list[str]) -> tuple[dict[str, list[str]], dict[str, float]]:
    """The tests that pass through each line of the modules (``file:line``), and how long each test takes.

    What is known of a file of tests from an earlier run holds until it or one of the modules changes.
    """
    code = hashlib.sha256()
    for module in modules:
        code.update((ROOT / module).read_bytes())
    known = WORK / "reach"
    known.mkdir(parents=True, exist_ok=True)
    files = sorted(
        {path for test in tests for path in ([ROOT / test] if test.endswith(".py") else _files(ROOT / test))}
    )
    notes = {
        str(path.relative_to(ROOT)): known / f"{hashlib.sha256(code.digest() + path.read_bytes()).hexdigest()}.json"
        for path in files
    }
    missing = [file for file, note in notes.items() if not note.exists()]
    if missing:
        for file, found in apart(lambda: measured(missing, modules)).items():
            notes[file].write_text(json.dumps(found), encoding="utf-8")
    reach: dict[str, list[str]] = defaultdict(list)
    seconds: dict[str, float] = {}
    for note in notes.values():
        found = json.loads(note.read_text(encoding="utf-8"))
        seconds |= found["seconds"]
        for line, names in found["reach"].items():
            reach[line] += names
    return reach, seconds


def _files(folder: Path) -> list[Path]:
    return list(folder.glob("**/test_*.py"))


def measured(files: list[str], modules: list[str]) -> dict[str, dict[str, Any]]:
    """For each file of tests the lines that its tests pass through, in processes that they fork as well."""
    from coverage import Coverage

    folder = OWN / "coverage"
    folder.mkdir()
    include = [str(ROOT / module) for module in modules]
    coverage = Coverage(str(folder / "data"), data_suffix=True, config_file=False, include=include)
    coverage.set_option("run:patch", ["_exit"])
    watch = Stopwatch(coverage.switch_context)
    coverage.start()
    pytest.main([*QUIET, "-p", "no:cov", *files], plugins=[watch])
    coverage.stop()
    coverage.save()
    coverage.combine([str(folder)])
    for name in set(watch.failed):
        print(f"mutants: left out, as it fails unchanged: {name}")
        del watch.seconds[name]
    data = coverage.get_data()
    found = {file: {"seconds": {}, "reach": defaultdict(list)} for file in files}
    for name, duration in watch.seconds.items():
        found[name.partition("::")[0]]["seconds"][name] = duration
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            for name in set(contexts) & watch.seconds.keys():
                found[name.partition("::")[0]]["reach"][f"{file}:{line}"].append(name)
    return found


def tried(tests: list[str], trials: list[Trial], seconds: dict[str, float], jobs: int) -> list[int]:
    """The outcome of each trial."""
    scratch = OWN / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    runner = Trials(trials, seconds, scratch, jobs)
    pytest.main([*QUIET, "-p", "no:cov", *tests], plugins=[runner])
    for name, text in runner.unfirm.items():
        print(f"mutants: left out, as it fails in a fork without any change: {name}\n{text}")
    return [runner.outcomes[number] for number in range(len(trials))]


def in_order(names: set[str], seconds: dict[str, float]) -> list[str]:
    """The quickest file first, and in it the quickest test: a change that is noticed is noticed soon."""
    files: dict[str, float] = defaultdict(float)
    for name in names:
        files[name.partition("::")[0]] += seconds.get(name, 0.0)
    return sorted(
        names, key=lambda name: (files[name.partition("::")[0]], name.partition("::")[0], seconds.get(name, 0))
    )


def within(most: float, names: list[str], seconds: dict[str, float]) -> list[str]:
    """The first tests of a list, for so many seconds: what passes through every line is not asked of every change."""
    spent = itertools.accumulate(seconds.get(name, 0.0) for name in names)
    return [name for name, until in zip(names, spent, strict=True) if until <= most or name == names[0]]


def equivalents() -> set[tuple[str, ...]]:
    """What makes no difference: module and function, and of a single change the source line and what is done to it."""
    listed = tomllib.loads((HERE / "equivalent.toml").read_text(encoding="utf-8")).get("equivalent", [])
    unexplained = [entry for entry in listed if not entry.get("reason")]
    if unexplained:
        sys.exit(f"mutants: these are said to be equivalent without a reason: {unexplained}")
    keys = ("module", "function", "source", "change")
    return {tuple(entry[key] for key in keys if key in entry) for entry in listed}


def report(scores: list[Score]) -> None:
    """Print the survivors and a line for each module, and keep both in ``build/mutants/report.md``."""
    lines = []
    for score in scores:
        for change in score.left:
            lines += [f"{score.module}:{change.line}  {change.function}", f"    {change.text}"]
    lines += ["", *HEADING, *(score.row for score in scores)]
    text = "\n".join(lines)
    print(text)
    (WORK / "report.md").write_text(text + "\n", encoding="utf-8")


def write_down(scores: list[Score]) -> None:
    """Put the rows of these modules into the table of ``scores.md``; others keep theirs while their module is there."""
    before = SCORES.read_text(encoding="utf-8") if SCORES.exists() else ""
    above, _, table = before.partition("\n".join(HEADING))
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in table.splitlines() if row}
    rows = {module: row for module, row in rows.items() if (ROOT / module).exists()}
    rows |= {score.module: score.row for score in scores if score.tried}
    lines = [*HEADING, *(row for _, row in sorted(rows.items()))]
    SCORES.write_text(above + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if os.environ.get("DEEP500_TIMING_PURE") != "1":
        # Compiled functions cannot be changed while they run.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "DEEP500_TIMING_PURE": "1"})
    sys.exit(main())
