"""Checkpoints of Keras's own callbacks are timed, and marked in the run with the last step that they contain."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from deep500_timing import Timer
from deep500_timing.runs import Run, RunLog
from deep500_timing_tensorflow import TimerCallback


def fit(folder, backup, callbacks, **settings):
    """Train four batches an epoch with backups, from where the last fit was stopped."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    tmr = Timer(run=RunLog(folder, flush_s=None))
    found = [keras.callbacks.BackupAndRestore(backup, delete_checkpoint=False), *callbacks]
    try:
        model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=2, callbacks=[TimerCallback(tmr), *found], **settings)
    finally:
        tmr.run.close()
    assert not any({"_save_model", "_load_model"} & vars(callback).keys() for callback in found)
    return tmr


class Stop(keras.callbacks.Callback):
    """Ends the second epoch before its last batch."""

    def on_train_batch_end(self, batch, logs=None):
        """Raise in the second epoch."""
        if int(self.model.optimizer.iterations) == 7:
            raise RuntimeError("stopped")


def test_restarts_of_keras_are_accounted_for(tmp_path):
    """The fit that is stopped in its seventh step loses those since its checkpoint, and the next one restores it."""
    saved = keras.callbacks.ModelCheckpoint(tmp_path / "best.weights.h5", save_weights_only=True)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(tmp_path / "run", tmp_path / "backup", [Stop()], epochs=3, verbose=0)
    tmr = fit(tmp_path / "run", tmp_path / "backup", [saved], epochs=3, verbose=0)
    assert tmr.get_time_stats("CHECKPOINT").count == 4
    with Run.open(tmp_path / "run") as run:
        rows = run.sql("select session, what, step, dur_ns from milestones order by session, unix_ns").rows()
        account = run.goodput()
    assert [(row["session"], row["what"], row["step"]) for row in rows] == [
        (0, "checkpoint_restored", -1),
        (0, "checkpoint_saved", 3),
        (1, "checkpoint_restored", 3),
        *((1, "checkpoint_saved", step) for step in (7, 7, 11, 11)),
    ]
    assert all(row["dur_ns"] > 0 for row in rows)
    # Steps 4, 5 and 6: the stop came before the end of BATCH was recorded for the last of them or after it.
    assert account.lost_steps in (2, 3)
    assert account.seconds("checkpoint") > 0


def test_a_checkpoint_that_is_not_better_is_not_marked(tmp_path):
    """With ``save_best_only`` only saves count."""
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.weights.h5", save_weights_only=True, save_best_only=True, monitor="loss", mode="max"
    )
    fit(tmp_path / "run", tmp_path / "backup", [best], epochs=3, verbose=0)
    with Run.open(tmp_path / "run") as run:
        rows = run.sql(
            "select step, count(*) as n from milestones where what = 'checkpoint_saved' group by step"
        ).rows()
    assert sorted((row["step"], row["n"]) for row in rows) == [(3, 2), (7, 1), (11, 1)]
