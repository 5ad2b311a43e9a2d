"""Shared by the cases: tiny models on made data, and a timer whose callback must leave nothing behind."""

from __future__ import annotations

import gc
import os
import sys
import warnings

import pytest
import suite_guard

from deep500_timing._base.warn import forget_warnings

if "KERAS_MODULE" in os.environ and os.environ["KERAS_BACKEND"] != "tensorflow":
    # In a process of cases it is as where TensorFlow is not installed: Keras seeds its generator too, on any backend,
    # and would import it for that. When pytest walks through all folders, this file is imported for nothing.
    sys.modules["tensorflow"] = None


def _freeze():
    # Half a million objects of the frameworks, which stay: to look at them takes longer than most cases.
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    """Spare the collector the imports' objects."""
    _freeze()


@pytest.fixture(autouse=True)
def _waits_are_read_one_by_one(monkeypatch):
    """A case counts its waits by its batches. Groups of short steps have their own cases."""
    from deep500_timing_tensorflow import _data

    monkeypatch.setattr(_data, "_FIRST_ONES", 16)


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    """Each case hears every message from it, and one that it does not expect is a failure."""
    forget_warnings()
    with warnings.catch_warnings():
        from deep500_timing import TimingWarning

        warnings.filterwarnings("error", category=TimingWarning)
        yield


@pytest.fixture
def backend():
    """The backend that this process runs on."""
    return os.environ["KERAS_BACKEND"]


@pytest.fixture
def data():
    """Forty samples of four numbers and their sum."""
    from clocks import made_data

    return made_data()


@pytest.fixture
def fed(data, backend):
    """What ``fit`` takes of the samples in batches of some size, for cases that are not about arrays.

    Of arrays Keras makes a graph for each fit on TensorFlow, which takes longer than the fit itself.
    """

    def fed(size, *, validated=False):
        given, held_out = {"x": data[0], "y": data[1], "batch_size": size}, data
        if backend == "tensorflow":
            import tensorflow as tf

            held_out = tf.data.Dataset.from_tensor_slices(data).batch(size)
            given = {"x": held_out, "shuffle": False}
        return {**given, "validation_data": held_out} if validated else given

    return fed


@pytest.fixture
def collects_its_own():
    """The collector looks at the case's objects alone, not at frameworks and all that earlier cases have left."""
    suite_guard.freeze()
    yield
    gc.collect()
    suite_guard.freeze()


@pytest.fixture
def no_collector():
    """The collector runs when it is asked to."""
    gc.disable()
    yield
    gc.enable()
