"""TensorFlow on a real GPU; ``make test-gpu`` runs these where there is one."""

from __future__ import annotations

import pytest

import deep500_timing_tensorflow as timer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def tf():
    """TensorFlow, if it and CuPy both see a GPU."""
    pytest.importorskip("cupy")
    tensorflow = pytest.importorskip("tensorflow")
    if not tensorflow.config.list_physical_devices("GPU"):
        pytest.skip("needs a TensorFlow that sees the GPU")
    return tensorflow


def test_region_holds_the_kernels_that_tensorflow_launched_in_it(tf):
    """The device's time of a long product is at least that of a short one, and no more than the host's around it."""
    tmr = timer.CPUGPUTimer(device="cuda")
    matrix = tf.random.normal((4096, 4096))
    for name, products in (("warm-up", 1), ("short", 1), ("long", 50)):
        with tmr.region(name, gpu=True):
            for _ in range(products):
                result = matrix @ matrix
    del result
    (short,), (long,) = tmr.get_time("short", gpu=True), tmr.get_time("long", gpu=True)
    assert 0 < short < long


def test_each_batch_of_a_fit_has_its_time_on_the_gpu(tf):
    """The contract's callback times each batch on both."""
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    tmr = timer.CPUGPUTimer(device="cuda")
    data = tf.random.normal((64, 64)), tf.random.normal((64, 1))
    model.fit(*data, batch_size=8, epochs=2, callbacks=[timer.TimerCallback(tmr, gpu=True)], verbose=0)
    times = tmr.get_time("BATCH", gpu=True)
    assert len(tmr.get_time("BATCH")) >= len(times) > 0
    assert min(times) > 0
