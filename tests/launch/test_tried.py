"""The parameters that ``deep500-timing try`` sets at the calls of a program, and the lines that it names."""

from __future__ import annotations

import gc
import json
import types

import pytest
import suite_ranks

pytest.importorskip("torch", reason="sets parameters of PyTorch")
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from deep500_timing._launch.tried import Tried
from deep500_timing._views.findings import evidence_of
from deep500_timing._views.findings._tries import data_of, to_try

ROWS = TensorDataset(torch.zeros(4, 1))


class Endless(IterableDataset):
    """Each worker would read all of it."""

    def __iter__(self):
        yield from range(4)


class Log:
    """Keeps what is told at the end."""

    def __init__(self):
        self.run = types.SimpleNamespace(event=lambda what, text, before: self.told.append((what, text, before)))
        self.told, self.endings, self.begun = [], [], 0

    def before_report(self, call):
        """Keep what is called at the end."""
        self.endings.append(call)

    def begin(self):
        """A step has been made."""
        self.begun += 1


@pytest.fixture
def trying():
    """Begins to set a parameter; undone at the end."""
    made = []

    def begin(text):
        log = Log()
        made.append(Tried(log, text))
        return log

    before = torch.get_num_threads()
    yield begin
    for one in made:
        one.undo()
    torch.set_num_threads(before)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    gc.unfreeze()


def told(log):
    """The lines that are named, with the values there, of this file."""
    for end in log.endings:
        end()
    return [(text.split(":")[0].rsplit("/", 1)[-1], before) for _, text, before in log.told if text]


def test_workers_of_a_loader(trying):
    """By default, by name and by position; they are kept from epoch to epoch."""
    log = trying("num_workers=2")
    made = [DataLoader(ROWS), DataLoader(ROWS, num_workers=1), DataLoader(ROWS, 1, False, None, None, 3)]
    assert [(2, True)] * 3 == [(one.num_workers, one.persistent_workers) for one in made]
    # One line, told once.
    assert [("test_tried.py", "0")] == told(log)


def test_no_workers(trying):
    """What a loader without workers would refuse is left out."""
    log = trying("num_workers=0")
    given = {"persistent_workers": True, "prefetch_factor": 4, "timeout": 9, "multiprocessing_context": "spawn"}
    made = [DataLoader(ROWS, num_workers=2, **given), DataLoader(ROWS)]
    assert [(0, False)] * 2 == [(one.num_workers, one.persistent_workers) for one in made]
    assert [("test_tried.py", "2")] == told(log)


@pytest.mark.parametrize("data", [Endless(), ROWS])
def test_loaders_that_are_left_alone(trying, data):
    """An iterable data set, and a loader that has the value already."""
    log = trying("num_workers=2")
    given = 0 if isinstance(data, Endless) else 2
    assert given == DataLoader(data, num_workers=given).num_workers
    assert [] == told(log)


@pytest.mark.parametrize(
    ("name", "value", "before"), [("persistent_workers", True, "False"), ("prefetch_factor", 8, "None")]
)
def test_what_takes_workers(name, value, before, trying):
    """Without workers PyTorch would refuse it; an iterable data set has it as well."""
    log = trying(f"{name}={value}")
    made = [DataLoader(ROWS), DataLoader(ROWS, num_workers=1), DataLoader(Endless(), num_workers=1)]
    assert [False, True, True] == [getattr(one, name) == value for one in made]
    assert [("test_tried.py", before)] == told(log)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("bucket_cap_mb=100", "bucket_bytes_cap", 100 << 20),
        ("gradient_as_bucket_view=True", "gradient_as_bucket_view", True),
        ("static_graph=True", "static_graph", True),
    ],
)
def test_arguments_of_ddp(text, name, value, trying):
    """A real model in a process group of one."""
    log = trying(text)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    finally:
        dist.destroy_process_group()
    assert value == getattr(model, name)
    assert ["test_tried.py"] == [file for file, _ in told(log)]


CALLS = """
import types
import keras, tensorflow as tf
from deep500_timing._launch.tried import Tried
log = types.SimpleNamespace(before_report=bool)
for text in ("num_parallel_calls=tf.data.AUTOTUNE", "steps_per_execution=8"):
    tried = Tried(log, text)
    data = tf.data.Dataset.range(9).map(lambda x: x + 1)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    tried.undo()
    print("made", type(data).__name__, model.steps_per_execution, tried._places)
"""


def test_calls_of_tensorflow_and_keras(forks, tmp_path):
    """``map`` without parallel calls, and ``compile``."""
    for needed in ("tensorflow", "keras"):
        pytest.importorskip(needed, reason="sets parameters of TensorFlow")
    log = tmp_path / "log"
    assert 0 == forks.start_tensorflow(["-c", CALLS], suite_ranks.environment(), log).wait(300), log.read_text()
    made = [line for line in log.read_text().splitlines() if line.startswith("made")]
    assert ["made _ParallelMapDataset 1 {'<string>:8': 'None'}", "made _MapDataset 8 {'<string>:10': '1'}"] == made


def test_a_wrong_call_fails_as_without_us(trying):
    """In the words of PyTorch."""
    trying("num_workers=2")
    with pytest.raises(TypeError, match="unexpected keyword argument 'workers'"):
        DataLoader(ROWS, workers=2)


@pytest.mark.parametrize(
    ("text", "own", "read"),
    [
        ("num_threads=1", lambda: torch.set_num_threads(3), torch.get_num_threads),
        (
            "float32_matmul_precision=high",
            lambda: torch.set_float32_matmul_precision(precision="medium"),
            torch.get_float32_matmul_precision,
        ),
        (
            "cudnn.benchmark=True",
            lambda: setattr(torch.backends.cudnn, "benchmark", False),
            lambda: torch.backends.cudnn.benchmark,
        ),
    ],
)
def test_what_a_program_has_once(text, own, read, trying):
    """It is set, and a call of the program's own is named and has no effect."""
    log = trying(text)
    own()
    assert text.partition("=")[2] == str(read())
    assert ["test_tried.py"] == [file for file, _ in told(log)]


def test_collections(trying):
    """What is there at the first step is collected no more; steps go on as ever."""
    log = trying("gc.freeze=True")
    before = gc.get_freeze_count()
    log.begin()
    log.begin()
    assert 2 == log.begun
    assert gc.get_freeze_count() > before


def test_a_finding_as_data(tmp_path):
    """The fixed keys are there whether or not anything is known of them, and are plain data."""
    from deep500_timing import Timer, TimeType
    from deep500_timing._views.findings import find
    from deep500_timing.runs import Run

    pytest.importorskip("duckdb", reason="reads a run")
    timer = Timer(run=str(tmp_path))
    at = timer.now_ns() - 10**10
    for _ in range(100):
        timer.record(TimeType.BATCH, at, at + 10**7)
        timer.record(TimeType.IO, at, at + 8 * 10**6)
        at += 10**7
    timer.run.close()
    with Run.open(str(tmp_path)) as run:
        evidence = evidence_of(run, None, None)
        found = [data_of(one, evidence) for one in find(evidence)]
        assert [] == to_try(find(evidence), evidence)  # no loader is known
    first = next(one for one in found if one["rule"] == "waits-for-data")
    assert (None, {"parameter": None, "value": None, "can_try": False}) == (
        first["where"],
        {key: first["remedy"][key] for key in ("parameter", "value", "can_try")},
    )
    assert 0 < first["bound"] <= 1
    assert first["verify"].startswith("deep500-timing ab")
    json.dumps(first)
