"""Lines of times, a file for each rank: written as people know them, and read back as a run."""

from __future__ import annotations

import itertools
import re
import shutil
from decimal import Decimal

import pytest

import deep500_timing
from deep500_timing import RegionNotOpenError, RegionOpenError, Timer, TimingWarning
from deep500_timing.ranklog import GlobalTimer, read_rank_logs
from deep500_timing.runs import Run, RunLog
from deep500_timing.runs._lines import Line, read_line, write_line
from deep500_timing.testing import ManualDeviceClock

# As the tool that this follows prints it.
SEEN = "[RANK 0] forward, start=1716182684.282194, end=1716182685.123003, cpu_dur=0.840809s, cuda_dur=830.512ms"


@pytest.fixture
def device():
    """A device with a time that moves on request."""
    return ManualDeviceClock()


@pytest.fixture
def make(clock):
    """Make a global timer that writes on request, on a clock that stands still."""
    made = []

    def make(folder, rank=0, device=None):
        made.append(GlobalTimer(folder, timer=Timer(device, clock=clock), rank=rank, flush_s=None))
        return made[-1]

    yield make
    for timer in made:
        if timer._log is not None:
            timer._log.close()


@pytest.fixture
def timer(make, device, tmp_path):
    """A global timer of rank 3 with a device."""
    return make(tmp_path / "time_log", 3, device)


def test_the_line_is_the_one_that_people_know():
    """A line in the format of old is read to the digit and written as it was."""
    line = read_line(SEEN)
    assert Line(0, "forward", 1716182684_282194000, 1716182685_123003000, 840_809_000, 830_512_000) == line
    assert SEEN + "\n" == write_line(line)


def test_a_missing_time_is_missing():
    """Where there is no time on the device the line says so, and it is read as none, not as zero."""
    line = Line(7, "a, start=1", 10**18, 10**18 + 2_000, 2_000, None)
    text = write_line(line)
    assert text.endswith("cpu_dur=0.000002s, cuda_dur=missing\n")
    assert line == read_line(text)


@pytest.mark.parametrize("text", ["", "forward", SEEN[:-2], "x" + SEEN, SEEN.replace("=", ":")])
def test_what_is_no_line(text):
    """Half a line, or something else, is no time."""
    assert read_line(text) is None


def test_stages_with_times_on_the_device(timer, clock, device, tmp_path):
    """Each stage is a line with its times on the host and on the device, which may come later than the next."""
    for number in range(3):
        timer.start("forward")
        device.launch(0.25 * (number + 1))
        clock.advance(0.5)
        timer.stop("forward")
    timer.start("rest")
    clock.advance(0.125)
    timer.stop("rest")
    device.finish()
    timer.dump()
    texts = (tmp_path / "time_log" / "timer_rank3.log").read_text().splitlines()
    lines = [read_line(text) for text in texts]
    assert ["forward"] * 3 + ["rest"] == [line.name for line in lines]
    assert [0.25, 0.5, 0.75, 0.0] == [line.cuda_ns / 1e9 for line in lines]
    assert [500_000_000] * 3 + [125_000_000] == [line.cpu_ns for line in lines]
    for line, following in itertools.pairwise(lines):
        assert line.end_ns - line.start_ns == line.cpu_ns
        assert line.end_ns == following.start_ns


def test_a_line_waits_for_the_device(timer, clock, device, tmp_path):
    """A line is written when the device has given its time; at the end, with what there is."""
    path = tmp_path / "time_log" / "timer_rank3.log"
    timer.start("a")
    device.launch(1.0)
    clock.advance(0.5)
    timer.stop("a")
    timer._log.flush()
    assert "" == path.read_text()
    timer._log.close(wait=False)
    assert read_line(path.read_text()).cuda_ns is None


def test_without_a_device(clock, make, tmp_path):
    """Without a device the time on it is missing, and no one is warned."""
    timer = make(tmp_path)
    timer.start("io")
    clock.advance(0.5)
    timer.stop("io")
    timer.dump()
    timer.dump()
    (text,) = (tmp_path / "timer_rank0.log").read_text().splitlines()
    assert re.fullmatch(r"\[RANK 0\] io, start=\d+\.\d{6}, end=\d+\.\d{6}, cpu_dur=0\.500000s, cuda_dur=missing", text)


def test_misuse_is_named(timer):
    """Starting twice, and stopping a stage that was not started, are errors that name the stage."""
    timer.start("a")
    with pytest.raises(RegionOpenError, match="'a'"):
        timer.start("a")
    with pytest.raises(RegionNotOpenError, match="'b'"):
        timer.stop("b")


def test_nothing_is_overwritten(make, tmp_path):
    """A later run of a rank writes its own file next to the first one's."""
    for number in range(2):
        timer = make(tmp_path)
        timer.start(f"run {number}")
        timer.stop(f"run {number}")
        timer.dump()
    assert ["run 0", "run 1"] == [
        read_line((tmp_path / name).read_text()).name for name in ("timer_rank0.log", "timer_rank0.1.log")
    ]


def test_a_folder_that_cannot_be_made(make, tmp_path):
    """A fault costs one warning; what could not be written is written when it can be."""
    (tmp_path / "log").write_text("mine")
    timer = make(tmp_path / "log")
    timer.start("a")
    timer.stop("a")
    with pytest.warns(TimingWarning, match="File exists") as said:
        timer.dump()
        timer.dump()
    assert 1 == len(said)
    (tmp_path / "log").unlink()
    timer.dump()
    assert "a" == read_line((tmp_path / "log" / "timer_rank0.log").read_text()).name


def test_read_as_a_run(clock, make, device, tmp_path):
    """The lines of all ranks are the tables of a run: counts and sums are theirs, on the host and on the device."""
    for rank in range(2):
        timer = make(tmp_path, rank, device)
        for step in range(5):
            timer.start("BATCH")
            clock.advance(0.25)
            timer.start("forward")
            device.launch(0.5)
            clock.advance(0.5)
            timer.stop("forward")
            timer.stop("BATCH")
            clock.advance(0.001 * step)
        device.finish()
        timer.dump()
    with (tmp_path / "timer_rank1.log").open("a") as file:
        file.write("[RANK 1] forward, start=17161")
    with pytest.warns(TimingWarning, match="1 of 11 lines"), read_rank_logs(tmp_path) as run:
        texts = [text for path in tmp_path.glob("*.log") for text in path.read_text().splitlines()[:10]]
        total = sum(Decimal(re.search(r"cpu_dur=([\d.]+)s", text)[1]) for text in texts if "forward" in text)
        rows = {(row["path"], row["device"]): row for row in run.regions().rows()}
        assert {("BATCH", "CPU"), ("BATCH", "GPU"), ("BATCH/forward", "CPU"), ("BATCH/forward", "GPU")} == set(rows)
        assert total * 10**9 == rows["BATCH/forward", "CPU"]["total_ns"]
        assert 10 * 500_000_000 == rows["BATCH/forward", "GPU"]["total_ns"]
        assert list(range(5)) == [row["step"] for row in run.steps(rank=1).rows()]
        folder = run.folders[0]
    with pytest.raises(FileNotFoundError):
        shutil.os.stat(folder)


def test_there_is_nothing_to_read(tmp_path):
    """A folder without such logs is an error that says what writes them."""
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="global_timer writes them"):
            read_rank_logs(folder)


def test_a_timer_that_writes_to_a_run_as_well(tmp_path):
    """A run of the timer has the same times as the lines, and stays the timer's run."""
    tmr = Timer(run=RunLog(tmp_path / "run", rank=0, flush_s=None))
    timer = GlobalTimer(tmp_path / "lines", timer=tmr, rank=0, flush_s=None)
    timer.start("a")
    timer.stop("a")
    timer.dump()
    with tmr.run as log:
        timer._log.close()
        assert log is tmr.run
    line = read_line((tmp_path / "lines" / "timer_rank0.log").read_text())
    with Run.open(tmp_path / "run") as run:
        (row,) = run.intervals().rows()
        assert abs(row["dur_ns"] - line.cpu_ns) < 1000


PROGRAM = """
import os, sys
from deep500_timing import global_timer
global_timer.start("all")
for _ in range(100):
    global_timer.start("part")
    global_timer.stop("part")
if os.fork() == 0:
    global_timer.start("child")
    global_timer.stop("child")
    sys.exit()
os.wait()
global_timer.stop("all")
"""


def test_a_program_that_forgets_to_dump(start, tmp_path, monkeypatch):
    """At the end of a process everything is written; a forked one writes its own, to its own file."""
    monkeypatch.chdir(tmp_path)
    process = start(PROGRAM, RANK="5", WORLD_SIZE="8")
    _, error = process.communicate(timeout=300)
    assert (0, "") == (process.returncode, error)
    found = {
        path.name: [read_line(text).name for text in path.read_text().splitlines()]
        for path in (tmp_path / "time_log").iterdir()
    }
    both = sorted(found.values(), key=len)
    assert {"timer_rank5.log", "timer_rank5.1.log"} == set(found)
    assert [["child"], ["part"] * 100 + ["all"]] == both


def test_it_is_importable_where_people_look():
    """The package and the torch adapter have it; the adapter's times on the accelerator as well."""
    assert isinstance(deep500_timing.global_timer, GlobalTimer)
    pytest.importorskip("torch")
    torch_adapter = pytest.importorskip("deep500_timing_torch")
    assert isinstance(torch_adapter.global_timer.timer, torch_adapter.CPUGPUTimer)
    assert deep500_timing.read_rank_logs is torch_adapter.read_rank_logs
