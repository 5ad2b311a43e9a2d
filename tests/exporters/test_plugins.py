from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import types

import pytest

from deep500_timing import exporters
from deep500_timing._base import plugins as _plugins
from deep500_timing._base.require import is_installed, require
from deep500_timing.exceptions import MissingPackageError, TimingWarning

BUILT_IN = (
    *("comet", "csv", "jsonl", "mlflow", "opentelemetry", "prometheus", "tensorboard", "terminal", "text", "trackio"),
    "wandb",
)


@pytest.fixture
def registered(monkeypatch):
    """Register more exporters: ``registered(name="package.module:Class")``."""
    real = list(importlib.metadata.entry_points(group=exporters.GROUP))

    def register(**points):
        more = [importlib.metadata.EntryPoint(name, value, exporters.GROUP) for name, value in points.items()]
        monkeypatch.setattr(_plugins, "entry_points", lambda group: [*real, *more])

    return register


def test_every_built_in_exporter_is_registered():
    """The built-in exporters are found in the way that anyone's are."""
    assert set(BUILT_IN) <= set(exporters.all())


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_entry_point_loads(name):
    """A registered name is the exporter that the package exports."""
    exporter = exporters.get(name)

    assert issubclass(exporter, exporters.BaseExporter)
    assert exporter is getattr(exporters, exporter.__name__)


def test_an_exporter_without_its_package_is_not_available(monkeypatch):
    """``available`` leaves out what cannot be used here, ``all`` does not."""
    monkeypatch.setitem(sys.modules, "wandb", None)

    assert "wandb" in exporters.all()
    assert "wandb" not in exporters.available()
    assert {"csv", "jsonl", "terminal", "text"} <= set(exporters.available())


def test_a_third_partys_exporter_is_found(registered):
    """A plugin has the rights of a built-in part."""
    registered(memory="deep500_timing.testing:InMemoryExporter")

    assert "memory" in exporters.all()
    assert "memory" in exporters.available()
    assert exporters.get("memory").__name__ == "InMemoryExporter"


def test_a_broken_plugin_costs_a_warning(registered):
    """A plugin that cannot be imported is left out and named; asked for by name, it raises its own error."""
    registered(broken="no_such_package:Exporter")
    with pytest.warns(TimingWarning, match=r"Loading 'broken' \(no_such_package:Exporter, from .* left out"):
        assert "broken" not in exporters.available()

    assert "broken" in exporters.all()
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        exporters.get("broken")


def test_a_name_that_is_taken_costs_a_warning(registered):
    """Of two distributions that register one name, the first is used, and both are named."""
    registered(csv="deep500_timing.testing:InMemoryExporter")
    with pytest.warns(TimingWarning, match=r"Both deep500-timing and an unknown distribution register 'csv'"):
        assert exporters.get("csv") is exporters.CsvExporter


def test_a_built_in_name_is_ours(registered, monkeypatch):
    """A distribution that comes first cannot take the place of a part of ours; both are named."""
    real = list(importlib.metadata.entry_points(group=exporters.GROUP))
    theirs = importlib.metadata.EntryPoint("terminal", "json:dumps", exporters.GROUP)
    monkeypatch.setattr(_plugins, "entry_points", lambda group: [theirs, *real])
    with pytest.warns(TimingWarning, match=r"Both deep500-timing and an unknown distribution register 'terminal'"):
        assert exporters.get("terminal") is exporters.TerminalExporter


def test_a_plugin_that_exits_does_not_end_the_program(registered, tmp_path, monkeypatch):
    """A module that calls ``sys.exit`` when it is imported is left out; asked for by name, it is an ImportError."""
    (tmp_path / "plugin_that_exits.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    registered(exits="plugin_that_exits:Exporter")
    with pytest.warns(TimingWarning, match=r"Loading 'exits' .* failed: SystemExit: 3. It is left out"):
        assert "exits" not in exporters.available()

    with pytest.raises(ImportError, match=r"'exits' of .* would end the program: SystemExit\(3\)"):
        exporters.get("exits")


def test_an_unknown_name_lists_the_known_ones():
    """Asking for an exporter that is not there says which are."""
    with pytest.raises(LookupError, match=r"'nope' among deep500_timing.exporters: .* Registered are: 'comet', 'csv'"):
        exporters.get("nope")


def test_names_are_complete():
    """The package lists its content in order, and nothing else is found."""
    assert sorted(exporters.__all__) == exporters.__all__
    assert all(getattr(exporters, name) for name in exporters.__all__)
    assert set(exporters.__all__) <= set(dir(exporters))
    with pytest.raises(AttributeError, match="no attribute 'NoSuchExporter'"):
        _ = exporters.NoSuchExporter


def imported_by(program):
    """Which of the packages that are kept away a program imports in its own interpreter."""
    heavy = ["mlflow", "wandb", "rich", "numpy"]
    program += f"\nimport json, sys; print(json.dumps([name for name in {heavy} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True, cwd="/"
    )
    return json.loads(done.stdout)


def test_importing_the_package_imports_no_destination():
    """Importing the exporters, and naming all of them, imports neither a tracker nor numpy."""
    assert [] == imported_by("from deep500_timing import exporters; exporters.all()")


def test_the_probe_can_fail():
    """The probe of the test above sees the import."""
    assert ["numpy"] == imported_by("from deep500_timing.exporters import read_json_lines")


@pytest.mark.parametrize(
    ("package", "extra", "exporter", "given"),
    [
        ("wandb", "wandb", "WandbExporter", {}),
        ("mlflow", "mlflow", "MlflowExporter", {}),
        ("tensorboardX", "tensorboard", "TensorBoardExporter", {"folder": "x"}),
        ("prometheus_client", "prometheus", "PrometheusExporter", {"port": 0}),
        ("opentelemetry", "opentelemetry", "OpenTelemetryExporter", {}),
        ("trackio", "trackio", "TrackioExporter", {}),
        ("comet_ml", "comet", "CometExporter", {}),
    ],
)
def test_a_missing_package_is_named_with_the_remedy(monkeypatch, package, extra, exporter, given):
    """Making an exporter without its package names the package to install."""
    needed = getattr(exporters, exporter).package
    monkeypatch.setitem(sys.modules, needed, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError) as caught:
        getattr(exporters, exporter)(**given)

    assert f"{exporter} requires {package}; pip install 'deep500-timing[{extra}]'" == str(caught.value)
    assert needed == caught.value.name


def test_a_folder_of_runs_is_no_package(tmp_path, monkeypatch):
    """The folder ``wandb`` that W&B keeps runs in does not pass for the package, imported or not."""
    (tmp_path / "runs_of_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("runs_of_tracker")

    __import__("runs_of_tracker")
    assert not is_installed("runs_of_tracker")
    del sys.modules["runs_of_tracker"]


def test_a_module_that_does_not_say_where_it_is_from_will_do(monkeypatch):
    """A stand-in for a package, as tests make them, counts as installed; a package below a missing one does not."""
    monkeypatch.setitem(sys.modules, "stand_in", types.ModuleType("stand_in"))

    assert is_installed("stand_in")
    assert not is_installed("no_such_package.part")


def test_a_broken_install_says_itself_what_is_wrong(tmp_path, monkeypatch):
    """A package that is there and fails to import is not reported as missing."""
    (tmp_path / "broken_tracker.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_dependency'") as caught:
        require("broken_tracker", extra="broken", caller="Broken")

    assert not isinstance(caught.value, MissingPackageError)


def test_a_module_of_a_missing_package():
    """What one looks for is the package, not the module in it that was wanted."""
    with pytest.raises(MissingPackageError) as caught:
        require("not_there.inside.it", extra="report", caller="Writing")
    assert "Writing requires not_there; pip install 'deep500-timing[report]'" == str(caught.value)
