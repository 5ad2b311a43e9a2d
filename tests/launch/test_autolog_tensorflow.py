"""``autolog`` in loops of TensorFlow by hand: each round is a BATCH, and retraces are named."""

from __future__ import annotations

import ast

import pytest
import suite_ranks

from deep500_timing.runs import Run

pytest.importorskip("tensorflow", reason="times TensorFlow")
pytest.importorskip("keras", reason="is what the loops are written in")
pytestmark = pytest.mark.slow

BEGIN = """
import deep500_timing; log = deep500_timing.autolog({run!r}, quiet=True)
import numpy as np, tensorflow as tf, keras
x = np.random.rand(96, 4).astype("float32")
data = tf.data.Dataset.from_tensor_slices(x).batch(8)
def model(): return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
m, other = model(), model()
opt, second = keras.optimizers.SGD(), keras.optimizers.SGD()
def slopes(m, a):
    with tf.GradientTape() as tape: loss = tf.reduce_mean(m(a) ** 2)
    return tape.gradient(loss, m.trainable_variables)
def step(a): opt.apply(slopes(m, a), m.trainable_variables)
def by_hand(a):
    for v, g in zip(m.trainable_variables, slopes(m, a)): v.assign_sub(0.1 * g)
opt.build(m.trainable_variables); second.build(other.trainable_variables)
"""
END = "\nlog.close(); print({r.name: r.stats.count for r in log.timer().snapshot() if r.stats}['BATCH'])\n"
PROGRAMS = {
    "apply": "for a in data: step(a)",
    "apply in a tf.function": "step = tf.function(step)\nfor a in data: step(a)",
    "two optimizers": "for a in data: step(a); second.apply(slopes(other, a), other.trainable_variables)",
    "two tf.functions": "one = tf.function(step)\n"
    "two = tf.function(lambda a: second.apply(slopes(other, a), other.trainable_variables))\n"
    "for a in data: one(a); two(a)",
    "a strategy": "s = tf.distribute.OneDeviceStrategy('/cpu:0')\nrun = tf.function(lambda a: s.run(step, (a,)))\n"
    "for a in data: run(a)",
    "no optimizer": "for a in data: by_hand(a)",
    "no optimizer, a tf.function": "by_hand = tf.function(by_hand)\nfor a in data: by_hand(a)",
    "no data set": "for i in range(12): opt.apply(slopes(m, x[8 * i : 8 * i + 8]), m.trainable_variables)",
    "no data set, apply_gradients": "for i in range(12):\n"
    "    opt.apply_gradients(zip(slopes(m, x[8 * i : 8 * i + 8]), m.trainable_variables))",
    "no data set, a method looked up before": "apply = opt.apply\n"
    "for i in range(12): apply(slopes(m, x[8 * i : 8 * i + 8]), m.trainable_variables)",
    "no optimizer, no data set": "for i in range(12): by_hand(x[8 * i : 8 * i + 8])",
    "functions that run eagerly": "tf.config.run_functions_eagerly(True)\nstep = tf.function(step)\n"
    "for a in data: step(a)",
    "a function that was traced before": "step = tf.function(step)\nstep(tf.constant(x[:8]))\n"
    "outer = tf.function(lambda a: step(a))\nfor a in data.skip(1): outer(a)",
    "a gradient within its tape": "for a in data:\n    with tf.GradientTape() as tape:\n"
    "        g = tape.gradient(tf.reduce_mean(m(a) ** 2), m.trainable_variables)\n"
    "        opt.apply(g, m.trainable_variables)",
    "a tape within a tape": "for a in data:\n    with tf.GradientTape() as outer:\n        g = slopes(m, a)\n"
    "        loss = tf.reduce_mean(m(a) ** 2) + tf.reduce_sum(g[0] ** 2)\n"
    "    opt.apply(outer.gradient(loss, m.trainable_variables), m.trainable_variables)",
    "an error in a tape": "for i, a in enumerate(data):\n    try:\n        if not i: slopes(m, 'no tensor')\n"
    "    except ValueError: pass\n    step(a)",
    "gradients added up": "for i, a in enumerate(tf.data.Dataset.from_tensor_slices(x).batch(4)):\n"
    "    g = slopes(m, a)\n    if i % 2: opt.apply(g, m.trainable_variables)",
}


def run(text, forks, tmp_path, end=END):
    """A program's last line."""
    output = tmp_path / "output"
    text = BEGIN.format(run=str(tmp_path / "run")) + text + end
    program = forks.start_tensorflow(["-c", text], suite_ranks.environment(), output)
    assert 0 == program.wait(300), output.read_text()[-3000:]
    return output.read_text().splitlines()[-1]


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_loop(what, forks, tmp_path):
    """Twelve rounds are twelve BATCHes, for any end of a round."""
    assert "12" == run(PROGRAMS[what], forks, tmp_path)


COUNTS = "\nlog.close(); print({r.name: r.stats.count for r in log.timer().snapshot() if r.stats})\n"
PARTS = {
    "eager": ("for a in data: step(a)", {"FORWARD": 12, "BACKWARD": 12, "optimizer": 12, "EPOCH": 1}),
    "an evaluation in a tf.function": (
        "test = tf.function(lambda a: m(a))\ntrain = tf.function(step)\n"
        "for _ in range(2):\n    for a in data: train(a)\n    for a in data: test(a)",
        {"BATCH": 24, "VALIDATION": 2, "EPOCH": 2, "tf.function": 48},
    ),
    "an evaluation without a tape": (
        "for _ in range(2):\n    for a in data: step(a)\n    for a in data: m(a)",
        {"BATCH": 24, "VALIDATION": 2, "EPOCH": 2, "FORWARD (no grad)": 24},
    ),
    "a policy that acts": (
        "for _ in range(12):\n    for _ in range(20): m(x[:1])\n    step(x[:8])",
        {"BATCH": 12, "generate": 12, "FORWARD": 12, "FORWARD (no grad)": 240},
    ),
    "a teacher": (
        "for a in data: other(a); step(a)",
        {"BATCH": 12, "FORWARD": 12, "FORWARD (no grad)": 12, "VALIDATION": None},
    ),
    "an evaluation by Keras": (
        "m.compile('sgd', 'mse')\nfor _ in range(2):\n"
        "    for a in data: step(a)\n    m.evaluate(x, x[:, :2], verbose=0)",
        {"BATCH": 24, "TEST": 2, "EPOCH": 2},
    ),
    "a fit before": (
        "m.compile('sgd', 'mse')\nm.fit(x, x[:, :2], verbose=0)\nfor a in data: step(a)",
        {"FIT": 1, "BATCH": 3 + 12, "EPOCH": 2, "IO": 3 + 12},
    ),
    "a fit that fails before": (
        "m.compile('sgd', 'mse')\ntry: m.fit(x, x[:, :3], verbose=0)\nexcept ValueError: pass\nfor a in data: step(a)",
        {"BATCH": 12, "IO": 12},
    ),
    "a fit in a fit": (
        "class Again(keras.callbacks.Callback):\n    def on_epoch_end(self, *_):\n"
        "        other.fit(x, x[:, :2], verbose=0)\n"
        "m.compile('sgd', 'mse'); other.compile('sgd', 'mse')\n"
        "m.fit(x, x[:, :2], epochs=2, callbacks=[Again()], verbose=0)\nfor a in data: step(a)",
        {"FIT": 3, "BATCH": 4 * 3 + 12},
    ),
}


@pytest.mark.parametrize("what", PARTS)
def test_what_a_loop_consists_of(what, forks, tmp_path):
    """A loop of TensorFlow has the regions of any loop, also where Keras has fitted a model before."""
    text, expected = PARTS[what]
    counts = ast.literal_eval(run(text, forks, tmp_path, COUNTS))
    assert expected == {name: counts.get(name) for name in expected}


TRACED = {
    "a number": (
        "@tf.function\ndef train(a, rate):\n    opt.learning_rate.assign(rate); step(a)\n"
        "for i, a in enumerate(data): train(a, 0.1 / (i + 1))",
        "rate, a Python number that changes",
    ),
    "a keyword": (
        "@tf.function\ndef train(a, *, warm, rate=0.1): step(a)\n"
        "for i, a in enumerate(data): train(a, warm=True, rate=float(i))",
        "rate, a Python number that changes",
    ),
    "a shape": (
        "@tf.function\ndef train(a): step(a)\nfor i in range(12): train(tf.constant(x[: i + 1]))",
        "inputs of another shape or type",
    ),
}


@pytest.mark.parametrize("what", TRACED)
def test_what_is_traced_anew_is_in_the_run(what, forks, tmp_path):
    """Each trace after the first has its reason."""
    text, reason = TRACED[what]
    run(text, forks, tmp_path)
    with Run.open(tmp_path / "run") as opened:
        rows = opened.table("compilations").rows()
    reasons = [row["reason"] for row in rows if row["frame"] == "train"]

    assert {reason} == set(reasons) - {""}
    assert len(reasons) >= 11 - (what == "a shape") * 9
