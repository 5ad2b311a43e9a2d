"""The suite that an exporter of others inherits: ours pass it, and it finds what one lacks."""

from __future__ import annotations

import pytest

from deep500_timing.exporters import CsvExporter, JsonLinesExporter, TerminalExporter, TextExporter
from deep500_timing.testing import ExporterContract, InMemoryExporter


class TestOurs(ExporterContract):
    """Each that needs no other package."""

    @pytest.fixture(params=[CsvExporter, JsonLinesExporter, TextExporter, TerminalExporter, InMemoryExporter])
    def exporter(self, request, tmp_path):
        """A new one."""
        one = request.param
        return one() if one in (TerminalExporter, InMemoryExporter) else one(tmp_path / "times", strict=True)


class _NoClose:
    def export(self, snapshot, *, step=None):
        """Takes it."""

    def flush(self):
        """Has nothing."""


class _Median(_NoClose):
    def export(self, snapshot, *, step=None):
        """Takes each region's times for granted."""
        for region in snapshot.regions:
            region.stats.median  # noqa: B018

    def close(self):
        """Has nothing."""


class _Once(_Median):
    def __init__(self):
        self.open = [1]

    def close(self):
        """Forgets what it closes."""
        self.open.pop()


@pytest.mark.parametrize(
    ("wrong", "test", "error"),
    [
        (_NoClose, "test_is_an_exporter", AssertionError),
        (_Median, "test_takes_what_a_timer_has", AttributeError),
        (_Once, "test_is_closed_twice", IndexError),
    ],
)
def test_finds_what_is_wrong(wrong, test, error):
    """A method that is absent, times that are not there, and a second close."""
    with pytest.raises(error):
        getattr(ExporterContract(), test)(wrong())
