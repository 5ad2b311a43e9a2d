"""The content of a log: every interval once, to the nanosecond, with its step; and what else there is to know."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest

from deep500_timing import Timer, TimeType, TimingWarning
from deep500_timing._recording import intervals
from deep500_timing.memory import MemoryTimer, MemoryUsage
from deep500_timing.runs import RunLog, attach, current, feeders
from deep500_timing.runs._format import NO_STEP, TABLES, read_frames
from deep500_timing.testing import ManualClock, ManualDeviceClock
from deep500_timing.throughput import ThroughputTimer

RANK_0 = "rank-00000.d5log"


def test_every_interval_is_written_once(tmr, log, timed, rows, tmp_path):
    """However often a log is flushed, it holds each interval once, as the timer has it."""
    for flushes in range(4):
        for number in range(flushes * 700):
            timed(tmr, TimeType.FORWARD, number)
            timed(tmr, "my region", 3)
        log.flush()
    log.close()
    got = rows(tmp_path / "run" / RANK_0)
    for key in (TimeType.FORWARD, "my region"):
        name = key if isinstance(key, str) else key.name
        mine = [[row["start_ns"], row["start_ns"] + row["dur_ns"]] for row in got if row["region"] == name]
        assert tmr.intervals(key).tolist() == sorted(mine, key=lambda pair: pair[1])
    assert 2 * 6 * 700 == len(got)


def test_a_flush_makes_few_frames(tmp_path):
    """What comes at once is one frame, of 32 768 rows at most; each interval is in one."""
    tmr = Timer()
    lengths = []
    with RunLog(tmp_path, tmr, rank=0, flush_s=None) as log:
        for count in (10_000, 280_000):
            for number in range(count):
                tmr.record("a", number, number + 1)
            log.flush()
            lengths.append([rows for kind, rows in frames_of(tmp_path / RANK_0) if kind == TABLES["intervals"][0]])
    few, all_of_them = lengths
    assert [10_000] == few
    assert [32_768] * 8 + [17_856] == all_of_them[len(few) :]


def frames_of(path):
    """Kind and rows of each frame of a file."""
    return [(frame.kind, frame.rows) for frame in read_frames(path.read_bytes())]


def test_what_was_recorded_before(tmr, timed, rows, tmp_path):
    """A log that is attached later takes earlier records, too."""
    timed(tmr, "early", 5)
    with RunLog(tmp_path, tmr, rank=3, flush_s=None):
        timed(tmr, "late", 6)
    assert ["early", "late"] == [row["region"] for row in rows(tmp_path / "rank-00003.d5log")]


def test_nothing_recorded_leaves_nothing(tmr, tmp_path):
    """A process that times nothing leaves no file."""
    with RunLog(tmp_path / "run", tmr, flush_s=None) as log:
        log.flush()
    assert not (tmp_path / "run").exists()


def test_steps_are_counted_by_batch(tmr, log, timed, rows, tmp_path):
    """The preparation of a batch, the batch, and its regions belong to one step, also across flushes."""
    for _ in range(3):
        timed(tmr, TimeType.IO, 10)
        timed(tmr, TimeType.BATCH, 20, inside=lambda: timed(tmr, TimeType.FORWARD, 5))
        log.flush()
    log.close()
    got = [(row["region"], row["step"]) for row in rows(tmp_path / "run" / RANK_0)]
    assert [(name, step) for step in range(3) for name in ("IO", "BATCH", "FORWARD")] == got


def test_steps_are_numbered_by_the_program(tmr, log, timed, rows, tmp_path):
    """With ``step(n)`` an interval belongs to the last step that had begun when it ended."""
    timed(tmr, "before", 10)
    for number in (500, 501, 700):
        tmr.step(number)
        timed(tmr, TimeType.BATCH, 20)
        if number == 501:
            log.flush()
    log.close()
    got = rows(tmp_path / "run" / RANK_0)
    assert [("before", NO_STEP), ("BATCH", 500), ("BATCH", 501), ("BATCH", 700)] == [
        (row["region"], row["step"]) for row in got
    ]
    assert [500, 501, 700] == [row["step"] for row in rows(tmp_path / "run" / RANK_0, "marks")]


def test_a_restart_goes_on_counting(clock, timed, rows, whole, tmp_path):
    """The same rank started again writes its own file, and counts its batches on."""
    for _ in range(2):
        tmr = Timer(clock=clock)
        with RunLog(tmp_path, tmr, rank=0, flush_s=None):
            timed(tmr, TimeType.BATCH, 20)
            timed(tmr, TimeType.BATCH, 20)
    again = tmp_path / "rank-00000.s1.d5log"
    assert [0, 1] == [row["step"] for row in rows(tmp_path / RANK_0)]
    assert [2, 3] == [row["step"] for row in rows(again)]
    assert (0, 1) == (whole(tmp_path / RANK_0).session, whole(again).session)


def test_a_reset_loses_nothing(tmr, log, timed, rows, tmp_path):
    """A log takes the times before a ``reset`` forgets them, however often it is reset between two flushes."""
    for number in range(5):
        timed(tmr, "a", number + 1)
        if number == 2:
            log.flush()
        tmr.reset()
    timed(tmr, "a", 6)
    log.close()
    assert [1, 2, 3, 4, 5, 6] == [row["dur_ns"] for row in rows(tmp_path / "run" / RANK_0)]
    (counters,) = rows(tmp_path / "run" / RANK_0, "counters")
    assert (6, 0) == (counters["recorded"], counters["dropped"])


def test_counts_of_what_is_no_interval(tmr, log, timed, rows, tmp_path):
    """Failed and discarded regions are in the log as counts."""
    timed(tmr, "a", 1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), tmr.region("a"):
            1 / 0  # noqa: B018
    tmr.start("a")
    tmr.discard("a")
    log.close()
    last = rows(tmp_path / "run" / RANK_0, "counters")[-1]
    assert (1, 2, 1, 0, 0) == tuple(last[name] for name in ("recorded", "failed", "discarded", "captured", "dropped"))


def test_a_bounded_timer_waits_for_its_log(clock, timed, rows, tmp_path):
    """A timer with ``keep_last`` keeps more intervals until the log has taken it."""
    tmr = Timer(clock=clock, keep_last=100)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None) as log:
        for number in range(5000):
            timed(tmr, "a", number)
            if number == 2500:
                log.flush()
    assert list(range(5000)) == [row["dur_ns"] for row in rows(tmp_path / RANK_0)]


def test_a_bounded_timer_says_what_it_dropped(clock, rows, whole, tmp_path, monkeypatch):
    """It waits within a bound; the rest is counted as dropped, and the rest is there."""
    bound, count = 4000, 10_000
    monkeypatch.setattr(intervals, "LOG_BOUND", bound)
    tmr = Timer(clock=clock, keep_last=100)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None):
        for number in range(count):
            tmr.record("a", number, number + 1)
    got = [row["start_ns"] for row in rows(tmp_path / RANK_0)]
    (last,) = rows(tmp_path / RANK_0, "counters")[-1:]
    assert list(range(count - len(got), count)) == got
    assert count > len(got) >= bound
    assert (count, count - len(got)) == (last["recorded"], last["dropped"])
    assert last["dropped"] == whole(tmp_path / RANK_0).end["dropped"]


class Pauses:
    """Stands in for the event on which a log's thread waits: the records of each pause is given."""

    def __init__(self, recorders):
        self.recorders = list(recorders)
        self.waited = []

    def wait(self, pause):
        """Let the pause go by; the last one ends the thread's work."""
        if not self.recorders:
            return True
        self.waited.append(pause)
        self.recorders.pop(0)(pause)
        return False

    def set(self):
        """No one waits."""


def test_a_flush_comes_by_size(clock, rows, tmp_path):
    """At 10⁶ intervals a second, after a rest or not, flushes come so fast that a bounded timer drops nothing."""
    tmr = Timer(clock=clock, keep_last=100)
    log = RunLog(tmp_path, tmr, rank=0, flush_s=None)
    ends = itertools.count(1)

    def rest(_):
        """Record nothing."""

    def record(pause):
        for end in itertools.islice(ends, round(pause * 1_000_000)):
            tmr.record("a", end - 1, end)

    pauses = log._wake = Pauses([*[rest] * 7, *[record] * 5])
    log._flush_s = 1.0
    log._work()
    count = next(ends) - 1
    assert pauses.waited == pytest.approx([0.2] * 12)
    assert count == 1_000_000 == len(rows(tmp_path / RANK_0))
    log.close()
    assert (count, 0) == tuple(rows(tmp_path / RANK_0, "counters")[-1][name] for name in ("recorded", "dropped"))


def test_a_reset_does_not_hide_what_is_recorded(tmr, timed, rows, tmp_path):
    """A timer that was reset has recorded less than before; its new records is seen by its size all the same."""
    log = RunLog(tmp_path, tmr, rank=0, flush_s=None)

    def record(count):
        return lambda _: [tmr.record("a", number, number + 1) for number in range(count)]

    def reset(_):
        tmr.reset()

    log._wake = Pauses([record(100_000), reset, record(40_000)])
    log._flush_s = 10.0
    log._work()
    assert 140_000 == len(rows(tmp_path / RANK_0))
    log.close()


def test_a_flush_comes_by_time(tmr, timed, rows, tmp_path):
    """Where little is recorded, it is written after the time that was asked for, and looked at in between."""
    log = RunLog(tmp_path, tmr, rank=0, flush_s=None)
    seen = []

    def record(_):
        timed(tmr, "a", 1)
        seen.append(len(rows(tmp_path / RANK_0)) if (tmp_path / RANK_0).exists() else 0)

    pauses = log._wake = Pauses([record] * 12)
    log._flush_s = 1.0
    log._work()
    log.close()
    assert pauses.waited == pytest.approx([0.2] * 12)
    assert [0] * 5 + [5] * 5 + [10] * 2 == seen


def test_open_regions_are_written(tmr, log, timed, rows, tmp_path):
    """A flush says which regions are open, so that a killed region is known to have begun."""
    tmr.start(TimeType.EPOCH)
    timed(tmr, TimeType.BATCH, 10)
    log.flush()
    tmr.end(TimeType.EPOCH)
    log.close()
    assert [("EPOCH", 1_000_000_000)] == [
        (row["region"], row["start_ns"]) for row in rows(tmp_path / "run" / RANK_0, "open")
    ]


def test_threads_have_numbers_and_names(tmr, log, timed, rows, tmp_path, in_thread):
    """Each thread has its number, the main thread 0, and its name is in the log."""
    timed(tmr, "a", 1)
    in_thread(lambda: (timed(tmr, "a", 2), log.flush()), name="loader")
    log.close()
    assert {1: 0, 2: 1} == {row["dur_ns"]: row["thread"] for row in rows(tmp_path / "run" / RANK_0)}
    assert {0: "MainThread", 1: "loader"} == {
        row["thread"]: row["name"] for row in rows(tmp_path / "run" / RANK_0, "threads")
    }


def test_device_times_are_of_their_step(clock, rows, tmp_path):
    """A device's interval comes when the device is done, and belongs to the step in which its region began."""
    device = ManualDeviceClock()
    tmr = Timer(device, clock=clock)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None) as log:
        for _ in range(3):
            with tmr.region(TimeType.BATCH, gpu=True):
                device.launch(0.5)
                clock.advance_ns(10)
            clock.advance_ns(1)
            log.flush()
        device.finish()
    got = [(row["device"], row["step"], row["dur_ns"]) for row in rows(tmp_path / RANK_0)]
    assert [("GPU", step, 500_000_000) for step in range(3)] == [row for row in got if row[0] == "GPU"]
    assert [("CPU", step, 10) for step in range(3)] == [row for row in got if row[0] == "CPU"]


def test_names_with_every_odd_character(tmr, log, timed, rows, tmp_path):
    """A region may have any name: control characters, quotes, other scripts, half of a surrogate pair."""
    names = ["a\nb\t\0", 'quote"\\', "β·層", "\U0001f600", "\ud800", "/", "$(rm)", " ", "\u202eabc", "x" * 10_000]
    for name in names:
        timed(tmr, name, 1)
    log.close()
    assert sorted(names) == sorted(row["region"] for row in rows(tmp_path / "run" / RANK_0))


def test_samples_collectives_and_events(tmr, log, clock, rows, whole, tmp_path):
    """Other kinds of records go through the same door; a number that is unknown is missing, not zero."""
    log.sample("memory.host_rss_bytes", 2.0**40, region="FORWARD")
    clock.advance_ns(5)
    log.sample("loss", float("nan"))
    log.collective("all_reduce", 10, 25, group="data", sequence=7, nbytes=4096)
    log.event("checkpoint", "saved", path="here")
    log.close()
    path = tmp_path / "run" / RANK_0
    first, second = rows(path, "samples")
    assert {"time_ns": 10**9, "metric": "memory.host_rss_bytes", "value": 2.0**40, "region": "FORWARD"} == first
    assert second["value"] != second["value"]
    assert [{"start_ns": 10, "dur_ns": 15, "op": "all_reduce", "group": "data", "sequence": 7, "bytes": 4096}] == rows(
        path, "collectives"
    )
    assert [("checkpoint", "saved", "here")] == [
        (event["what"], event["text"], event["path"]) for event in whole(path).events
    ]


def test_a_table_of_ones_own(tmr, log, rows, tmp_path):
    """A capability that comes later declares its table, and the log describes it to every reader."""
    log.declare("layers", start_ns="time", layer="name", flops="float", micro_batch="int")
    log.declare("layers", start_ns="time", layer="name", flops="float", micro_batch="int")
    log.add("layers", (5, "conv", 1e9, 0), (9, "head", 2e9, 1))
    log.close()
    assert [
        {"start_ns": 5, "layer": "conv", "flops": 1e9, "micro_batch": 0},
        {"start_ns": 9, "layer": "head", "flops": 2e9, "micro_batch": 1},
    ] == rows(tmp_path / "run" / RANK_0, "layers")


@pytest.mark.parametrize(
    ("table", "columns"),
    [("layers", {}), ("layers", {"a": "text"}), ("not a name", {"a": "int"}), ("samples", {"a": "int"})],
)
def test_a_table_that_cannot_be(log, table, columns):
    """A table of unknown types, without columns, or of a name that is taken, is refused."""
    with pytest.raises(ValueError):
        log.declare(table, **columns)
    with pytest.raises(ValueError):
        log.add("unheard", (1,))


def test_the_header_says_what_wrote_it(tmr, timed, whole, tmp_path):
    """A log says which process wrote it, with what, and how its clock lies to Unix time."""
    odd = {"model": "resnet", "lr": 0.1, "seen": {1, 2}, "nan": float("nan")}
    with RunLog(tmp_path, tmr, rank=2, attributes=odd, flush_s=None):
        timed(tmr, "a", 1)
    header = whole(tmp_path / "rank-00002.d5log").header
    assert {"rank": 2, "session": 0, "segment": 0, "schema": 1} == {
        name: header[name] for name in ("rank", "session", "segment", "schema")
    }
    assert ("resnet", 0.1, "nan") == tuple(header["attributes"][name] for name in ("model", "lr", "nan"))
    assert 64 == len(header["command_sha256"])
    assert header["anchor"]["time_ns"] == 1_000_000_001
    assert header["versions"].keys() >= {"python", "numpy"}


@pytest.mark.parametrize(("backends", "named"), [({}, set()), ({"cpu": object()}, {"jax"})])
def test_the_header_names_jax_if_it_computes(backends, named, tmr, timed, tmp_path, whole, monkeypatch):
    """TensorFlow imports it too, where it is installed."""
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(__version__="1.0"))
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", SimpleNamespace(_backends=backends))
    with RunLog(tmp_path, tmr, rank=0, flush_s=None):
        timed(tmr, "a", 1)
    assert named == {"jax"} & whole(tmp_path / "rank-00000.d5log").header["versions"].keys()


def test_rotation(tmr, timed, rows, whole, tmp_path):
    """A file that has its size is ended and the next one begun, which says everything again."""
    with RunLog(tmp_path, tmr, rank=0, flush_s=None, rotate_bytes=500) as log:
        for number in range(6):
            for inner in range(400):
                timed(tmr, "a", number * 1000 + inner * 7919 % 1000)
            log.flush()
    files = sorted(path.name for path in tmp_path.glob("rank-*"))
    assert len(files) == 7
    assert [RANK_0, *(f"rank-00000.{number:04}.d5log" for number in range(1, len(files)))] == sorted(files, key=len)
    assert tmr.intervals("a")[:, 0].tolist() == sorted(
        row["start_ns"] for name in files for row in rows(tmp_path / name)
    )
    logs = [whole(tmp_path / name) for name in sorted(files, key=len)]
    assert list(range(len(files))) == [log.segment for log in logs]
    assert ["rotated"] * (len(files) - 1) + ["closed"] == [log.end["reason"] for log in logs]
    assert 2400 == logs[-1].end["written"]


def test_two_timers_share_a_log(clock, timed, rows, tmp_path):
    """Timers of one folder and clock write to one file."""
    one, two = Timer(clock=clock, run=tmp_path), Timer(clock=clock)
    log = attach(two, tmp_path)
    timed(one, "a", 1)
    timed(two, "b", 2)
    log.close()
    assert [RANK_0] == [path.name for path in tmp_path.glob("rank-*")]
    assert ["a", "b"] == [row["region"] for row in rows(tmp_path / RANK_0)]


def test_another_clock_is_refused(tmr, log):
    """Times of two clocks do not go into one log."""
    with pytest.raises(ValueError):
        log.attach(Timer(clock=ManualClock()))
    with pytest.raises(ValueError):
        Timer(clock=ManualClock(), run=log)


@pytest.mark.parametrize("wrong", [{"flush_s": 0}, {"rotate_bytes": 0}, {"rotate_bytes": -1}, {"system_s": 0.0}])
def test_settings_that_cannot_be(tmr, tmp_path, wrong):
    """A time or a size of nothing is an error that names it."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RunLog(tmp_path, tmr, **{"flush_s": None, **wrong})


def test_a_queue_that_is_full(tmr, log, clock, rows, whole, tmp_path, monkeypatch):
    """Samples beyond the queue's size are dropped, counted, and reported; the log's own sample is among them."""
    monkeypatch.setattr("deep500_timing.runs._collector.QUEUE_ROWS", 3)
    for number in range(5):
        log.sample("loss", number)
    log.close()
    path = tmp_path / "run" / RANK_0
    assert [0, 1, 2] == [row["value"] for row in rows(path, "samples")]
    assert ["3 rows of samples did not fit into the queue of 3"] == [event["text"] for event in whole(path).events]


def test_a_closed_log_lets_the_timer_go_on(tmr, log, timed):
    """After ``close`` the timer records as if there had never been a log, and closing again does nothing."""
    timed(tmr, "a", 1)
    log.close()
    log.close()
    tmr.step(3)
    timed(tmr, "a", 2)
    tmr.reset()
    assert log.closed


def test_the_environment_names_a_folder(clock, timed, rows, tmp_path, monkeypatch):
    """``DEEP500_TIMING_RUN`` gives every timer of a process its run."""
    monkeypatch.setenv("DEEP500_TIMING_RUN", str(tmp_path))
    tmr = Timer(clock=clock)
    timed(tmr, "a", 4)
    tmr._run.close()
    assert [4] == [row["dur_ns"] for row in rows(tmp_path / RANK_0)]


def test_the_machine_is_sampled(tmr, clock, timed, rows, tmp_path):
    """With ``system_s`` the machine's state is read once in that time; rates need two readings."""
    with RunLog(tmp_path, tmr, rank=0, flush_s=None, system_s=1.0) as log:
        for _ in range(5):
            timed(tmr, "a", 400_000_000)
            log.flush()
    got = rows(tmp_path / RANK_0, "samples")
    times = sorted({row["time_ns"] for row in got})
    assert [1_400_000_000, 2_600_000_000] == times
    of_first = {row["metric"] for row in got if row["time_ns"] == times[0]}
    of_second = {row["metric"] for row in got if row["time_ns"] == times[1]}
    assert {"system.memory_percent"} <= of_first
    assert "process.cpu_percent" in of_second - of_first


def test_device_times_that_come_late_are_of_their_step(clock, rows, tmp_path):
    """A device that lags behind by steps: each of its times is of the step in which the host began it."""
    device = ManualDeviceClock()
    tmr = Timer(device, clock=clock)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None) as log:
        for step in range(40):
            if step == 20:
                device.capturing = True
            with tmr.region(TimeType.BATCH, gpu=True):
                device.launch((step + 1) * 1e-3)
                clock.advance_ns(10)
            device.capturing = False
            clock.advance_ns(1)
            if step == 30:
                device.advance(0.2)
            log.flush()
        device.finish()
    got = {row["dur_ns"]: row["step"] for row in rows(tmp_path / RANK_0) if row["device"] == "GPU"}
    assert {(step + 1) * 1_000_000 for step in range(40) if step != 20} == set(got)
    # One was captured and has no time, which moves none of the others.
    assert {dur: dur // 1_000_000 - 1 for dur in got} == got


def test_a_device_time_of_many_steps_is_of_the_step_in_which_its_region_ended(clock, rows, tmp_path):
    """As on the host: the region's end decides, not its start."""
    device = ManualDeviceClock()
    tmr = Timer(device, clock=clock)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None) as log:
        with tmr.region("EPOCH", gpu=True):
            for _ in range(3):
                with tmr.region(TimeType.BATCH):
                    clock.advance_ns(10)
            clock.advance_ns(1)
        log.flush()
        device.finish()
    got = {(row["region"], row["device"]): row["step"] for row in rows(tmp_path / RANK_0)}
    assert got["EPOCH", "GPU"] == got["EPOCH", "CPU"] == 3


def test_device_times_after_a_reset_are_of_their_step(clock, rows, tmp_path):
    """A reset in mid-training: the steps go on as on the host."""
    device = ManualDeviceClock()
    tmr = Timer(device, clock=clock)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None) as log:
        for step in range(6):
            if step == 3:
                device.finish()
                tmr.complete_all()
                tmr.reset()
            with tmr.region(TimeType.BATCH, gpu=True):
                device.launch((step + 1) * 1e-3)
                clock.advance_ns(10)
            log.flush()
        device.finish()
    got = {row["dur_ns"]: row["step"] for row in rows(tmp_path / RANK_0) if row["device"] == "GPU"}
    assert {dur: dur // 1_000_000 - 1 for dur in got} == got
    assert 6 == len(got)


def test_memory_at_the_ends_of_regions(clock, rows, tmp_path):
    """A memory timer's reading at a region's end is a sample of that region; what is unknown is not there."""

    class Reader:
        def read(self):
            return MemoryUsage(host_rss_bytes=1 << 30, device="cuda:0", device_allocated_bytes=5)

    tmr = MemoryTimer(clock=clock, memory=Reader(), run=RunLog(tmp_path, rank=0, flush_s=None))
    for _ in range(2):
        with tmr.region(TimeType.FORWARD):
            clock.advance_ns(3)
    tmr._run.close()
    got = [(row["metric"], row["value"], row["region"], row["time_ns"]) for row in rows(tmp_path / RANK_0, "samples")]
    assert [
        (metric, value, "FORWARD", 10**9 + time)
        for time in (3, 6)
        for metric, value in (("memory.host_rss_bytes", 2.0**30), ("memory.device_allocated_bytes", 5.0))
    ] == got


def test_rates_of_a_throughput_timer(clock, rows, tmp_path):
    """Each timed step of a throughput timer is a sample of its rates, by unit."""
    tmr = Timer(clock=clock, run=RunLog(tmp_path, rank=0, flush_s=None))
    throughput = ThroughputTimer(batch_size=8, timer=tmr, start_step=0, steps_per_output=None)
    for _ in range(2):
        throughput.start()
        clock.advance(0.5)
        throughput.stop(global_step=True, amounts={"tokens": 1024})
    tmr._run.close()
    got = {(row["metric"], row["value"]) for row in rows(tmp_path / RANK_0, "samples")}
    assert {("throughput.samples_per_s", 16.0), ("throughput.tokens_per_s", 2048.0)} == got


def test_what_no_timer_records(tmr, log, clock, rows, tmp_path):
    """Any caller finds the process's log, and feeders are called before each flush; a fault ends nothing."""
    with Timer(run=RunLog(tmp_path / "own", rank=0, flush_s=None))._run as own:
        assert own is current()
        fed = [lambda: current().sample("fed", 1.0), lambda: 1 / 0]
        feeders.extend(fed)
        try:
            with pytest.warns(TimingWarning, match="division by zero"):
                own.event("begin")
                own.flush()
                own.close()
        finally:
            for feeder in fed:
                feeders.remove(feeder)
    assert current() is not own
    assert ["fed", "fed"] == [row["metric"] for row in rows(tmp_path / "own" / RANK_0, "samples")]


def test_a_resumed_run_counts_from_its_start(rows, clock, tmp_path):
    """The run's steps begin at ``start``, and the wait for a batch belongs to its step."""
    tmr = Timer(clock=clock, run=tmp_path / "run")
    for _ in tmr.steps(range(3), start=100):
        clock.advance(10)
    tmr.run.close()
    expected = {(region, step) for region in ("BATCH", "IO") for step in (100, 101, 102)}
    assert expected == {(row["region"], row["step"]) for row in rows(tmp_path / "run" / RANK_0)}


def test_a_log_starts_no_process(start, tmp_path):
    """While one is looked for, the filters of warnings are replaced: what the program shows once is shown again."""
    program = """if True:
        import sys
        from deep500_timing import Timer
        from deep500_timing.runs import RunLog
        sys.addaudithook(lambda event, _: event in ("subprocess.Popen", "os.fork", "os.posix_spawn") and print(event))
        with RunLog(sys.argv[1], tmr := Timer(), rank=0), tmr.region("a"):
            pass
    """
    assert ("", "") == start(program, tmp_path).communicate(timeout=300)
