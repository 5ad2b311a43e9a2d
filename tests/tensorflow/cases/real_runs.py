"""Fits as others arrange them, on each backend: tuners, restored fits, policies; ``test_keras.py`` runs them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from every_backend import assert_same_weights, batches, counts, failed, make_model

import deep500_timing_tensorflow as timer
from deep500_timing.runs import Run, RunLog


def test_fit_that_is_restored(data, tmp_path):
    """A fit that was broken off and is taken up again trains and times the epochs that are left."""

    class Breaks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("preempted")

    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr)
    fitting = {"batch_size": 8, "epochs": 4, "verbose": 0}
    with pytest.raises(RuntimeError):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        make_model().fit(*data, **fitting, callbacks=[backup, callback, Breaks()])
    assert 10 == callback.batches
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    made = make_model().fit(*data, **fitting, callbacks=[backup, callback])
    assert [2, 3] == made.epoch
    assert (20, 1, 20) == (callback.batches, counts(tmr)["FIT"], batches(tmr))


def test_which_fits_are_one_training(data, tmp_path):
    """Those of a loop are; another model, one that is compiled again and batches of another size are not."""
    tmr = timer.Timer()
    with RunLog(tmp_path, tmr, flush_s=None):
        for model in (make_model(), make_model()):
            for batch_size in (8, 8, 10, 10):
                model.fit(*data, batch_size=batch_size, callbacks=[timer.TimerCallback(tmr)], verbose=0)
            model.compile("sgd", "mse")
            model.fit(*data, batch_size=10, callbacks=[timer.TimerCallback(tmr)], verbose=0)
    with Run.open(tmp_path) as run:
        assert 5 == len(run.sql("select what from events where what = 'training'").rows())


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_policies_of_precision(data, policy):
    """A model of another precision has the weights that it has without the callback."""
    weights = []
    tmr = timer.Timer()
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        for callbacks in ([], [timer.TimerCallback(tmr)]):
            model = make_model()
            model.fit(*data, batch_size=8, callbacks=callbacks, verbose=0)
            weights.append(model.get_weights())
    finally:
        keras.config.set_dtype_policy(before)
    for without, with_callback in zip(*weights, strict=True):
        np.testing.assert_array_equal(without, with_callback)
    assert 5 == batches(tmr)


def test_distribution_on_jax(data, backend):
    """Data that ``keras.distribution`` spreads over the devices is waited for and counted as any other."""
    if backend != "jax":
        pytest.skip("keras.distribution is complete on JAX alone")
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
    try:
        callback = timer.TimerCallback(timer.Timer())
        make_model().fit(*data, batch_size=8, epochs=2, callbacks=[callback], verbose=0)
    finally:
        keras.distribution.set_distribution(None)
    assert (10, 10) == (callback.batches, counts(callback.timer)["IO"])
    assert 40 == callback.throughput.epoch_samples


def test_tuner(fed, backend, tmp_path):
    """KerasTuner copies the callback for each trial; all are in the one timer, and the search finds the same."""
    if backend == "jax":
        pytest.skip("one backend beside TensorFlow, which most searches run on, is enough")
    tuner_of = pytest.importorskip("keras_tuner")
    if backend == "tensorflow":
        pytest.importorskip("tensorboard")

    def search(callbacks):
        trained = []

        def build(choices):
            trained.append(make_model(optimizer=keras.optimizers.SGD(choices.Choice("rate", [0.01, 0.1]))))
            return trained[-1]

        tuner = tuner_of.GridSearch(build, objective="val_loss", directory=tmp_path / str(len(callbacks)), max_trials=2)
        tuner.search(**fed(20, validated=True), epochs=2, callbacks=callbacks, verbose=0)
        scores = {trial.hyperparameters.get("rate"): trial.score for trial in tuner.oracle.trials.values()}
        return scores, [weights for model in trained for weights in model.get_weights()]

    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr)
    (expected, expected_weights), (actual, weights) = search([]), search([callback])
    assert [0.01, 0.1] == sorted(expected)
    assert expected == actual
    assert_same_weights(expected_weights, weights)
    found = counts(tmr)
    assert (2, 4, 4, 8, 8) == (found["FIT"], found["EPOCH"], found["VALIDATION"], found["IO"], batches(tmr))
    assert set() == failed(tmr)
    assert 0 == callback.batches, "The copies were to count."
