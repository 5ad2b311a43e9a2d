"""A run's content equals the timer's, on every engine, whole or damaged, growing or finished."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from deep500_timing import Timer, TimeType, TimingWarning
from deep500_timing._base.sql import arrow_of, codes_of
from deep500_timing._base.warn import forget_warnings
from deep500_timing.runs import Run, RunLog, _compact
from deep500_timing.runs._format import encode
from deep500_timing.runs._tables import COLUMNS
from deep500_timing.runs._tree import COLUMNS as REGION_COLUMNS
from deep500_timing.testing import ManualClock, ManualDeviceClock

DOCS = Path(__file__).parents[2] / "docs" / "runs.md"
RANKS = 4
STEPS = 60


def train(folder, rank, *, steps=STEPS, slow=None, session_start=10**9):
    """A rank's training of so many steps in a time that stands still; returns its timer."""
    clock, rng, device = ManualClock(session_start), random.Random(rank), ManualDeviceClock(f"rank {rank}")
    tmr = Timer(device, clock=clock)
    with RunLog(folder, tmr, rank=rank, flush_s=None) as log:
        tmr.start(TimeType.EPOCH)
        for step in range(steps):
            with tmr.region(TimeType.BATCH):
                with tmr.region(TimeType.IO):
                    clock.advance_ns(1_900_000 + rng.randrange(300))
                    if slow == (rank, step):
                        clock.advance_ns(280_000_000)
                with tmr.region(TimeType.FORWARD, gpu=True):
                    device.launch(0.03)
                    clock.advance_ns(30_000_000 + rng.randrange(10_000))
                with tmr.region(TimeType.COMM):
                    clock.advance_ns(1_000_000)
                    if slow is not None and slow[1] == step and slow[0] != rank:
                        clock.advance_ns(280_000_000)
                clock.advance_ns(50_000)
            device.advance(0.04)
            if step % 7 == 0:
                log.flush()
        tmr.end(TimeType.EPOCH)
        log.sample("loss", 0.5)
        log.collective("all_reduce", 5, 9, sequence=3)
    return tmr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four ranks, one of which was slow in step 33; its folder, and the timers."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, [train(folder, rank, slow=(2, 33)) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def run(trained):
    """That run, read by DuckDB."""
    with Run.open(trained[0]) as run:
        yield run


def test_intervals_equal_the_timers(run, trained):
    """Each rank's intervals are those of its timer, to the nanosecond."""
    for rank, tmr in enumerate(trained[1]):
        rows = run.intervals(rank=rank).rows()
        for key in (TimeType.EPOCH, TimeType.BATCH, TimeType.IO, TimeType.FORWARD, TimeType.COMM):
            for gpu, device in ((False, "CPU"), (True, "GPU")):
                mine = sorted(
                    [row["start_ns"], row["start_ns"] + row["dur_ns"]]
                    for row in rows
                    if (row["region"], row["device"]) == (key.name, device)
                )
                assert sorted(tmr.intervals(key, gpu).tolist()) == mine


def test_regions_equal_the_snapshot(run, trained):
    """Counts, totals and extremes of a rank are the snapshot's; quantiles within 1 %."""
    snapshot = trained[1][1].snapshot()
    rows = {(row["region"], row["device"]): row for row in run.regions(rank=1).rows()}
    assert {(region.name, region.device) for region in snapshot} == set(rows)
    for region in snapshot:
        row, stats = rows[region.name, region.device], region.stats
        assert (stats.count, round(stats.total * 1e9)) == (row["count"], row["total_ns"])
        assert (round(stats.min * 1e9), round(stats.max * 1e9)) == (row["min_ns"], row["max_ns"])
        assert stats.median * 1e9 == pytest.approx(row["median_ns"], rel=0.01)
        assert stats.p95 * 1e9 == pytest.approx(row["p95_ns"], rel=0.01)


def test_the_tree(run):
    """Regions are where they were timed, with their shares and rests, siblings by falling total."""
    rows = run.regions(rank=0).rows()
    epoch, batch = rows[0], rows[1]
    assert [
        ("EPOCH", "CPU"),
        ("EPOCH/BATCH", "CPU"),
        ("EPOCH/BATCH/FORWARD", "CPU"),
        ("EPOCH/BATCH/FORWARD", "GPU"),
        ("EPOCH/BATCH/COMM", "CPU"),
        ("EPOCH/BATCH/IO", "CPU"),
    ] == [(row["path"], row["device"]) for row in rows]
    assert (None, "EPOCH", 1) == (epoch["parent"], batch["parent"], batch["depth"])
    assert (0, 1.0, 50_000 * STEPS) == (epoch["rest_ns"], batch["share"], batch["rest_ns"])
    assert batch["total_ns"] == batch["rest_ns"] + sum(row["total_ns"] for row in rows[2:] if row["device"] == "CPU")


def test_steps(run, trained):
    """Each step of each rank, in order, as long as its BATCH."""
    rows = run.steps().rows()
    assert [(rank, step) for rank in range(RANKS) for step in range(STEPS)] == [
        (row["rank"], row["step"]) for row in rows
    ]
    batches = [pair for tmr in trained[1] for pair in tmr.intervals(TimeType.BATCH).tolist()]
    assert batches == [[row["start_ns"], row["start_ns"] + row["dur_ns"]] for row in rows]
    assert STEPS == len(run.steps(rank=3).rows())


def test_steps_of_marks_alone(tmp_path):
    """Where no BATCH was timed a step lasts from its mark to the next, and the last one's length is unknown."""
    clock = ManualClock()
    tmr = Timer(clock=clock)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None):
        for step in (7, 8, 9):
            tmr.step(step)
            clock.advance_ns(step)
    with Run.open(tmp_path) as run:
        assert [(7, 7), (8, 8), (9, None)] == [(row["step"], row["dur_ns"]) for row in run.steps().rows()]


def test_counted_steps_before_the_first_mark_are_none(tmp_path):
    """An earlier count of steps does not pass for its numbers."""
    clock = ManualClock()
    tmr = Timer(clock=clock)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None) as log:
        for step in (None, None, 0, 1):
            if step is not None:
                tmr.step(step)
            with tmr.region(TimeType.BATCH):
                clock.advance_ns(10)
            log.flush()
            clock.advance_ns(5)
    with Run.open(tmp_path) as run:
        rows = sorted(run.intervals().rows(), key=lambda row: row["start_ns"])
        assert [None, None, 0, 1] == [row["step"] for row in rows]


def test_why_names_the_rank_that_the_others_waited_for(run):
    """A slow step: the wait on the others, the rank that was late, and its late part."""
    answer = run.why(33)
    assert answer.rank != 2
    assert 280e6 == pytest.approx(answer.dur_ns - answer.typical_ns, rel=0.001)
    assert ["COMM"] == [cause.name for cause in answer.causes]
    assert (2, "IO", 3) == (answer.late.rank, answer.late.name, answer.waited)
    first, second, third = str(answer).splitlines()
    assert first.startswith("Step 33 took 313.")
    assert first.endswith("(median of 59).")
    assert second == "  + 280.0 ms  COMM on 3 of 4 ranks: they waited for rank 2"
    assert third.startswith("  on rank 2: IO took 281.9 ms (1.90")


def test_why_a_step_that_is_as_the_others(run):
    """A step that took no longer is said to have taken no longer."""
    slowest = run.why(20)
    assert not [cause for cause in slowest.causes if cause.excess_ns > 10_000]
    assert slowest.late is None


def test_why_finds_the_steps_that_are_alike(tmp_path):
    """What recurs is said to recur, and how often."""
    clock = ManualClock()
    tmr = Timer(clock=clock)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None):
        for step in range(100):
            with tmr.region(TimeType.BATCH), tmr.region("validate"):
                clock.advance_ns(10**6 * (50 if step % 20 == 10 else 1))
    with Run.open(tmp_path) as run:
        answer = run.why(50)
        assert (10, 30, 50, 70, 90) == answer.causes[0].steps
        assert str(answer).endswith("the same at 10, 30, 70: every 20 steps")


@pytest.mark.parametrize("step", [STEPS, -1])
def test_why_a_step_that_is_not_there(run, step):
    """The steps that there are, are said."""
    with pytest.raises(LookupError, match=f"from 0 to {STEPS}|from 0 to {STEPS - 1}"):
        run.why(step + 1 if step > 0 else step)


def assert_same(run, other):
    """Two readers of one run give the same answers."""
    for by_rank in (False, True):
        assert run.regions(by_rank=by_rank).arrow() == other.regions(by_rank=by_rank).arrow()
    assert run.steps().arrow() == other.steps().arrow()
    assert str(run.why(33)) == str(other.why(33))
    assert run.why(33) == other.why(33)
    key = ["rank", "device", "start_ns", "depth"]
    order = [(name, "ascending") for name in key]
    assert run.intervals().arrow().sort_by(order) == other.intervals().arrow().sort_by(order)
    query = "select region, count(*) as n, max(dur_ns) as longest from intervals group by region order by region"
    assert run.sql(query).rows() == other.sql(query).rows()
    for table in ("samples", "collectives", "marks", "counters", "logs", "events", "threads"):
        mine, others = (sorted(map(str, reader.table(table).rows())) for reader in (run, other))
        assert mine == others


def in_spark(folder):
    """Compare Spark, in local mode, with DuckDB: in its own process, which ends with its Java."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    for name in ("bindAddress", "host"):
        builder = builder.config(f"spark.driver.{name}", "127.0.0.1")
    session = builder.config("spark.sql.shuffle.partitions", "1").getOrCreate()
    with Run.open(folder) as run, Run.open(folder, engine=session) as other:
        assert_same(run, other)
    session.stop()
    print("the same")


@pytest.mark.slow
@pytest.mark.matrix
def test_spark_agrees(trained, start):
    """Spark gives the same answers over the same Parquet."""
    pytest.importorskip("pyspark", reason="needs PySpark: pip install --group test")
    if shutil.which("java") is None:
        pytest.skip("needs a Java runtime of the system")
    program = "import runpy, sys; runpy.run_path(sys.argv[1])['in_spark'](sys.argv[2])"
    # Its queries are short: to compile them well, and to collect with many threads, takes a third of the time.
    process = start(program, __file__, trained[0], JAVA_TOOL_OPTIONS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    out, error = process.communicate(timeout=300)
    assert out.endswith("the same\n"), error[-3000:]


def test_columns_are_documented(run):
    """Every column of every table is on the page, in order and with its type, and no other."""
    text = DOCS.read_text(encoding="utf-8")
    tables = [
        [line.split("|")[1:3] for line in part.splitlines() if line.startswith("| `")]
        for part in text.split("| column | type | what |")[1:]
    ]
    said = [{name.strip().strip("`"): kind.strip() for name, kind in table} for table in tables]
    steps = {field.name: str(field.type) for field in run.steps().arrow().schema}
    assert [COLUMNS["intervals"], REGION_COLUMNS, steps] == said
    assert list(COLUMNS["intervals"]) == run.intervals().columns
    assert list(REGION_COLUMNS) == run.regions(by_rank=True).columns


def test_a_query_reads_the_tables_that_it_names(trained):
    """In any case of letters; tables that a query does not name are not looked into for it."""
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection, Run.open(trained[0], engine=connection) as run:
        query = "select count(*) as n from INTERVALS join \"Samples\" using (rank) where metric = 'loss'"
        assert RANKS * (1 + STEPS * 5) == run.sql(query).rows()[0]["n"]
        views = "select view_name from duckdb_views() where not internal order by 1"
        assert [("intervals",), ("samples",)] == connection.sql(views).fetchall()


def test_a_run_that_grows_is_read_anew(tmp_path):
    """New blocks are read, of a run that is open and of one that is opened again."""
    clock = ManualClock()
    tmr = Timer(clock=clock)
    log = RunLog(tmp_path, tmr, rank=0, flush_s=None)
    train(tmp_path, 1, steps=2)

    def count(run):
        return run.sql("select count(*) as n from intervals where region = 'a'").rows()[0]["n"]

    with tmr.region("a"):
        clock.advance_ns(1)
    log.flush()
    with Run.open(tmp_path) as run:
        before = sorted(path.name for path in (tmp_path / "compacted").glob("*.parquet"))
        assert 1 == count(run)
        run.compact()
        assert before == sorted(path.name for path in (tmp_path / "compacted").glob("*.parquet"))
        with tmr.region("a"):
            clock.advance_ns(1)
        log.close()
        assert 1 == count(run)
        run.compact()
        assert 2 == count(run)
    with Run.open(tmp_path) as run:
        assert 2 == count(run)
        assert {"closed"} == {row["end"] for row in run.table("logs").rows()}


def test_readers_of_a_run_that_grows(tmp_path):
    """A reader keeps its files while another renews the run once; after that it reads the run again alone."""
    tmr = Timer(clock=ManualClock())
    log = RunLog(tmp_path, tmr, rank=0, flush_s=None)

    def grow():
        with tmr.region("a"):
            pass
        log.flush()

    def count(run):
        return len(run.table("intervals").rows())

    grow()
    with Run.open(tmp_path) as first, Run.open(tmp_path) as second:
        grow()
        second.compact()
        assert (1, 2) == (count(first), count(second))
        grow()
        second.compact()
        assert (3, 3) == (count(first), count(second))
        assert len(list((tmp_path / "compacted").glob("intervals-*.parquet"))) <= 2
        shutil.rmtree(tmp_path / "compacted")
        assert (3, 3) == (count(first), count(second))
    log.close()


def test_a_region_that_never_ended(tmp_path):
    """Of a process that was killed: children of an open region have their place, and the region no time."""
    clock = ManualClock()
    tmr = Timer(clock=clock)
    log = RunLog(tmp_path, tmr, rank=0, flush_s=None)
    tmr.start(TimeType.EPOCH)
    for _ in range(3):
        with tmr.region(TimeType.BATCH):
            clock.advance_ns(10)
        log.flush()
    shutil.copytree(tmp_path, tmp_path / "killed")
    log.close()
    with Run.open(tmp_path / "killed") as run:
        rows = run.regions().rows()
        assert [("EPOCH", 0, None), ("EPOCH/BATCH", 3, 30)] == [
            (row["path"], row["count"], row["total_ns"]) for row in rows
        ]
        assert [None] == [row["end"] for row in run.table("logs").rows()]


def test_damage_is_counted(trained, tmp_path):
    """A log with a flipped bit and a torn tail is read all the same, and the loss is in the table of logs."""
    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder, ignore=shutil.ignore_patterns("compacted"))
    path = folder / "rank-00001.d5log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data[:-3])
    with Run.open(folder) as run:
        logs = {row["rank"]: row for row in run.table("logs").rows()}
        assert (0, None) == (logs[0]["damaged_bytes"], logs[1]["end"])
        assert logs[1]["damaged_bytes"] > 0
        assert RANKS == len({row["rank"] for row in run.steps().rows()})


def test_foreign_files_and_newer_schemas(trained, tmp_path):
    """Files of another origin are nothing, a log of a later version is refused by name, and the others are read."""
    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder, ignore=shutil.ignore_patterns("compacted"))
    (folder / "notes.txt").write_text("mine")
    (folder / "junk.d5log").write_bytes(b"not a log at all")
    (folder / "empty.d5log").write_bytes(b"")
    (folder / "rank-00099.d5log").write_bytes(encode(0, 0, 1, b'{"schema":2,"written_by":"a later one"}'))
    (folder / "later.d5log").mkdir()
    for _ in range(2):  # at the second reading as well
        forget_warnings()
        with pytest.warns(TimingWarning) as said, Run.open(folder) as run:
            assert RANKS * STEPS == len(run.steps().rows())
            assert 1 == len(run.sql("select * from logs where fault like '%a later one with schema 2%'").rows())
        texts = " ".join(str(one.message) for one in said)
        assert all(word in texts for word in ("junk.d5log is not read", "empty.d5log", "a later one with schema 2"))


@pytest.mark.parametrize("hours", [-1, 25, -24 * 365, 0.001])
def test_a_clock_that_is_set(tmp_path, monkeypatch, hours):
    """When Unix time is set during a run its order stays, and the table of logs says by how much."""
    step_ns = int(hours * 3_600_000_000_000)
    now = [1_700_000_000_000_000_000]
    monkeypatch.setattr("deep500_timing._summary.snapshot.time.time_ns", lambda: now[0])
    clock = ManualClock()
    tmr = Timer(clock=clock)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None) as log:
        for _ in range(2):
            with tmr.region("a"):
                clock.advance_ns(100)
            now[0] += 100
            log.flush()
            now[0] += step_ns
    with Run.open(tmp_path) as run:
        first, second = sorted(run.intervals().rows(), key=lambda row: row["start_ns"])
        assert 100 == second["unix_ns"] - first["unix_ns"]
        (log_row,) = run.table("logs").rows()
        assert 2 * step_ns == log_row["clock_step_ns"]


def test_sessions_of_a_rank(tmp_path):
    """A run that was started again is read as one, each start a session."""
    train(tmp_path, 0, steps=3)
    train(tmp_path, 0, steps=2, session_start=5)
    with Run.open(tmp_path) as run:
        assert [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)] == [(row["session"], row["step"]) for row in run.steps().rows()]
        assert 2 == len(run.steps(session=1).rows())


def test_a_table_of_a_later_capability(tmp_path):
    """A table that a log declares itself is read like any other, with its time in Unix time."""
    for rank in range(2):
        with RunLog(tmp_path, Timer(clock=ManualClock()), rank=rank, flush_s=None) as log:
            log.declare("layers", start_ns="time", layer="name", flops="float")
            log.add("layers", (5, f"conv{rank}", 1e9), (9, "", float("nan")))
    with Run.open(tmp_path) as run:
        rows = sorted(run.table("layers").rows(), key=lambda row: (row["rank"], row["start_ns"]))
        assert [("conv0", 1e9), (None, None), ("conv1", 1e9), (None, None)] == [
            (row["layer"], row["flops"]) for row in rows
        ]
        assert 4 == rows[1]["unix_ns"] - rows[0]["unix_ns"]
        with pytest.raises(LookupError, match="collectives"):
            run.table("unheard")


def test_many_files(tmp_path):
    """Hundreds of ranks in one folder make a few files of Parquet, and each rank is there."""
    train(tmp_path / "one", 0, steps=2)
    data = (tmp_path / "one" / "rank-00000.d5log").read_bytes()
    header = data[: data.index(b"\xd5RUN", 1)]
    folder = tmp_path / "many"
    folder.mkdir()
    for rank in range(300):
        # Without its header a log is of the rank that its name says.
        (folder / f"rank-{rank:05}.d5log").write_bytes(data[len(header) :])
    with Run.open(folder) as run:
        rows = run.sql("select count(*) as n, count(distinct rank) as ranks from intervals").rows()
        assert [{"n": 300 * 11, "ranks": 300}] == rows
    assert len(list((folder / "compacted").glob("intervals-*.parquet"))) == 1


def test_several_folders_are_one_run(tmp_path):
    """Ranks that wrote to their own folders are read together by a pattern."""
    for rank in range(2):
        train(tmp_path / f"node{rank}" / "run", rank, steps=2)
    with Run.open(str(tmp_path / "node*" / "run")) as run:
        assert [0, 0, 1, 1] == [row["rank"] for row in run.steps().rows()]


def test_what_is_no_run(tmp_path):
    """A folder without logs, and one that is not there, are errors that say how a run is made."""
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="writes one"):
            Run.open(path)
    train(tmp_path, 0, steps=1)
    with pytest.raises(ValueError, match="'duckdb' or 'spark'"):
        Run.open(tmp_path, engine="sqlite")


def test_pandas_and_arrow(run):
    """A relation is a pandas frame or an Arrow table, whichever is asked for."""
    frame, table = run.regions(rank=0).df(), run.regions(rank=0).arrow()
    assert list(frame.columns) == table.column_names == run.regions(rank=0).columns
    assert frame["total_ns"].tolist() == table["total_ns"].to_pylist()
    assert "intervals" in repr(run.intervals())
    assert str(run.folders[0]) in repr(run)


def test_a_run_is_converted_and_read_without_pandas(tmp_path):
    """Its import takes a second, which would be added to the end of each program under ``deep500-timing run``."""
    train(tmp_path, 0)
    program = (
        "import sys; from deep500_timing.runs import Run\n"
        "from deep500_timing.runs._stacks import samples_between\n"
        "with Run.open(sys.argv[1]) as run:\n"
        "    rows = run.regions().rows() + run.steps().rows()\n"
        "    assert not samples_between(run, [(0, 0, 10)], rank=0)\n"
        "print({'pandas', 'pyarrow.compute'} & sys.modules.keys() or 'neither', len(rows) > 3)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "neither True\n"


def test_text_in_codes():
    """The same codes for few rows and for many, which Arrow sorts out; a number that does not fit is an error."""
    of_few, texts = codes_of(pa.chunked_array([["b", "a"], ["b"]]))
    of_many, same = codes_of(pa.chunked_array([["b", "a", "b"]] * 4000))
    assert (of_few.tolist() * 4000, ["b", "a"], texts) == (of_many.tolist(), texts, same)
    with pytest.raises(ValueError, match="from 0 to 4294967296 do not fit into int32"):
        arrow_of([1, None, 1 << 32], pa.int32())


def test_a_log_that_is_removed_while_its_folder_is_listed(tmp_path, monkeypatch):
    """As by a rank that keeps to ``keep_bytes``: the others are found."""
    for rank in (0, 1, 2):
        (tmp_path / f"rank-{rank:05}.d5log").touch()
    scandir = os.scandir

    @contextlib.contextmanager
    def scan(folder):
        with scandir(folder) as entries:
            listed = list(entries)
        (tmp_path / "rank-00001.d5log").unlink(missing_ok=True)
        yield listed

    monkeypatch.setattr(os, "scandir", scan)
    found = [Path(log.path).name for log in _compact.find_logs(str(tmp_path))]
    assert ["rank-00000.d5log", "rank-00002.d5log"] == found


def test_a_run_that_keeps_what_it_can_afford(tmp_path):
    """With ``keep_bytes`` the files stay within a size: the newest steps are kept, removed files are events."""
    clock = ManualClock()
    tmr = Timer(clock=clock)
    keep = 40_000
    with RunLog(tmp_path, tmr, rank=0, flush_s=None, keep_bytes=keep) as log:
        for step in range(6000):
            with tmr.region(TimeType.BATCH), tmr.region("a"):
                clock.advance_ns(10**6 + step * step % 97_001)
            if step % 100 == 99:
                log.flush()
                assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1.3 * keep
    with Run.open(tmp_path) as run:
        kept = [step["step"] for step in run.steps().rows()]
        assert list(range(6000 - len(kept), 6000)) == kept
        assert 100 <= len(kept) < 5000
        assert [len(kept)] * 2 == [row["count"] for row in run.regions().rows()]
        (last, *_) = run.sql("select text from events where what = 'removed' order by time_ns desc").rows()
        assert last["text"].endswith(".d5log, to keep within keep_bytes")
        assert any("keep_bytes has removed old files" in note for note in run.goodput().notes)


def test_a_folder_of_many_logs_is_put_into_parts_in_one_pass(monkeypatch):
    """Which logs make a part together takes as many steps as there are logs, however many parts there are."""
    asked = []
    monkeypatch.setattr(_compact, "PART_BYTES", 250)
    monkeypatch.setattr(_compact, "_session_of", lambda path, of=_compact._session_of: asked.append(path) or of(path))
    names = [f"rank-{rank:05}{segment}.d5log" for rank in range(1000) for segment in (".0001", "")]
    logs = [_compact.LogFile(f"run/{name}", 100, 7) for name in names]
    parts = list(_compact._groups(logs[::-1], {"parts": []}))
    assert logs == [log for part in parts for log in part]
    assert {4} == {len(part) for part in parts}
    manifest = {"parts": [{"logs": [log.key for log in part]} for part in parts]}
    grown = _compact.LogFile("run/rank-00003.0002.d5log", 900, 8)
    new = _compact.LogFile("run/rank-01000.d5log", 900, 8)
    asked.clear()
    again = list(_compact._groups([new, *logs, grown], manifest))
    assert [parts[0], sorted([*parts[1], grown]), *parts[2:], [new]] == again
    assert len(asked) <= 2 * len(logs) + 2


@pytest.mark.parametrize("view", ["show", "report", "timeline"])
def test_queries_grow_neither_with_names_nor_with_ranks(tmp_path, monkeypatch, view):
    """A run of 2 000 names or 4 000 ranks is read with as many queries as a small one."""
    from deep500_timing._views.page._page import build
    from deep500_timing._views.reports import report_of_run
    from deep500_timing._views.timeline import write_timeline
    from deep500_timing.runs._run import DuckDB

    views = {
        "show": report_of_run,
        "report": build,
        "timeline": lambda run: write_timeline(run, tmp_path / "t.json", steps=(5, 7)),
    }
    asked: list[str] = []
    sql = DuckDB.sql
    monkeypatch.setattr(DuckDB, "sql", lambda self, query, tables: asked.append(query) or sql(self, query, tables))

    def queries(names, ranks):
        folder = tmp_path / f"{names}-{ranks}"
        for rank in range(ranks):
            clock = ManualClock()
            tmr = Timer(clock=clock)
            with RunLog(folder, tmr, rank=rank, flush_s=None) as log:
                for step in range(60):
                    if step % 15 == 0:
                        tmr.start("EPOCH")
                        tmr.record("begin", clock.now_ns(), clock.now_ns())
                    with tmr.region("BATCH"):
                        for number in range(names):
                            with tmr.region(f"part {number}"):
                                clock.advance_ns(1_000_000 * (50 if step % 20 == 7 else 1))
                        log.collective("all_reduce", clock.now_ns() - 1000, clock.now_ns(), sequence=step)
                    for number in range(names):
                        with tmr.region(f"after {number}"):
                            clock.advance_ns(100_000 * (1 + 100 * (step % 15 == 14)))
                    if step % 15 == 14:
                        tmr.end("EPOCH")
        with Run.open(folder) as run:
            asked.clear()
            views[view](run)
        return len(asked)

    usual = queries(3, 3)
    assert (usual, usual) == (queries(12, 3), queries(3, 6))
