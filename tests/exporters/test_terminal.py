from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
import termios

import pytest

from deep500_timing._views.reports import report_of_snapshot
from deep500_timing._views.table import render
from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters import TerminalExporter

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """A pseudo-terminal of 160 columns, and what a program sees of it."""

    def __init__(self, columns=160):
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (50, columns))
        self.stream = os.fdopen(slave, "w", encoding="utf-8")

    def read(self):
        """The output, read while there is more."""
        self.stream.flush()
        os.set_blocking(self._master, False)
        parts = []
        while True:
            try:
                parts.append(os.read(self._master, 65536))
            except BlockingIOError:
                return b"".join(parts).decode().replace("\r\n", "\n")

    def close(self):
        """Close both ends."""
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch):
    """A wide terminal that knows colours."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_a_stream_gets_the_plain_table(tmr):
    """Anything with a write method gets the table without control characters."""
    stream = io.StringIO()
    TerminalExporter(stream).export(tmr.snapshot(), step=3)

    assert render(report_of_snapshot(tmr.snapshot(), 3)) == stream.getvalue()


def test_write_alone_will_do(tmr):
    """A stream needs neither flush nor isatty."""

    class Writer:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

    writer = Writer()
    TerminalExporter(writer).export(tmr.snapshot())

    assert render(report_of_snapshot(tmr.snapshot())) == writer.text


def test_standard_output_is_looked_up_at_the_time(tmr, capsys):
    """Without a file the table goes to what sys.stdout is when it is printed."""
    exporter = TerminalExporter()
    exporter.export(tmr.snapshot())

    assert render(report_of_snapshot(tmr.snapshot())) == capsys.readouterr().out


def test_a_program_without_standard_output_goes_on(tmr, monkeypatch):
    """Where there is no standard output, nothing is printed, as with print()."""
    monkeypatch.setattr(sys, "stdout", None)
    exporter = TerminalExporter(strict=True)
    exporter.export(tmr.snapshot())

    assert 0 == exporter.failures
    assert sys.stdout is None


def test_a_terminal_gets_colours_and_the_same_text(tmr, terminal):
    """On a terminal the table is coloured, and reads as the plain one does."""
    pytest.importorskip("rich")
    TerminalExporter(terminal.stream).export(tmr.snapshot())
    shown = terminal.read()

    assert "\x1b[" in shown
    plain = [line.rstrip() for line in COLOURS.sub("", shown).splitlines()]
    assert render(report_of_snapshot(tmr.snapshot())).splitlines() == plain


def test_no_color_is_respected(tmr, terminal, monkeypatch):
    """With NO_COLOR set there are no colours on a terminal (bold and dim are none)."""
    pytest.importorskip("rich")
    monkeypatch.setenv("NO_COLOR", "1")
    TerminalExporter(terminal.stream).export(tmr.snapshot())

    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.read())


def test_a_terminal_without_rich_gets_the_plain_table(tmr, terminal, monkeypatch):
    """Without rich a terminal gets the same text without control characters."""
    for name in ("rich", "rich.console", "rich.cells"):
        monkeypatch.setitem(sys.modules, name, None)
    TerminalExporter(terminal.stream).export(tmr.snapshot())

    assert render(report_of_snapshot(tmr.snapshot())) == terminal.read()


@pytest.mark.parametrize("with_rich", [True, False])
def test_no_line_is_wider_than_a_narrow_terminal(clock, tmr, monkeypatch, with_rich):
    """Columns are left out and notes wrapped, so that nothing is broken by the terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if with_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    for _ in range(6):
        with tmr.region("augmentation"):
            clock.advance(0.0123)
    tmr.start("another region with a long name, that is still open while the times are shown")
    narrow = Terminal(columns=70)
    TerminalExporter(narrow.stream).export(tmr.snapshot(places=True))
    lines = COLOURS.sub("", narrow.read()).splitlines()
    narrow.close()

    assert max(map(len, lines)) <= 70
    assert any(line.startswith("not shown  ") for line in lines)


def test_markup_in_a_name_is_shown_as_it_is(tmr, terminal):
    """A name that looks like rich's markup is not taken for it."""
    pytest.importorskip("rich")
    with tmr.region("[red]load[/red] :rocket:"):
        pass
    TerminalExporter(terminal.stream).export(tmr.snapshot())

    assert "[red]load[/red] :rocket:" in terminal.read()


def test_a_stream_that_lacks_signs_gets_plain_ones(tmr, clock):
    """A stream in ASCII gets a table, with us for µs."""
    with tmr.region("größe"), tmr.region("fast"):
        clock.advance_ns(1500)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    TerminalExporter(stream, strict=True).export(tmr.snapshot(places=True))
    text = raw.getvalue().decode("ascii")

    assert "1.50 us" in text
    assert "gr\\xf6\\xdfe" in text
    assert "`- fast" in text


def test_the_width_can_be_set(tmr, terminal, monkeypatch):
    """COLUMNS says how wide the terminal is, as for other programs."""
    monkeypatch.setenv("COLUMNS", "40")
    TerminalExporter(terminal.stream).export(tmr.snapshot(places=True))

    assert max(map(len, COLOURS.sub("", terminal.read()).splitlines())) <= 40


@pytest.mark.parametrize("with_rich", [True, False])
def test_a_terminal_of_unknown_width_is_taken_for_80_columns(tmr, clock, monkeypatch, with_rich):
    """A stream that says it is a terminal and knows no more is taken for one of the usual width."""

    class Claims(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *args: os.terminal_size((0, 0)))
    if with_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    for _ in range(40):
        with tmr.region("a name of thirty-two characters "), tmr.region("another one that lies inside of it"):
            clock.advance(0.01)
    stream = Claims()
    TerminalExporter(stream, strict=True).export(tmr.snapshot(places=True))

    assert "the terminal is 80 columns wide" in COLOURS.sub("", stream.getvalue())


def test_nothing_timed_on_a_terminal(terminal, machine, snapshot_of):
    """A terminal says as well that nothing was timed."""
    TerminalExporter(terminal.stream).export(snapshot_of())

    assert "no times  nothing has been recorded yet\n" in COLOURS.sub("", terminal.read())


def test_something_without_write_is_refused():
    """A file name given for a stream is refused where it is given, with the remedy."""
    with pytest.raises(TypeError, match=r"it has no write method.*save_all_time_stats"):
        TerminalExporter("times.txt")  # pyright: ignore[reportArgumentType]


def test_a_closed_stream_costs_one_warning(tmr, recwarn):
    """A stream that takes nothing is reported once, however often it fails."""
    stream = io.StringIO()
    stream.close()
    exporter = TerminalExporter(stream)
    exporter.export(tmr.snapshot())
    exporter.export(tmr.snapshot())

    assert [
        "Exporting times with TerminalExporter failed: ValueError: I/O operation on closed file. "
        "The run goes on without this report. Said once."
    ] == [str(warning.message) for warning in recwarn if warning.category is TimingWarning]


def test_a_pipe_that_was_closed_costs_nothing(tmr, recwarn):
    """The reader, such as ``head``, may stop: nothing is said, unless the exporter is strict."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8", buffering=1) as stream:
        TerminalExporter(stream).export(tmr.snapshot())
        with pytest.raises(ExportError, match="BrokenPipeError"):
            TerminalExporter(stream, strict=True).export(tmr.snapshot())
        with contextlib.suppress(BrokenPipeError):
            stream.close()

    assert [] == recwarn.list


def test_a_strict_exporter_raises(tmr):
    """A strict exporter turns the fault into an ExportError that has it as its cause."""
    stream = io.StringIO()
    stream.close()
    with pytest.raises(ExportError, match="I/O operation on closed file") as caught:
        TerminalExporter(stream, strict=True).export(tmr.snapshot())

    assert isinstance(caught.value.__cause__, ValueError)
