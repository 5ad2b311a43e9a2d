"""Runs tests against changed functions: pytest collects once, and each change is tried in a fork of it."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import os
import shutil
import signal
import time
import types
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from changes import Change

SURVIVED, KILLED, HUNG, UNFIT = 0, 1, 2, 3
# Tests that may fail in a fork without any change, before there is no point in going on.
MOST_UNFIRM = 5


def put_in_place(file: str, source: str, change: Change | None) -> bool:
    """Give the live functions of a file their changed code; whether any could take it.

    Where the change takes a variable out of a closure, Python refuses the code. No change is put in place at once.
    """
    if change is None:
        return True
    before = dict(_codes(compile(source, file, "exec")))
    after = dict(_codes(compile(change.applied(ast.parse(source)), file, "exec")))
    live = defaultdict(list)
    for function in gc.get_objects():
        if type(function) is types.FunctionType and function.__code__.co_filename == file:
            live[function.__code__.co_qualname, function.__code__.co_firstlineno].append(function)
    changed = 0
    for name, code in after.items():
        if name in before and code != before[name]:
            for function in live[name]:
                try:
                    function.__code__ = code
                except ValueError:
                    return False
                changed += 1
    return changed > 0


def _module_name(file: str) -> str:
    """By which name a file is imported: that of the folders above it that are packages, and its own."""
    path = Path(file)
    names = [path.stem]
    while (path.parent / "__init__.py").exists():
        path = path.parent
        names.insert(0, path.name)
    return ".".join(names)


def _codes(code: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield (constant.co_qualname, constant.co_firstlineno), constant
            yield from _codes(constant)


class Trials:
    """A pytest plug-in that runs no test itself: it forks for each change, and the forks run what reaches the change.

    Args:
        trials: For each change its file, the file's text, and the names of the tests that reach it, in their order.
            ``None`` for a change tries the tests unchanged.
        seconds: How long the processor was at each test, unchanged.
        scratch: A folder for what tests write.
        jobs: Forks at a time.
    """

    def __init__(
        self,
        trials: list[tuple[Change | None, str, str, list[str]]],
        seconds: dict[str, float],
        scratch: Path,
        jobs: int,
    ) -> None:
        self.trials = trials
        self.seconds = seconds
        self.scratch = scratch
        self.jobs = jobs
        self.outcomes: dict[int, int] = {}
        self.unfirm: dict[str, str] = {}
        """Tests that failed in a fork without any change, with what they said; no change is tried on them."""
        self.failed: pytest.TestReport | None = None
        self.note = scratch / "unchanged"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In a fork: a test that failed has noticed the change."""
        if report.failed and self.failed is None:
            self.failed = report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try each change; hand back that the tests have been run."""
        for name in sorted({_module_name(file) for _, file, _, _ in self.trials if file}):
            importlib.import_module(name)  # What a function imports when it is called may not be there yet.
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors while the tests were collected")
        items = {item.nodeid: item for item in session.items}
        running: dict[int, tuple[int, float]] = {}
        for number, (change, file, source, names) in enumerate(self.trials):
            for _ in range(MOST_UNFIRM):
                wanted = [items[name] for name in names if name in items and name not in self.unfirm]
                if not wanted:
                    self.outcomes[number] = SURVIVED
                    break
                while len(running) >= self.jobs:
                    self._reap(running)
                seconds = 20 + round(5.0 * sum(self.seconds.get(name, 0.0) for name in names))
                pid = os.fork()
                if pid == 0:
                    self._try(session, wanted, file, source, change, seconds)
                # Others may have the machine, or have stopped this for a while.
                limit = 60.0 + 10.0 * seconds
                running[pid] = number, time.monotonic() + limit
                if change is not None:
                    break
                # What fails unchanged would be taken for a notice; without it the others go on.
                self._reap(running)
                if self.outcomes[number] != KILLED or not self.note.exists():
                    break
                name, _, text = self.note.read_text(encoding="utf-8").partition("\n")
                self.note.unlink()
                self.unfirm[name] = text
        while running:
            self._reap(running)
        return True

    def _try(
        self,
        session: pytest.Session,
        items: list[pytest.Item],
        file: str,
        source: str,
        change: Change | None,
        seconds: int,
    ) -> None:
        outcome = UNFIT
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nowhere, descriptor)
            session.config.pluginmanager.unregister(name="terminalreporter")
            session.config.option.basetemp = str(self.scratch / str(os.getpid()))
            session.config._tmp_path_factory._given_basetemp = self.scratch / str(os.getpid())
            with contextlib.suppress(ImportError):  # not on Windows
                import resource

                resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            if put_in_place(file, source, change):
                outcome = SURVIVED
                for item, following in zip(items, [*items[1:], None], strict=True):
                    session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    if self.failed is not None:
                        outcome = KILLED
                        break
                if change is None and self.failed is not None:
                    text = f"{self.failed.nodeid}\n{self.failed.longreprtext}\n"
                    self.note.write_text(text, encoding="utf-8")
        except BaseException:
            outcome = KILLED
        finally:
            os._exit(outcome)

    def _reap(self, running: dict[int, tuple[int, float]]) -> None:
        """Wait until one fork has ended; end those that hang, which is a way to be noticed."""
        while True:
            for pid, (number, deadline) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                late = time.monotonic() > deadline
                if not ended and not late:
                    continue
                _kill_group(pid)
                if not ended:
                    os.waitpid(pid, 0)
                code = HUNG if not ended else os.waitstatus_to_exitcode(status)
                self.outcomes[number] = KILLED if code < 0 else code
                shutil.rmtree(self.scratch / str(pid), ignore_errors=True)
                del running[pid]
                return
            time.sleep(0.005)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
