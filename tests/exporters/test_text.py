from __future__ import annotations

import pytest

from deep500_timing._views.reports import report_of_snapshot
from deep500_timing._views.table import render
from deep500_timing.exceptions import TimingWarning
from deep500_timing.exporters import TextExporter, _table


def test_the_file_holds_the_table(tmr, tmp_path):
    """A new file gets the plain table."""
    path = tmp_path / "times.txt"
    TextExporter(path).export(tmr.snapshot(), step=5)

    assert render(report_of_snapshot(tmr.snapshot(), 5)) == path.read_text("utf-8")


def test_an_existing_file_is_left_untouched(tmr, tmp_path):
    """The second run of a script, and the third, write next to the first, and say where."""
    path = tmp_path / "times.txt"
    path.write_text("precious")
    for number in (2, 3):
        exporter = TextExporter(path)
        with pytest.warns(TimingWarning, match=rf"written to '.*times-{number}\.txt'; overwrite=True"):
            exporter.export(tmr.snapshot())
        exporter.export(tmr.snapshot())
        assert str(tmp_path / f"times-{number}.txt") == exporter.path
        assert 2 == (tmp_path / f"times-{number}.txt").read_text("utf-8").count("Times by region")

    assert "precious" == path.read_text()
    assert 3 == len(list(tmp_path.iterdir()))


def test_a_file_can_be_replaced(tmr, tmp_path):
    """Asked to overwrite, the first table takes the place of the old file, later ones are added."""
    path = tmp_path / "times.txt"
    path.write_text("old")
    exporter = TextExporter(path, overwrite=True)
    assert "old" == path.read_text()
    exporter.export(tmr.snapshot(), step=1)
    assert render(report_of_snapshot(tmr.snapshot(), 1)) == path.read_text("utf-8")
    exporter.export(tmr.snapshot(), step=2)

    assert 2 == path.read_text("utf-8").count("Times by region")


def test_making_an_exporter_makes_no_file(tmp_path):
    """A run that ends before its first report leaves no empty file in the way of the next."""
    TextExporter(tmp_path / "times.txt")

    assert [] == list(tmp_path.iterdir())


def test_later_exports_add_to_the_file(tmr, tmp_path):
    """The same exporter writes its tables one below the other."""
    path = tmp_path / "times.txt"
    exporter = TextExporter(path)
    exporter.export(tmr.snapshot(), step=1)
    exporter.export(tmr.snapshot(), step=2)

    one, two = (render(report_of_snapshot(tmr.snapshot(), step)) for step in (1, 2))
    assert f"{one}\n{two}" == path.read_text("utf-8")


def test_a_long_name_is_written_whole(tmr, tmp_path):
    """No name is cut in a file."""
    name = "layer." * 60
    with tmr.region(name):
        pass
    TextExporter(tmp_path / "times.txt").export(tmr.snapshot())

    assert name in (tmp_path / "times.txt").read_text("utf-8")


def test_a_table_that_cannot_be_drawn_leaves_no_file(tmr, tmp_path, monkeypatch):
    """A fault before anything is written leaves no empty file behind, so that the next try can succeed."""

    def broken(report, **settings):
        raise ValueError("cannot be drawn")

    exporter = TextExporter(tmp_path / "times.txt")
    monkeypatch.setattr(_table, "render", broken)
    with pytest.warns(TimingWarning, match="cannot be drawn"):
        exporter.export(tmr.snapshot())

    assert [] == list(tmp_path.iterdir())
    monkeypatch.setattr(_table, "render", render)
    exporter.export(tmr.snapshot())
    assert ["times.txt"] == [path.name for path in tmp_path.iterdir()]
