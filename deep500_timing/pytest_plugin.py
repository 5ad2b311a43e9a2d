"""A pytest plugin: time a test in fresh processes, and compare it with the code of another revision.

::

    @pytest.mark.deep500_timing(runs=5, rev="HEAD", fail_on=0.05)
    def test_training(deep500_timing):
        with deep500_timing.region("BATCH"):
            train_step()

``pytest --deep500-timing`` runs each marked test in fresh processes, in turn with the code of ``rev`` if one is given,
prints the comparison, and fails the test if the gate does. Without the option the test runs once as any other.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHILD = "DEEP500_TIMING_PYTEST_CHILD"
_REPORTS = pytest.StashKey[list[str]]()
_STEPS = 30
_RUNS = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    text = "Time the tests marked deep500_timing in fresh processes."
    parser.getgroup("deep500-timing").addoption("--deep500-timing", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "deep500_timing(runs=5, steps=30, rev=None, fail_on=None): time the test in fresh processes under "
        "--deep500-timing; rev is the git revision to compare with, fail_on the slowdown that fails the test",
    )


@pytest.fixture
def deep500_timing() -> Iterator[Any]:
    """A timer for the regions of a test; its run is what --deep500-timing compares."""
    from deep500_timing.timer import Timer

    timer = Timer()
    yield timer
    if timer.run is not None:
        timer.run.flush()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test in fresh processes; in such a process, run it once for each step."""
    mark = pyfuncitem.get_closest_marker("deep500_timing")
    if mark is None:
        return None
    if os.environ.get(_CHILD):
        names = pyfuncitem._fixtureinfo.argnames
        arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
        for step in range(mark.kwargs.get("steps", _STEPS)):
            timer = arguments.get("deep500_timing")
            if timer is not None:
                timer.step(step)
            pyfuncitem.obj(**arguments)
        return True
    if not pyfuncitem.config.getoption("--deep500-timing"):
        return None
    _measure(pyfuncitem, **mark.kwargs)
    return True


def _measure(
    item: pytest.Function,
    *,
    runs: int = _RUNS,
    steps: int = _STEPS,
    rev: str | None = None,
    fail_on: float | None = None,
) -> None:
    from deep500_timing.compare._ab import CommandFailedError, Variant, revision, run_once, run_pairs
    from deep500_timing.compare._text import draw, gate

    if "deep500_timing" not in item.fixturenames:
        pytest.fail("A test marked deep500_timing requires the fixture deep500_timing, its timer.", pytrace=False)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", item.nodeid)
    here = str(item.config.rootpath)
    child = {_CHILD: "1"}
    with tempfile.TemporaryDirectory(prefix="deep500-timing-") as folder, ExitStack() as stack:
        try:
            new = Variant(command, here, child)
            if rev is None:
                found = [
                    run_once(new, os.path.join(folder, f"run-{number}"), session="pytest", pair=number, side="A")
                    for number in range(runs)
                ]
                _report(item, "\n".join(f"{run.name}: {1e3 * (run.step_s or 0):.4g} ms a step" for run in found))
                return
            old_here, environment = stack.enter_context(revision(rev, os.path.join(folder, "tree"), here))
            old = Variant(command, old_here, child | environment)
            compared, floor, _ = run_pairs(old, new, folder, pairs=runs)
        except (CommandFailedError, ValueError) as error:
            pytest.fail(str(error), pytrace=False)
        _report(item, draw(compared))
        if fail_on is not None:
            judged = gate(compared, fail_on, floor)
            _report(item, judged.text)
            if judged.failed:
                pytest.fail(judged.text, pytrace=False)


def _report(item: pytest.Function, text: str) -> None:
    item.config.stash.setdefault(_REPORTS, []).append(f"{item.nodeid}\n{text}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the comparisons, of tests that passed too."""
    for text in config.stash.get(_REPORTS, []):
        terminalreporter.section("deep500-timing")
        terminalreporter.write_line(text)
