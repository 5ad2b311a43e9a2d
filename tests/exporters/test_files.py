"""Text file, JSON Lines and CSV: their common behaviour."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from mischief import full_disk

from deep500_timing._base import files as _lock
from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters import CsvExporter, JsonLinesExporter, TextExporter, _files

KINDS = [TextExporter, JsonLinesExporter, CsvExporter]
LOGS = [JsonLinesExporter, CsvExporter]


def descriptors():
    """The files that this process has open."""
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request):
    """Each exporter that writes to a file."""
    return request.param


def test_missing_folders_are_made(kind, tmr, tmp_path):
    """A report does not fail after a run because no one made the folder before."""
    path = tmp_path / "missing" / "deeper" / "times"
    kind(path, strict=True).export(tmr.snapshot())

    assert "BATCH" in path.read_text("utf-8")


WRONG_PATHS = [
    ("", ValueError, "was given the path '', which is empty; name a file"),
    ("a\0b", ValueError, r"was given the path 'a\\x00b', which holds a NUL character"),
    (3, TypeError, "was given 3, which is not a path: give the name of a file, such as 'times.txt'"),
    (None, TypeError, "was given None, which is not a path"),
    (".", IsADirectoryError, "was given a folder; name a file in it"),
]


@pytest.mark.parametrize(("path", "error", "text"), WRONG_PATHS)
def test_what_is_wrong_with_a_path_is_said_when_the_exporter_is_made(kind, path, error, text, tmp_path, monkeypatch):
    """The true cause, in words with the remedy, before the run and not after it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        kind(path)

    assert [] == list(tmp_path.iterdir())


def test_a_file_in_the_place_of_a_folder(kind, tmp_path):
    """A path below a file names the file that is in the way, however deep the path goes, next to the whole path."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "times", tmp_path / "file" / "of" / "times"):
        with pytest.raises(NotADirectoryError, match=r"below '.*/file', which is a file and no folder") as caught:
            kind(path)

        assert str(path) == caught.value.filename


def test_an_open_file_is_no_path(tmr, tmp_path):
    """Where a path is needed, an open file is refused with what takes one."""
    with (
        (tmp_path / "open").open("w") as file,
        pytest.raises(TypeError, match="it is an open file; print_all_time_stats"),
    ):
        tmr.save_all_time_stats(file)


def test_a_path_in_bytes_will_do(kind, tmr, tmp_path):
    """Bytes are a path as for ``open``."""
    kind(os.fsencode(tmp_path / "times"), strict=True).export(tmr.snapshot())

    assert "BATCH" in (tmp_path / "times").read_text("utf-8")


@pytest.mark.parametrize("kind", [TextExporter, JsonLinesExporter])
def test_the_null_device_takes_reports(kind, tmr):
    """A pipe or device is written to as it is."""
    kind("/dev/null", strict=True).export(tmr.snapshot())


@contextmanager
def without_privileges():
    """Run as an ordinary user for a while, if this is root, which may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(65534)
    except OSError as error:
        pytest.skip(f"root may write anywhere, and cannot be nobody here: {error}")
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_permission_is_the_systems_error(kind, tmr, tmp_path):
    """A directory that may not be written to is the system's error as well."""
    tmp_path.chmod(0o500)
    try:
        with without_privileges(), pytest.raises(PermissionError) as caught:
            kind(tmp_path / "times").export(tmr.snapshot())
    finally:
        tmp_path.chmod(0o700)

    assert str(tmp_path / "times") == caught.value.filename


def test_a_timer_passes_the_systems_error_on(tmr, tmp_path):
    """``Timer.export`` raises it too, after the other exporters had the snapshot."""
    (tmp_path / "folder").mkdir()
    late = TextExporter(tmp_path / "folder" / "times")
    shutil.rmtree(tmp_path / "folder")
    with pytest.raises(FileNotFoundError):
        tmr.export(late, TextExporter(tmp_path / "free"))

    assert "BATCH" in (tmp_path / "free").read_text()


def test_a_full_disk_leaves_nothing_half_written(kind, tmr, tmp_path, recwarn):
    """When the disk is full in the middle of a report, it is said once and the part is taken back."""
    path = tmp_path / "times"
    exporter = kind(path)
    with full_disk(100):
        exporter.export(tmr.snapshot())
        exporter.export(tmr.snapshot())
        exporter.flush()

    assert [
        f"Exporting times with {kind.__name__} failed: OSError: [Errno 27] File too large: {str(path)!r}. "
        "The run goes on without this report. Said once."
    ] == [str(warning.message) for warning in recwarn]
    assert not path.exists() or path.read_bytes() == b""
    exporter.export(tmr.snapshot())
    exporter.flush()
    assert b"BATCH" in path.read_bytes()


def test_a_full_disk_keeps_earlier_reports(kind, tmr, tmp_path):
    """A report that does not fit leaves those before it as they were, and later ones whole."""
    path = tmp_path / "times"
    exporter = kind(path, strict=True)
    exporter.export(tmr.snapshot(), step=1)
    before = path.read_bytes()
    with full_disk(len(before) + 50), pytest.raises(ExportError, match="File too large"):
        exporter.export(tmr.snapshot(), step=2)

    assert before == path.read_bytes()
    exporter.export(tmr.snapshot(), step=3)
    assert path.read_bytes().startswith(before)


@pytest.mark.parametrize("kind", LOGS)
def test_a_device_that_is_always_full(kind, tmr):
    """Writing to ``/dev/full`` fails as a full disk does, and is said."""
    with pytest.warns(TimingWarning, match="No space left on device: '/dev/full'"):
        exporter = kind("/dev/full")
        exporter.export(tmr.snapshot())
        exporter.flush()


def test_what_another_process_added_is_kept(tmp_path, monkeypatch):
    """A write that fails takes back its own bytes only if nothing was added after them."""
    path = tmp_path / "log"
    path.write_bytes(b"first\n")
    write = os.write

    def fail_after_another(descriptor, data):
        write(descriptor, data[:3])
        with path.open("ab") as other:
            other.write(b"other\n")
        raise OSError(errno.EIO, "the disk is gone")

    file = _files.SharedFile(str(path))
    monkeypatch.setattr(_files.os, "write", fail_after_another)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        file.append(b"second\n")

    assert str(path) == caught.value.filename
    assert b"first\nsecother\n" == path.read_bytes()


def test_a_later_change_of_directory_changes_nothing(kind, tmr, tmp_path, monkeypatch):
    """A relative path belongs to the directory in which the exporter was made."""
    monkeypatch.chdir(tmp_path)
    exporter = kind("times")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    exporter.export(tmr.snapshot())
    exporter.flush()

    assert (tmp_path / "times").stat().st_size > 0


def test_no_file_is_held_open(kind, tmr, tmp_path):
    """Between exports no descriptor is held, so nothing is left to close."""
    before = descriptors()
    exporter = kind(tmp_path / "times")
    exporter.export(tmr.snapshot())
    exporter.flush()

    assert before == descriptors()
    exporter.close()
    exporter.close()


def test_a_lone_surrogate_in_a_name_is_written_as_its_escape(kind, tmr, tmp_path):
    """A name that UTF-8 cannot hold does not cost the report."""
    with tmr.region("bad\udc80name"):
        pass
    kind(tmp_path / "times", strict=True).export(tmr.snapshot())

    assert "bad\\udc80name" in (tmp_path / "times").read_text("utf-8")


@pytest.mark.parametrize("kind", LOGS)
def test_a_file_replaced_by_somebodys_notes(kind, tmr, tmp_path):
    """Notes without a line end stay whole. A log of lines continues below them; a CSV file does not, with a warning."""
    path = tmp_path / "times"
    exporter = kind(path)
    exporter.export(tmr.snapshot(), step=1)
    exporter.flush()
    path.unlink()
    path.write_text("somebody's notes")
    warned = pytest.warns(TimingWarning, match="is not the header of these")
    with warned if kind is CsvExporter else nullcontext():
        for step in (2, 3):
            exporter.export(tmr.snapshot(), step=step)
            exporter.flush()

    lines = path.read_text("utf-8").splitlines()
    assert "somebody's notes" == lines[0]
    assert (1 if kind is CsvExporter else 3) == len(lines)
    path.unlink()
    exporter.export(tmr.snapshot(), step=4)
    exporter.flush()
    assert path.read_text("utf-8").startswith("step," if kind is CsvExporter else '{"schema"')


@pytest.mark.parametrize("kind", LOGS)
def test_a_file_cut_amid_its_last_line(kind, tmr, tmp_path):
    """The next report begins on a new line."""
    path = tmp_path / "times"
    exporter = kind(path, strict=True)
    exporter.export(tmr.snapshot(), step=1)
    os.truncate(path, path.stat().st_size - 5)
    exporter.export(tmr.snapshot(), step=2)
    exporter.export(tmr.snapshot(), step=3)

    lines = path.read_text("utf-8").splitlines()
    per_report = 3 if kind is CsvExporter else 1
    assert (per_report * 3 + (kind is CsvExporter)) == len(lines)
    assert [lines[-1].replace("3", "2", 1)] == [lines[-1 - per_report]] or kind is JsonLinesExporter


@pytest.mark.parametrize("kind", LOGS)
def test_a_file_that_was_moved_away(kind, tmr, tmp_path, recwarn):
    """A log that is rotated goes on in a new file, without a word."""
    path = tmp_path / "times"
    exporter = kind(path, strict=True)
    exporter.export(tmr.snapshot(), step=1)
    first = path.read_bytes()
    path.rename(tmp_path / "times.1")
    exporter.export(tmr.snapshot(), step=1)

    assert first == path.read_bytes() == (tmp_path / "times.1").read_bytes()
    assert [] == recwarn.list


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_during_a_write_keeps_no_lock(tmp_path, monkeypatch):
    """A child that was forked while a report was written does not keep the file locked as long as it lives."""
    fcntl = pytest.importorskip("fcntl")
    path, write = tmp_path / "log", os.write
    path.touch()
    file, (reading, writing) = _files.SharedFile(str(path)), os.pipe()
    children = []

    def fork_first(descriptor, data):
        children.append(os.fork())
        if not children[0]:
            os.close(writing)
            os.read(reading, 1)  # until the parent closes its end
            os._exit(0)
        return write(descriptor, data)

    monkeypatch.setattr(_files.os, "write", fork_first)
    file.append(b"line\n")
    monkeypatch.undo()
    try:
        with path.open() as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(writing)
        os.waitpid(children[0], 0)
        os.close(reading)


WRITERS = """
import os, resource, sys
from deep500_timing import Timer
from deep500_timing.exceptions import ExportError
from deep500_timing.exporters import CsvExporter, JsonLinesExporter
kind, folder = {"jsonl": JsonLinesExporter, "csv": CsvExporter}[sys.argv[1]], sys.argv[2]
timer = Timer()
for number in range(20):
    timer.record(f"region {number}", 0, 1000)
snapshot = timer.snapshot()
for trial in range(8):
    children = []
    for writer in range(4):
        reading, writing = os.pipe()
        if os.fork() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000 + 611 * trial, resource.RLIM_INFINITY))
            exporter, taken = kind(f"{folder}/{trial}", strict=True), 0
            for step in range(40):
                try:
                    exporter.export(snapshot, step=1000 * writer + step)
                    taken += 1
                except ExportError:
                    pass
            os.write(writing, str(taken).encode())
            os._exit(0)
        os.close(writing)
        children.append(reading)
    print(sum(int(os.read(reading, 100)) for reading in children))
"""


@pytest.mark.parametrize(("kind", "per_report"), [("jsonl", 1), ("csv", 20)])
def test_several_writers_on_a_full_disk(kind, per_report, tmp_path):
    """Four processes that fill a disk leave whole lines only, one header, and every report said to be written."""
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, kind, tmp_path], capture_output=True, text=True, timeout=300, check=True
    )
    taken = list(map(int, done.stdout.split()))

    assert 8 == len(taken)
    for trial, reports in enumerate(taken):
        data = (tmp_path / str(trial)).read_bytes()
        lines = data.splitlines(keepends=True)
        assert b"\0" not in data
        assert all(line.endswith(b"\n") for line in lines)
        assert kind == "jsonl" or {lines[0].count(b",")} == {line.count(b",") for line in lines}
        assert reports * per_report == len(lines) - (kind == "csv")
        assert 0 < reports < 160


@pytest.mark.parametrize("holder", ["another", None], ids=["held", "none"])
def test_without_a_lock_reports_are_written_all_the_same(holder, tmr, tmp_path, monkeypatch):
    """A lock that another process keeps, or that the file system does not have, does not stop a report."""
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "times"
    exporter = JsonLinesExporter(path, strict=True)
    if holder is None:
        monkeypatch.setattr(fcntl, "flock", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks")))
        exporter.export(tmr.snapshot())
    else:
        monkeypatch.setattr(_lock, "LONGEST_WAIT_S", 0.0)
        with path.open() as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            exporter.export(tmr.snapshot())

    assert 1 == len(path.read_bytes().splitlines())
