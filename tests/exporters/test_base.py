from __future__ import annotations

import io
import math

import numpy as np
import pytest

from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters import BaseExporter, Exporter, TerminalExporter
from deep500_timing.testing import InMemoryExporter


class Faulty(BaseExporter):
    """Fails at any request."""

    def __init__(self, *errors, strict=False):
        super().__init__(strict=strict)
        self._errors = list(errors)

    def _fail(self):
        raise self._errors.pop(0)

    def _export(self, snapshot, step):
        self._fail()

    def _flush(self):
        self._fail()

    def _close(self):
        self._fail()


class Foreign:
    """An exporter of someone else, which has not thought of faults."""

    def export(self, snapshot, *, step=None):
        """Fail."""
        raise KeyError("oops")

    def flush(self):
        """Do nothing."""

    def close(self):
        """Do nothing."""


def test_every_method_is_guarded(tmr, recwarn):
    """Faults in exporting, flushing and closing are distinguished and never raised."""
    exporter = Faulty(*(ValueError(n) for n in "abc"))
    exporter.export(tmr.snapshot())
    exporter.flush()
    exporter.close()

    assert ["Exporting", "Flushing", "Closing"] == [str(warning.message).split()[0] for warning in recwarn]


def test_a_fault_whose_text_changes_is_told_once(tmr, recwarn):
    """An address in an error's text does not make it another error."""
    exporter = Faulty(*(ConnectionError(f"<Connection at {n:#x}>") for n in range(5)))
    for _ in range(5):
        exporter.export(tmr.snapshot())

    assert 1 == len(recwarn)


def test_faults_of_different_kinds_are_told_apart(tmr, recwarn):
    """A full disk after a broken pipe is named as well."""
    exporter = Faulty(OSError(28, "full"), OSError(32, "pipe"), OSError(28, "full"), ValueError("x"))
    for _ in range(4):
        exporter.export(tmr.snapshot())

    assert 3 == len(recwarn)


def test_a_strict_exporter_raises_from_each_method(tmr):
    """Strictness is for flushing and closing too."""
    exporter = Faulty(*(ValueError(n) for n in "abc"), strict=True)
    for call in (lambda: exporter.export(tmr.snapshot()), exporter.flush, exporter.close):
        with pytest.raises(ExportError, match=r"with Faulty failed: ValueError: [abc]$"):
            call()


def test_ending_the_program_is_no_fault(tmr):
    """Ctrl-C during an export ends the program."""
    with pytest.raises(KeyboardInterrupt):
        Faulty(KeyboardInterrupt()).export(tmr.snapshot())


def test_the_others_get_the_snapshot(tmr):
    """A strict exporter that fails, and a foreign one, take nothing from those after them."""
    kept = InMemoryExporter()
    with (
        pytest.warns(TimingWarning, match=r"with Foreign failed: KeyError: 'oops'. The run goes on"),
        pytest.raises(ExportError, match="x"),
    ):
        tmr.export(Faulty(ValueError("x"), strict=True), Foreign(), kept, step=2)

    assert [(tmr.snapshot(), 2)] == kept.exported


def test_the_contract_is_three_methods():
    """An object with them is an exporter."""
    assert isinstance(Foreign(), Exporter)
    assert isinstance(InMemoryExporter(), Exporter)
    assert not isinstance(object(), Exporter)


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ("jsonl", r"it is a name; make an exporter: deep500_timing\.exporters\.get\('jsonl'\)\(\.\.\.\)"),
        (InMemoryExporter, r"it is a class; make one of it: InMemoryExporter\(\.\.\.\)"),
        ([InMemoryExporter()], r"pass each exporter as an argument: export\(\*exporters\)"),
        (None, "it has no method export"),
        (print, "it has no method export"),
    ],
)
def test_what_is_no_exporter_is_refused_at_once(tmr, wrong, remedy):
    """Misuse is an error each time, with the remedy, before any other exporter has had the snapshot."""
    kept = InMemoryExporter()
    for _ in range(2):
        with pytest.raises(TypeError, match=remedy):
            tmr.export(kept, wrong)

    assert [] == kept.exported


@pytest.mark.parametrize("step", [2.0, math.nan, "7", True, np.bool_(True), [1], object()])
def test_a_step_is_an_integer(tmr, step):
    """A step of another kind is an error at the call, for every exporter alike."""
    kept = InMemoryExporter()
    with pytest.raises(TypeError, match=r"a step is an integer, or None if there is none"):
        tmr.export(kept, step=step)
    with pytest.raises(TypeError, match=r"a step is an integer, or None if there is none"):
        TerminalExporter(io.StringIO()).export(tmr.snapshot(), step=step)

    assert [] == kept.exported


@pytest.mark.parametrize("step", [2**63, -(2**63) - 1, 2**70])
def test_a_step_fits_64_bits(tmr, step):
    """A step that not every destination can hold is refused."""
    with pytest.raises(ValueError, match="a step must fit 64 bits"):
        tmr.export(InMemoryExporter(), step=step)


@pytest.mark.parametrize("step", [None, 0, -5, 2**63 - 1, np.int64(7), np.uint8(3)])
def test_any_integer_will_do(tmr, step):
    """Integers of Python and numpy are taken, as Python's."""
    kept = InMemoryExporter()
    tmr.export(kept, step=step)

    ((_, taken),) = kept.exported
    assert (step, None if step is None else int) == (taken, None if taken is None else type(taken))


def test_a_warning_points_at_the_users_line(tmr):
    """For any layer of ours that warns, the line that is shown is the one that called us."""
    with pytest.warns(TimingWarning) as warned:
        tmr.export(Foreign())
        Faulty(ValueError("x")).export(tmr.snapshot())

    assert [__file__, __file__] == [warning.filename for warning in warned]
