"""Sampled stacks: their content, their place, and their use in findings, `why` and the page."""

from __future__ import annotations

import itertools
import sys
import textwrap
import threading
from collections import Counter
from contextlib import nullcontext
from functools import partial
from threading import get_ident
from types import SimpleNamespace

import pytest
from made_runs import made_rank

from deep500_timing import Timer
from deep500_timing._base.stack import read_stack
from deep500_timing._views.findings import find
from deep500_timing._views.reports import report_of_run
from deep500_timing.runs import Run, RunLog, _stacks, attach
from deep500_timing.runs._stacks import StackTexts, frames_of, parts_of, places_of, said_of, samples_in
from deep500_timing.testing import ManualClock

MAIN = "<module>\ttrain.py:90\tmain()"
LOOP = f"{MAIN}\nmain\ttrain.py:70\tlog_metrics(loss)"
LOG = f"{LOOP}\nlog_metrics\ttrain.py:41\tos.fsync(file)"
SLEEP = f"{LOOP}\nlog_metrics\ttrain.py:44\ttime.sleep(1)"
FIT = f"{MAIN}\nmain\ttrain.py:12\tmodel.fit(data)\nfit\tkeras/trainer.py\nList.on_epoch_end\tkeras/list.py"
SAVING = f"{FIT}\nCheckpoint.on_epoch_end\tkeras/checkpoint.py\nwrite\th5py/dataset.py"
MS = 1e-3


def program(tmp_path, monkeypatch, text):
    """A module with this text, in a file of the current folder."""
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "train"}
    exec(compile((tmp_path / "train.py").read_text(), str(tmp_path / "train.py"), "exec"), names)
    return names


def test_a_sample_names_lines_of_the_program(tmp_path, monkeypatch):
    """A frame of the program has its line and the call that is under way; one of a library has its file."""
    text = """\
        import json
        def save(sample, text):
            return json.loads(text, parse_int=lambda _: sample())
        class Log:
            def write(self, sample):
                return (1,
                    save(sample, "7"))
    """
    log = program(tmp_path, monkeypatch, text)["Log"]()
    found = frames_of(StackTexts().text_of(log.write(partial(read_stack, get_ident()))[1]))
    at = next(place for place, frame in enumerate(found) if frame.name == "Log.write")
    assert [tuple(frame) for frame in found[at:]] == [
        ("Log.write", "train.py", "7", "save(sample, '…')"),
        ("save", "train.py", "3", "json.loads(text, parse_int=lambda _: sample())"),
        ("loads", "json/__init__.py", "", ""),
        ("JSONDecoder.decode", "json/decoder.py", "", ""),
        ("JSONDecoder.raw_decode", "json/decoder.py", "", ""),
        ("save.<lambda>", "train.py", "3", "sample()"),
    ]


@pytest.mark.parametrize(
    ("line", "expression"),
    [
        ("from tensor_board_module import SummaryWriter as It", "from tensor_board_module"),
        ("from tensor_board_module import It", "from tensor_board_module import It"),
        ("import tensor_board_module as a_name_that_is_longer", "import tensor_board_modu…s a_name_that_is_longer"),
    ],
)
def test_a_long_import_is_named_by_its_module(tmp_path, monkeypatch, line, expression):
    """What it imports from there says less than the last part of the module's name."""
    made = []
    sampler = SimpleNamespace(sample=lambda: made.append(read_stack(get_ident())))
    monkeypatch.setitem(sys.modules, "sampler", sampler)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tensor_board_module.py").write_text("import sampler\nsampler.sample()\nIt = SummaryWriter = 1\n")
    program(tmp_path, monkeypatch, f"def run():\n    {line}\n")["run"]()
    del sys.modules["tensor_board_module"]
    frames = frames_of(StackTexts().text_of(made[0]))
    assert expression == next(frame.expression for frame in frames if frame.name == "run")


def test_a_log_of_the_programs_own_timer_samples_too(tmp_path):
    """A timer that `DEEP500_TIMING_RUN` has given a log came first: what is asked for later is added."""
    timer = Timer(run=tmp_path)
    timer.record("BATCH", 1, 2)
    log = timer.run
    assert log._stacks is None
    assert attach(Timer(), tmp_path, stacks_s=3600.0, whole_process=True) is log
    watch = log._stacks
    attach(Timer(), tmp_path)
    assert watch is log._stacks is not None
    assert log._whole_process
    log.close()


def test_stacks_without_end_cost_no_memory(monkeypatch):
    """Of more different stacks than are kept, only the number is."""
    monkeypatch.setattr(_stacks, "_MOST_TEXTS", 2)
    texts, read = StackTexts(), partial(read_stack, get_ident())
    said = [texts.text_of(one) for one in (read(), (read)(), [read()][0])]
    assert all(said[:2])
    assert said[0] != said[1]
    assert texts.text_of(read()) in ("", *said[:2])
    assert len(texts._known) == 2


def test_our_frames_and_what_starts_us_are_not_of_the_program(tmp_path):
    """Neither `deep500-timing run` nor code that the compiler generated is named as a line of the program."""
    files = ("bin/deep500-timing", "deep500_timing/__main__.py", "deep500_timing/_launch/program.py")
    codes = [compile("pass", f"{_stacks._HOME}/{file}", "exec") for file in files]
    package = compile("pass", str(tmp_path / "package" / "__main__.py"), "exec")
    adapter = compile("pass", f"{_stacks._HOME}/adapters/deep500_timing_torch/_autolog.py", "exec")
    made = compile("pass", str(tmp_path / "torchinductor_me" / "cg" / "ccg6.py"), "exec")
    stack = [(code, 2) for code in (made, adapter, package, *reversed(codes))]
    frame, generated = frames_of(StackTexts().text_of(stack))
    assert (frame.file, frame.line) == ("package/__main__.py", "1")
    assert not generated.line


@pytest.mark.parametrize(("inner", "said"), [("lambda: 1", "slow.<lambda>"), ("x", "slow")])
def test_a_function_that_tensorflow_has_written_anew_has_its_own_name(inner, said):
    """Its file is a temporary one, which its author has never seen."""
    text = f"def outer_factory():\n def inner_factory():\n  def tf__slow(x):\n   return {inner}\n  return tf__slow"
    space = {}
    exec(compile(f"{text}\n return inner_factory()", "/tmp/__autograph_generated_file9_x.py", "exec"), space)
    made = space["outer_factory"]()
    made = made(0) if "lambda" in inner else made
    [frame] = frames_of(StackTexts().text_of([(made.__code__, 2)]))
    assert (said, "AutoGraph", "4") == (frame.name, frame.file, frame.line)


def test_the_log_samples_between_flushes(tmp_path, monkeypatch):
    """The log's thread samples while it waits, at the times of the timers' clock, and writes its samples."""
    tmr = Timer()
    log = RunLog(tmp_path, tmr, rank=0, flush_s=None, stacks_s=0.02, gc=False)
    now = [0.0]
    monkeypatch.setattr("deep500_timing.runs._log.time", SimpleNamespace(monotonic=lambda: now[0]))

    def watch(_seconds):
        now[0] += 0.125
        return [(tmr.now_ns(), read_stack(threading.main_thread().ident), (7, 8)), (tmr.now_ns(), None, None)]

    log._stacks = SimpleNamespace(watch=watch, wake=lambda: None, takes_gil=False)
    with tmr.region("a"):
        for _ in range(2):
            assert not log._rest(0.5)
    monkeypatch.undo()
    log.close()
    with Run.open(tmp_path) as run:
        [region] = run.table("intervals").rows()
        rows, times = run.table("stacks").rows(), run.table("processor").rows()
    assert len(rows) == 16
    assert all(region["start_ns"] <= row["time_ns"] <= region["start_ns"] + region["dur_ns"] for row in rows)
    assert "test_the_log_samples_between_flushes" in rows[0]["stack"]
    assert not rows[1]["stack"]
    assert (7, 8) in {(row["ran_ns"], row["waited_ns"]) for row in times}


def test_threads_that_make_data_are_sampled_with_the_main_thread(tmp_path, monkeypatch):
    """Those that run the program's Python meanwhile; none before, and one that has ended costs nothing."""
    log = RunLog(tmp_path, Timer(), rank=0, flush_s=None, stacks_s=0.02, gc=False)
    asked, now = [], itertools.count(0.0, 0.25)
    monkeypatch.setattr(log._stacks, "watch", lambda seconds: asked.append(seconds) or [])
    monkeypatch.setattr("deep500_timing.runs._log.time", SimpleNamespace(monotonic=lambda: next(now)))
    log._rest(0.5)
    monkeypatch.setattr("deep500_timing.runs._log.makers", {get_ident(), 1})
    log._rest(0.5)
    monkeypatch.undo()
    log.close()
    with Run.open(tmp_path) as run:
        stacks = [row["stack"] or "" for row in run.table("maker_stacks").rows()]
    assert [0.25, 0.02] == asked
    assert [False, True] == sorted("test_threads_that_make_data" in stack for stack in stacks)


def test_the_samples_of_a_long_start_up_are_read_little_by_little(tmp_path, monkeypatch):
    """Their texts are made over many periods of the sampler, so that no step is slow for them, or at the end."""
    log = RunLog(tmp_path, Timer(), rank=0, flush_s=None, stacks_s=0.02, gc=False)
    asked, made = [], []
    monkeypatch.setattr(log._stacks, "watch", lambda seconds: asked.append(seconds) or [])
    monkeypatch.setattr(log._texts, "text_of", lambda stack: made.append(stack) or "f\ta.py")
    log.add_stacks([(number, None) for number in range(100)])
    monkeypatch.setattr("deep500_timing.runs._log.time", SimpleNamespace(monotonic=itertools.count(0.0, 0.25).__next__))
    log._rest(1.0)
    assert [0.02] * 3 == asked
    assert 12 == len(made)
    monkeypatch.undo()
    log.close()
    with Run.open(tmp_path) as run:
        assert 100 == len(run.table("stacks").rows())


def test_a_log_that_is_closed_ends_its_watch(tmp_path):
    """The close of a log does not wait for the next sample."""
    log = RunLog(tmp_path, Timer(), rank=0, stacks_s=3600.0)
    log.close()
    assert log._stacks.watch(3600.0) == []


def test_samples_follow_the_clock_of_the_timers(tmp_path):
    """With a clock of its own a program is sampled with the GIL, at the times of that clock."""
    log = RunLog(tmp_path, Timer(clock=ManualClock()), rank=0, flush_s=None, stacks_s=1e-9)
    [(time_ns, stack, _)] = log._stacks.watch(3600.0)
    log.close()
    assert log._stacks.takes_gil
    assert time_ns == ManualClock().now_ns()
    assert stack


def test_a_sampler_that_fails_is_left_out(tmp_path, monkeypatch, recwarn):
    """An error costs the samples and one warning, never the log."""
    log = RunLog(tmp_path, Timer(), rank=0, flush_s=None, stacks_s=0.02)
    monkeypatch.setattr(log._stacks, "watch", lambda _: 1 / 0)
    log._sample_stacks(log._stacks, 1.0)
    assert log._stacks is None
    assert "Sampling the stack failed" in str(recwarn.pop().message)
    log.close()


def test_no_samples_without_the_gil(tmp_path, monkeypatch):
    """Where frames may change while they are read, none is read."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with RunLog(tmp_path, Timer(), rank=0, flush_s=None, stacks_s=0.02) as log:
        assert log._stacks is None


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ({LOG: 58, f"{MAIN}\nmain\ttrain.py:60\tf()": 42}, "60 % of it in log_metrics (train.py:41): os.fsync(file)"),
        (
            {LOG: 60, SLEEP: 40},
            "60 % of it in log_metrics (train.py:41): os.fsync(file), 40 % in log_metrics (train.py:44): time.sleep(1)",
        ),
        (
            {f"{MAIN}\nmain\ttrain.py:{line}\tf{line}()\nf{line}\tf.py:1\tg()": 20 for line in range(5)},
            "20 % of it in main (train.py:0): f0(), 20 % in main (train.py:1): f1()",
        ),
        ({f"{MAIN}\ntokenize\tdata.py:{line}\tf()": 10 for line in range(10)}, "100 % of it in tokenize (data.py)"),
        (
            {SAVING: 80, FIT: 20},
            "100 % of it in main (train.py:12): model.fit(data), "
            "there in Checkpoint.on_epoch_end (keras/checkpoint.py)",
        ),
        (
            {"f\ta.py:3\tfor batch in loader:\nnext\tloader.py": 20},
            "100 % of it in f (a.py:3): for batch in loader, there in next (loader.py)",
        ),
        (
            {f"main\ta.py:3\tf()\nf{n}\tlib.py": 20 for n in range(3)} | {"main\ta.py:3\tg()\ng\tlib.py": 40},
            "100 % of it in main (a.py:3): f()",
        ),
        ({"run\tray/worker.py": 60, "poll\tray/other.py": 40}, "60 % of it in run (ray/worker.py)"),
        ({"a\ta.py:1\tx()": 30, "b\tb.py:1\tx()": 30, "c\tc.py:1\tx()": 30}, ""),
        ({"": 100}, ""),
        ({LOG: 19}, ""),
        ({}, ""),
    ],
)
def test_what_most_samples_share(samples, said):
    """The function that half of the samples share is named with its lines; a callback by its own name."""
    assert said_of(places_of(Counter(samples), 20)) == said


def test_the_share_is_of_all_samples():
    """Samples elsewhere, and samples without a stack, count in the whole."""
    [place] = places_of(Counter({LOG: 60, "": 20, MAIN: 20}))
    assert place.share == 0.6


def logging(folder, stacks=True):
    """Steps of 100 ms, of which 40 lie in no region: 30 in `log_metrics`, 10 elsewhere; each 20th takes 400 ms more."""
    with made_rank(folder) as made:
        clock = made.clock

        def wait(ms, stack):
            for _ in range(ms // 10):
                clock.advance(5 * MS)
                if stacks:
                    made.log.add("stacks", (clock.now_ns(), stack))
                clock.advance(5 * MS)

        for step in range(60):
            with made.region("BATCH"):
                with made.region("FORWARD"):
                    wait(60, f"{MAIN}\nmain\ttrain.py:60\tmodel(x)")
                wait(30, LOG)
                wait(10, MAIN)
                if step % 20 == 19:
                    wait(400, SLEEP)


def test_samples_lie_in_the_innermost_region(tmp_path):
    """A sample counts for the own time of the region that was open, whenever the region was recorded."""
    logging(tmp_path)
    with Run.open(tmp_path) as run:
        assert samples_in(run, "BATCH", rank=0) == {LOG: 180, MAIN: 60, SLEEP: 120}
        assert samples_in(run, "BATCH", rank=0, steps=[19, 20]) == {LOG: 6, MAIN: 2, SLEEP: 40}
        assert list(samples_in(run, "BATCH/FORWARD", rank=0).values()) == [360]
        assert not samples_in(run, "", rank=0)
        assert not samples_in(run, "BATCH", rank=1)


@pytest.mark.parametrize("stacks", [True, False])
def test_findings_name_lines(tmp_path, stacks):
    """What lies in no region, and what makes steps slow, is said with its lines, if stacks were sampled."""
    logging(tmp_path, stacks)
    with Run.open(tmp_path) as run:
        by_rule = {finding.rule: finding for finding in find(run)}
        why = str(run.why())
    lines = "50 % of it in log_metrics (train.py:41): os.fsync(file), 35 % in log_metrics (train.py:44): time.sleep(1)"
    slow = "90 % of it in log_metrics (train.py:44): time.sleep(1)"
    assert by_rule["unnamed"].why == (lines if stacks else "")
    assert by_rule["spikes"].why == "mostly in the rest of BATCH" + (f", {slow}" if stacks else "")
    assert (slow in why) == stacks


def test_pauses_and_time_in_no_region(tmp_path):
    """What lies between the steps, and outside every region, is said with its lines as well."""
    with made_rank(tmp_path) as made:
        for epoch in range(2):
            with made.region("EPOCH"):
                for step in range(40):
                    made.spend("BATCH", 10 * MS)
                    if step % 10 == 9:
                        for _ in range(10):
                            made.wait(10 * MS)
                            made.log.add("stacks", (made.clock.now_ns(), SAVING))
                        made.wait(MS)
            for _ in range(40 - 40 * epoch):
                made.wait(20 * MS)
                made.log.add("stacks", (made.clock.now_ns(), SLEEP))
            made.wait(MS)
    with Run.open(tmp_path) as run:
        said = " ".join(finding.text for finding in find(run))
    assert "100 % of it in main (train.py:12): model.fit(data), there in Checkpoint.on_epoch_end" in said
    assert "of it in log_metrics (train.py:44): time.sleep(1)" in said


@pytest.mark.parametrize("apart", [False, True])
def test_a_thread_that_trains_has_no_lines_of_the_main_thread(tmp_path, apart):
    """Samples are of the main thread: while it waits for the one that trains, its line explains nothing."""
    with made_rank(tmp_path) as made:

        def train():
            with made.region("EPOCH"):
                for step in range(40):
                    made.spend("BATCH", 10 * MS)
                    for _ in range(10 * (step % 10 == 9)):
                        made.wait(10 * MS)
                        made.log.add("stacks", (made.clock.now_ns(), LOG))

        if apart:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
        else:
            train()
    with Run.open(tmp_path) as run:
        assert apart != any("log_metrics" in finding.text for finding in find(run))


def test_what_runs_after_each_step_is_said_with_its_lines(tmp_path):
    """The name of the region, such as Keras's CALLBACKS, does not say which callback it is."""
    with made_rank(tmp_path) as made:
        for _ in range(40):
            made.spend("BATCH", 10 * MS)
            with made.region("CALLBACKS", 5 * MS):
                made.wait(5 * MS)
                made.log.add("stacks", (made.clock.now_ns(), LOG))
    with Run.open(tmp_path) as run:
        [found] = (one for one in find(run) if one.rule == "outside-steps")
    assert found.why == "100 % of it in log_metrics (train.py:41): os.fsync(file)"


def test_lines_of_a_validation_are_not_those_of_the_pause_beside_it(tmp_path):
    """Samples between two epochs name the lines of the time in no region only if nearly all of the time is."""
    with made_rank(tmp_path) as made:
        for _ in range(4):
            with made.region("EPOCH"):
                for _ in range(40):
                    made.spend("BATCH", 10 * MS)
            for _ in range(30):
                with made.region("VALIDATION", 5 * MS):
                    made.wait(5 * MS)
                    made.log.add("stacks", (made.clock.now_ns(), SLEEP))
            made.wait(400 * MS)
    with Run.open(tmp_path) as run:
        [said] = [finding.text for finding in find(run) if finding.rule == "between-epochs"]
    assert said.endswith("of the run: most of it in no region.")


def test_the_page_has_the_lines(tmp_path):
    """The tree's section has a table of lines; without samples it has none."""
    from deep500_timing._views.page._page import build

    for stacks in (True, False):
        logging(tmp_path / str(stacks), stacks)
        with Run.open(tmp_path / str(stacks)) as run:
            content = next(one.content for one in build(run)[1] if one.name == "tree")
        tables = [rows for title, _, rows in content.tables if "Lines" in title]
        assert len(tables) == stacks
        if stacks:
            assert tables[0][-1] == ("FORWARD", "100\u00a0%", "main", "train.py:60", "model(x)", 360)


FIND = "_find_and_load\t<frozen importlib._bootstrap>"
TORCH = f"<module>\ttrain.py:1\timport torch\n{FIND}\n<module>\ttorch/__init__.py"
OWN = f"<module>\ttrain.py:2\timport data\n{FIND}\n<module>\tdata.py:1\timport pandas"
PANDAS = f"{OWN}\n{FIND}\n<module>\tpandas/__init__.py\n<module>\tpandas/core/api.py"
HOOK = f"<module>\ttrain.py:1\timport torch\n{FIND}\nload\timportlib/metadata.py\n{FIND}\n<module>\tours.py"
WRITER, SPLIT = (
    f"<module>\ttrain.py:{line}\t{text}\n{FIND}\n<module>\ttensorflow/__init__.py"
    for line, text in (
        (3, "from torch.utils.tensorboard import SummaryWriter"),
        (4, "import sklearn.ensem…le as trees"),
    )
)
INDEX, BUILD = (f"{MAIN}\nmain\ttrain.py:{line}\t{call}" for line, call in ((8, "index()"), (9, "build()")))
A, B = (f"<module>\ttrain.py:9\t{name}()\n{name}\ttrain.py:3\ttime.sleep(1)" for name in ("index", "build"))


@pytest.mark.parametrize(
    ("samples", "parts"),
    [
        ({TORCH: 3, PANDAS: 1}, {"import torch": 0.75, "import pandas": 0.25}),
        (
            {INDEX: 2, BUILD: 1, TORCH: 1},
            {"index() (train.py:8)": 0.5, "build() (train.py:9)": 0.25, "import torch": 0.25},
        ),
        ({A: 4, B: 4}, {"index() (train.py:9)": 0.5, "build() (train.py:9)": 0.5}),
        ({A: 9, B: 1}, {"time.sleep(1) (train.py:3)": 0.9, "build() (train.py:9)": 0.1}),
        ({OWN: 1}, {"import pandas": 1.0}),
        ({WRITER: 3, TORCH: 1}, {"import torch.utils.tensorboard": 0.75, "import torch": 0.25}),
        ({SPLIT: 3, TORCH: 1}, {"import sklearn": 0.75, "import torch": 0.25}),
        ({HOOK: 1, TORCH: 1}, {"import torch": 1.0}),
        ({TORCH.replace("import torch", "import os as o, torch"): 1, TORCH: 1}, {"import torch": 1.0}),
        ({f"{A}\n{FIND}\n<module>\tjson/__init__.py": 1}, {"import json": 1.0}),
        ({"_fetch\tfetch.py": 1}, {"code of libraries": 1.0}),
        ({}, {}),
    ],
)
def test_the_parts_of_a_stretch(samples, parts):
    """Imports by their module, and the program's calls where they part."""
    assert parts == dict(parts_of(Counter(samples)))


def started(folder, name):
    """A program that imports for 3 s, indexes for 4 s, trains for 1 s and tests for 4 s, in a region if it is named."""
    with made_rank(folder, started_s=1.0, stacks_s=0.02, whole_process=True) as made:
        clock = made.clock
        made.log.event("begin")
        made.log.flush()  # the log's clock is compared with Unix time when it begins

        def spend(seconds, stack):
            for _ in range(50):
                clock.advance(seconds / 50)
                made.log.add("stacks", (clock.now_ns(), stack))

        spend(3, TORCH)
        spend(4, INDEX)
        for _ in range(50):
            with made.region("BATCH"):
                made.spend("FORWARD", 20 * MS)
        with made.region(name) if name else nullcontext():
            spend(4, BUILD)


@pytest.mark.parametrize("name", ["", "VALIDATION", "export"])
def test_the_start_and_the_end_of_a_program_are_told_by_cause(tmp_path, name):
    """What comes before the first step and after the last one have rows and their own sentences."""
    started(tmp_path, name)
    with Run.open(tmp_path) as run:
        report = report_of_run(run)
    assert [(node.name, node.total_s) for node in report.tree.roots] == [
        ("start-up", pytest.approx(8.0)),
        ("after training", pytest.approx(4.0)),
        ("BATCH", pytest.approx(1.0)),
    ]
    assert [(node.name, node.share) for node in report.tree.roots[1].children] == [(name, pytest.approx(1))] * bool(
        name
    )
    part = f"4.00 s in {name}, " if name else ""
    assert [finding.text for finding in report.findings] == [
        "62 % of the run lies before the first step, 8.00 s: 3.97 s in index() (train.py:8), 2.97 s in import torch, "
        "1.06 s in the time before Python.",
        f"31 % of the run lies after the last step, 4.00 s: {part}100 % of it in main (train.py:9): build().",
    ]
    assert not any(finding.gain_share for finding in report.findings)
