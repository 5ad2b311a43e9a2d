"""The rest of a log that was cut short, flipped or killed: everything that is whole, and nothing wrong."""

from __future__ import annotations

import itertools
import os
import random
import struct
from pathlib import Path

import pytest

from deep500_timing import Timer, TimeType
from deep500_timing.runs import RunLog
from deep500_timing.runs._format import encode
from deep500_timing.runs._tables import Log, NewerSchemaError, read_log
from deep500_timing.testing import ManualClock

TRIES = 200
PAGE = Path(__file__).parents[2] / "docs" / "run-format.md"
RANK_0 = "rank-00000.d5log"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A log of 12 flushes: its bytes, and its intervals as they were recorded."""
    folder = tmp_path_factory.mktemp("run")
    clock, rng = ManualClock(), random.Random(5)
    tmr = Timer(clock=clock)
    with RunLog(folder, tmr, rank=0, flush_s=None) as log:
        for _ in range(12):
            for _ in range(60):
                with tmr.region(TimeType.BATCH):
                    for key in (TimeType.FORWARD, TimeType.BACKWARD, "optimizer"):
                        with tmr.region(key):
                            clock.advance_ns(rng.randrange(10**6))
                clock.advance_ns(rng.randrange(10**4))
            log.sample("loss", rng.random())
            log.flush()
    truth = {
        (name, start, end - start)
        for name in ("BATCH", "FORWARD", "BACKWARD", "optimizer")
        for start, end in tmr.intervals(name).tolist()
    }
    return (folder / RANK_0).read_bytes(), truth


def as_read(data, path):
    """The intervals that a file of these bytes gives, and its log."""
    path.write_bytes(data)
    log = Log(str(path))
    found = []
    for batch in read_log(log):
        if batch.table == "intervals":
            columns = batch.arrays
            names = map(log.text, columns["region"].tolist())
            found += zip(names, columns["start_ns"].tolist(), columns["dur_ns"].tolist(), strict=True)
    return found, log


def test_an_undamaged_log_is_whole(written, tmp_path):
    """The file that is damaged below holds every interval."""
    data, truth = written
    found, log = as_read(data, tmp_path / RANK_0)
    assert truth == set(found)
    assert (len(truth), [], 0, "closed") == (len(found), log.damage, log.missing_frames, log.end["reason"])


def test_truncations(written, tmp_path):
    """Cut anywhere: never a wrong number, every frame before the cut read, and the end known to be missing."""
    data, truth = written
    ends = {0}
    whole = Log(str(tmp_path / "whole.d5log"))
    (tmp_path / "whole.d5log").write_bytes(data)
    frames = [*read_offsets(data), len(data)]
    rows_at = {}
    count = 0
    for begin, end in itertools.pairwise(frames):
        kind, rows = struct.unpack_from("<H6xI", data, begin + 4)
        count += rows if kind == 16 else 0
        rows_at[end] = count
        ends.add(end)
    assert whole.intervals == 0
    rng = random.Random(1)
    for _ in range(TRIES):
        cut = rng.randrange(len(data))
        found, log = as_read(data[:cut], tmp_path / RANK_0)
        assert set(found) <= truth
        assert max((rows for end, rows in rows_at.items() if end <= cut), default=0) == len(found)
        assert log.end is None
        assert (cut not in ends) == bool(log.damage)


def read_offsets(data):
    """Where the frames of an undamaged file begin."""
    at, offsets = 0, []
    while at < len(data):
        offsets.append(at)
        at += 24 + struct.unpack_from("<I", data, at + 16)[0]
    return offsets


def test_flipped_bits(written, tmp_path):
    """Flip any bit: never a wrong number, one frame lost and named, every other one read."""
    data, truth = written
    offsets = [*read_offsets(data), len(data)]
    rng = random.Random(2)
    for _ in range(TRIES):
        place = rng.randrange(len(data))
        broken = bytearray(data)
        broken[place] ^= 1 << rng.randrange(8)
        found, log = as_read(bytes(broken), tmp_path / RANK_0)
        begin = max(offset for offset in offsets if offset <= place)
        kind, rows = struct.unpack_from("<H6xI", data, begin + 4)
        lost_names = kind == 1
        assert lost_names or set(found) <= truth
        assert {(start, dur) for _, start, dur in found} <= {(start, dur) for _, start, dur in truth}
        assert len(truth) - (rows if kind == 16 else 0) == len(found)
        assert [(begin, offsets[offsets.index(begin) + 1] - begin)] == [(d.offset, d.length) for d in log.damage]
        # The last frame's number is not missed by a later one.
        assert (begin != offsets[-2]) == bool(log.missing_frames)


def test_the_page_reads_what_the_log_says(written, tmp_path):
    """The reader that the format's page shows, in plain Python of 60 lines, reads every table as ours does."""
    code = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 75
    space = {"__name__": "page"}
    exec(compile(code, "run-format.md", "exec"), space)
    data, truth = written
    path = tmp_path / RANK_0
    path.write_bytes(data)
    got = space["read"](path)
    assert truth == {(row["region"], row["start_ns"], row["dur_ns"]) for row in got["intervals"]}
    assert list(range(720)) == [row["step"] for row in got["intervals"] if row["region"] == "BATCH"]
    assert {"CPU"} == {row["device"] for row in got["intervals"]}
    values = [row["value"] for row in got["samples"] if row["metric"] != "process.rss_bytes"]
    assert 12 == len(values)
    assert all(0 <= value < 1 for value in values)
    assert 2880 == got["flushes"][-1]["written"]
    broken = bytearray(data)
    broken[len(data) // 2] ^= 1
    path.write_bytes(bytes(broken))
    assert {(row["region"], row["start_ns"], row["dur_ns"]) for row in space["read"](path)["intervals"]} < truth


def test_a_newer_schema_is_refused(written, tmp_path):
    """A log that says that this version would misread it is refused, with the remedy."""
    data, _ = written
    header = encode(0, 0, 1, b'{"schema":2,"written_by":"deep500-timing 9","rank":0}')
    with pytest.raises(NewerSchemaError, match="Update deep500-timing"):
        as_read(header + data, tmp_path / RANK_0)


def test_unknown_kinds_are_skipped(written, tmp_path):
    """Frames of kinds that no one described are skipped and counted; what follows is read."""
    data, truth = written
    found, log = as_read(encode(63, 0, 5, b"?" * 999) + encode(9, 1, 1, b"{}") + data, tmp_path / RANK_0)
    assert (truth, 2) == (set(found), log.unknown)


KILLED = """
import os, random, signal, sys, time
from deep500_timing import Timer
from deep500_timing.runs import RunLog

rng = random.Random(3)
for number in range(int(sys.argv[2])):
    folder = os.path.join(sys.argv[1], str(number))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        tmr = Timer()
        log = RunLog(folder, tmr, rank=0, flush_s=0.001)
        flushed = 0
        while True:
            for _ in range(rng.randrange(1, 400)):
                tmr.start("a")
                tmr.end("a")
                flushed += 1
            log.flush()
            os.write(writer, flushed.to_bytes(8, "little"))
    os.read(reader, 8)
    time.sleep(rng.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(writer)
    said = b""
    while part := os.read(reader, 1 << 16):
        said += part
    os.close(reader)
    print(int.from_bytes(said[-8:], "little"), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_9_in_mid_write(start, tmp_path):
    """Killed 50 times at any moment of writing: every interval that was flushed is there, each once."""
    process = start(KILLED, tmp_path, 50)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    for number, flushed in enumerate(map(int, out.split())):
        log = Log(str(tmp_path / str(number) / RANK_0))
        starts = [
            start
            for batch in read_log(log)
            if batch.table == "intervals"
            for start in batch.arrays["start_ns"].tolist()
        ]
        assert len(starts) >= flushed
        assert len(set(starts)) == len(starts)
        assert log.end is None
    assert number == 49
