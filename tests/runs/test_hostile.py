"""A run folder of someone else: reading it changes nothing outside, is bounded, and one bad log costs itself only."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest

from deep500_timing import TimingWarning
from deep500_timing._base.files import whole_file
from deep500_timing._base.warn import forget_warnings
from deep500_timing._views.reports import report_of_run
from deep500_timing._views.table import draw
from deep500_timing.runs import Run
from deep500_timing.runs import _format as form
from deep500_timing.runs._header import _command_sha256
from deep500_timing.runs._stacks import without_texts
from deep500_timing.runs._tables import COLUMNS
from tests.support.made_runs import made_rank

STEPS = 5
RANK_1 = "rank-00001.d5log"


def write_run(folder, ranks=1, region="work"):
    """A run of some ranks with 2 intervals in each step."""
    for rank in range(ranks):
        with made_rank(folder, rank) as made:
            for _ in range(STEPS):
                with made.region("BATCH"):
                    made.spend(region, 0.01)
            made.log.sample("loss", 0.5)
            made.log.event("note", "an event")
            made.log.mark("checkpoint_saved", step=3)
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run of three ranks; it is copied, not changed."""
    return write_run(tmp_path_factory.mktemp("three"), ranks=3)


@pytest.fixture
def run(three, tmp_path):
    """A copy of it."""
    forget_warnings()
    return shutil.copytree(three, tmp_path / "run")


def frames_of(path):
    """The frames of a log as tuples: kind, rows, payload."""
    return [(frame.kind, frame.rows, frame.payload) for frame in form.read_frames(path.read_bytes())]


def write_frames(path, frames):
    """Write a log with right checksums."""
    path.write_bytes(b"".join(form.encode(kind, at, rows, load) for at, (kind, rows, load) in enumerate(frames)))


def listing(folder):
    """Every file below a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def document(kind, value):
    """A frame of JSON."""
    return kind, 1, value if isinstance(value, bytes) else json.dumps(value).encode()


def with_header(**values):
    """Change fields of the header."""

    def change(frames):
        header = json.loads(frames[0][2])
        return [document(form.HEADER, header | values), *frames[1:]]

    return change


def with_document(kind, value):
    """Add a document behind the header."""
    return lambda frames: [frames[0], document(kind, value), *frames[1:]]


def with_table(name, *columns, kind=90):
    """Add a table of one row; of zeros."""
    columns = columns or (("a", "int"),)
    described = {name: {"kind": kind, "columns": [list(column) for column in columns]}}
    made = [form.Column(*column) for column in columns]
    rows = form.pack(made, {column.name: np.zeros(1) for column in made})
    return lambda frames: [frames[0], document(form.KINDS, described), (kind, 1, rows), *frames[1:]]


def with_row(table, **values):
    """Add a row to a table that every reader knows."""
    kind, columns = form.TABLES[table]
    arrays = {
        column.name: np.array([values.get(column.name, 0)], np.float64 if column.type == "float" else np.int64)
        for column in columns
    }
    return lambda frames: [*frames[:3], (kind, 1, form.pack(columns, arrays)), *frames[3:]]


def with_claim(rows, table="samples"):
    """Add a frame that claims rows without having their bytes: columns of one value are of width 0."""
    kind, columns = form.TABLES[table]
    load = b"".join((b"\0" * 8 if column.type == "time" else b"") + b"\1" + b"\0" * 8 for column in columns)
    return lambda frames: [*frames[:3], (kind, rows, load), *frames[3:]]


def with_claimed_table(rows):
    """The same in a table that only this log has."""
    described = {"mine": {"kind": 90, "columns": [["a", "int"]]}}
    return lambda frames: [frames[0], document(form.KINDS, described), (90, rows, b"\1" + b"\0" * 8), *frames[1:]]


LEFT_OUT = {
    "rank 2**40": with_header(rank=2**40),
    "rank of another log": with_header(rank=7),
    "pid is a text": with_header(pid="x"),
    "world size 10**12": with_header(world_size=10**12),
    "world size is true": with_header(world_size=True),
    "host is a number": with_header(host=5),
    "anchor far": with_header(anchor={"time_ns": 0, "unix_ns": 2**63 - 1}),
    "versions of lists": with_header(versions={"torch": [1]}),
    "no tables": with_header(tables=None),
    "processors are a text": with_header(machine={"cpus": "two"}),
    "2**40 processors": with_header(machine={"usable_cpus": 2**40}),
    "the load is a text": with_header(machine={"load_per_cpu": "high"}),
    "a pair that is a text": with_header(measurement={"pair": "first"}),
    "the command is a number": with_header(command_sha256=5),
    "100 000 brackets": lambda frames: [document(form.HEADER, b"[" * 100_000), *frames[1:]],
    "Infinity": lambda frames: [document(form.HEADER, b'{"schema":1,"rank":Infinity}'), *frames[1:]],
    "a list": lambda frames: [document(form.HEADER, []), *frames[1:]],
}
FRAME_ONLY = {
    "table is a path": with_table("/tmp/planted"),
    "table goes up": with_table("../../planted"),
    "table hides ours": with_table("INTERVALS"),
    "table of the reader": with_table("logs"),
    "table without a name": with_table(""),
    "table with a quote": with_table("a\"'; drop table x; --"),
    "table of 300 letters": with_table("n" * 300),
    "table called ..": with_table(".."),
    "a column that is a path": with_table("mine", ("../x", "int")),
    "a column with a quote": with_table("mine", ('a"; drop table intervals; --', "int")),
    "table with our column": with_table("mine", ("rank", "name")),
    "two columns of one name": with_table("twice", ("a", "int"), ("A", "int")),
    "a number of ours": with_table("mine", kind=16),
    "event without a time": with_document(form.EVENT, {"time_ns": None, "what": "x"}),
    "event at 2**80": with_document(form.EVENT, {"time_ns": 2**80, "what": "x"}),
    "event of brackets": with_document(form.EVENT, b"[" * 100_000),
    "a number of 5000 digits": with_document(form.EVENT, b'{"time_ns": ' + b"9" * 5000 + b"}"),
    "names of Infinity": with_document(form.NAMES, b'[[Infinity, "x"]]'),
    "region -5": with_row("intervals", region=-5, device=1),
    "region 3 * 10**7": with_row("intervals", region=30_000_000, device=1),
    "thread 2**40": with_row("intervals", thread=2**40, region=1, device=1),
    "lasts -2**63": with_row("intervals", dur_ns=-(2**63), region=1, device=1),
    "begins at 2**63 - 1": with_row("intervals", start_ns=2**63 - 1, region=1, device=1),
    "flush at 2**63 - 1": with_row("flushes", unix_ns=2**63 - 1),
    "milestone of -2**63": with_row("milestones", dur_ns=-(2**63), what=1),
    "2 * 10**8 rows": with_claim(200_000_000),
    "2**32 - 1 rows": with_claim(2**32 - 1, "marks"),
    "a row more than any frame": with_claim(form.ROWS + 1, "intervals"),
    "2**32 - 1 rows of a table of its own": with_claimed_table(2**32 - 1),
    "no rows": with_claim(0, "flushes"),
}


@pytest.mark.parametrize("name", [*LEFT_OUT, *FRAME_ONLY])
def test_one_bad_log_costs_itself(run, name):
    """A whole frame with a wrong content costs its frame or its log, with a word; the other ranks are read."""
    change = (LEFT_OUT | FRAME_ONLY)[name]
    write_frames(run / RANK_1, change(frames_of(run / RANK_1)))
    before = listing(run.parent)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Run.open(run) as opened:
            counts = opened.sql("select rank, count(*) as n from intervals group by rank").rows()
            text = "\n".join(str(line) for line in draw(report_of_run(opened, rank=0), width=100))
            str(opened.goodput())
            logs = {row["rank"]: row for row in opened.table("logs").rows()}
    found = {row["rank"]: row["n"] for row in counts}
    assert {0: 2 * STEPS, 2: 2 * STEPS} == {rank: n for rank, n in found.items() if rank != 1}
    if name in LEFT_OUT:
        assert 1 not in found
        assert logs[1]["fault"]
        assert "1 logs not read" in text
        assert RANK_1 in str(said[0].message)
    else:
        assert (2 * STEPS, None) == (found[1], logs[1]["fault"])
        assert logs[1]["unknown_frames"] >= 1
    after = listing(run.parent)
    assert before == {path: after[path] for path in before}
    assert {"run/compacted"} == {path for path in after.keys() - before.keys() if "compacted/" not in path}


@pytest.mark.parametrize("kind", [form.TABLES["marks"].kind, form.NAMES, form.EVENT])
def test_a_frame_that_decompresses_to_gigabytes(run, kind):
    """Its size is bounded before it is believed."""
    packed = zlib.compressobj(9)
    data = b"".join(packed.compress(bytes(1 << 20)) for _ in range(64)) + packed.flush()
    head = form.HEAD.pack(form.MAGIC, kind, form.ZLIB, 99, 1, len(data), 0)[:-4]
    with (run / RANK_1).open("ab") as file:
        file.write(head + zlib.crc32(data, zlib.crc32(head)).to_bytes(4, "little") + data)
    with Run.open(run) as opened:
        assert 3 * 2 * STEPS == len(opened.intervals().rows())


@pytest.mark.parametrize("how", ["glued to itself", "a frame twice", "glued three times"])
def test_frames_that_are_there_twice(run, how):
    """They are counted once, and it is said."""
    path = run / RANK_1
    data = path.read_bytes()
    frames = [frame for frame in form.read_frames(data) if frame.kind == 16]
    again = data[frames[0].offset : frames[0].end] if how == "a frame twice" else data * (1 + ("three" in how))
    path.write_bytes(data + again)
    with Run.open(run) as opened:
        assert 3 * 2 * STEPS == len(opened.intervals().rows())
        assert "frames of logs repeated" in "\n".join(str(line) for line in draw(report_of_run(opened), width=200))


LACKING = {
    "an interval frame": lambda kinds: kinds.index(16),
    "the last frame": lambda kinds: -1,
    "the names": lambda kinds: kinds.index(form.NAMES),
    "the header": lambda kinds: 0,
    "an event": lambda kinds: kinds.index(form.EVENT),
}


@pytest.mark.parametrize("place", LACKING.values(), ids=LACKING)
def test_a_frame_that_is_not_there(run, place):
    """The loss is said with the log that has it."""
    path = run / RANK_1
    data, frames = path.read_bytes(), [*form.read_frames(path.read_bytes())]
    gone = frames[place([frame.kind for frame in frames])]
    path.write_bytes(data[: gone.offset] + data[gone.end :])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TimingWarning)
        with Run.open(run) as opened:
            logs = {row["rank"]: row for row in opened.table("logs").rows()}
    assert (0, None, "closed") == tuple(logs[0][name] for name in ("missing_frames", "fault", "end"))
    lacks = logs.get(1, {"fault": "no header"})
    assert lacks["fault"] or lacks["missing_frames"] == 1 or lacks["end"] is None


NAMES = ["copy of rank-00001.d5log", "rank-1.d5log", "rank-00001 (conflicted copy).d5log", f"rank-{10**30}.d5log"]


@pytest.mark.parametrize("name", [*NAMES, os.fsdecode(b"rank-\xff.d5log"), "x.d5log"])
def test_a_copy_under_another_name(run, name):
    """Only names that a writer gives are logs; another one is said."""
    shutil.copy(run / RANK_1, run / name)
    with pytest.warns(TimingWarning, match="no log has such a name"), Run.open(run) as opened:
        assert 3 * 2 * STEPS == len(opened.intervals().rows())


def test_a_run_that_is_there_twice(run):
    """As by a pattern that matches a copy: the report says that the numbers have it twice. Links are one folder."""
    shutil.copytree(run, run.parent / "run-copy")
    (run.parent / "run-link").symlink_to(run)
    with Run.open(run.parent / "run-*") as opened:
        text = "\n".join(str(line) for line in draw(report_of_run(opened), width=200))
    assert "3 logs are in two folders" in text
    shutil.rmtree(run.parent / "run-copy")
    with Run.open(run.parent / "run*") as opened:
        assert 3 * 2 * STEPS == len(opened.intervals().rows())


@pytest.mark.parametrize("name", ["lr[1]", "lr?", "[12]"])
def test_a_folder_with_the_name_of_a_pattern(tmp_path, name):
    """A path that is there is no pattern."""
    write_run(tmp_path / name, region="mine")
    write_run(tmp_path / ("lr1" if "lr" in name else "1"), region="others")
    with Run.open(tmp_path / name) as opened:
        assert {"BATCH", "mine"} == {row["region"] for row in opened.intervals().rows()}


# --- the folder `compacted` -----------------------------------------------------------------------------------------


def a_link(target, mine):
    """A link to a folder of the reader's."""
    target.symlink_to(mine)


def others_may_write(target, mine):
    """A folder in which others can plant files."""
    shutil.copytree(mine, target)
    target.chmod(0o777)


def others_own(target, mine):
    """A folder of another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    target.mkdir()
    os.chown(target, 65534, 65534)


def own_data(target, mine):
    """The user's own folder of that name."""
    shutil.copytree(mine, target)


def a_file(target, mine):
    """A file."""
    target.write_text("mine")


def dangling(target, mine):
    """A link to nothing."""
    target.symlink_to(mine / "nothing")


@pytest.mark.parametrize("prepare", [a_link, others_may_write, others_own, own_data, a_file, dangling])
def test_a_compacted_that_is_not_ours_stays(run, tmp_path, prepare):
    """Nothing in it is read, written or removed; the run is read by way of a temporary folder."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "part-0.parquet").write_bytes(b"data")
    (mine / f"intervals-{'0' * 16}-3.parquet").write_bytes(b"data")
    prepare(run / "compacted", mine)
    before = listing(tmp_path)
    for _ in range(2):
        with Run.open(run) as opened:
            assert 3 * 2 * STEPS == len(opened.intervals().rows())
    assert before == listing(tmp_path)


@pytest.mark.parametrize("name", ["../../mine.parquet", "/etc/passwd", "mine.parquet"])
def test_a_manifest_that_names_other_files(run, tmp_path, name):
    """They are neither opened nor removed."""
    (tmp_path / "mine.parquet").write_bytes(b"data")
    with Run.open(run):
        pass
    path = run / "compacted" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["parts"][0]["files"]["mine"] = {name: 0}
    manifest["removed"] = ["../../mine.parquet"]
    path.write_text(json.dumps(manifest))
    with Run.open(run) as opened:
        assert "mine" not in opened.tables
    assert (tmp_path / "mine.parquet").exists()


def odd_file(path, kind):
    """What is no file, or leads to one of others."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "itself": path.name}.get(kind, kind))


ODD_FILES = ["pipe", "device", "itself", "folder", "/etc/passwd", "nothing", "socket", "/dev/tty"]


@pytest.mark.filterwarnings("ignore:.*rank-00009")
@pytest.mark.parametrize("name", [".lock", "manifest.json", "rank-00009.d5log"])
@pytest.mark.parametrize("kind", ODD_FILES)
def test_files_that_would_block(run, name, kind):
    """A pipe, an endless device and a link to itself are not read, and nothing waits for them."""
    (run / "compacted").mkdir()
    odd_file(run / ("compacted" if "log" not in name else "") / name, kind)
    with Run.open(run) as opened:
        assert 3 * 2 * STEPS == len(opened.intervals().rows())
    assert not (run / "nothing").exists()
    assert not (run / "compacted" / "nothing").exists()


@pytest.mark.parametrize("kind", ODD_FILES)
def test_odd_files_in_a_folder_that_a_run_is_written_to(tmp_path, kind):
    """The file that names the world may be of another user: the training waits for nothing, and its log is whole."""
    odd_file(tmp_path / "world", kind)
    write_run(tmp_path)
    with Run.open(tmp_path) as opened:
        assert 2 * STEPS == len(opened.intervals().rows())
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("change", ["footer", "empty", "gone", "cut", "of another table"])
def test_a_damaged_compacted_is_made_again(run, change):
    """From the logs, which are whole, and each time it is damaged."""
    for _ in range(2):
        with Run.open(run):
            pass
        (path,) = (run / "compacted").glob("intervals-*.parquet")
        data = bytearray(path.read_bytes())
        data[-20] ^= 0xFF
        (other,) = (run / "compacted").glob("events-*.parquet")
        changed = {"footer": data, "empty": b"", "cut": data[:-1], "of another table": other.read_bytes()}
        path.unlink()
        if change in changed:
            path.write_bytes(changed[change])
        with Run.open(run) as opened:
            assert 3 * 2 * STEPS == len(opened.intervals().rows())


def test_the_engine_opens_no_other_files(run, tmp_path):
    """The engine can read the run's own files and no others."""
    (tmp_path / "private.csv").write_text("secret\nPRIVATE\n")
    with Run.open(run) as opened:
        assert 3 * 2 * STEPS == len(opened.intervals().rows())
        with pytest.raises(Exception, match="Cannot access file"):
            opened.sql(f"select *, (select count(*) from intervals) from '{tmp_path}/private.csv'").rows()


# --- results --------------------------------------------------------------------------------------------------------


def test_a_result_goes_into_a_pipe(tmp_path):
    """A pipe stays a pipe, and its reader gets the result."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(str(path)) as file:
        file.write(b"result")
    assert b"result" == os.read(reader, 100)
    os.close(reader)
    assert stat.S_ISFIFO(path.lstat().st_mode)


def test_a_result_goes_to_devices():
    """A device stays a device."""
    with whole_file(os.devnull) as file:
        file.write(b"result")
    assert stat.S_ISCHR(os.lstat(os.devnull).st_mode)


@pytest.mark.parametrize("there", [True, False])
def test_a_result_goes_where_a_link_leads(tmp_path, there):
    """The link stays, and its target is replaced or made."""
    target, link = tmp_path / "page-of-today.html", tmp_path / "page.html"
    if there:
        target.write_text("old")
    link.symlink_to(target)
    with whole_file(str(link)) as file:
        file.write(b"result")
    assert (True, b"result") == (link.is_symlink(), target.read_bytes())


def test_a_result_has_the_permissions_of_any_new_file(tmp_path, monkeypatch):
    """The ones that the umask leaves; with the setting they are private."""
    mask = os.umask(0o027)
    try:
        for name, private in (("a", "0"), ("b", "1")):
            monkeypatch.setenv("DEEP500_TIMING_PRIVATE", private)
            with whole_file(str(tmp_path / name)) as file:
                file.write(b"result")
    finally:
        os.umask(mask)
    assert [0o640, 0o600] == [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "b")]


def test_what_killed_processes_left_is_removed_after_a_day(tmp_path):
    """Only temporary files of the same result, and only old ones."""
    names = [".r.html.0.unfinished", ".r.html.1.unfinished", ".other.0.unfinished", ".r.html.mine"]
    for name in names:
        (tmp_path / name).touch()
    for name in names[1:]:
        os.utime(tmp_path / name, (0, 0))
    with whole_file(str(tmp_path / "r.html")) as file:
        file.write(b"result")
    assert {"r.html", *names} - {names[1]} == {path.name for path in tmp_path.iterdir()}


def test_an_event_may_have_its_own_time(tmp_path):
    """As a step and a sample; None is now."""
    with made_rank(tmp_path) as made:
        made.spend("a", 1.0)
        made.log.event("resumed", "from a checkpoint", time_ns=None)
        made.log.event("resumed", "earlier", time_ns=5)
    with Run.open(tmp_path) as opened:
        times = [row["time_ns"] for row in opened.table("events").rows()]
    assert [5] == times[1:]
    assert times[0] >= 1_000_000_000


@pytest.mark.parametrize("name", ["time_ns", "what", "text"])
def test_an_event_s_own_names_are_its_own(tmp_path, name):
    """What the program adds cannot replace them: Python refuses a name that is given twice."""
    with made_rank(tmp_path) as made, pytest.raises(TypeError, match=name):
        made.log.event("a", "b", time_ns=1, **{name: 2})


# --- a user's data in a run -----------------------------------------------------------------------------------


def test_the_page_names_every_field(tmp_path):
    """``docs/run-format.md`` has each column of each table, and each field of the header."""
    page = (Path(__file__).parents[2] / "docs" / "run-format.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    columns = {column.name for table in form.TABLES.values() for column in table.columns}
    columns |= {name for table in COLUMNS.values() for name in table}
    write_run(tmp_path)
    header = json.loads(frames_of(tmp_path / "rank-00000.d5log")[0][2])
    assert set() == (columns | header.keys()) - named


@pytest.mark.parametrize(
    ("code", "stored"),
    [
        ('query("postgres://bob:hunter2@db/prod")', "query('…')"),
        ("f\"a {x} hunter2\", rb'hunter2'", "'…', '…'"),
        ('load("""hunter2', "load('…'"),
        ("login(user, 'it\\'s hunter2')  # hunter2", "login(user, '…')"),
        ("step(0.5)", "step(0.5)"),
    ],
)
def test_a_line_of_code_is_stored_without_its_texts(code, stored):
    """Passwords are in literal texts and in comments."""
    assert stored == without_texts(code)


def test_values_of_the_command_are_not_in_its_digest(monkeypatch):
    """A digest of a password can be guessed."""
    found = set()
    for words in (["--password", "a", "-pb"], ["--password=b", "-pc", "d"]):
        monkeypatch.setattr("sys.argv", ["train.py", *words])
        found.add(_command_sha256())
    assert 1 == len(found)
