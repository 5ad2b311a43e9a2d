"""The schedule as a picture, and its rows in a run."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from deep500_timing_torch.pipeline import Action, Kind, draw_schedule, order_of, read_batches, simulate

pytestmark = pytest.mark.slow

TIMES = {Kind.FORWARD: 10**6, Kind.BACKWARD: 2 * 10**6, Kind.BACKWARD_INPUT: 10**6, Kind.BACKWARD_WEIGHT: 10**6}


def _actions(name, stages):
    return simulate(order_of(name, 4, 8, stages), lambda slot: TIMES[slot.kind], delay_ns=10**5)


def _colour_at(pixels, x, y):
    height, width, _ = pixels.shape
    return tuple(round(float(part), 2) for part in pixels[round(y * height), round(x * width)][:3])


@pytest.mark.parametrize(("name", "stages"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBV", 2)])
def test_a_schedule_is_drawn(tmp_path, name, stages):
    """A picture in the colours of the passes that it has, idle time among them."""
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = draw_schedule(_actions(name, stages), tmp_path / "pictures" / "schedule.png")
    pixels = imread(path)
    assert pixels.shape[1] > 1000
    seen = {tuple(round(float(part) * 255) for part in colour) for row in pixels[::4, ::4, :3] for colour in row}
    forward, backward, own_input, own_weight = (
        (0x00, 0x72, 0xB2),
        (0x00, 0x9E, 0x73),
        (0x00, 0x66, 0x4B),
        (0x7F, 0xCE, 0xB9),
    )
    assert {forward, (0xEE, 0xEE, 0xEE)} <= seen
    assert (backward in seen) == (name != "ZBV")
    assert ({own_input, own_weight} <= seen) == (name == "ZBV")


def test_waits_are_drawn_where_nothing_is_computed(tmp_path):
    """Communication has another colour; actions outside of the batch are left out."""
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    actions = _actions("1F1B", 1)
    waits = [Action(3, 3, 0, Kind.WAIT_ACTIVATION, 0, 3 * 10**6), Action(0, -1, -1, Kind.STEP, 0, 10**9)]
    pixels = imread(draw_schedule([*actions, *waits], tmp_path / "waits.png"))
    seen = {tuple(round(float(part) * 255) for part in colour) for row in pixels[::4, ::4, :3] for colour in row}
    assert (0xCC, 0x79, 0xA7) in seen


def test_nothing_to_draw_is_an_error(tmp_path):
    """Not an empty picture."""
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError) as raised:
        draw_schedule([], tmp_path / "none.png")
    assert "no computation took any time" in str(raised.value)


def test_a_batch_comes_back_from_a_run(tmp_path):
    """Actions that several ranks have written are the same actions afterwards; warm-up and evaluation stay away."""
    pytest.importorskip("duckdb")
    from deep500_timing import Timer
    from deep500_timing.report import write_timeline
    from deep500_timing.runs import Run, RunLog
    from deep500_timing.testing import ManualClock
    from deep500_timing_torch.pipeline._recorder import Recorder

    actions = _actions("1F1B", 1)
    clock = ManualClock()
    logs = []
    for rank in range(4):
        timer = Timer(clock=clock)
        logs.append(RunLog(tmp_path / "run", timer, rank=rank, flush_s=None))
        recorder = Recorder(timer, "1f1b", rank)
        for number, late_ns in enumerate((0, 10**9, 2 * 10**9)):
            with recorder.batch():
                recorder.warm_up = number == 0
                for one in actions:
                    if one.rank == rank:
                        times = (one.start_ns + late_ns, one.end_ns + late_ns)
                        recorder.put(one.kind, one.stage, one.microbatch, *times)
        evaluation = Recorder(timer, None, rank, evaluation=True)
        with evaluation.batch():
            evaluation.put(Kind.FORWARD, rank, 0, 5 * 10**9, 6 * 10**9)
    for log in logs:
        log.close()
    with Run.open(tmp_path / "run") as run:
        found = read_batches(run)
        latest = read_batches(run, last=1)
        write_timeline(run, tmp_path / "t.json")
        assert ((), ()) == (read_batches(run, replica=1).numbers, read_batches(run, replica=1).batches)
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [event["name"] for event in trace if "microbatch" in event.get("args", ())]
    assert [f"{what} {number}" for what in ("backward", "forward") for number in range(8)] == sorted(set(slices))
    assert "1f1b" == found.schedule
    assert (1, 2) == found.numbers
    assert (2,) == latest.numbers
    bubble = found.bubble()
    assert 2 == bubble.batches
    assert 10**5 == pytest.approx(bubble.delay_ns, abs=2 * 10**4)
    for batch in found.batches:
        first_ns = min(one.start_ns for one in batch)
        assert {(one.rank, one.slot, one.duration_ns) for one in actions} == {
            (one.rank, one.slot, one.duration_ns) for one in batch
        }
        assert first_ns > 0


def test_a_run_without_a_pipeline_has_no_batches(tmp_path):
    """Not an error either."""
    pytest.importorskip("duckdb")
    from deep500_timing import Timer
    from deep500_timing.runs import Run, RunLog

    timer = Timer()
    log = RunLog(tmp_path / "run", timer, rank=0, flush_s=None)
    with timer.region("BATCH"):
        pass
    log.close()
    with Run.open(tmp_path / "run") as run:
        assert () == read_batches(run).batches


def test_a_report_has_a_section_of_the_pipeline(tmp_path):
    """The sentences of the account, a chart with every action, and the causes by rank; nothing for another run."""
    pytest.importorskip("duckdb")
    from deep500_timing import Timer
    from deep500_timing.report import Context, write_report
    from deep500_timing.runs import Run, RunLog
    from deep500_timing.testing import ManualClock
    from deep500_timing_torch.pipeline import PipelineSection
    from deep500_timing_torch.pipeline._recorder import Recorder

    clock = ManualClock()
    for rank in range(4):
        timer = Timer(clock=clock)
        with RunLog(tmp_path / "run", timer, rank=rank, flush_s=None):
            recorder = Recorder(timer, "1f1b", rank)
            with recorder.batch():
                for one in _actions("1F1B", 1):
                    if one.rank == rank:
                        recorder.put(one.kind, one.stage, one.microbatch, one.start_ns, one.end_ns)
            clock.advance_ns(40 * 10**6)
    with RunLog(tmp_path / "other", Timer(), rank=0, flush_s=None) as log:
        log.event("nothing")
    with Run.open(tmp_path / "run") as run:
        content = PipelineSection().build(Context(run))
        assert PipelineSection(replica=1).build(Context(run)) is None
        write_report(run, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "1F1B of 4 ranks, 8 micro-batches" in page
    assert content.text[0].startswith("1F1B of 4 ranks, 8 micro-batches, 1 batch of")
    figure = content.figures[0]
    values = [value for value in figure.panels[0].spec["data"]["values"] if value["what"] != "idle"]
    assert 64 == len(values)
    assert {0, 1, 2, 3} == {value["rank"] for value in values}
    assert [0, 1, 2, 3] == [row[0] for row in figure.rows]
    assert len(figure.columns) == len(figure.rows[0])
    with Run.open(tmp_path / "other") as run:
        assert PipelineSection().build(Context(run)) is None
