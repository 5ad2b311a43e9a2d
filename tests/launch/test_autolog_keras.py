"""``autolog`` in unchanged programs of Keras and TensorFlow: the regions are there, the weights are the same."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import suite_ranks

from deep500_timing._views.findings import find
from deep500_timing.runs import Run

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
    "fit": {"FIT", "EPOCH", "BATCH", "compile", "IO", "CALLBACKS"},
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
    assert printed[1][-1].endswith({"fit": "20", "eager": "10", "function": "10"}[what])
    assert [*(tmp_path / "run").glob("rank-*")]


CALLS = """
import sys
import deep500_timing; log = deep500_timing.autolog(sys.argv[1], quiet=True)
import keras, numpy as np
x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
seen = []
class Data(keras.utils.PyDataset):
    def __len__(self):
        seen.append({region.name for region in log.timer().snapshot() if region.running} & {"TEST", "PREDICT"})
        return 2
    def __getitem__(self, index):
        return x, y
class Calls(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.predict(Data(), verbose=0)
model.fit(x, y, epochs=3, validation_data=(x, y), callbacks=[Calls()], verbose=0)
model.evaluate(Data(), verbose=0)
model.evaluate(x, y, batch_size=2, verbose=0)
model.test_on_batch(x, y)
model.predict_on_batch(x)
try:
    model.predict(np.ones((8, 3), "float32"), verbose=0)
except ValueError as error:
    import traceback
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    print(sorted(file for file in files if "deep500_timing_tensorflow" in file))
print(sorted(map(sorted, {*map(frozenset, seen)})))
model.fit(x, y, verbose=0)
log.close()
found = {region.name: region for region in log.timer().snapshot()}
counts = [found[name].stats.count for name in ("FIT", "VALIDATION", "TEST", "PREDICT")]
print(keras.backend.backend(), counts, found["PREDICT"].failed)
"""


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_calls_of_a_model_are_timed_as_a_whole(forks, tmp_path, backend):
    """Keras's set-up is a part of it, and in a fit it stays the fit's validation; PyTorch's plug-in adds no other."""
    output, given = tmp_path / "output", suite_ranks.environment(KERAS_BACKEND=backend)
    start = {"tensorflow": forks.start_tensorflow, "torch": forks.start}[backend]
    program = start(["-c", CALLS, str(tmp_path / "run")], given, output)
    assert 0 == program.wait(300), output.read_text()[-3000:]
    assert ["[]", "[['PREDICT'], ['TEST']]", f"{backend} [2, 3, 3, 4] 1"] == output.read_text().splitlines()[-3:]


EAGER = """
import sys
import deep500_timing; log = deep500_timing.autolog(sys.argv[1], quiet=True)
import keras, numpy as np
x, y = np.ones((200, 4), "float32"), np.ones((200, 1), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", run_eagerly=sys.argv[2] in ("generator", "arrays"), jit_compile=False)
if sys.argv[2] == "no XLA":
    model._resolve_auto_jit_compile = lambda: True  # as on a GPU
def generate():
    for start in range(0, 200, 4):
        yield x[start : start + 4], y[start : start + 4]
if sys.argv[2] == "generator":
    model.fit(generate(), verbose=0)
else:
    model.fit(x, y, batch_size=4, verbose=0)
log.close()
"""


@pytest.mark.parametrize("data", ["generator", "arrays", "no XLA", "no GPU"])
def test_what_a_fit_runs_on_and_is_fed_with_is_in_the_run(data, forks, tmp_path):
    """So that a finding names what costs: here that nothing is compiled."""
    output = tmp_path / "output"
    program = forks.start_tensorflow(["-c", EAGER, str(tmp_path / "run"), data], suite_ranks.environment(), output)
    assert 0 == program.wait(300), output.read_text()[-3000:]
    with Run.open(tmp_path / "run") as run:
        [fit] = run.table("fits").rows()
        said = [finding for finding in find(run) if finding.rule in ("runs-eagerly", "dominant-region", "unnamed")]
    assert "tensorflow" == fit["backend"]
    if data in ("no XLA", "no GPU"):
        assert ("arrays", 0, data == "no XLA") == (fit["data"], fit["eager"], fit["could_jit"])
        return
    assert (data, 1, 0) == (fit["data"], fit["eager"], fit["could_jit"])
    assert ["runs-eagerly"] == [finding.rule for finding in said]
    assert "run_eagerly=True" in said[0].fact


ON_TORCH = """
import json, os, sys
import torch, keras, numpy as np
import deep500_timing
x, y = torch.rand(96, 4), torch.rand(96, 1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
def train(optimizer=None, apply=lambda optimizer, slopes, weights: optimizer.apply(slopes, weights)):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    for epoch in range(2):
        for a, b in loader:
            loss = ((model(a) - b) ** 2).mean(); model.zero_grad(); loss.backward()
            weights = model.trainable_weights
            with torch.no_grad():
                apply(optimizer, [weight.value.grad for weight in weights], weights)
    return model
for program in json.loads(sys.argv[2]):
    if os.fork():
        os.wait()
        continue
    log = deep500_timing.autolog(f"{sys.argv[1]}-{os.getpid()}", quiet=True)
    exec(program)
    log.close()
    print([log.timer().snapshot().get(name).stats.count for name in ("EPOCH", "BATCH", "optimizer")])
    sys.stdout.flush()
    os._exit(0)
"""


def test_an_optimizer_of_keras_on_pytorch(forks, tmp_path):
    """In loops by hand its steps are steps, also after those of PyTorch's own; the last epoch before a fit is one."""
    programs = {
        "train(apply=lambda optimizer, *_: optimizer.step()); train(keras.optimizers.Adam())": [4, 48, 48],
        "train(keras.optimizers.SGD(), lambda o, *both: o.apply_gradients(zip(*both)))": [2, 24, 24],
        "model = train(keras.optimizers.Lion()); model.compile('sgd', 'mse')\n"
        "model.fit(x.numpy(), y.numpy(), batch_size=8, epochs=2, verbose=0)": [4, 48, 48],
    }
    output = tmp_path / "output"
    # One process for all: the import of Keras takes most of the time.
    command = ["-c", ON_TORCH, str(tmp_path / "run"), json.dumps([*programs])]
    program = forks.start(command, suite_ranks.environment(KERAS_BACKEND="torch"), output)
    assert 0 == program.wait(300), output.read_text()[-3000:]
    assert [*map(str, programs.values())] == output.read_text().splitlines()[-3:]


KERAS_2 = """
import sys
import deep500_timing; log = deep500_timing.autolog(sys.argv[1], quiet=True)
exec(sys.argv[2])
import tf_keras as keras, numpy as np
x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, y, epochs=3, batch_size=8, validation_split=0.25, verbose=0)
log.close()
print([log.timer().snapshot().get(name).stats.count for name in ("FIT", "EPOCH", "BATCH", "VALIDATION")])
"""


@pytest.mark.matrix
@pytest.mark.parametrize("first", ["import tf_keras", "from tf_keras.layers import Dense", "import tensorflow"])
def test_keras_2_is_seen_in_whatever_order_it_is_imported(first, tmp_path):
    """In a fresh interpreter, where nothing has imported TensorFlow before it."""
    if find_spec("tf_keras") is None:
        pytest.skip("needs tf_keras")
    command = [sys.executable, "-c", KERAS_2, str(tmp_path / "run"), first]
    environment = suite_ranks.environment(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    assert "[1, 3, 9, 3]" == done.stdout.splitlines()[-1]


TRACKED = """
import tempfile
import keras, mlflow, numpy as np, wandb
from wandb.integration.keras import WandbMetricsLogger
import deep500_timing_tensorflow as timer
x, y = np.random.rand(64, 4).astype("float32"), np.random.rand(64, 1).astype("float32")
def fit(*callbacks):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(x, y, epochs=2, batch_size=8, validation_split=0.25, verbose=0, callbacks=[*callbacks])
def in_wandb(*ours):
    with wandb.init(mode="offline", dir=tempfile.mkdtemp(), settings=wandb.Settings(silent=True)) as run:
        fit(*ours, WandbMetricsLogger())
        return {name: value for name, value in dict(run.summary).items() if not name.startswith("_")}
def in_mlflow(*ours):
    with mlflow.start_run() as run:
        fit(*ours)
    return mlflow.get_run(run.info.run_id).data.metrics
mlflow.set_tracking_uri(f"sqlite:///{tempfile.mkdtemp()}/runs.db")
found = {}
for of in (in_wandb, in_mlflow):
    if of is in_mlflow:
        mlflow.tensorflow.autolog(log_models=False, log_datasets=False)
    alone, beside = of(), of(timer.TimerCallback(timer.Timer(), log_prefix="time/"))
    times = [name for name in beside if "time/" in name]
    found[of.__name__] = len(alone) >= 4, alone == {name: beside.get(name) for name in alone}, len(times) > 4
print(found)
"""


@pytest.mark.matrix
def test_trackers_of_keras_keep_all_that_is_the_users(forks, tmp_path):
    """Each takes the names that a prefix puts into the logs: a tracker that refuses one may lose the whole epoch."""
    for needed in ("mlflow", "wandb"):
        pytest.importorskip(needed, reason="is one of the trackers")
    output = tmp_path / "output"
    program = forks.start_tensorflow(["-c", TRACKED], suite_ranks.environment(), output)
    assert 0 == program.wait(300), output.read_text()[-3000:]
    found = ast.literal_eval(output.read_text().splitlines()[-1])
    assert found == dict.fromkeys(("in_wandb", "in_mlflow"), (True, True, True))


EPOCHS = """
import sys, tempfile
import keras, mlflow, numpy as np
import deep500_timing_tensorflow as timer
tmr = timer.CPUGPUTimer()
ours = timer.TimerCallback(tmr, log_prefix="time/")
tell = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: tmr.log_mlflow_all("timer", step=epoch, strict=True))
mlflow.set_tracking_uri(f"sqlite:///{tempfile.mkdtemp()}/runs.db")
mlflow.tensorflow.autolog(log_models=False, log_datasets=False)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
with mlflow.start_run() as run:
    model.fit(x, y, epochs=3, batch_size=8, verbose=0, **eval(sys.argv[1]))
def told(name):
    return [(one.step, one.value) for one in mlflow.MlflowClient().get_metric_history(run.info.run_id, name)]
print([told(f"timer/CPU/{name}") == [*enumerate(tmr.get_time(name))] for name in sys.argv[2:]], len(told("loss")))
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("fit", "regions"),
    [
        ("dict(callbacks=[ours, tell])", ["EPOCH"]),
        ("dict(callbacks=[tell, ours])", ["EPOCH"]),
        ("dict(callbacks=[tell, ours], validation_split=0.25)", ["EPOCH", "VALIDATION"]),
    ],
)
def test_an_epoch_is_at_its_own_step_in_a_tracker(fit, regions, forks, tmp_path):
    """A program that reports in ``on_epoch_end`` finds the times of epoch e at step e, wherever its callback stands."""
    pytest.importorskip("mlflow", reason="is the tracker")
    output = tmp_path / "output"
    program = forks.start_tensorflow(["-c", EPOCHS, fit, *regions], suite_ranks.environment(), output)
    assert 0 == program.wait(300), output.read_text()[-3000:]
    assert output.read_text().splitlines()[-1] == f"{[True] * len(regions)} 3"
