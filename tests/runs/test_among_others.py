"""A run of somebody else through every command, and files of ours where others can write."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_runs import made_rank
from planted import OPEN_TO_OTHERS, planted_link

from deep500_timing import Timer, TimingWarning
from deep500_timing._base import regular
from deep500_timing._base.files import whole_file
from deep500_timing._base.regular import is_private
from deep500_timing._base.warn import forget_warnings
from deep500_timing._command._app import main
from deep500_timing._views.reports import report_of_run
from deep500_timing._views.table import draw
from deep500_timing.runs import Run, _compact
from deep500_timing.runs import _format as form

pytestmark = [pytest.mark.slow, pytest.mark.one_form, pytest.mark.filterwarnings("ignore:Reading a log failed")]

STEPS = 25
EVIL = "e\x1b]0;PWN\x07\x1b[31m\x9b32m\r\b\0\u202e\u2066n"
RAW = re.compile("\x1b|\x07|\x9b|\r|\b|\0|\u202e|\u2066")
RANK_0 = "rank-00000.d5log"


def write_run(folder, region="work", steps=STEPS, rank=0):
    """A run of one rank."""
    with made_rank(folder, rank) as made:
        for _ in range(steps):
            with made.region("BATCH"):
                made.spend(region, 0.01)
        made.log.event(f"w{region}", f"t{region}")
    return folder


def change_header(path, **values):
    """Change fields of a log's header."""
    frames = [*form.read_frames(path.read_bytes())]
    header = json.loads(frames[0].payload) | values
    rest = [form.encode(one.kind, one.sequence, one.rows, one.payload) for one in frames[1:]]
    path.write_bytes(b"".join([form.encode(form.HEADER, 0, 1, json.dumps(header).encode()), *rest]))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with two runs whose every text would steer a terminal, one with a newer log, and a dump of nonsense."""
    base = tmp_path_factory.mktemp("others")
    machine = {"cpu": EVIL, "governor": EVIL}
    for name in ("hostile", "other", "newer", f"n{EVIL}".replace("\0", "")):
        write_run(base / name, EVIL)
        texts = dict.fromkeys(("host", "platform", "clock", "written_by"), EVIL)
        change_header(base / name / RANK_0, **texts, devices=[EVIL], versions={EVIL: EVIL}, machine=machine)
    write_run(base / "newer", rank=1)
    change_header(base / "newer" / "rank-00001.d5log", schema=99, written_by=EVIL)
    (base / "x.json").write_text("{" + EVIL)
    return base


COMMANDS = """show hostile; show hostile --all; show hostile --json; show newer; show .; show nEVIL; show /nowhereEVIL
top hostile --once; why hostile; why hostile 3; why hostile 99999; stragglers hostile; goodput hostile; goodput nEVIL
goodput hostile --ranks; compare hostile other; compare hostile other --json; compare x.json x.json; history .; doctor
report hostile r.html; timeline hostile t.json; plot hostile p --only EVIL; shEVIL""".replace("\n", "; ").split("; ")


@pytest.mark.parametrize("line", COMMANDS)
def test_no_text_steers_a_terminal_and_nothing_is_sent(base, line, capsys, monkeypatch):
    """Each escape of a name is shown as what it is. No command talks to the network. Only the result is new."""

    def refuse(*_):
        raise AssertionError("a command talks to the network")

    for name in ("connect", "connect_ex", "bind", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(base)
    forget_warnings()
    words = line.replace("EVIL", EVIL.replace("\0", "")).split(" ")
    before = {path for path in base.iterdir() if path.suffix not in (".html", ".json")}
    with pytest.warns(TimingWarning) if "newer" in line else nullcontext():
        assert main(words) in (0, 1, 2)
    said = capsys.readouterr()
    assert RAW.search(said.out + said.err) is None
    assert "fault of deep500-timing" not in said.err
    assert before == {path for path in base.iterdir() if path.suffix not in (".html", ".json")}


def test_a_log_of_a_newer_version_is_said_at_each_reading(base):
    """The second reading has the Parquet of the first."""
    for _ in range(2):
        forget_warnings()
        with pytest.warns(TimingWarning, match="schema 99") as said, Run.open(base / "newer") as run:
            text = "\n".join(str(line) for line in draw(report_of_run(run, rank=0), width=100))
        assert "1 logs not read" in text
        assert RAW.search(str(said[0].message)) is None


NAMES = [
    "lr=0.1,bs=4",
    "rank=7/run",
    "session=5/run",
    "dur_ns=1/run",
    "unix_ns=abc/run",
    "a[1]b",
    "a*b",
    "a?b",
    "{a,b}",
]
NAMES += ['it\'s "quoted"; --', "with space and ünï", "new\nline", "-rf", "step=3/%s{0}", "~", "$HOME"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_any_name(tmp_path, name):
    """What means something to an engine, a shell or a sweeper is a name."""
    with Run.open(write_run(tmp_path / name)) as run:
        rows = run.sql("select rank, session, count(*) as n, min(step) as s from intervals group by 1, 2").rows()
        columns = run.table("intervals").columns
    assert [{"rank": 0, "session": 0, "n": 2 * STEPS, "s": 0}] == rows
    assert len(columns) == len(set(columns)) == 15


@pytest.mark.parametrize("name", ["load image {}", "epoch {}/step", "0x{:012x}"])
def test_names_without_end(tmp_path, name):
    """As of a program that has the step in the name: the report stays short, and says how much it left out."""
    with made_rank(tmp_path) as made:
        for number in range(3000):
            made.spend(name.format(number), 0.001)
    with Run.open(tmp_path) as run:
        text = "\n".join(str(line) for line in draw(report_of_run(run), width=100))
    assert len(text.splitlines()) < 100


SURROUNDINGS = [("TZ", "Pacific/Kiritimati"), ("TZ", "XXX-25:99"), ("TZ", "/etc/passwd"), ("TZ", "../../../etc/passwd")]
SURROUNDINGS += [("COLUMNS", text) for text in ("20", "1", "0", "-5", "x", "100000")]
SURROUNDINGS += [("HOME", "/nonexistent"), ("TERM", "dumb"), ("LC_ALL", "C"), ("TMPDIR", "/nonexistent")]


@pytest.mark.parametrize(("variable", "value"), SURROUNDINGS)
def test_odd_surroundings(tmp_path, capsys, monkeypatch, variable, value):
    """A run is shown in whatever environment."""
    write_run(tmp_path / "run")
    monkeypatch.setenv(variable, value)
    try:
        time.tzset()
        assert 0 == main(["show", str(tmp_path / "run")])
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "BATCH" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["show", "show --json", "goodput", "why", "stragglers", "top --once", "timeline", "report"]
)
def test_an_output_that_is_closed(tmp_path, monkeypatch, line):
    """As by ``>&-``: a command without an output says nothing, and fails at nothing."""
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdout", None)
    command, *options = line.split()
    assert 0 == main([command, "run", *options])


@pytest.mark.parametrize("number", [1, 2, 8, 12, 13])
def test_a_reading_that_is_killed(tmp_path, monkeypatch, number):
    """At any file that it puts in its place: the next one reads everything."""
    run, calls, replace = write_run(tmp_path / "run"), [], os.replace

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        replace(*arguments)

    monkeypatch.setattr(_compact.os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        Run.open(run)
    with Run.open(run) as opened:
        assert 2 * STEPS == len(opened.intervals().rows())
    assert not [path for path in (run / "compacted").iterdir() if "unfinished" in path.name]


# --- files of ours ----------------------------------------------------------------------------------------------------


def owned(mode, uid=1000, gid=1000):
    """A status as the system gives it, for the user 1000."""
    return SimpleNamespace(st_mode=mode, st_uid=uid, st_gid=gid)


@pytest.mark.parametrize(
    ("file", "folder", "is_ours"),
    [
        (owned(0o644), owned(0o755), True),
        (owned(0o664), owned(0o775), True),
        (owned(0o644, 0, 0), owned(0o775, 0, 0), True),
        (owned(0o664, gid=50), owned(0o755), False),
        (owned(0o644), owned(0o2775, gid=50), False),
        (owned(0o664, 0, 50), owned(0o755, 0, 0), False),
        (owned(0o646), owned(0o755), False),
        (owned(0o644), owned(0o1777), False),
        (owned(0o644, 2000, 2000), owned(0o755), False),
        (owned(0o644), owned(0o755, 2000, 2000), False),
    ],
)
def test_whom_a_file_belongs_to(monkeypatch, tmp_path, file, folder, is_ours):
    """Settings, the compiled kernel and the page's JavaScript count if only this user or root can write them."""
    path = str(tmp_path / "file")
    found = {path: file, str(tmp_path): folder}
    monkeypatch.setattr(regular, "os", SimpleNamespace(path=os.path, geteuid=lambda: 1000, stat=found.__getitem__))
    assert is_ours == is_private(path)


@pytest.mark.parametrize("kind", ["result", "log", "benchmark"])
def test_the_umask_is_left_alone(tmp_path, monkeypatch, kind):
    """It is of the whole process: another thread's new file would be readable by all."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
    if kind == "log":
        write_run(tmp_path)
    elif kind == "result":
        with whole_file(str(tmp_path / "result")) as file:
            file.write(b"x")
    else:
        Timer().save_all_time_stats(tmp_path / "times.txt")


@pytest.mark.parametrize("mode", OPEN_TO_OTHERS)
def test_a_result_replaces_a_link_in_a_folder_of_others(tmp_path, mode):
    """They may have planted it."""
    victim, link = planted_link(tmp_path, mode, "r.html")
    with whole_file(str(link)) as file:
        file.write(b"page")
    assert ("mine", b"page") == (victim.read_text(), link.read_bytes())
    assert not link.is_symlink()


RESULTS = ["compare a b --page", "report a", "timeline a"]


@pytest.mark.parametrize("line", RESULTS)
@pytest.mark.parametrize("target", [os.devnull, "target"])
def test_results_go_where_a_link_leads(tmp_path, monkeypatch, line, target):
    """A device and a link stay what they are; ``/dev/stdout`` is such a link."""
    for name in "ab":
        write_run(tmp_path / name)
    change_header(tmp_path / "b" / RANK_0, host="another")
    monkeypatch.chdir(tmp_path)
    Path("to.html").symlink_to(target)
    assert main([*line.split(), "to.html"]) in (0, 3)
    assert Path("to.html").is_symlink()
    assert Path(os.devnull).is_char_device()
    assert Path(target).exists()
