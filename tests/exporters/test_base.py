from __future__ import annotations

import pytest

from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters import BaseExporter, Exporter, export_to
from deep500_timing.testing import InMemoryExporter


class Faulty(BaseExporter):
    """Fails at whatever it is asked."""

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
    """An exporter of somebody else, which has not thought of faults."""

    def export(self, snapshot, *, step=None):
        """Fail."""
        raise KeyError("oops")

    def flush(self):
        """Do nothing."""

    def close(self):
        """Do nothing."""


def test_every_method_is_guarded(tmr, recwarn):
    """Faults in exporting, flushing and closing are told apart and never raised."""
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
    """A full disk after a broken pipe is told as well."""
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
    """Ctrl-C during an export ends what it is meant to end."""
    with pytest.raises(KeyboardInterrupt):
        Faulty(KeyboardInterrupt()).export(tmr.snapshot())


def test_the_others_get_the_snapshot(tmr):
    """A strict exporter that fails, and a foreign one, take nothing from those after them."""
    kept = InMemoryExporter()
    with (
        pytest.warns(TimingWarning, match=r"with Foreign failed: KeyError: 'oops'. The run goes on"),
        pytest.raises(ExportError, match="x"),
    ):
        export_to(tmr.snapshot(), [Faulty(ValueError("x"), strict=True), Foreign(), kept], step=2)

    assert [(tmr.snapshot(), 2)] == kept.exported


def test_the_contract_is_three_methods():
    """Whatever has them is an exporter."""
    assert isinstance(Foreign(), Exporter)
    assert isinstance(InMemoryExporter(), Exporter)
    assert not isinstance(object(), Exporter)
