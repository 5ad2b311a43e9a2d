"""Files and messages that somebody else has changed: no traceback, no hang, bounded memory, no wrong number in silence.

``--mutations N`` tries N of each instead of some.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from made_runs import made_rank
from mutations import of_bytes, of_frames, of_json

from deep500_timing._base.warn import forget_warnings
from deep500_timing._command._app import main
from deep500_timing._distributed.exchange import pack, unpack
from deep500_timing._views.timeline import write_timeline
from deep500_timing.compare._compare import compare, find_floor, floor_of, store_floor
from deep500_timing.compare._runs import read_side, write_baseline
from deep500_timing.compare._text import draw, gate
from deep500_timing.runs import Run
from deep500_timing.runs import _format as form
from deep500_timing.runs._compact import _tables_of, compact, find_logs
from deep500_timing.runs._tables import safe_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.one_form,
    pytest.mark.filterwarnings("ignore::deep500_timing.TimingWarning"),
]

LIMIT_S, LIMIT_BYTES = 5.0, 500 << 20
"""Of one reading, in seconds of the processor, and of all, beyond what was used before."""
STEPS = 25
COMMANDS = ("show", "why", "goodput", "stragglers", "report", "timeline", "show --json", "compare", "top --once")
COMMAND_EVERY = 15
FOUND = {"of_bytes": (6950,)}
"""Those that found a fault among thousands."""


class HangsError(BaseException):
    """No reader catches it."""


@pytest.fixture
def mutations(request):
    """How many to try, and their source of chance: the same ones each time."""
    count = request.config.getoption("--mutations")

    def each(kind):
        for number in (*range(count), *FOUND.get(kind, ())):
            yield number, random.Random(f"{kind} {number}")

    return each


@pytest.fixture(autouse=True)
def bounded():
    """Memory, and the time of each of the test's readings."""

    def hangs(*_):
        raise HangsError

    before, peak = signal.signal(signal.SIGPROF, hangs), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < LIMIT_BYTES


@contextmanager
def reading(kind, number):
    """Limit a reading's time, and say which one it was if it fails."""
    forget_warnings()
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    except BaseException as error:
        error.add_note(f"It is {kind} {number}.")
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Eight runs of one rank, alike but for their times; and a sentinel beside each file that a path could lead to."""
    base = tmp_path_factory.mktemp("runs")
    for number in range(8):
        with made_rank(base / str(number)) as made:
            made.log.declare("mine", time_ns="time", what="name", value="float")
            for step in range(STEPS):
                with made.region("BATCH"):
                    made.spend("FORWARD", 0.01 + number / 10_000)
                    made.spend("work", 0.02)
                made.log.sample("loss", 1 / (1 + step))
                made.log.add("mine", (step, "x", 0.5))
                made.log.collective("all_reduce", step, step + 5, group="g", sequence=step, nbytes=4)
            made.log.event("note", "an event")
            made.log.mark("checkpoint_saved", step=3, dur_s=0.1)
    (base / "x").write_text("precious")
    return base


@pytest.fixture
def outside(runs):
    """Nothing but what is in ``compacted`` of a run changes, and what the test itself writes."""

    def listing():
        return {
            path: (path.stat().st_size, path.stat().st_mtime_ns)
            for path in runs.rglob("*")
            if path.is_file() and "compacted" not in path.parts and "scratch" not in path.parts
        }

    before = listing()
    yield listing
    assert before == listing()


@pytest.fixture
def scratch(runs):
    """A folder for what a test writes."""
    folder = runs / "scratch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def page_reader():
    """The reader that the format's page shows: the names of its functions."""
    page = (Path(__file__).parents[2] / "docs" / "run-format.md").read_text(encoding="utf-8")
    space = {"__name__": "page"}
    exec(compile(page.split("```python\n")[1].split("```")[0], "run-format.md", "exec"), space)
    return space


def read_plainly(page, data):
    """The intervals of a log by that reader's functions, without our checks; names may come late."""
    names, raw = {0: ""}, []
    kind, columns = form.TABLES["intervals"]
    for number, count, payload in page["frames"](data):
        if number == form.NAMES:
            names = {**dict(json.loads(payload)), **names}
        elif number == kind:
            at, found = 0, {}
            for name, type_ in columns:
                found[name], at = page["column"](type_, count, payload, at)
            raw += zip(found["region"], found["start_ns"], found["dur_ns"], strict=True)
    return Counter((safe_text(names.get(region, f"name {region} (lost)")), start, dur) for region, start, dur in raw)


def read_ours(folder):
    """The intervals and the facts of the log of rank 0."""
    found, facts, faults = Counter(), {}, []
    for name, table in _tables_of(find_logs(str(folder)), faults, 0, 1):
        if name == "intervals":
            found.update(zip(*(table[column].to_pylist() for column in ("region", "start_ns", "dur_ns")), strict=True))
        elif name == "logs":
            [facts] = table.to_pylist()
    told = ("fault", "damaged_bytes", "missing_frames", "unknown_frames", "repeated_frames")
    return found, any(facts[name] for name in told) or facts["end"] is None


@pytest.mark.parametrize("change", [of_bytes, of_frames])
def test_logs(runs, scratch, outside, mutations, change, capsys):
    """Read as a plain reader reads it, or it is said that something is missing; and so by every command."""
    page, data = page_reader(), (runs / "0" / "rank-00000.d5log").read_bytes()
    truth = read_plainly(page, data)
    places = {(start, dur) for _, start, dur in truth}
    shutil.copytree(runs / "1", scratch / "other")
    for number, rng in mutations(change.__name__):
        folder = scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        changed = change(rng, data)
        (folder / "rank-00000.d5log").write_bytes(changed)
        with reading(change.__name__, number):
            found, is_told = read_ours(folder)
            if change is of_bytes:
                assert {(start, dur) for _, start, dur in found} <= places
                assert is_told or truth == found
            elif not is_told:
                assert read_plainly(page, changed) == found
        if number % COMMAND_EVERY:
            continue
        with reading(change.__name__, number):
            command = COMMANDS[number // COMMAND_EVERY % len(COMMANDS)]
            words = [str(folder), *{"compare": [str(scratch / "other")]}.get(command, [])]
            if command in ("report", "timeline"):
                words.append(str(scratch / ("result.html" if command == "report" else "result.json")))
            name, *options = command.split()
            assert main([name, *words, *options]) in (0, 1, 2)
            assert "is a fault of" not in capsys.readouterr().err, command


def rows_of(files):
    """The rows of Parquet files."""
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def test_parquet(runs, scratch, outside, mutations):
    """A changed file is made again from the logs."""
    run = shutil.copytree(runs / "0", scratch / "run")
    truth = {table: rows_of(files) for table, files in compact(str(run)).items()}
    files = sorted((run / "compacted").glob("*.parquet"))
    whole = {file: file.read_bytes() for file in files}
    for number, rng in mutations("parquet"):
        file = rng.choice(files)
        file.write_bytes(of_bytes(rng, whole[file]))
        table = file.name.split("-")[0]
        with reading("parquet", number):
            assert truth[table] == rows_of(compact(str(run))[table]), table


def test_manifests(runs, scratch, outside, mutations):
    """It is believed as far as its files are what was written, else made again."""
    run = shutil.copytree(runs / "0", scratch / "run")
    truth = {table: rows_of(files) for table, files in compact(str(run)).items()}
    path = run / "compacted" / "manifest.json"
    whole = path.read_bytes()
    for number, rng in mutations("manifest"):
        path.write_bytes(of_json(rng, whole))
        with reading("manifest", number):
            assert truth == {table: rows_of(files) for table, files in compact(str(run)).items()}


def of_ranks():
    """What ranks tell each other: the exchange's own functions, and a report."""
    pytest.importorskip("torch")
    from deep500_timing_torch.comm._straggler import exchange as comm
    from deep500_timing_torch.pipeline._pipeline_timer import _by_rank, _checked, _on_one_clock

    operations = [[number, "all_reduce", 4096, 10_000 + 50 * number] for number in range(30)]
    yield comm._read, comm._combine, comm._opened, {"world [0, 1]": [[0, 1], operations]}
    batch = [0, False, [[0, 0, 0, "F", 10, 20], [0, 0, 0, "B", 20, 30]]]
    report = {"offset_ns": 0, "host": "a", "batches": [batch]}
    yield _checked, dict, lambda plain: _on_one_clock([*_by_rank(plain).values()]), report


@pytest.mark.parametrize("which", [0, 1], ids=["comm", "pipeline"])
def test_messages(mutations, which):
    """What is read can be combined with what the others report; anything else is said before."""
    read, combine, opened, report = list(of_ranks())[which]
    for number, rng in mutations(f"message {which}"):
        message = pack({"round": "1", "call": 1, "report": json.loads(of_json_text(rng, report))})
        if rng.random() < 0.4:
            message = of_bytes(rng, message)
        with reading(f"message {which}", number):
            try:
                got = read(unpack(message)["report"])
            except Exception:  # It costs the rank its place in the round, and a sentence.
                continue
            str(opened(json.loads(json.dumps(combine({0: read(report), 1: got})))))


def of_json_text(rng, value):
    """Changed JSON that is JSON still."""
    while True:
        try:
            text = of_json(rng, json.dumps(value).encode())
            json.loads(text)
        except (ValueError, RecursionError):
            continue
        return text


def results(run, runs, scratch):
    """Files that ``compare`` and ``timeline`` read: their bytes, and what reads one."""
    times = [read_side(str(runs / str(number)))[0] for number in range(8)]
    first, second = times[:4], times[4:]
    baseline = Path(write_baseline(str(scratch / "base"), first)).read_bytes()
    floor = Path(store_floor(floor_of(list(zip(first, second, strict=True))), str(scratch / "floor"))).read_bytes()
    place = {"pid": 1, "tid": 2}
    events = [{"ph": "M", "name": "process_name", **place, "args": {"name": "python"}}]
    events += [{"ph": "X", "name": "mm", **place, "ts": 10.0 + n, "dur": 1.5, "args": {"id": n}} for n in range(4)]
    events += [{"ph": side, "id": 5, "cat": "ac2g", **place, "ts": 12.0} for side in "sf"]
    trace = {"baseTimeNanoseconds": 10**18, "distributedInfo": {"rank": 0}, "traceEvents": events}

    def compared(path):
        return draw(compare(read_side(path), second), width=100)

    def judged(path):
        found = find_floor(times[0], path)
        return gate(compare(first, second, floor=found), 0.03, found)

    def placed(path):
        write_timeline(run, scratch / "timeline.json", profiles=[path])
        json.loads((scratch / "timeline.json").read_bytes())

    return {"baseline": (baseline, compared), "floor": (floor, judged), "trace": (json.dumps(trace).encode(), placed)}


@pytest.fixture
def opened(runs):
    """A run with a timeline."""
    with Run.open(runs / "0") as run:
        yield run


@pytest.mark.parametrize("kind", ["baseline", "floor", "trace"])
def test_json(opened, runs, scratch, outside, mutations, kind):
    """It is read, or refused by a sentence that names the file or says what cannot be compared."""
    whole, read = results(opened, runs, scratch)[kind]
    path = str(scratch / "changed.json")
    Path(path).write_bytes(whole)
    read(path)
    for number, rng in mutations(kind):
        Path(path).write_bytes(of_json(rng, whole))
        with reading(kind, number), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            said = f"{path} ."
            try:
                read(path)
            except (ValueError, FileNotFoundError) as error:
                said = str(error)
            assert " " in said
            assert path in said or said.endswith(".")
