"""The benchmark of the layers measures every contender."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from benchmarks import bench_layers  # noqa: E402


@pytest.fixture
def _one_thread():
    """The benchmark gives PyTorch one thread."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
def test_every_contender_has_its_line():
    """Each contender is measured in each pass, and is a line of the table; the model is as it was."""
    found = bench_layers.measure(rounds=2, passes=1)
    expected = {name: set(bench_layers._PASSES) for name in bench_layers._LABELS}
    assert expected == {name: set(passes) for name, passes in found["added_ns"].items()}
    lines = bench_layers.as_lines(found)
    assert all(any(line.startswith(f"| {label} |") for line in lines) for label in bench_layers._LABELS.values())
