"""Real fits by cases of TensorFlow alone, on Keras 3 and on tf_keras; beside ``test_keras.py``, which takes as long."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

# What runs, and the package that it needs.
RUNS = [
    pytest.param("kinds_of_fit.py on_tensorflow.py", "tensorflow", id="Keras 3"),
    pytest.param("kinds_of_fit.py on_tf_keras.py", "tf_keras", id="tf_keras", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("cases", "package"), RUNS)
def test_cases_of_graphs(cases, package, assert_cases_pass):
    """Every case of the files holds with that Keras."""
    assert_cases_pass(cases, "tensorflow", package)
