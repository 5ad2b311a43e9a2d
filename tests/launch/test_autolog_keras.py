"""``autolog`` in unchanged programs of Keras and TensorFlow: the regions are there, the weights are the same."""

from __future__ import annotations

import pytest
import suite_ranks

pytest.importorskip("tensorflow", reason="times TensorFlow")
pytest.importorskip("keras", reason="times Keras")
pytestmark = pytest.mark.slow

BEGIN = """
import sys
import numpy as np, tensorflow as tf
{begin}
import keras
keras.utils.set_random_seed(0)
x, y = np.random.rand(320, 16).astype("float32"), np.random.randint(0, 4, 320)
model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)])
criterion = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam()
def step(a, b):
    with tf.GradientTape() as tape:
        loss = criterion(b, model(a))
    slopes = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(slopes, model.trainable_variables))
def loop(step):
    for a, b in tf.data.Dataset.from_tensor_slices((x, y)).batch(32):
        step(a, b)
"""
PROGRAMS = {
    "fit": "model.compile(optimizer, criterion); model.fit(x, y, batch_size=32, epochs=2, verbose=0)",
    "eager": "loop(step)",
    "function": "loop(tf.function(step))",
}
REGIONS = {
    "fit": {"FIT", "EPOCH", "BATCH", "BATCH (first)", "IO", "CALLBACKS"},
    "eager": {"BATCH", "IO", "BACKWARD", "optimizer"},
    "function": {"BATCH", "IO", "tf.function"},
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_program(what, forks, tmp_path):
    """Each kind has its regions in a run; after ``close`` nothing is timed; its result is the same."""
    end = "\nprint(repr(float(sum(w.sum() for w in model.get_weights()))))\n"
    begin = f"import deep500_timing; log = deep500_timing.autolog({str(tmp_path / 'run')!r}, quiet=True)"
    report = (
        "log.close(); found = {r.name: r.stats and r.stats.count for r in log.timer().snapshot().regions}\n"
        f"{PROGRAMS[what]}\n"
        "assert found == {r.name: r.stats and r.stats.count for r in log.timer().snapshot().regions}\n"
        "print(sorted(found), found['BATCH'], file=sys.stderr)\n"
    )
    printed = []
    for name, text in (
        ("plain", BEGIN.format(begin="") + PROGRAMS[what] + end),
        ("timed", BEGIN.format(begin=begin) + PROGRAMS[what] + end + report),
    ):
        output = tmp_path / name
        program = forks.start_tensorflow(["-c", text], suite_ranks.environment(), output)
        assert 0 == program.wait(300), output.read_text()[-3000:]
        printed.append(output.read_text().splitlines())
    assert printed[0][-1] == printed[1][-2]
    for region in REGIONS[what]:
        assert repr(region) in printed[1][-1]
    assert printed[1][-1].endswith({"fit": "19", "eager": "10", "function": "10"}[what])
    assert [*(tmp_path / "run").glob("rank-*")]
