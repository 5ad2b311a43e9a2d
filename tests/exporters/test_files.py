"""Text file, JSON Lines and CSV: what they have in common."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters import CsvExporter, JsonLinesExporter, TextExporter, _files

KINDS = [TextExporter, JsonLinesExporter, CsvExporter]
LOGS = [JsonLinesExporter, CsvExporter]


def descriptors():
    """The files that this process has open."""
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


@contextmanager
def files_of_at_most(size):
    """Let the system refuse to make any file larger than ``size`` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request):
    """Each exporter that writes to a file."""
    return request.param


def test_a_missing_directory_is_the_systems_error(kind, tmr, tmp_path):
    """The system's own error reaches the caller, with the path."""
    path = tmp_path / "missing" / "times"
    with pytest.raises(FileNotFoundError) as caught:
        kind(path).export(tmr.snapshot())

    assert str(path) == caught.value.filename


@contextmanager
def without_privileges():
    """Be nobody for a while, if this is root, who may write anywhere."""
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


def test_a_directory_is_not_a_file(kind, tmr, tmp_path):
    """A path that is a directory is refused by the system."""
    with pytest.raises(OSError, match=r"directory|exists"):
        kind(tmp_path).export(tmr.snapshot())


def test_a_timer_passes_the_systems_error_on(tmr, tmp_path):
    """``Timer.export`` raises it too, after the other exporters had the snapshot."""
    taken = tmp_path / "taken"
    taken.write_text("precious")
    with pytest.raises(FileExistsError):
        tmr.export(TextExporter(taken), TextExporter(tmp_path / "free"))

    assert "precious" == taken.read_text()
    assert "BATCH" in (tmp_path / "free").read_text()


def test_a_full_disk_leaves_nothing_half_written(kind, tmr, tmp_path, recwarn):
    """When the disk is full in the middle of a report, it is said once and what was written is taken back."""
    path = tmp_path / "times"
    exporter = kind(path)
    with files_of_at_most(100):
        exporter.export(tmr.snapshot())
        exporter.export(tmr.snapshot())

    assert [
        f"Exporting times with {kind.__name__} failed: OSError: [Errno 27] File too large: {str(path)!r}. "
        "The run goes on without this report. Said once."
    ] == [str(warning.message) for warning in recwarn]
    assert not path.exists() or path.read_bytes() == b""
    exporter.export(tmr.snapshot())
    assert b"BATCH" in path.read_bytes()


def test_a_full_disk_keeps_earlier_reports(kind, tmr, tmp_path):
    """A report that does not fit leaves those before it as they were, and later ones whole."""
    path = tmp_path / "times"
    exporter = kind(path, strict=True)
    exporter.export(tmr.snapshot(), step=1)
    before = path.read_bytes()
    with files_of_at_most(len(before) + 50), pytest.raises(ExportError, match="File too large"):
        exporter.export(tmr.snapshot(), step=2)

    assert before == path.read_bytes()
    exporter.export(tmr.snapshot(), step=3)
    assert path.read_bytes().startswith(before)


@pytest.mark.parametrize("kind", LOGS)
def test_a_device_that_is_always_full(kind, tmr):
    """Writing to ``/dev/full`` fails as a full disk does, and is said."""
    with pytest.warns(TimingWarning, match="No space left on device: '/dev/full'"):
        kind("/dev/full").export(tmr.snapshot())


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

    monkeypatch.setattr(_files.os, "write", fail_after_another)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        _files.append(str(path), b"second\n")

    assert str(path) == caught.value.filename
    assert b"first\nsecother\n" == path.read_bytes()


def test_a_later_change_of_directory_changes_nothing(kind, tmr, tmp_path, monkeypatch):
    """A relative path belongs to the directory in which the exporter was made."""
    monkeypatch.chdir(tmp_path)
    exporter = kind("times")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    exporter.export(tmr.snapshot())

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
