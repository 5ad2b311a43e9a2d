"""The thread's and the machine's account: the kernel's files, rows of the log, and the parts of a span of time."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest
from made_runs import MadeMachine, add_machine, cores, made_rank

from deep500_timing import Timer
from deep500_timing._base.stack import StackWatch
from deep500_timing._recording.intervals import ProcessorTimes
from deep500_timing._views.findings import find
from deep500_timing._views.findings._evidence import Evidence
from deep500_timing._views.page._page import build
from deep500_timing._views.reports import report_of_run
from deep500_timing._views.timeline import write_timeline
from deep500_timing.runs import Run, RunLog, _machine
from deep500_timing.runs._machine import LEVELS, RATES, MachineReader
from deep500_timing.runs._processor import ThreadTimes, machine_of

MS = 1e-3
on_linux = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not tell a thread's time on a processor"
)
FILES = {
    "proc/self/schedstat": "1 1 1",
    "proc/self/stat": "9 (a) b) S 1 2 3 4 5 6 7 8 9 10 900 800 150 50 20 0 2 0 7",
    "proc/self/task/7/schedstat": "1000000000 500000000 9",
    "proc/self/task/8/schedstat": "0 250000000 9",
    "proc/stat": "cpu  100 0 100 1000 30 10 0 40 0 0\ncpu0 1 1\n",
    "proc/pressure/cpu": "some avg10=1.00 avg60=0.00 avg300=0.00 total=1000000\n",
    "proc/pressure/io": "some avg10=1.00 avg60=0.00 avg300=0.00 total=2000000\nfull total=1\n",
    "proc/pressure/memory": "some avg10=1.00 avg60=0.00 avg300=0.00 total=3000000\nfull total=1\n",
    "proc/vmstat": "nr_free 1\npswpin 3\npswpout 4\n",
    "proc/self/io": "rchar: 1\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n",
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/job/cpu.stat": "usage_usec 5\nnr_throttled 2\nthrottled_usec 500000\n",
}
LATER = {
    "proc/self/stat": "9 (a) b) S 1 2 3 4 5 6 7 8 9 10 990 890 180 70 20 0 2 0 7",
    "proc/self/task/7/schedstat": "1500000000 750000000 9",
    "proc/stat": "cpu  200 0 200 1000 130 10 0 90 0 0\ncpu0 1 1\n",
    "proc/pressure/io": "some avg10=1.00 avg60=0.00 avg300=0.00 total=2400000\nfull total=1\n",
    "proc/vmstat": "nr_free 1\npswpin 13\npswpout 4\n",
    "proc/self/io": "rchar: 1\nread_bytes: 1004096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n",
    "sys/fs/cgroup/job/cpu.stat": "usage_usec 5\nnr_throttled 2\nthrottled_usec 1000000\n",
}


def lay(root, files):
    """Make the kernel's files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def clock_s(monkeypatch):
    """The seconds that the reader sees pass: set its first entry."""
    now = [100.0]
    monkeypatch.setattr(_machine.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(_machine.os, "sysconf", lambda _: 100, raising=False)
    return now


def test_rates_of_the_kernels_files(tmp_path, clock_s):
    """Sums become means over the time between two readings, 2 s here; what one file tells stands in one row."""
    lay(tmp_path, FILES)
    reader = MachineReader(1.0, str(tmp_path))
    assert None is reader.due()
    lay(tmp_path, LATER)
    clock_s[0] = 100.9
    assert None is reader.due()
    clock_s[0] = 102.0
    row = reader.due()
    assert [*RATES, *LEVELS] == list(row)
    expected = {
        "process_waiting": 0.125,
        "workers_cores": 0.25,
        "busy_cores": 1.0,
        "iowait_cores": 0.5,
        "steal_cores": 0.25,
        "pressure_cpu": 0.0,
        "pressure_io": 0.2,
        "throttled": 0.25,
        "swapped_pages": 5.0,
        "read_bytes": 500_000.0,
        "limit_cores": 1.5,
    }
    assert pytest.approx(expected) == {name: row[name] for name in expected}
    assert math.isnan(row["clock_share"])
    assert ["clock"] == reader.missing


@pytest.mark.parametrize(("quota", "limit"), [("150000\n", 1.5), ("-1\n", None)], ids=["a limit", "no limit"])
def test_the_limit_of_version_1(tmp_path, clock_s, quota, limit):
    """The first version of cgroups has its files below a controller's name, and counts in ns."""
    lay(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/x\n2:cpu,cpuacct:/docker/1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 1\nnr_throttled 2\nthrottled_time 500000000\n",
        },
    )
    reader = MachineReader(1.0, str(tmp_path))
    reader.due()
    lay(tmp_path, {"sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 1\nnr_throttled 2\nthrottled_time 1500000000\n"})
    clock_s[0] += 4
    row = reader.due()
    assert 0.25 == row["throttled"]
    assert (limit is None and math.isnan(row["limit_cores"])) or limit == row["limit_cores"]


def test_an_empty_machine_is_no_fault(tmp_path, clock_s):
    """Without any file of the kernel, each column is unknown, and each source is named."""
    reader = MachineReader(1.0, str(tmp_path))
    assert None is reader.due()
    clock_s[0] += 1
    row = reader.due()
    known = {name for name, value in row.items() if not math.isnan(value)}
    assert known <= {"process_cores", "major_faults"}
    assert {"threads", "workers", "stat", "pressure", "cgroup", "vmstat", "io", "clock"} == set(reader.missing) - {
        "usage"
    }


def test_a_file_of_another_form_is_missing(tmp_path, clock_s):
    """What cannot be read as expected is left out by name, and the others go on."""
    lay(tmp_path, FILES | {"proc/stat": "cpu  nonsense\n", "proc/vmstat": "no numbers"})
    reader = MachineReader(1.0, str(tmp_path))
    reader.due()
    clock_s[0] += 1
    row = reader.due()
    assert ["stat", "vmstat", "clock"] == reader.missing
    assert math.isnan(row["busy_cores"])
    assert 0.0 == row["process_waiting"]


@on_linux
def test_readings_are_of_the_thread_that_reads(in_thread):
    """Only the thread that is watched reads: another one would read its own account."""
    times = ProcessorTimes(threading.get_ident())
    in_thread(times.read, 10**7)
    assert 0 == times.rows.count
    for end_ms in 20, 30, 40:
        times.read(end_ms * 10**6)
    ints, recorded, lost = times.rows.since(0)
    rows = np.frombuffer(ints, dtype=np.int64).reshape(-1, 4)
    assert (3, 3, 0) == (len(rows), recorded, lost)
    assert (np.diff(rows[:, :3], axis=0) >= 0).all()
    times.stop()
    times.read(50 * 10**6)
    assert 3 == times.rows.count


@on_linux
def test_a_log_has_a_reading_for_each_batch(tmp_path):
    """And none of other regions; the parts of a step are its wall clock."""
    tmr = Timer()
    with RunLog(tmp_path, tmr, rank=0, flush_s=None) as log:
        for _ in range(6):
            with tmr.region("BATCH"), tmr.region("FORWARD"):
                end_ns = tmr.now_ns() + 4 * 10**6  # readings are no closer
                while tmr.now_ns() < end_ns:
                    pass
            log.flush()
    with Run.open(tmp_path) as run:
        rows = run.table("processor").rows()
        ends = [row["start_ns"] + row["dur_ns"] for row in run.intervals().rows() if row["region"] == "BATCH"]
        assert len(rows) == len(ends) == 6
        assert all(row["time_ns"] >= end for row, end in zip(rows, sorted(ends), strict=True))
        parts = ThreadTimes(run, 0, 0).whole
        assert pytest.approx(parts.wall_s, abs=0.02) == parts.ran_s + parts.waited_s + parts.blocked_s


def test_another_clock_has_no_readings(tmp_path, clock):
    """The kernel's times have no place on a clock of the user's own."""
    tmr = Timer(clock=clock)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None), tmr.region("BATCH"):
        clock.advance(1.0)
    with Run.open(tmp_path) as run:
        assert [] == run.table("processor").rows() == run.table("machine").rows()


def test_parts_between_readings(tmp_path):
    """A span has its share of what lies between two readings; before the first one nothing is known."""
    with made_rank(tmp_path) as made:
        made.spend("BATCH", 0.1)
        machine = MadeMachine(made)
        for waited_s, blocked_s in ((0.05, 0.0), (0.0, 0.03)):
            made.spend("BATCH", 0.1)
            machine.read(waited_s, blocked_s)
    with Run.open(tmp_path) as run:
        times = ThreadTimes(run, 0, 0)
        whole = times.whole
        first_ns = made.clock.now_ns() - 200_000_000
        found = [times.parts(0, first_ns + at, first_ns + at + 50_000_000) for at in (0, 75_000_000, 150_000_000)]
        assert None is times.parts(0, first_ns - 200_000_000, first_ns - 100_000_000)
        assert None is times.parts(1, first_ns, first_ns + 1)
    assert pytest.approx((0.2, 0.12, 0.05, 0.03)) == (*whole, whole.blocked_s)
    assert [(0.025, 0.025, 0.0), (0.03, 0.0125, 0.0075), (0.035, 0.0, 0.015)] == [
        pytest.approx((each.ran_s, each.waited_s, each.blocked_s)) for each in found
    ]


def slow_steps(folder, *, waited):
    """Each 20th step of 10 ms takes 60: in BACKWARD, and by its own work or waiting for a processor."""
    with cores(2), made_rank(folder) as made:
        machine = MadeMachine(made, busy_cores=1.9, process_cores=0.9, workers_cores=0.0)
        for step in range(200):
            extra_s = 0.05 * (step % 20 == 19)
            with made.region("BATCH"):
                made.spend("FORWARD", 0.004)
                made.spend("BACKWARD", 0.006 + extra_s)
            machine.read(extra_s * waited)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (100, 0), (0, 100), (100, 100)])
def test_a_wait_outside_all_regions_is_no_gain_in_them(tmp_path, before, after):
    """A run that waits for half of its time is at most half as long without, and not 0."""
    with cores(2), made_rank(tmp_path) as made:
        machine = MadeMachine(made, busy_cores=1.9, process_cores=0.9, workers_cores=0.0)
        for spend, times in ((made.wait, before), (lambda s: made.spend("BATCH", s), 100), (made.wait, after)):
            for _ in range(times):
                spend(0.01)
                machine.read(0.005)
    with Run.open(tmp_path) as run:
        found = find(run)[0]
    assert ("cpu-contention", 0.5) == (found.rule, pytest.approx(found.gain_share, rel=0.02))


def test_slow_steps_that_waited_for_a_processor(tmp_path):
    """The rule about slow steps says so and names no region, or leaves it to the rule that knows the cause."""
    said = {}
    for waited in (True, False):
        slow_steps(tmp_path / str(waited), waited=waited)
        with Run.open(tmp_path / str(waited)) as run:
            said[waited] = {finding.rule: finding for finding in find(run)}
            if waited:
                alone = {finding.rule: finding for finding in find(run, off=["cpu-contention"])}
                title, why = report_of_run(run).title, str(run.why(19))
    assert alone["spikes"].text.endswith(": the thread waited for a processor.")
    assert "disturbed: 20 % of the time without a processor" == title[-2]
    assert [
        "Step 19 took 60.00 ms; its neighbours take 10.00 ms (median of 119).",
        "  50.00 ms of it the thread waited for a processor (other processes use 1.0 of 2 cores)",
        "  + 50.00 ms  BACKWARD",
    ] == why.splitlines()[:3]
    assert "BACKWARD" in said[False]["spikes"].text
    assert "cpu-contention" not in said[False]
    assert {"cpu-contention"} == set(said[True])
    assert (
        "The machine is busy: for 20 % of the time the training thread waited for a processor; other processes use 1.0 "
        "of 2 cores."
    ) == said[True]["cpu-contention"].text


def test_slow_steps_in_which_helpers_wait(tmp_path):
    """The thread spins while other threads of its operation have no processor: its own wait is half of it at most."""
    slow_steps(tmp_path, waited=0.45)
    with Run.open(tmp_path) as run:
        assert [found.text.endswith(": the thread waited for a processor.") for found in find(run)] == [True]


def findings_of(folder, own, busy=2.0, *, usable=2, waited=0.3, at_start=None):
    """Of a run whose thread waits for a processor for so much of its time.

    ``own`` is what process and workers run and wait, ``at_start`` the same in a minute before the first step.
    """
    names = ("process_cores", "process_waiting", "workers_cores", "workers_waiting", "busy_cores")
    with cores(usable, 2), made_rank(folder) as made:
        for _ in range(60 if at_start else 0):
            made.clock.advance(1.0)
            add_machine(made, dict(zip(names, (*at_start, busy), strict=True)))
        machine = MadeMachine(made, **dict(zip(names, (*own, busy), strict=True)))
        for _ in range(100):
            made.spend("BATCH", 0.01)
            machine.read(0.01 * waited)
    with Run.open(folder) as run:
        return find(run)


@pytest.mark.parametrize(
    ("usable", "waited", "own", "busy", "rules"),
    [
        (2, 0.13, (1.8, 0.2, 0.1, 0.05), 1.95, []),
        (2, 0.13, (1.7, 0.1, 0.1, 0.0), 1.82, []),
        (2, 0.13, (1.6, 0.2, 0.1, 0.05), 1.95, ["cpu-contention"]),
        (2, 0.5, (1.0, 1.0, 0.0, 0.0), 2.0, ["cpu-contention"]),
        (1, 0.12, (0.87, 0.12, 0.1, 0.1), 1.5, ["one-core"]),
        (1, 0.5, (0.5, 0.53, 0.0, 0.0), 1.5, ["cpu-contention"]),
        (2, 0.3, (1.9, 0.6, 0.1, 0.1), 2.0, ["too-many-threads"]),
    ],
    ids=["a worker", "bursts", "a neighbour", "neighbours", "a worker, one core", "one core", "many threads"],
)
def test_who_makes_the_thread_wait(tmp_path, usable, waited, own, busy, rules):
    """Neighbours are named if they can be half of the wait: not where a worker and few threads share the processors."""
    assert rules == [one.rule for one in findings_of(tmp_path, own, busy, usable=usable, waited=waited)]


@pytest.mark.parametrize(
    ("at_start", "own", "rule"),
    [
        ((1.0, 0.0, 0.0, 0.0), (1.4, 1.8, 0.0, 0.0), "too-many-threads"),
        ((2.0, 4.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0), "cpu-contention"),
    ],
    ids=["an import before too many threads", "a pool before neighbours"],
)
def test_a_start_up_says_nothing_of_the_steps(tmp_path, at_start, own, rule):
    """The cause is looked for in the time of the steps, however long the start-up before them is."""
    assert [rule] == [one.rule for one in findings_of(tmp_path, own, at_start=at_start)]


def test_threads_that_wait_in_bursts(tmp_path):
    """In the mean they want no more than there is; nobody else is there, so it is they that make each other wait."""
    [found] = findings_of(tmp_path, (1.2, 0.6, 0.0, 0.0), 1.3)
    assert found.text.startswith("Too many threads: at times this run wants more than its 2 cores, for 30 % of")


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("torch", "torch.set_num_threads(2)"),
        ("tensorflow", "TF_NUM_INTRAOP_THREADS=2"),
        ("jax", "XLA_FLAGS=--xla_cpu_multi_thread_eigen=false"),
        ("numpy", "OMP_NUM_THREADS=2"),
    ],
)
def test_fewer_threads_are_of_the_framework(tmp_path, monkeypatch, package, remedy):
    """JAX and TensorFlow do not read the variable of OpenMP."""
    monkeypatch.setattr(Evidence, "has", lambda _, *packages: package in packages)
    assert [remedy] == [one.remedy for one in findings_of(tmp_path, (1.9, 0.6, 0.0, 0.0))]


@pytest.mark.parametrize(("ahead_s", "is_known"), [(0.0, True), (0.3, True), (0.9, True), (-0.3, True), (1.5, False)])
def test_a_reader_without_a_processor_between_clock_and_sums(tmp_path, ahead_s, is_known):
    """As the sampler of stacks on a busy machine: its sums are later than its time, and the parts stay known.

    Sums that fall by more are those of another thread.
    """
    with made_rank(tmp_path) as made:
        machine = MadeMachine(made)
        for step in range(30):
            made.spend("BATCH", 0.1)
            machine.read(waited_s=0.06)
            if step % 10 == 5:
                late_ns = round(ahead_s * 1e9)
                sums = machine.ran_ns, machine.waited_ns + late_ns
                made.log.add("processor", (made.clock.now_ns() + 1, 0, *sums))
    with Run.open(tmp_path) as run:
        times = ThreadTimes(run, 0, 0)
        assert is_known == bool(times)
        if is_known:
            assert pytest.approx((3.0, 1.2, 1.8)) == (*times.whole,)


def test_a_kernel_that_does_not_count(tmp_path, clock_s):
    """Zeros are no times: nothing is said to be blocked, and no thread to wait."""
    lay(tmp_path, FILES | {"proc/self/schedstat": "0 0 0\n", "proc/self/task/7/schedstat": "0 0 0\n"})
    reader = MachineReader(1.0, str(tmp_path))
    reader.due()
    clock_s[0] += 1
    assert math.isnan(reader.due()["process_waiting"])
    assert ["threads", "workers", "clock"] == reader.missing
    with made_rank(tmp_path / "run") as made:
        for _ in range(30):
            made.spend("BATCH", 0.01)
            made.log.add("processor", (made.clock.now_ns(), 0, 0, 0))
    with Run.open(tmp_path / "run") as run:
        assert not ThreadTimes(run, 0, 0)


@pytest.mark.parametrize(("steps", "waited", "is_said"), [(20, 1, False), (50, 1, True), (20, 0, True), (50, 0, True)])
def test_a_while_of_waiting_for_a_processor(tmp_path, steps, waited, is_said):
    """A neighbour of a moment is no finding; work of the program that is as long is one."""
    with cores(2), made_rank(tmp_path) as made:
        machine = MadeMachine(made)
        for step in range(200):
            extra_s = 0.004 * (150 <= step < 150 + steps)
            made.spend("BATCH", 0.01 + extra_s)
            machine.read(extra_s * waited)
    with Run.open(tmp_path) as run:
        assert is_said == ("level-shift" in [finding.rule for finding in find(run)])


def test_a_slow_beginning_that_waited_for_a_processor(tmp_path):
    """It is no warm-up of the program, although nothing is known of the beginning of the first step."""
    with cores(2), made_rank(tmp_path) as made:
        machine = None
        for step in range(100):
            extra_s = 0.01 * (step < 40)
            made.spend("BATCH", 0.01 + extra_s)
            machine = machine or MadeMachine(made)
            machine.read(extra_s if step else 0.0)
    with Run.open(tmp_path) as run:
        assert ["cpu-contention"] == [finding.rule for finding in find(run)]
        [alone] = find(run, off=["cpu-contention"])
    assert ("warm-up", True) == (alone.rule, alone.text.endswith("the thread waited for a processor."))


def test_tracks_of_the_timeline(tmp_path):
    """The share of waiting between two readings, and the machine's load, are counters; unknown columns have none."""
    with made_rank(tmp_path / "run") as made:
        machine = MadeMachine(made, busy_cores=1.5)
        for waited_s in (0.05, 0.02):
            made.spend("BATCH", 0.1)
            machine.read(waited_s)
    with Run.open(tmp_path / "run") as run:
        write_timeline(run, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    counters = {}
    for event in events:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event["args"]["value"])
    assert {"machine.busy_cores", "thread 0 waits for a processor"} == set(counters) - {"process.rss_bytes"}
    assert pytest.approx([0.5, 0.2]) == counters["thread 0 waits for a processor"]


def test_the_section_of_the_page(tmp_path):
    """The three parts add up over the run; columns that nothing told are not drawn."""
    slow_steps(tmp_path, waited=True)
    with Run.open(tmp_path) as run:
        [section] = (one for one in build(run)[1] if one.name == "machine")
    thread, load = section.content.figures
    assert [
        ("on a processor", "2.000 s", "80 %"),
        ("waiting for a processor", "500.0 ms", "20 %"),
        ("blocked", "0 s", "0.0 %"),
    ] == thread.rows
    sums = {}
    for value in thread.panels[0].spec["data"]["values"]:
        sums[value["t"]] = sums.get(value["t"], 0) + value["value"]
    assert [pytest.approx(1.0)] * len(sums) == [*sums.values()]
    assert ["this process", "all processes"] == [row[0] for row in load.rows]


def test_a_run_without_readings_has_no_such_section(tmp_path):
    """As one of another system, or of another clock; and the page says the kernel's missing values."""
    with made_rank(tmp_path) as made:
        made.spend("BATCH", 0.1)
        made.log._machine.missing = ["threads", "pressure"]
        made.log._stacks = StackWatch(0.02, 1)  # no such thread: it takes the GIL
    with Run.open(tmp_path) as run:
        sections = {one.name: one.content for one in build(run)[1]}
    assert "machine" not in sections
    [left_out] = (rows for title, _, rows in sections["not-measured"].tables if title == "Left out of this page")
    assert ("Processors", "The kernel did not tell: threads, pressure.") in left_out
    assert "waited for the GIL" in dict(left_out)["Lines"]


def test_the_machine_of_a_span(tmp_path):
    """Means are of the rows in a span; unknown columns are absent, and a sum with one is None."""
    with cores(2, 8), made_rank(tmp_path) as made:
        for busy in (1.0, 3.0):
            MadeMachine(made, busy_cores=busy, process_cores=0.5)
            made.spend("BATCH", 5.0)
    with Run.open(tmp_path) as run:
        whole, start = machine_of(run, 0), machine_of(run, 0, (0, 1_000_000_001))
    assert (2, 8, {"busy_cores": 2.0, "process_cores": 0.5}, ()) == whole
    assert 1.0 == start.rates["busy_cores"]
    assert (None, None, "") == (whole.wanted, whole.others, whole.neighbours())


def busy(folder):
    """A run of which half was waiting for a processor."""
    with made_rank(folder) as made:
        machine = MadeMachine(made, busy_cores=1.0)
        for _ in range(30):
            made.spend("BATCH", 0.01)
            machine.read(0.005)
    return folder


@on_linux
def test_a_run_of_this_machine_has_rows_of_it(tmp_path):
    """A log's end has a row of the rest of its last period, and its header the missing sources."""
    tmr = Timer()
    log = RunLog(tmp_path, tmr, rank=0, flush_s=None)
    with tmr.region("BATCH"):
        pass
    log.flush()
    log._machine._last_s -= 5.0
    log.close()
    with Run.open(tmp_path) as run:
        [row] = run.table("machine").rows()
        assert 0 <= row["process_cores"] < 1000
        assert machine_of(run, 0).cores == _machine.usable_cores()


@on_linux
def test_no_file_is_left_open():
    """The account's file is closed with its times."""
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(20):
        ProcessorTimes(threading.get_ident()).read(10**7)
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 2
