"""Layers are in the run: read back they are the timer's values, and the report has a section of them."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("duckdb")
from torch import nn  # noqa: E402

from deep500_timing.report import Context, write_report  # noqa: E402
from deep500_timing.runs import Run, RunLog  # noqa: E402
from deep500_timing_torch.layers import LayersSection, LayerTimer, read_layers  # noqa: E402
from deep500_timing_torch.layers import _in_run as of_run  # noqa: E402


@pytest.fixture
def layers(work, tmr, value, tmp_path):
    """Six blocks of two layers and a head, one of them shared and one slow, timed for three steps into a run."""
    slow = work(20, 40)
    model = nn.Sequential(*(nn.Sequential(work(1, 2), slow if i == 4 else work(3, 6)) for i in range(6)), slow)
    timed = LayerTimer(model, tmr, peak_flops_per_s=1e9)
    with RunLog(tmp_path / "run", tmr, rank=0, flush_s=None):
        timed.count_flops(lambda: model(value).sum().backward())
        with timed:
            for _ in range(3):
                model(value).sum().backward()
    return timed


def _comparable(times):
    """All of a layer but its median's interval, which a run's reader does not give."""
    rounded = lambda numbers: {name: round(number, 9) for name, number in numbers.items()}  # noqa: E731
    return [
        {
            **{
                name: getattr(layer, name)
                for name in ("path", "kind", "depth", "parent", "shared", "parameters", "flops")
            },
            "self_s": rounded(layer.self_s),
            "stats": {
                purpose: rounded({k: v for k, v in dataclasses.asdict(stats).items() if k != "median_ci"})
                for purpose, stats in layer.stats.items()
            },
        }
        for layer in times.layers
    ]


def test_what_is_read_back_is_what_was_timed(layers, tmp_path):
    """Structure, statistics, own times and the table itself are the same from the run as from the timer."""
    with Run.open(tmp_path / "run") as run:
        found = read_layers(run)
        assert read_layers(run, rank=7) is None
        assert read_layers(run, model="Other") is None
    assert _comparable(layers.times()) == _comparable(found)
    assert 1e9 == found.peak_flops_per_s
    from deep500_timing_torch.layers._table import render

    assert layers.table() == render(found)


def test_two_models_in_a_run_have_each_their_own(work, tmr, value, tmp_path):
    """A generator and a discriminator with layers of the same names are read back by the name of the model."""

    class G(nn.Sequential):
        pass

    class D(nn.Sequential):
        pass

    models = [G(work(1, 2)), D(work(3, 4))]
    with RunLog(tmp_path / "run", tmr, rank=0, flush_s=None), LayerTimer(models[0], tmr), LayerTimer(models[1], tmr):
        models[1](models[0](value)).sum().backward()
    with Run.open(tmp_path / "run") as run:
        found = {name: read_layers(run, model=name).get("0").stats for name in ("G", "D")}
    means = {
        name: [round(1e3 * stats[what].mean, 6) for what in ("forward", "backward")] for name, stats in found.items()
    }
    assert {"G": [1, 2], "D": [3, 4]} == means


def test_the_report_has_a_section_of_them(layers, tmp_path):
    """The page has the tree, folded, and a chart with bars that add up to the step."""
    with Run.open(tmp_path / "run") as run:
        content = LayersSection().build(Context(run))
        write_report(run, tmp_path / "report.html")
    assert content.text[0] == "Layers of Sequential, time per step on the CPU, 3 training steps, rank 0."
    figure = content.figures[0]
    values = figure.panels[0].spec["data"]["values"]
    times = layers.times()
    assert pytest.approx(times.model.step_s / 3 * 1e3) == sum(value["ms"] for value in values)
    assert {"forward", "backward"} == {value["pass"] for value in values}
    assert len(figure.columns) == len(figure.rows[0])
    assert any("4 × Sequential (0 … 3)" in row[0] for row in figure.rows)
    assert 'id="layers"' in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_run_of_a_killed_process_has_its_layers(work, tmr, value, tmp_path):
    """What layers are is in the log as soon as they are timed."""
    model = nn.Sequential(work(1, 2))
    with RunLog(tmp_path / "run", tmr, rank=0, flush_s=None):
        timed = LayerTimer(model, tmr).attach()
        model(value).sum().backward()
    with Run.open(tmp_path / "run") as run:
        assert ["Sequential", "0"] == [layer.path for layer in read_layers(run).layers]
    timed.detach()


def test_a_run_without_layers_has_no_section(tmr, tmp_path):
    """No table, no section, and nothing to read."""
    with RunLog(tmp_path / "run", tmr, rank=0, flush_s=None) as log:
        log.event("nothing")
    with Run.open(tmp_path / "run") as run:
        assert (None, None) == (LayersSection().build(Context(run)), read_layers(run))


def test_the_section_is_registered_by_its_table():
    """The entry point has the name of the table, so that a run without layers does not import PyTorch."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    points = project["project"]["entry-points"]["deep500_timing.table_sections"]
    assert "deep500_timing_torch.layers:LayersSection" == points[of_run.TABLE]
