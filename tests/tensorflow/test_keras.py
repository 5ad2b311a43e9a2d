"""Real fits by cases that hold on every backend of Keras that is installed, each in its own process."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

EVERY_BACKEND = "every_backend.py model_unnoticed.py times_by_name.py real_runs.py"

# What runs, and on which backend. On PyTorch nothing is traced: the cases take a third of the time that they take on
# TensorFlow, whose graphs have cases of their own.
RUNS = [
    pytest.param(f"{EVERY_BACKEND} checkpoints.py", "torch", id="torch"),
    pytest.param(EVERY_BACKEND, "tensorflow", id="tensorflow", marks=pytest.mark.matrix),
    pytest.param(EVERY_BACKEND, "jax", id="jax", marks=pytest.mark.matrix),
    pytest.param("on_torch_events.py", "torch", id="torch events", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("cases", "backend"), RUNS)
def test_cases(cases, backend, assert_cases_pass):
    """Every case of the files holds on that backend."""
    assert_cases_pass(cases, backend, package=backend)
