"""The contract's methods of the timer, end to end: as a user sees them."""

from __future__ import annotations

import io

import pytest

from deep500_timing import Timer, TimeType
from deep500_timing.exceptions import TimingWarning
from deep500_timing.exporters import read_json_lines
from deep500_timing.testing import ManualClock


def train(tmr, clock):
    """Two epochs of four batches with I/O, on the host."""
    for _ in range(2):
        tmr.start(TimeType.EPOCH)
        for batch in range(4):
            with tmr.region(TimeType.BATCH):
                with tmr.region(TimeType.IO):
                    clock.advance(0.0005 * (batch + 1))
                with tmr.region("augment/flip"):
                    clock.advance(0.0000125)
                clock.advance(0.0208)
        tmr.end(TimeType.EPOCH)


REPORT = """\
Times by region  node01, process 4711  2027-01-15 08:00:00 +0000

region                total  share  count   median  over the run
EPOCH                176 ms             2
└─ BATCH             176 ms  100 %      8  22.1 ms  ▃▃▃▃▃▃▃▃
   ├─ IO            10.0 ms    6 %      8   1.2 ms  ▁▂▃▄▁▂▃▄
   ├─ augment/flip   100 µs   <1 %      8  12.5 µs  ▃▃▃▃▃▃▃▃
   └─ the rest       166 ms   94 %
"""


@pytest.fixture
def trained(machine):
    """A timer after two epochs."""
    clock = ManualClock()
    timer = Timer(clock=clock)
    train(timer, clock)
    return timer


def test_print_all_time_stats(trained, capsys):
    """Without a file the report goes to the standard output."""
    trained.print_all_time_stats()

    assert REPORT == capsys.readouterr().out


def test_print_all_time_stats_to_a_file(trained, capsys):
    """With one it goes there, and only there."""
    stream = io.StringIO()
    trained.print_all_time_stats(stream)
    trained.print_all_time_stats(file=stream)

    assert REPORT * 2 == stream.getvalue()
    assert "" == capsys.readouterr().out


def test_save_all_time_stats(trained, tmp_path, monkeypatch):
    """A file that does not exist gets the same report, under a name or a path."""
    monkeypatch.chdir(tmp_path)
    trained.save_all_time_stats("times.txt")
    trained.save_all_time_stats(tmp_path / "more.txt")

    assert REPORT == (tmp_path / "times.txt").read_text("utf-8") == (tmp_path / "more.txt").read_text("utf-8")


def test_save_all_time_stats_overwrites_nothing(trained, tmp_path):
    """A file that exists is left untouched; the report goes next to it, unless it is to be replaced."""
    path = tmp_path / "times.txt"
    assert str(path) == trained.save_all_time_stats(path)
    before = path.stat()
    with pytest.warns(TimingWarning, match=r"times-2\.txt"):
        assert str(tmp_path / "times-2.txt") == trained.save_all_time_stats(path)

    assert (REPORT, before.st_mtime_ns) == (path.read_text("utf-8"), path.stat().st_mtime_ns)
    assert REPORT == (tmp_path / "times-2.txt").read_text("utf-8")
    path.write_text("old")
    trained.save_all_time_stats(path, overwrite=True)
    assert REPORT == path.read_text("utf-8")


@pytest.mark.parametrize("filename", [None, 3])
def test_save_all_time_stats_needs_a_name(trained, filename):
    """Something that is no file name is refused, and not taken for a descriptor."""
    with pytest.raises(TypeError, match=r"which is not a path: give the name of a file"):
        trained.save_all_time_stats(filename)


def test_a_report_in_the_middle_of_a_run(trained, capsys):
    """While regions are open the report names them as running, and changes nothing."""
    trained.start(TimeType.EPOCH)
    trained.start("checkpoint")
    trained.print_all_time_stats()

    lines = capsys.readouterr().out.splitlines()
    assert ["EPOCH …", "└─ checkpoint …"] == [line[:15].rstrip() for line in lines if "…" in line]
    assert "running  EPOCH (CPU), checkpoint (CPU): open now; not included" == lines[-1]
    trained.end("checkpoint")
    trained.end(TimeType.EPOCH)
    assert (3, 1) == (len(trained.get_time(TimeType.EPOCH)), len(trained.get_time("checkpoint")))


def test_a_report_before_anything_is_timed(machine, capsys):
    """A timer that has timed nothing says so, in the terminal and in a file."""
    Timer().print_all_time_stats()

    assert REPORT.partition("\n")[0] + "\n\nno times  nothing has been recorded yet\n" == capsys.readouterr().out


def test_a_report_of_a_disabled_timer(machine, capsys):
    """That nothing was recorded is put down to the timer that is off, with what turns it on; what it has is shown."""
    tmr = Timer(enabled=False)
    with tmr.region("load"):
        pass
    tmr.print_all_time_stats()
    said = "no times  the timer is disabled; Timer(enabled=True), or timer.enabled = True, lets it record\n"
    assert capsys.readouterr().out.endswith(f"\n\n{said}")
    tmr.enabled = True
    with tmr.region("load"):
        pass
    tmr.enabled = False
    tmr.print_all_time_stats()
    assert "disabled" not in capsys.readouterr().out


def test_warm_up_is_told(machine, capsys):
    """How many times were left out as warm-up stands below the table."""
    clock = ManualClock()
    timer = Timer(clock=clock, skip_first=2)
    for seconds in (5.0, 5.0, 1.0):
        with timer.region(TimeType.BATCH):
            clock.advance(seconds)
    with timer.region(TimeType.IO):
        pass
    timer.print_all_time_stats()

    lines = capsys.readouterr().out.splitlines()
    assert ["BATCH (warm-up)  10.0 s      2", "BATCH             1.0 s      1"] == lines[3:5]
    assert [
        "warm-up   2 × BATCH (CPU): left out by skip_first",
        "no times  IO (CPU): used, but nothing is recorded, or nothing but warm-up",
    ] == lines[-2:]


def test_what_lies_in_a_warm_up_is_told(machine, capsys):
    """A batch inside an epoch that is left out counts: its total may be above the epochs', and a line says why."""
    clock = ManualClock()
    timer = Timer(clock=clock, skip_first=1)
    for _ in range(2):
        with timer.region(TimeType.EPOCH):
            clock.advance(1.0)
            for _ in range(2):
                with timer.region(TimeType.BATCH):
                    clock.advance(10.0)
    timer.print_all_time_stats()
    lines = capsys.readouterr().out.splitlines()
    assert "├─ BATCH            30.0 s   95 %      3  10.0 s  ▃▃▃" in lines
    assert [
        "warm-up  1 × EPOCH (CPU), 1 × BATCH (CPU): left out by skip_first",
        "shares   BATCH (CPU): the total includes intervals in the warm-up of the parent, the share does not",
    ] == lines[-2:]


def test_quantiles_from_a_histogram_are_told(machine, capsys):
    """A timer that keeps a few times only says that its percentiles are rounded."""
    clock = ManualClock()
    timer = Timer(clock=clock, keep_last=5)
    for _ in range(1000):
        with timer.region(TimeType.BATCH):
            clock.advance(0.01)
    timer.print_all_time_stats()

    last = capsys.readouterr().out.splitlines()[-2]
    assert "rounded  BATCH (CPU): medians and percentiles are from a histogram, within ±1 %" == last


def test_reports_wait_for_the_device(tmr, device, capsys):
    """Printing waits for times that are on their way; exporting does not, and counts them."""
    tmr.start(TimeType.BATCH, gpu=True)
    device.launch(2.0)
    tmr.end(TimeType.BATCH, gpu=True)
    assert 1 == tmr.snapshot().get(TimeType.BATCH, "GPU").pending

    tmr.print_all_time_stats()
    assert "BATCH   2.00 s      3  1.00 s     6.00 s" in capsys.readouterr().out


def test_failed_and_captured_regions_are_told(tmr, device, capsys):
    """A region that raised, and one in a graph being captured, are counted below the table."""
    with pytest.raises(ValueError, match="x"), tmr.region(TimeType.FORWARD):
        raise ValueError("x")
    device.capturing = True
    with tmr.region(TimeType.BACKWARD, gpu=True):
        pass
    device.capturing = False
    tmr.print_all_time_stats()

    lines = capsys.readouterr().out.splitlines()
    assert "failed    1 × FORWARD (CPU): ended by an exception, or not to be measured; not included" in lines
    assert "captured  1 × BACKWARD (GPU): in a graph being captured, where nothing can be timed; not included" in lines


def test_several_destinations_get_one_snapshot(trained, tmp_path):
    """``Timer.export`` hands the same snapshot to each exporter."""
    from deep500_timing.exporters import CsvExporter, JsonLinesExporter, TerminalExporter

    stream = io.StringIO()
    log, rows = tmp_path / "times.jsonl", tmp_path / "times.csv"
    files = JsonLinesExporter(log), CsvExporter(rows)
    trained.export(TerminalExporter(stream), *files, step=300)
    for exporter in files:
        exporter.close()

    assert REPORT.replace("+0000\n", "+0000  step 300\n") == stream.getvalue()
    assert [(trained.snapshot(), 300)] == read_json_lines(log)
    assert 5 == len(rows.read_text().splitlines())
