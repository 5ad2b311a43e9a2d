"""Handing snapshots over: no destination's fault reaches the run, or another destination."""

from __future__ import annotations

import warnings

import pytest

from deep500_timing import ExportError, TimingWarning
from deep500_timing.exporters import BaseExporter, Exporter
from deep500_timing.testing import InMemoryExporter

S = 1_000_000_000


class Broken(BaseExporter):
    """Fails in everything that it does."""

    def _export(self, snapshot, step):
        raise OSError("disk full")

    def _flush(self):
        raise OSError("disk full")

    def _close(self):
        raise OSError("disk full")


class Rude:
    """An exporter that has not thought about faults."""

    def export(self, snapshot, *, step=None):
        """Fail."""
        raise ZeroDivisionError("oh")

    def flush(self):
        """Do nothing."""

    def close(self):
        """Do nothing."""


@pytest.fixture
def tmr(tmr):
    """A timer with something to report."""
    tmr.record("a", 0, S)
    return tmr


def test_each_gets_the_same_snapshot_and_step(tmr):
    """One snapshot is taken for all."""
    first, second = InMemoryExporter(), InMemoryExporter()
    tmr.export(first, second, step=7)
    tmr.export(first)
    ((snapshot, step), (later, no_step)) = first.exported
    assert (7, None, "a") == (step, no_step, snapshot.regions[0].name)
    assert second.exported[0][0] is snapshot is not later


def test_one_that_fails_costs_a_warning_and_none_of_the_others(tmr):
    """A fault is said once, with what failed and why, and the others have the report."""
    memory = InMemoryExporter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            tmr.export(Broken(), Rude(), memory)
    texts = [str(warning.message) for warning in caught]
    assert [TimingWarning] * 2 == [warning.category for warning in caught]
    assert texts[0].startswith("Exporting times with Broken failed: OSError: disk full.")
    assert texts[1].startswith("Exporting times with Rude failed: ZeroDivisionError: oh")
    assert 3 == len(memory.exported)


def test_a_strict_one_raises_after_the_others_had_theirs(tmr):
    """``strict`` turns a fault into an error, which costs the others nothing either."""
    memory = InMemoryExporter()
    with pytest.raises(ExportError, match="Exporting times with Broken failed: OSError: disk full") as caught:
        tmr.export(Broken(strict=True), Broken(strict=True), memory)
    assert isinstance(caught.value.__cause__, OSError)
    assert 1 == len(memory.exported)


@pytest.mark.parametrize("method", ["flush", "close"])
def test_flush_and_close(method):
    """They fail as gently, or as strictly, as ``export``."""
    with pytest.warns(TimingWarning, match=f"{method[:-1] if method == 'close' else 'flush'}.*disk full".capitalize()):
        getattr(Broken(), method)()
    with pytest.raises(ExportError, match="disk full"):
        getattr(Broken(strict=True), method)()


def test_what_ends_a_program_is_no_fault(tmr):
    """A Ctrl-C in an exporter ends the program, as it should."""

    class Interrupted(BaseExporter):
        def _export(self, snapshot, step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tmr.export(Interrupted())


def test_a_minimal_exporter(tmr):
    """One that holds nothing needs ``_export`` only; anything with the three methods is an exporter."""
    taken = []

    class Minimal(BaseExporter):
        def _export(self, snapshot, step):
            taken.append(step)

    exporter = Minimal()
    tmr.export(exporter, step=1)
    exporter.flush()
    exporter.close()
    exporter.close()
    assert [1] == taken
    for exporter in (Minimal(), InMemoryExporter(), Rude()):
        assert isinstance(exporter, Exporter)
    assert not isinstance(object(), Exporter)


def test_the_in_memory_exporter_notes_what_is_asked_of_it(tmr):
    """It keeps the reports, counts flushes, and knows that it was closed."""
    memory = InMemoryExporter()
    assert ([], 0, False) == (memory.exported, memory.flushes, memory.closed)
    memory.flush()
    memory.close()
    assert (1, True) == (memory.flushes, memory.closed)
